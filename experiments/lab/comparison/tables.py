"""A comparison as tables: on the terminal, as Markdown, as CSV; the page shows the same."""

from dataclasses import dataclass, field
from typing import Any

from lab.base.formats import markdown_text, visible
from lab.comparison.results import COSTS, GPU_MEMORY, Comparison, counted
from lab.comparison.stats import Difference, Mean
from lab.run.frames import csv_text

MARKS = {"better": "▲", "worse": "▼", "not shown": "○", "": ""}


@dataclass
class Sheet:
    """A table of texts; text_columns: columns that are not figures. bold: (row, column) of the best."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: frozenset[int] = frozenset({0, 1})
    bold: set[tuple[int, int]] = field(default_factory=set)


def sheets(found: Comparison) -> list[Sheet]:
    """Return the tables that have rows."""
    return [sheet for sheet in (scores(found), differences(found), costs(found), ratios(found), left_out(found)) if sheet.rows]


def scores(found: Comparison) -> Sheet:
    grid, same = found.grid, same_seeds(found)
    rows, bold = [], set()
    for i, row in enumerate(grid.rows):
        cells = [grid.cell(row, column) for column in grid.columns]
        rows.append([row.label, *(mean(found, cell.score) + ("" if same else f" (n={cell.score.n})") if cell else "–" for cell in cells)])
        bold |= {(i, j) for j, cell in enumerate(cells, start=1) if cell and cell.best}
    seeds = counted(same, "seed") if same else "n seeds"
    shown = "one seed, without an interval" if same == 1 else f"mean ± {found.confidence:.0%} interval over {seeds}"
    title = f"{found.title[0].upper()}{found.title[1:]}{', in %' if found.percent else ''}: {shown}"
    note = f"{'Higher' if found.higher else 'Lower'} is better; the best mean of a column is bold."
    if same != 1:
        note += " The interval is Student's, of the mean."
    return Sheet(title, [names(found)[0], *(column.label for column in grid.columns)], rows, note, frozenset({0}), bold)


def same_seeds(found: Comparison) -> int:
    """Return how many seeds each cell has; 0 if cells differ in it."""
    counts = {cell.score.n for cell in found.grid.cells}
    return counts.pop() if len(counts) == 1 else 0


def differences(found: Comparison) -> Sheet:
    compared = [cell for cell in found.grid.cells if cell.baseline is not None]
    rows = [[cell.row.label, cell.column.label, *difference_cells(found, cell.difference)] for cell in compared]
    tested = sum(cell.difference is not None and cell.difference.p is not None for cell in compared)
    unit = " in points" if found.percent else ""
    title = f"Difference to {found.baseline}{unit}, paired over seeds of the same {_other(found)}"
    note = "n: pairs."
    if tested:
        note += (
            f" p: two-sided paired t-test; Holm: corrected for the {counted(tested, 'test')} of this table. "
            f"▲ better, ▼ worse (Holm's p below {1 - found.confidence:.2g}), ○ no difference shown."
        )
    return Sheet(title, [*names(found), "difference", "n", "p", "Holm", ""], rows, note, frozenset({0, 1, 6}))


def difference_cells(found: Comparison, difference: Difference | None) -> list[str]:
    """Return the cells "difference ± interval", n, p, Holm's p and verdict."""
    if difference is None:
        return ["–", "0", "–", "–", "no seed is shared"]
    figures = [mean(found, difference.of, "+"), str(difference.of.n)]
    if difference.p is None or difference.holm is None:
        return [*figures, "–", "–", f"cannot be tested: {difference.untested}"]
    verdict = difference.verdict.replace("not shown", "no difference shown")
    return [*figures, p_text(difference.p), p_text(difference.holm), f"{MARKS[difference.verdict]} {verdict}"]


def costs(found: Comparison) -> Sheet:
    rows = [
        [cell.row.label, cell.column.label, *(plain(cell.costs.get(name), 3 if name == "loss ms" else 0) for name in COSTS)]
        for cell in found.grid.cells
    ]
    what = "allocated on the GPU" if found.memory == GPU_MEMORY else "of the process"
    note = f"Means over seeds ± {found.confidence:.0%} interval. Peak memory: {what}. Loss: forward and backward, the median over the run."
    return Sheet("Costs of training", [*names(found), *COSTS], rows, note)


def ratios(found: Comparison) -> Sheet:
    """Return the table of ratios of costs to the baseline's; leave out rows without an interval."""
    shown = [cell for cell in found.grid.cells if any(ratio.as_ratio() for ratio in cell.ratios.values())]
    rows = []
    for cell in shown:
        pairs = "/".join(sorted({str(ratio.of.n) for ratio in cell.ratios.values()}))
        rows.append([cell.row.label, cell.column.label, pairs, *(ratio_text(cell.ratios.get(name)) for name in COSTS)])
    tested = sum(ratio.p is not None for cell in shown for ratio in cell.ratios.values())
    title = f"Costs ÷ those of {found.baseline}, paired over seeds of the same {_other(found)}"
    note = (
        f"n: pairs. Geometric mean of the ratios, and its {found.confidence:.0%} interval. Paired t-tests of logarithms, Holm-corrected "
        f"for the {counted(tested, 'test')} of this table: ▲ better, ▼ worse, ○ no difference shown; no mark: all ratios are equal."
    )
    return Sheet(title, [*names(found), "n", *COSTS], rows, note)


def ratio_text(difference: Difference | None) -> str:
    """Return a ratio with its interval and mark, or a dash if it has no interval."""
    ratio = difference and difference.as_ratio()
    if not difference or not ratio:
        return "–"
    return f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f}) {MARKS[difference.verdict]}".strip()


def left_out(found: Comparison) -> Sheet:
    rows = [[run.name, run.id[:8], why] for run, why in found.grid.left_out]
    return Sheet("Not averaged", ["run", "id", "why"], rows, text_columns=frozenset({0, 1, 2}))


def terminal(sheet: Sheet) -> Any:
    """Return the table with its title above, which rich would wrap at the width of a narrow table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=sheet.note or None, caption_justify="left")
    for i, name in enumerate(sheet.head):
        table.add_column(visible(name), justify="left" if i in sheet.text_columns else "right")
    for i, row in enumerate(sheet.rows):
        table.add_row(*(Text(visible(text), style="bold" if (i, j) in sheet.bold else "") for j, text in enumerate(row)))
    return Group(Text(visible(sheet.title), style="italic"), table)


def markdown(found: Comparison) -> str:
    parts = []
    for sheet in sheets(found):
        rows = [[markdown_text(text) for text in row] for row in sheet.rows]
        body = [[f"**{text}**" if (i, j) in sheet.bold else text for j, text in enumerate(row)] for i, row in enumerate(rows)]
        rule = ["---" if i in sheet.text_columns else "---:" for i in range(len(sheet.head))]
        lines = [_line([markdown_text(name) for name in sheet.head]), _line(rule), *(_line(row) for row in body)]
        parts.append(
            "\n\n".join(part for part in (f"## {markdown_text(sheet.title)}", "\n".join(lines), markdown_text(sheet.note)) if part)
        )
    parts.append("\n".join(f"- {markdown_text(note)}" for note in found.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def cells_csv(found: Comparison) -> str:
    """Return a line a cell, with figures in full precision; missing figures are empty, and shares are not in %."""
    lines = []
    for cell in found.grid.cells:
        line: dict[str, Any] = dict(cell.row.settings + cell.column.settings)
        line |= {"metric": found.metric} | _figures("", cell.score) | {"best": int(cell.best)}
        if base := cell.baseline:
            line["baseline"] = base.row.label if base.row != cell.row else base.column.label
        if of := cell.difference:
            line |= _figures("difference_", of.of) | {"t": of.t, "p": of.p, "p_holm": of.holm, "verdict": of.verdict or of.untested}
        for title, name in COSTS.items():
            if cost := cell.costs.get(title):
                line |= {name: cost.mean, f"{name}_half": cost.half}
            if (of := cell.ratios.get(title)) and (ratio := of.as_ratio()):
                line |= dict(zip((f"{name}_ratio", f"{name}_ratio_low", f"{name}_ratio_high"), ratio, strict=True))
                line |= {f"{name}_ratio_p": of.p, f"{name}_ratio_p_holm": of.holm, f"{name}_ratio_verdict": of.verdict or of.untested}
        lines.append(line)
    return csv_text(lines)


def runs_csv(found: Comparison) -> str:
    """Return a line a run, for your own statistics."""
    lines = []
    for cell in found.grid.cells:
        for seed, run in cell.runs.items():
            line = {"run_id": run.id, "name": run.name, "row": cell.row.label, "column": cell.column.label, "seed": " ".join(seed)}
            lines.append(line | {"metric": found.metric, "value": run.metrics[found.metric], "why_left_out": ""})
    for run, why in found.grid.left_out:
        lines.append({"run_id": run.id, "name": run.name, "seed": run.settings.get("seed", ""), "why_left_out": why})
    return csv_text(lines)


def figures(found: Comparison) -> dict[str, float]:
    """Return means, intervals, differences and adjusted p values as metrics of the comparison's own run."""
    values: dict[str, float | None] = {}
    for cell in found.grid.cells:
        place, difference = f"{cell.row.label}/{cell.column.label}", cell.difference
        values |= {f"{place}/mean": cell.score.mean, f"{place}/half": cell.score.half}
        values |= {f"{place}/p": difference.holm, f"{place}/difference": difference.of.mean} if difference else {}
    return {key: value for key, value in values.items() if value is not None}


def mean(found: Comparison, value: Mean, sign: str = "") -> str:
    """Format the mean ± its interval, in % if the metric is a share; with its sign if `sign` is "+"."""
    return number(found, value.mean, sign) + (f" ± {number(found, value.half)}" if value.half is not None else "")


def number(found: Comparison, value: float, sign: str = "") -> str:
    text = f"{100 * value:{sign}.2f}" if found.percent else f"{value:{sign}.4g}"
    return text.replace("-", "−")


def plain(value: Mean | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value.mean:,.{digits}f}" + (f" ± {value.half:,.{digits}f}" if value.half is not None else "")


def p_text(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _figures(prefix: str, value: Mean) -> dict[str, Any]:
    return {f"{prefix}{name}": getattr(value, name) for name in ("n", "mean", "sd", "low", "high")}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def names(found: Comparison) -> tuple[str, str]:
    """Return the names of the rows' and of the columns' settings."""
    row, column = found.grid.rows[0], found.grid.columns[0]
    return " · ".join(row.names[: row.main]), " · ".join(column.names[: column.main])


def _other(found: Comparison) -> str:
    """Return the setting that both runs of a pair share, besides the seed."""
    rows = any(cell.baseline is not None and cell.baseline.column != cell.column for cell in found.grid.cells)
    return names(found)[0 if rows else 1]

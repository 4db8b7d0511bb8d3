"""A comparison as tables: on the terminal, as Markdown, as CSV; the page shows the same."""

from dataclasses import dataclass, field
from typing import Any

from lab.comparison.results import GPU_MEMORY, LOSS_TIME, SPEED, Comparison, Ratio, Result
from lab.comparison.stats import Mean
from lab.results.frames import csv_text
from lab.runs.formats import markdown_text, visible

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
        cells = [found.result(grid.cell(row, column)) for column in grid.columns]
        rows.append([row.label, *(mean(found, cell.score) + ("" if same else f" (n={cell.score.n})") if cell else "–" for cell in cells)])
        bold |= {(i, j) for j, cell in enumerate(cells, start=1) if cell and cell.best}
    seeds = f"{same} seed{'s' if same > 1 else ''}" if same else "n seeds"
    title = (
        f"{found.title[0].upper()}{found.title[1:]}{', in %' if found.percent else ''}: mean ± {found.confidence:.0%} interval over {seeds}"
    )
    note = f"{'Higher' if found.higher else 'Lower'} is better; the best mean of a column is bold. The interval is Student's, of the mean."
    return Sheet(title, [names(found)[0], *(column.label for column in grid.columns)], rows, note, frozenset({0}), bold)


def same_seeds(found: Comparison) -> int:
    """Return how many seeds each cell has; 0 if cells differ in it."""
    counts = {each.score.n for each in found.results}
    return counts.pop() if len(counts) == 1 else 0


def differences(found: Comparison) -> Sheet:
    rows = []
    for each in found.results:
        if each.baseline is not None:
            rows.append([each.row, each.column, *difference_cells(found, each)])
    tested = sum(each.holm is not None for each in found.results)
    unit = " in points" if found.percent else ""
    title = f"Difference to {found.baseline}{unit}, paired over seeds of the same {_other(found)}"
    note = (
        f"n: pairs. p: two-sided paired t-test; Holm: corrected for the {tested} test{'s' if tested != 1 else ''} of this table. "
        f"▲ better, ▼ worse (Holm's p below {1 - found.confidence:.2g}), ○ no difference shown."
    )
    return Sheet(title, [*names(found), "difference", "n", "p", "Holm", ""], rows, note, frozenset({0, 1, 6}))


def difference_cells(found: Comparison, each: Result) -> list[str]:
    """Return the cells "difference ± interval", n, p, Holm's p and verdict."""
    difference = each.difference
    if difference is None:
        return ["–", "0", "–", "–", "no seed is shared"]
    figures = [mean(found, difference.of, "+"), str(difference.of.n)]
    if difference.p is None or each.holm is None:
        return [*figures, "–", "–", f"cannot be tested: {difference.untested}"]
    verdict = {"not shown": "no difference shown"}.get(each.verdict, each.verdict)
    return [*figures, p_text(difference.p), p_text(each.holm), f"{MARKS[each.verdict]} {verdict}"]


def costs(found: Comparison) -> Sheet:
    rows = []
    for each in found.results:
        speed, memory, loss = (each.costs.get(name) for name in (SPEED, found.memory, LOSS_TIME))
        rows.append([each.row, each.column, plain(speed, 0), plain(memory, 0), plain(loss, 3)])
    what = "allocated on the GPU" if found.memory == GPU_MEMORY else "of the process"
    note = f"Means over seeds ± {found.confidence:.0%} interval. Peak memory: {what}. Loss: forward and backward, the median over the run."
    return Sheet("Costs of training", [*names(found), "images/s", "peak MiB", "loss ms"], rows, note)


def ratios(found: Comparison) -> Sheet:
    """Return the table of ratios of costs to the baseline's; leave out rows without an interval."""
    shown = [each for each in found.results if any(ratio.interval for ratio in each.ratios.values())]
    rows = []
    for each in shown:
        pairs = "/".join(sorted({str(ratio.of.of.n) for ratio in each.ratios.values()}))
        rows.append([each.row, each.column, pairs, *(ratio_text(each.ratios.get(name)) for name in (SPEED, found.memory, LOSS_TIME))])
    tested = sum(ratio.holm is not None for each in shown for ratio in each.ratios.values())
    title = f"Costs ÷ those of {found.baseline}, paired over seeds of the same {_other(found)}"
    note = (
        f"n: pairs. Geometric mean of the ratios, and its {found.confidence:.0%} interval. Paired t-tests of logarithms, Holm-corrected "
        f"for the {tested} test{'s' if tested != 1 else ''} of this table: "
        "▲ better, ▼ worse, ○ no difference shown; no mark: all ratios are equal."
    )
    return Sheet(title, [*names(found), "n", "images/s", "peak MiB", "loss ms"], rows, note)


def ratio_text(ratio: Ratio | None) -> str:
    """Return a ratio with its interval and mark, or a dash if it has no interval."""
    if ratio is None or ratio.interval is None:
        return "–"
    low, high = ratio.interval
    return f"{ratio.mean:.2f} ({low:.2f} to {high:.2f}) {MARKS[ratio.verdict]}".strip()


def left_out(found: Comparison) -> Sheet:
    rows = [[run.name, run.id[:8], why] for run, why in found.grid.left_out]
    return Sheet("Not averaged", ["run", "id", "why"], rows, text_columns=frozenset({0, 1, 2}))


def terminal(sheet: Sheet) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=visible(sheet.title), title_justify="left", caption=sheet.note or None, caption_justify="left")
    for i, name in enumerate(sheet.head):
        table.add_column(visible(name), justify="left" if i in sheet.text_columns else "right")
    for i, row in enumerate(sheet.rows):
        table.add_row(*(Text(visible(text), style="bold" if (i, j) in sheet.bold else "") for j, text in enumerate(row)))
    return table


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
    rows, columns = found.grid.rows[0].names, found.grid.columns[0].names
    lines = []
    for each in found.results:
        line: dict[str, Any] = dict(zip(rows, each.cell.row.values, strict=True)) | dict(zip(columns, each.cell.column.values, strict=True))
        line |= {"metric": found.metric} | _figures("", each.score) | {"best": int(each.best)}
        if each.baseline is not None:
            line["baseline"] = each.baseline.row.label if each.baseline.row != each.cell.row else each.baseline.column.label
        if each.difference is not None:
            tested = {"t": each.difference.t, "p": each.difference.p, "p_holm": each.holm}
            line |= _figures("difference_", each.difference.of) | tested | {"verdict": each.verdict or each.difference.untested}
        for name, cost in (("images_per_second", SPEED), ("peak_mib", found.memory), ("loss_ms", LOSS_TIME)):
            if cost in each.costs:
                line |= {name: each.costs[cost].mean, f"{name}_half": each.costs[cost].half}
            if cost in each.ratios and (interval := each.ratios[cost].interval):
                ratio = each.ratios[cost]
                said: dict[str, Any] = {"": ratio.mean, "_low": interval[0], "_high": interval[1]}
                said |= {"_p": ratio.of.p, "_p_holm": ratio.holm, "_verdict": ratio.verdict or ratio.of.untested}
                line |= {f"{name}_ratio{key}": value for key, value in said.items()}
        lines.append(line)
    return csv_text(lines)


def runs_csv(found: Comparison) -> str:
    """Return a line a run, for your own statistics."""
    lines = []
    for each in found.results:
        for seed, run in each.cell.runs.items():
            line: dict[str, Any] = {"run_id": run.id, "name": run.name, "row": each.row, "column": each.column, "seed": " ".join(seed)}
            lines.append(line | {"metric": found.metric, "value": run.metrics[found.metric], "why_left_out": ""})
    for run, why in found.grid.left_out:
        lines.append({"run_id": run.id, "name": run.name, "seed": run.settings.get("seed", ""), "why_left_out": why})
    return csv_text(lines)


def figures(found: Comparison) -> dict[str, float]:
    """Return means, intervals, differences and adjusted p values as metrics of the comparison's own run."""
    values: dict[str, float | None] = {}
    for each in found.results:
        place = f"{each.row}/{each.column}"
        values |= {f"{place}/mean": each.score.mean, f"{place}/half": each.score.half, f"{place}/p": each.holm}
        values |= {f"{place}/difference": each.difference.of.mean if each.difference else None}
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
    rows = any(each.baseline is not None and each.baseline.column != each.cell.column for each in found.results)
    return names(found)[0 if rows else 1]

"""Runs laid out in rows and columns: a cell holds runs that differ only in their seed.

A pivot of pandas would average runs that differ in more; which settings part them is worked out here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lab.base.errors import UserError, unknown
from lab.comparison.runs import Run, parse_condition
from lab.comparison.stats import Difference, Mean, Point

Key = tuple[str, ...]
# settings that do not change what the model learns; `loss` and `model` stand for the names of both, and the device is a tag
BESIDE = (
    "name", "resume", "tracking.*", "trainer.runs", "trainer.device", "trainer.log_every", "trainer.save_every", "trainer.timing_warmup",
    "trainer.max_nonfinite", "trainer.profile", "data.workers", "loss.name", "model.name", "model.detector",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row or a column: its settings and their values."""

    settings: tuple[tuple[str, str], ...]
    main: int  # how many of the settings were asked for; the rest were added because runs that differ in them must not be averaged

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.settings]

    @property
    def title(self) -> str:
        """Return the values of the settings that were asked for."""
        return ", ".join(value for _, value in self.settings[: self.main])

    @property
    def label(self) -> str:
        added = [f"{name.removesuffix('.name').rpartition('.')[2]}={value}" for name, value in self.settings[self.main :] if value]
        return ", ".join([self.title, *added])

    def meets(self, other: "Line") -> bool:
        """Return whether the lines are equal in every added setting that both have."""
        pairs = zip(self.settings[self.main :], other.settings[self.main :], strict=True)
        return all(mine == theirs or not mine or not theirs for (_, mine), (_, theirs) in pairs)


@dataclass(eq=False)
class Cell:
    """Runs of equal settings, and their results; differences are to the baseline's cell."""

    row: Line
    column: Line
    runs: dict[Key, Run] = field(default_factory=dict)  # by seed, the newest of each
    baseline: "Cell | None" = None
    score: Mean = field(init=False)
    difference: Difference | None = None  # None where there is nothing to pair
    best: bool = False  # of its column
    costs: dict[str, Mean] = field(default_factory=dict)  # images/s, MiB, ms, by name
    ratios: dict[str, Difference] = field(default_factory=dict)  # of the logarithms of costs, by name
    curve: list[Point] = field(default_factory=list)

    def values(self, metric: str) -> dict[Key, float]:
        return {seed: run.metrics[metric] for seed, run in self.runs.items() if metric in run.metrics}


@dataclass
class Grid:
    """Cells in the order of their first runs; left_out: runs that no cell averages, each with the reason."""

    cells: list[Cell]
    left_out: list[tuple[Run, str]]
    replaced: list[Run]  # by newer runs of the same settings and seed
    differing: dict[str, dict[str, list[str]]]  # settings that differ between cells, beside rows and columns: value: labels of cells

    @property
    def rows(self) -> list[Line]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[Line]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def runs(self) -> list[Run]:
        """Return the runs that are averaged."""
        return [run for cell in self.cells for run in cell.runs.values()]

    def cell(self, row: Line, column: Line) -> Cell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


def lay_out(runs: Sequence[Run], metric: str, rows: list[str], columns: list[str]) -> Grid:
    """Lay out the finished runs that have a finite `metric`.

    Where runs of one cell differ in more than their seed, the setting becomes part of the row: only runs with equal settings are averaged.

    Raises:
        UserError: no run can be laid out, or `rows` and `columns` name a setting that no run has.
    """
    for option, names in (("rows", rows), ("columns", columns)):
        if not names:
            raise UserError(f"{option}=: give one setting or more, such as {option}={'loss' if option == 'rows' else 'model'}.")
        for name in names:
            if all(run.setting(name) is None for run in runs):
                raise unknown(f"{option}={name}", name, {key for run in runs for key in run.settings}, show=80)
    chosen: list[Run] = []
    left_out: list[tuple[Run, str]] = []
    for run in runs:
        why = _unfit(run, metric, [*rows, *columns])
        left_out.append((run, why)) if why else chosen.append(run)
    if not chosen:
        listed = "\n".join(f"  {run.name} ({run.id}): {why}" for run, why in left_out[-10:])
        raise UserError(f"none of {len(runs)} runs can be compared:\n{listed}")

    varied = varying(chosen, [*rows, *columns])
    seeds = ("seed", *sorted(name for name in varied if _is_seed(name) and name != "seed"))
    added = sorted(name for name in varied if not _is_seed(name) and not is_beside(name, [*rows, *columns]))
    cells: dict[tuple[Line, Line], Cell] = {}
    replaced = []
    for run in chosen:
        row = Line(tuple((name, run.setting(name) or "") for name in (*rows, *added)), len(rows))
        column = Line(tuple((name, run.setting(name) or "") for name in columns), len(columns))
        cell = cells.setdefault((row, column), Cell(row, column))
        seed = tuple(run.settings.get(name, "") for name in seeds)
        if seed in cell.runs:
            replaced.append(cell.runs[seed])
        cell.runs[seed] = run
    found = list(cells.values())
    return Grid(found, left_out, replaced, _differing(found, [*rows, *columns, *added]))


def find_baselines(grid: Grid, conditions: list[str]) -> str:
    """Give each cell its baseline's cell, and return the baseline in words; no condition means loss=ce, if a row has it.

    The baseline of a cell is in the same column (or row), and equal in every added setting that both have; there must be exactly one.

    Raises:
        UserError: a condition names a setting that is in neither rows nor columns, or a value that no line has.
    """
    wanted = [parse_condition(text, "=", "baseline=loss=ce") for text in conditions]
    in_rows, in_columns = ({name for name, _ in wanted} <= set(lines[0].names) for lines in (grid.rows, grid.columns))
    if not (in_rows or in_columns):
        have = [*grid.rows[0].names, *grid.columns[0].names]
        name = next((name for name, _ in wanted if name not in have), wanted[0][0])
        raise unknown(f"baseline={','.join(conditions)}: rows and columns", name, have)
    lines = grid.rows if in_rows else grid.columns
    for name, value in wanted:
        there = {dict(line.settings)[name] for line in lines}
        if value not in there:
            raise unknown(f"baseline={name}={value}", value, there)
        lines = [line for line in lines if (name, value) in line.settings]
    if not wanted:
        lines = [line for line in lines if ("loss", "ce") in line.settings]
    for cell in grid.cells:
        mine = cell.row if in_rows else cell.column
        pairs = [grid.cell(line, cell.column) if in_rows else grid.cell(cell.row, line) for line in lines if mine.meets(line)]
        found = [other for other in pairs if other is not None]
        if mine not in lines and len(found) == 1:
            cell.baseline = found[0]
    return " or ".join(line.label for line in lines)


def _unfit(run: Run, metric: str, names: Iterable[str]) -> str:
    """Return why a run cannot be averaged; empty if it can."""
    if run.status != "FINISHED":
        error = run.tags.get("error", "")
        return run.status.lower() + (f": {error}" if error else "")
    if metric not in run.metrics:
        return f"no {metric}"
    if not math.isfinite(run.metrics[metric]):
        return f"{metric} is {run.metrics[metric]}"
    lacking = [name for name in names if run.setting(name) is None]
    return f"no setting {', '.join(lacking)}" if lacking else ""


def varying(runs: list[Run], names: list[str]) -> list[str]:
    """Return settings with more than one value among runs that are equal in `names`; a run that lacks a setting does not count."""
    import pandas

    groups = pandas.Index([tuple(run.setting(name) or "" for name in names) for run in runs], tupleize_cols=False)
    several = pandas.DataFrame([run.settings for run in runs]).groupby(groups).nunique() > 1
    return [str(name) for name in several.columns[several.any()]]


def _differing(cells: list[Cell], laid_out: list[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for name, value in next(iter(cell.runs.values())).settings.items():
            if not _is_seed(name) and not is_beside(name, laid_out) and not name.startswith(("loss.", "model.")):
                found.setdefault(name, {}).setdefault(value, []).append(f"{cell.row.label} × {cell.column.label}")
    return {name: values for name, values in sorted(found.items()) if len(values) > 1}


def _is_seed(name: str) -> bool:
    """Return whether runs that differ in this setting are averaged: a seed, or which fold is held out."""
    return name.rpartition(".")[2] == "seed" or name.endswith("_seed") or name == "data.fold"


def is_beside(name: str, laid_out: list[str]) -> bool:
    """Return whether runs may differ in this setting without a note: it is laid out, or does not change what the model learns."""
    return name in laid_out or name.removesuffix(".name") in laid_out or any(fnmatchcase(name, each) for each in BESIDE)

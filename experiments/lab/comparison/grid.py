"""Runs laid out in rows and columns: a cell holds runs that differ only in their seed.

A pivot of pandas would average runs that differ in more; which settings part them is what is worked out here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lab.comparison.runs import Run, parse_condition
from lab.config.errors import UserError, unknown

Key = tuple[str, ...]
# settings that do not change what the model learns; `loss` and `model` stand for the names of both, and the device is a tag
BESIDE = (
    "name", "resume", "tracking.*", "trainer.runs", "trainer.device", "trainer.log_every", "trainer.save_every", "trainer.timing_warmup",
    "trainer.max_nonfinite", "trainer.profile", "data.workers", "loss.name", "model.name", "model.detector",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row or a column: its settings and their values."""

    names: tuple[str, ...]
    values: Key
    main: int = 1  # how many of the settings were asked for; the rest were added because runs that differ in them must not be averaged

    @property
    def label(self) -> str:
        added = zip(self.names[self.main :], self.values[self.main :], strict=True)
        parts = [f"{name.removesuffix('.name').rpartition('.')[2]}={value}" for name, value in added if value]
        return ", ".join([*self.values[: self.main], *parts])


@dataclass
class Cell:
    row: Line
    column: Line
    runs: dict[Key, Run] = field(default_factory=dict)  # by seed, the newest of each

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

    groups = _grouped(chosen, rows, columns)
    seeds = ("seed", *sorted(name for name in _varying(groups) if _is_seed(name) and name != "seed"))
    added = sorted(name for name in _varying(groups) if not _is_seed(name) and not _beside(name, [*rows, *columns]))
    cells: dict[tuple[Line, Line], Cell] = {}
    replaced = []
    for run in chosen:
        row = Line((*rows, *added), tuple(run.setting(name) or "" for name in (*rows, *added)), len(rows))
        column = Line(tuple(columns), tuple(run.setting(name) or "" for name in columns), len(columns))
        cell = cells.setdefault((row, column), Cell(row, column))
        seed = tuple(run.settings.get(name, "") for name in seeds)
        if seed in cell.runs:
            replaced.append(cell.runs[seed])
        cell.runs[seed] = run
    found = list(cells.values())
    return Grid(found, left_out, replaced, _differing(found, [*rows, *columns, *added]))


def baseline_lines(grid: Grid, conditions: list[str]) -> tuple[str, list[Line]]:
    """Return 'row' or 'column', and the lines that meet the conditions; no condition means loss=ce, and ('row', []) if no row has it.

    Raises:
        UserError: a condition names a setting that is in neither rows nor columns, or a value that no line has.
    """
    wanted = [parse_condition(text, "=", "baseline=loss=ce") for text in conditions]
    for kind, lines in (("row", grid.rows), ("column", grid.columns)):
        names = lines[0].names
        if wanted and all(name in names for name, _ in wanted):
            found = lines
            for name, value in wanted:
                there = {line.values[names.index(name)] for line in found}
                if value not in there:
                    raise unknown(f"baseline={name}={value}", value, there)
                found = [line for line in found if line.values[names.index(name)] == value]
            return kind, found
    if wanted:
        have = [name for lines in (grid.rows, grid.columns) for name in lines[0].names]
        name = next((name for name, _ in wanted if name not in have), wanted[0][0])
        raise unknown(f"baseline={','.join(conditions)}: rows and columns", name, have)
    if "loss" in grid.rows[0].names:
        at = grid.rows[0].names.index("loss")
        return "row", [row for row in grid.rows if row.values[at] == "ce"]
    return "row", []


def baseline_of(cell: Cell, grid: Grid, kind: str, lines: list[Line]) -> Cell | None:
    """Return the baseline's cell for this cell: equal in every added setting that both lines have; None if there is not exactly one."""
    mine = cell.row if kind == "row" else cell.column
    if mine in lines:
        return None
    found = []
    for line in lines:
        pairs = list(zip(mine.values, line.values, strict=True))[mine.main :]
        other = grid.cell(line, cell.column) if kind == "row" else grid.cell(cell.row, line)
        if other is not None and all(a == b or not a or not b for a, b in pairs):
            found.append(other)
    return found[0] if len(found) == 1 else None


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


def _grouped(runs: list[Run], rows: list[str], columns: list[str]) -> list[list[Run]]:
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.setting(name) or "" for name in (*rows, *columns)), []).append(run)
    return list(groups.values())


def _varying(groups: list[list[Run]]) -> set[str]:
    """Return settings with more than one value within a group; a run that lacks a setting does not count."""
    found = set()
    for group in groups:
        seen: dict[str, str] = {}
        for run in group:
            found |= {name for name, value in run.settings.items() if seen.setdefault(name, value) != value}
    return found


def _differing(cells: list[Cell], laid_out: list[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for name, value in next(iter(cell.runs.values())).settings.items():
            if not _is_seed(name) and not _beside(name, laid_out) and not name.startswith(("loss.", "model.")):
                found.setdefault(name, {}).setdefault(value, []).append(f"{cell.row.label} × {cell.column.label}")
    return {name: values for name, values in sorted(found.items()) if len(values) > 1}


def _is_seed(name: str) -> bool:
    """Return whether runs that differ in this setting are averaged: a seed, or which fold is held out."""
    return name.rpartition(".")[2] == "seed" or name.endswith("_seed") or name == "data.fold"


def _beside(name: str, laid_out: list[str]) -> bool:
    return name in laid_out or name.removesuffix(".name") in laid_out or any(fnmatchcase(name, each) for each in BESIDE)

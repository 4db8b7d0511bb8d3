"""The results of a comparison: scores, differences to the baseline, costs and curves of every cell."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lab.base.errors import UserError, unknown
from lab.comparison.grid import Cell, Grid, Key, find_baselines, lay_out
from lab.comparison.runs import CompareConfig, Run, Store
from lab.comparison.stats import Difference, Point, mean_of, paired_difference, write_verdicts
from lab.training.monitor import is_lower_better

MONITORS = ("map", "top1", "accuracy")  # for runs that do not record which metric their task is monitored by
SHARES = ("top", "map", "ap", "acc", "precision", "recall", "auc", "mar", "f1")
NAMES = {"top1": "top-1", "top5": "top-5", "map": "mAP", "map50": "mAP50", "map75": "mAP75", "ece": "ECE"}
SHOWN_SETTINGS = ("task", "data", "data.batch_size", "trainer.epochs", "trainer.max_updates", "optim", "optim.lr", "trainer.amp")
SHOWN_TAGS = ("device", "loss.backend", "torch", "git.commit")
SPEED, GPU_MEMORY, MEMORY, LOSS_TIME = "images_per_second", "train/peak_allocated_mib", "train/peak_process_mib", "loss_ms"
COSTS = {"images/s": "images_per_second", "peak MiB": "peak_mib", "loss ms": "loss_ms"}  # names in tables, and in CSV files
SAME_VALUES = ("loss.implementation", "loss.fused_head", "loss.prior_bias")  # settings of a loss that do not change its value
BEST = "best_"  # how the names of the best epoch's metrics begin


@dataclass
class Comparison:
    metric: str
    higher: bool  # is better
    confidence: float
    grid: Grid
    memory: str  # the metric that is the peak memory
    baseline: str  # in words; empty without one
    shared: dict[str, str]  # settings and tags that all runs have in common
    notes: list[str]

    @property
    def percent(self) -> bool:
        return _last(self.metric).startswith(SHARES)

    @property
    def title(self) -> str:
        """Return the metric in words."""
        kind = "best" if self.metric.startswith(BEST) else self.metric.rpartition("/")[0]
        name = NAMES.get(self.short, self.short)
        titles = {"best": f"held-out {name}, best epoch", "val": f"held-out {name}, last epoch", "train": f"training {name}, last"}
        titles["test"] = f"test {name}, best epoch"
        return titles.get(kind, self.metric)

    @property
    def short(self) -> str:
        """Return the metric's name without its prefix."""
        return _last(self.metric)


def compare_runs(runs: Sequence[Run], config: CompareConfig, store: Store) -> Comparison:
    """Average the runs' metric over seeds, test the differences to the baseline, and collect costs and curves.

    Raises:
        UserError: metric, rows, columns or baseline do not fit the runs.
    """
    metric = choose_metric(runs, config.metric)
    runs, others = _of_one_task(runs, metric, config.metric)
    higher = (_goal(runs, metric) if config.goal == "auto" else config.goal) == "max"
    grid = lay_out(runs, metric, config.rows, config.columns)
    baseline = find_baselines(grid, config.baseline)
    memory = GPU_MEMORY if all(GPU_MEMORY in run.metrics for run in grid.runs) else MEMORY
    costs = {cell: _costs(cell, store, memory) for cell in grid.cells}
    for cell in grid.cells:
        cell.score = mean_of(list(cell.values(metric).values()), config.confidence)
        cell.costs = {name: mean_of(list(values.values()), config.confidence) for name, values in costs[cell].items()}
        cell.curve = _curve(cell, store, metric)
        if base := cell.baseline:
            cell.difference = paired_difference(cell.values(metric), base.values(metric), config.confidence)
            if cell.difference and _other_loss(cell, base, metric):
                cell.difference = Difference(cell.difference.of, untested="another loss")
            for name, theirs in costs[base].items():
                ratio = paired_difference(_logarithms(costs[cell].get(name, {})), _logarithms(theirs), config.confidence)
                cell.ratios |= {name: ratio} if ratio else {}
    write_verdicts([(cell.difference, higher) for cell in grid.cells if cell.difference], 1 - config.confidence)
    write_verdicts([(ratio, name == "images/s") for cell in grid.cells for name, ratio in cell.ratios.items()], 1 - config.confidence)
    for column in grid.columns:
        inside = [cell for cell in grid.cells if cell.column == column]
        if len(inside) > 1 and not any(_other_loss(cell, inside[0], metric) for cell in inside):
            (max if higher else min)(inside, key=lambda cell: cell.score.mean).best = True
    notes = [*others, *_notes(grid, baseline, metric)]
    return Comparison(metric, higher, config.confidence, grid, memory, baseline, _shared(grid.runs), notes)


def _other_loss(cell: Cell, other: Cell, metric: str) -> bool:
    """Return whether the metric is the loss itself, and the two cells have different losses, whose values do not compare."""

    def loss_of(each: Cell) -> dict[str, str]:
        settings = next(iter(each.runs.values())).settings
        return {name: value for name, value in settings.items() if name.startswith(("loss.", "box_loss.")) and name not in SAME_VALUES}

    ours, theirs = loss_of(cell), loss_of(other)  # a setting that one does not record says nothing
    return _last(metric) == "loss" and any(value != theirs.get(name, value) for name, value in ours.items())


def choose_metric(runs: Sequence[Run], wanted: str | None) -> str:
    """Return the metric that is asked for, else the best value of the metric that monitors the newest run's task.

    Raises:
        UserError: no run has it.
    """
    finished = [run for run in runs if run.status == "FINISHED"] or list(runs)
    there = {name for run in finished for name in run.metrics if not name.startswith("system/")}
    if wanted:
        for name in (wanted, f"{BEST}{wanted}"):
            if name in there:
                return name
        raise unknown(f"metric={wanted} of {len(runs)} runs", wanted, there, show=80)
    monitors = [found for run in finished if (found := _monitor(run))]
    if not monitors:
        choices = ", ".join(sorted(there)) or "none"
        names = ", ".join(f"{BEST}{name}" for name in MONITORS)
        raise UserError(f"{len(runs)} runs have no {names}. Choose one by metric=; there are: {choices}")
    return f"{BEST}{monitors[-1]}"


def _of_one_task(runs: Sequence[Run], metric: str, wanted: str | None) -> tuple[list[Run], list[str]]:
    """Return the runs whose task is monitored by the metric, with a note about the rest; all runs if the metric was asked for."""
    if wanted:
        return list(runs), []
    chosen = [run for run in runs if f"{BEST}{_monitor(run)}" in (metric, BEST)]
    others = Counter(run.setting("task") or "another task" for run in runs if run not in chosen)
    said = f"The newest run's task is compared. Left out: {_shares(others)}; where=task=... chooses another, or metric= one they share."
    return chosen, [said] if others else []


def _monitor(run: Run) -> str:
    return run.tags.get("monitor") or next((name for name in MONITORS if f"{BEST}{name}" in run.metrics), "")


def _goal(runs: Sequence[Run], metric: str) -> str:
    """Return "max" or "min": as the runs monitored by this metric say, else by its name."""
    said = {run.tags["monitor_goal"] for run in runs if "monitor_goal" in run.tags and metric == f"{BEST}{_monitor(run)}"}
    return said.pop() if len(said) == 1 else "min" if is_lower_better(metric) else "max"


def _costs(cell: Cell, store: Store, memory: str) -> dict[str, dict[Key, float]]:
    """Return the costs of each seed, by their names in COSTS; the loss's time is the median over the run."""
    timed = {seed: run for seed, run in cell.runs.items() if LOSS_TIME in run.metrics}
    medians = {seed: median(value for _, value in store.history(run, LOSS_TIME)) for seed, run in timed.items()}
    found = dict(zip(COSTS, (cell.values(SPEED), cell.values(memory), medians), strict=True))
    return {name: values for name, values in found.items() if values}


def _logarithms(values: dict[Key, float]) -> dict[Key, float]:
    return {seed: math.log(value) for seed, value in values.items() if 0 < value < math.inf}


def _curve(cell: Cell, store: Store, metric: str) -> list[Point]:
    """Return the metric at the updates that every seed logged; empty if there is only one."""
    name = f"val/{_last(metric)}" if metric.startswith(BEST) else metric
    histories = [dict(store.history(run, name)) for run in cell.runs.values() if name in run.metrics]
    if len(histories) < len(cell.runs):
        return []
    points = []
    for step in sorted(set.intersection(*map(set, histories))):
        values = [history[step] for history in histories]
        points.append(Point(step, sum(values) / len(values), min(values), max(values)))
    return points if len(points) > 1 else []


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """Return the settings and tags that readers ask for first, if they are the same in all runs."""
    found = {name: {run.setting(name) for run in runs} for name in SHOWN_SETTINGS}
    found |= {name: {run.tags.get(name) for run in runs} for name in SHOWN_TAGS}
    same = {name: next(iter(values)) for name, values in found.items() if len(values) == 1}
    return {name: value for name, value in same.items() if value not in (None, "null", "")}


def _notes(grid: Grid, baseline: str, metric: str) -> list[str]:
    notes = []
    if grid.replaced:
        names = some([f"{run.name} ({run.id[:8]})" for run in grid.replaced])
        notes.append(f"Of runs with the same settings and seed only the newest counts; left for newer ones: {names}.")
    for name, values in grid.differing.items():
        where = "; ".join(f"{value or 'not set'} ({some(cells)})" for value, cells in values.items())
        notes.append(f"Not only what is compared differs: {name} is {where}.")
    for tag, what in (("device", "Speed, memory and times come from different devices"), ("git.commit", "Runs are of different commits")):
        counts = Counter(run.tags.get(tag, "unknown") for run in grid.runs)
        if len(counts) > 1:
            notes.append(f"{what}: {_shares(counts)}.")
    if any(_other_loss(cell, grid.cells[0], metric) for cell in grid.cells):
        notes.append(f"{metric} is each run's own loss. The runs have different ones, whose values do not compare.")
    if not baseline:
        rows = some([row.label for row in grid.rows])
        notes.append(f"No differences: no row is loss=ce; baseline=SETTING=VALUE chooses another baseline among {rows}.")
    fewest = min(cell.score.n for cell in grid.cells)
    if fewest < 3:
        few = {1: "A single seed has no interval and no test", 2: "Two seeds have very wide intervals"}[fewest]
        notes.append(f"{few}: train three or more of what you compare.")
    if any(len({run.settings.get("data.fold") for run in cell.runs.values()}) > 1 for cell in grid.cells):
        notes.append("Folds share training images, so their scores vary together: intervals and tests over them are too sure.")
    for cell in grid.cells:
        place = f"{cell.row.label} × {cell.column.label}"
        if cell.baseline and cell.difference is None:
            notes.append(f"{place}: no seed is shared with the baseline.")
        elif cell.difference and cell.difference.of.n < cell.score.n:
            notes.append(f"{place}: the baseline has {cell.difference.of.n} of its {cell.score.n} seeds; these are paired.")
    return notes


def _shares(counts: Counter[str]) -> str:
    return ", ".join(f"{name[:40]} ({counted(count, 'run')})" for name, count in counts.most_common())


def counted(n: int, what: str) -> str:
    """Return a count with its noun."""
    plural = {"loss": "losses"}.get(what, what if what.endswith("a") or "·" in what else f"{what}s")
    return f"{n} {what if n == 1 else plural}"


def some(names: Sequence[str], most: int = 4) -> str:
    """List the first names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _last(metric: str) -> str:
    return metric.rpartition("/")[2].removeprefix(BEST)

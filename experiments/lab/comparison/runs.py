"""The settings of a comparison, and the runs that it finds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from lab.base.errors import UserError, unknown
from lab.base.formats import visible
from lab.config.fields import choice, number, setting, some
from lab.config.schema import TrackingConfig
from lab.config.settings import App, quoted
from lab.tracking.store import open_client


@dataclass
class CompareConfig:
    """Which runs to compare, and how.

    Names and values may be globs; several are a list. A run must match all tags and settings that are given, each by one of its values.
    """

    name: str | None = setting(None, "the comparison's name in MLflow")
    experiment: list[str] = some(list, "MLflow's experiments; none: tracking.experiment")
    sweep: str | None = setting(None, "a sweep's run, by name or id; null: the newest run's, without tag and where; all: any")
    tag: list[str] = some(list, "tags of the runs, NAME:VALUE")
    where: list[str] = some(list, "settings of the runs, SETTING=VALUE")
    metric: str | None = setting(None, "the metric to compare; null: the best value of the task's own")
    goal: str = choice("auto", "auto", "max", "min", meaning="whether larger or smaller values are better; auto: by the metric's name")
    baseline: list[str] = some(list, "a value of rows or columns to test against, SETTING=VALUE; none: loss=ce")
    rows: list[str] = some(lambda: ["loss"], "settings whose values are the rows")
    columns: list[str] = some(lambda: ["model"], "settings whose values are the columns")
    confidence: float = number(0.95, "level of the intervals; tests reject at 1 - confidence", above=0, below=1)
    ui: str | None = setting(None, "address of MLflow's UI, for links")
    runs: str | None = setting(None, "folder of run folders; null: as trainer.runs")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


COMPARE = App("compare", CompareConfig)
LISTS = ("experiment", "tag", "where", "baseline", "rows", "columns")
TEXTS = ("sweep", "metric", "ui", "runs", "name")


def as_hydra(word: str) -> str:
    """Rewrite `baseline=loss=ce` and `rows=loss,data` in Hydra's grammar; keep a bracketed or quoted value."""
    name, _, value = word.partition("=")
    if not value or value[0] in "['\"" or value == "null":
        return word
    if name in LISTS:
        return f"{name}=[{','.join(quoted(each) for each in value.split(','))}]"
    return f"{name}={quoted(value)}" if name in TEXTS or "=" in value else word


PARENT = "mlflow.parentRunId"
NOT_TRAINING = ("compare", "checkpoint")  # tags of comparisons and of evaluations


@dataclass(frozen=True, eq=False)
class Run:
    """A stored run; started: in ms since 1970. settings: its params and, as `loss` and `model`, their names as in its title."""

    id: str
    experiment_id: str
    name: str
    status: str
    started: int
    settings: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]

    def setting(self, name: str) -> str | None:
        """Return the value of a setting; `data` is short for `data.name`."""
        return self.settings.get(name, self.settings.get(f"{name}.name"))


class Store:
    """Read an MLflow store."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.client = open_client(uri)

    def experiments(self, names: list[str]) -> dict[str, str]:
        """Return the experiments whose names match, as id: name, in the order of `names`.

        Raises:
            UserError: a name matches no experiment.
        """
        there = {each.experiment_id: each.name for each in self._pages(self.client.search_experiments)}
        found: dict[str, str] = {}
        for name in names:
            matching = {number: each for number, each in there.items() if fnmatchcase(each, name)}
            if not matching:
                raise unknown(f"experiment={name} in {self.uri}", name, there.values())
            found |= matching
        return found

    def runs(self, experiment_ids: Iterable[str]) -> list[Run]:
        """Return every run that has not been deleted, the oldest first."""
        found = self._pages(lambda **page: self.client.search_runs(list(experiment_ids), max_results=1000, **page))
        return sorted((_run(each) for each in found), key=lambda run: (run.started, run.id))

    def history(self, run: Run, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, by step; the last value of a step that was logged again."""
        points = self.client.get_metric_history(run.id, metric)
        return sorted({point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)}.items())

    @staticmethod
    def _pages(search: Callable[..., Any]) -> list[Any]:
        found, token = [], None
        while True:
            page = search(page_token=token)
            found += page
            token = page.token
            if not token:
                return found


ALL = "all"
"""The value of `sweep` that compares the runs of no sweep in particular."""


def select(store: Store, config: CompareConfig) -> tuple[list[Run], dict[str, str], list[str]]:
    """Return the training runs that pass every filter, the oldest first.

    Without a filter they are those of the newest run's sweep, if it has one.

    Returns:
        The runs; the experiments that were searched, as id: name; messages for the user.

    Raises:
        UserError: no run passes; the message names the filter that left none, and what there is instead.
    """
    experiments = store.experiments(config.experiment or [config.tracking.experiment])
    everything = store.runs(experiments)
    parents = {run.tags[PARENT] for run in everything if PARENT in run.tags and "checkpoint" not in run.tags}  # evaluations are nested, too
    runs = [run for run in everything if run.id not in parents and is_training(run)]
    if not runs:
        where = f"experiment={','.join(experiments.values())} in {store.uri}"
        raise UserError(f"{where}: no training runs among {len(everything)} runs.")
    notes = []
    if config.sweep and config.sweep != ALL:
        runs = _of_sweep(runs, everything, parents, config.sweep)
    elif not (config.sweep or config.tag or config.where):
        of_newest = [run for run in runs if PARENT in run.tags and run.tags[PARENT] == runs[-1].tags.get(PARENT)]
        if of_newest and len(of_newest) < len(runs):
            name = next((run.name for run in everything if run.id == runs[-1].tags[PARENT]), runs[-1].tags[PARENT])
            notes = [f"Only the runs of the newest sweep, {name}, are compared; sweep={ALL} takes all {len(runs)} runs of the experiment."]
            runs = of_newest
    for name, values in _conditions(config.tag, ":", "tag=host:gpu*").items():
        runs = _passing(runs, f"tag={name}", ":", values, [run.tags.get(name) for run in runs])
    for name, values in _conditions(config.where, "=", "where=data=digits").items():
        runs = _passing(runs, f"where={name}", "=", values, [run.setting(name) for run in runs])
    return runs, experiments, notes


def is_training(run: Run) -> bool:
    return "loss.name" in run.settings and "model.name" in run.settings and not any(tag in run.tags for tag in NOT_TRAINING)


def parse_condition(text: str, separator: str, option: str) -> tuple[str, str]:
    """Split NAME=VALUE.

    Raises:
        UserError: the text does not have that form; the message shows `option` as an example.
    """
    name, found, value = text.partition(separator)
    if not (name and found and value):
        raise UserError(f"{option.partition('=')[0]}={text}: expected a name, {separator!r} and a value, such as {option}.")
    return name, value


def _conditions(texts: list[str], separator: str, option: str) -> dict[str, list[str]]:
    """Return values by name; a text without a name is one more value of the name before it."""
    wanted: dict[str, list[str]] = {}
    name = ""
    for text in texts:
        if name and separator not in text:
            wanted[name].append(text)
            continue
        name, value = parse_condition(text, separator, option)
        wanted.setdefault(name, []).append(value)
    return wanted


def _passing(runs: list[Run], option: str, separator: str, wanted: list[str], values: list[str | None]) -> list[Run]:
    """Return the runs whose value is one of `wanted` (globs); `values` has one value a run."""
    there = {value for value in values if value is not None}
    if not there:
        name = option.partition("=")[2]
        raise unknown(f"{option} of {len(runs)} runs", name, {key for run in runs for key in (*run.tags, *run.settings)}, show=0)
    for each in wanted:
        if not any(fnmatchcase(value, each) for value in there):
            raise unknown(f"{option}{separator}{each} of {len(runs)} runs", each, there)
    return [run for run, value in zip(runs, values, strict=True) if value is not None and any(fnmatchcase(value, each) for each in wanted)]


def _of_sweep(runs: list[Run], everything: list[Run], parents: set[str], sweep: str) -> list[Run]:
    """Return the runs under the sweep; under the newest if several sweeps have this name."""
    sweeps = [run for run in everything if run.id in parents]
    found = [run for run in sweeps if sweep in (run.id, run.name)]
    if not found:
        if not sweeps:
            raise UserError(f"sweep={sweep}: there are no sweeps among {len(everything)} runs.")
        raise unknown(f"sweep={sweep}", sweep, {run.name for run in sweeps})
    chosen = [run for run in runs if run.tags.get(PARENT) == found[-1].id]
    if not chosen:
        raise UserError(f"sweep={sweep}: no training runs under run {found[-1].id}.")
    return chosen


def _run(stored: Any) -> Run:
    params = {visible(name): "null" if value == "None" else visible(value) for name, value in stored.data.params.items()}
    if "loss.name" in params:
        params["loss"] = params.get("loss.target", "custom").rpartition(":")[2] if params["loss.name"] == "custom" else params["loss.name"]
    if "model.name" in params:
        params["model"] = "_".join(params[name] for name in ("model.detector", "model.name") if params.get(name))
    info = stored.info
    name, data = visible(info.run_name or info.run_id), stored.data
    tags = {visible(key): visible(value) for key, value in data.tags.items()}
    return Run(info.run_id, info.experiment_id, name, info.status, info.start_time or 0, params, dict(data.metrics), tags)

"""The plan of a sweep, read from its overrides and checked before anything starts."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.records import NAME, History, read_history
from lab.config.schema import SearchConfig, TrainConfig, as_opened
from lab.config.settings import SEARCH, each_value, groups, load, load_for, parsed
from lab.config.user import runs_folder
from lab.run.trust import are_settings, read_config


@dataclass
class Axis:
    """A setting and its values as text, or the `interval` from which a search chooses a number."""

    key: str
    values: list[str]
    interval: tuple[float, float] | None = None
    log: bool = False

    def overrides(self) -> list[str]:
        return [f"{self.key}={value}" for value in self.values]


@dataclass
class Job:
    """One run of a sweep: its overrides, as for a single run, and the settings in which it differs."""

    name: str
    overrides: list[str]
    varied: dict[str, str]
    tree: dict[str, Any] = field(repr=False)


@dataclass
class Plan:
    """A sweep's plan; overrides: without those of search and launcher. first: the settings of one job, for what all jobs share."""

    overrides: list[str]
    launcher: list[str]
    search: SearchConfig
    axes: list[Axis]
    fixed: list[str]
    jobs: list[Job]
    first: TrainConfig

    @property
    def folder(self) -> Path:
        """Return the sweep's folder; the same sweep under the same trainer.runs and tracking.experiment always has the same folder."""
        kept = [
            [word for word in overrides if _key(word) != "trainer.runs" and not is_tracking(word)]  # they say where a run is written
            for overrides in ([job.overrides for job in self.jobs] or [self.overrides])
        ]
        identity = json.dumps([sorted(sorted(overrides) for overrides in kept), self.search.name, self.first.tracking.experiment])
        keys = [key.rpartition(".")[2] for key in sorted((axis.key for axis in self.axes), key=_rank)]
        return runs_folder(self.first.trainer.runs) / "-".join(["sweep", *keys[:4], _digest(identity)])

    def job(self, values: Sequence[str], name: str = "") -> Job:
        """Return the job that gives each axis its value.

        Raises:
            UserError: as `lab.config.settings.load`.
        """
        varied = {axis.key: value for axis, value in zip(self.axes, values, strict=True)}
        overrides = [*self.fixed, *(f"{key}={value}" for key, value in varied.items())]
        settings = load(overrides)
        # the name does not depend on the order of the overrides, so that the job's runs are found again
        name = name or "-".join(_label(key, varied[key]) for key in sorted(varied, key=_rank)) or "job"
        base = f"{settings.config.name}-" if settings.config.name else ""
        return Job(re.sub(r"[^\w.+-]+", "_", base + name).strip("_")[:100], overrides, varied, settings.tree())


def plan_of(overrides: Sequence[str]) -> Plan:
    """Sort the overrides of a sweep and check all jobs' settings.

    Raises:
        UserError: an override is wrong, or two jobs are the same run.
    """
    launcher = [word for word in overrides if _key(word).startswith(("hydra/", "hydra."))]
    if wrong := [word for word in launcher if not re.match(r"hydra[/.]launcher", _key(word))]:
        raise UserError(f"{wrong[0]}: of Hydra's own settings a sweep takes hydra/launcher= and hydra.launcher.<setting>=.")
    search_words = [word for word in overrides if _key(word) == "search" or _key(word).startswith("search.")]
    own = [word for word in overrides if word not in launcher and word not in search_words]
    if any(_key(word) == "resume" for word in own):
        raise UserError("resume: a sweep resumes its interrupted runs by itself when it is started again; leave it out.")
    search = load_for(SEARCH, search_words).config.search
    parts = parsed(own)
    axes = [axis_of(override, search) for override in parts if override.is_sweep_override()]
    fixed = [override.input_line for override in parts if not override.is_sweep_override()]
    if not axes and search.name != "grid":
        raise UserError(f"search={search.name}: give settings to choose, such as 'optim.lr=tag(log,interval(1e-4,1e-2))' or loss=ce,focal.")
    first = load([*fixed, *(axis.overrides()[0] for axis in axes)]).config
    plan = Plan(sorted(own), launcher, search, axes, fixed, [], first)
    if search.name == "grid":
        plan.jobs = _every_job(plan)
    else:
        check_ends(axes, fixed)
    return plan


def axis_of(override: Any, search: SearchConfig) -> Axis:
    """Return the axis of an override with several values.

    Raises:
        UserError: the search cannot choose among such values.
    """
    key = override.get_key_element().lstrip("+")
    if search.name == "grid" or not override.is_interval_sweep():
        if search.name != "grid" and key == "seed":
            raise UserError(f"{override.input_line}: the best seed says nothing; search={search.name} takes one seed.")
        return Axis(key, [word.partition("=")[2] for word in each_value(override)])
    interval = override.value()
    low, high, log = interval.start, interval.end, "log" in interval.tags
    if not low < high:
        raise UserError(f"{override.input_line}: the interval's first number must be below its second.")
    if log and low <= 0:
        raise UserError(f"{override.input_line}: a logarithmic interval lies above 0.")
    if unknown := interval.tags - {"log"}:
        raise UserError(f"{override.input_line}: tag {', '.join(unknown)} is not known; log is.")
    return Axis(key, [repr(low), repr(high)], (low, high), log)


def check_ends(axes: Sequence[Axis], fixed: Sequence[str]) -> None:
    """Check each value and each interval's ends, with every other setting at its first value.

    Raises:
        UserError: as `lab.config.settings.load`.
    """
    for axis in axes:
        others = [other.overrides()[0] for other in axes if other is not axis]
        for word in axis.overrides():
            load([*fixed, *others, word])


def _every_job(plan: Plan) -> list[Job]:
    jobs: list[Job] = []
    by_essence: dict[str, Job] = {}
    for values in product(*(axis.values for axis in plan.axes)):
        job = plan.job(values)
        earlier = by_essence.setdefault(json.dumps(essence(job.tree), sort_keys=True), job)
        if earlier is not job:
            raise UserError(
                f"{' '.join(earlier.overrides)} and {' '.join(job.overrides)} are the same run: they differ in nothing that it computes."
            )
        jobs.append(job)
    names = Counter(job.name for job in jobs)
    for job in jobs:
        if names[job.name] > 1:
            job.name += f"-{_digest(' '.join(sorted(job.overrides)))}"
    return jobs


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def is_tracking(word: str) -> bool:
    return _key(word) == "tracking" or _key(word).startswith("tracking.")


def _rank(key: str) -> tuple[bool, bool, str]:
    """Return a sort key: options of groups first, the seed last."""
    return key == "seed", key not in _groups(), key


@cache
def _groups() -> frozenset[str]:
    return frozenset(groups())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _label(key: str, value: str) -> str:
    """Return a value's part of a job's name: an option as it is, a setting with its name."""
    return value if key in _groups() else f"{key.rpartition('.')[2]}{value}"


BESIDE = ("name", "tracking", "resume", "trust")  # settings that do not change what a run computes; neither does trainer.runs


def runs_of(sweep: Path, name: str, tree: dict[str, Any]) -> list[History]:
    """Return the runs in a sweep's folder that have the settings `tree`, the oldest first; `name` is part of their folders' names."""
    folders = sorted(folder for folder in sweep.glob(f"*-{name}*") if (folder / NAME).is_file())
    return [
        read_history(folder)
        for folder in folders
        if are_settings(given := read_config(folder)) and essence(given) == essence(as_opened(tree, given))  # type: ignore[arg-type]  # checked before
    ]


def essence(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what a run computes."""
    kept = {key: value for key, value in tree.items() if key not in BESIDE}
    kept["trainer"] = {key: value for key, value in tree["trainer"].items() if key != "runs"}
    return kept


def with_runs(folder: Path) -> list[Path]:
    """Return a run's folder, or a sweep's folder followed by those of its runs."""
    return [folder, *sorted(path.parent for path in folder.glob(f"*/{NAME}"))]

"""The settings of a comparison."""

from dataclasses import dataclass, field

from lab.config.fields import choice, number
from lab.config.schema import TrackingConfig
from lab.config.settings import App, quoted


@dataclass
class CompareConfig:
    """Which runs, and what of them.

    experiment, tag (NAME:VALUE), where (SETTING=VALUE): names and values may be globs; all of several tags and settings must hold, and of
    one tag or setting any of its values. experiment: MLflow's, `tracking.experiment` where none is given. sweep: its run's name or id.
    metric: the best of the task's own where none is given. baseline (SETTING=VALUE): loss=ce where none is given and there is one.
    confidence: of intervals; 1 - confidence is the level of tests. ui: the address of MLflow's UI, for links.
    """

    name: str | None = None
    experiment: list[str] = field(default_factory=list)
    sweep: str | None = None
    tag: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    metric: str | None = None
    goal: str = choice("auto", "auto", "max", "min")
    baseline: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=lambda: ["loss"])
    columns: list[str] = field(default_factory=lambda: ["model"])
    confidence: float = number(0.95, above=0, below=1)
    ui: str | None = None
    runs: str | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


COMPARE = App("compare", CompareConfig)
LISTS = ("experiment", "tag", "where", "baseline", "rows", "columns")
TEXTS = ("sweep", "metric", "ui", "runs", "name")


def as_hydra(word: str) -> str:
    """`baseline=loss=ce` and `rows=loss,data` as Hydra's grammar writes them; a bracketed or quoted value is Hydra's already."""
    name, _, value = word.partition("=")
    if not value or value[0] in "['\"" or value == "null":
        return word
    if name in LISTS:
        return f"{name}=[{','.join(quoted(each) for each in value.split(','))}]"
    return f"{name}={quoted(value)}" if name in TEXTS or "=" in value else word

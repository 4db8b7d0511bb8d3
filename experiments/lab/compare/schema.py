"""The settings of a comparison."""

from dataclasses import dataclass, field

from lab.config.fields import choice, number, setting, some
from lab.config.schema import TrackingConfig
from lab.config.settings import App, quoted


@dataclass
class CompareConfig:
    """Which runs, and what of them.

    Names and values may be globs; several are a list. All of several tags and settings must hold, and of one tag or setting any of its
    values.
    """

    name: str | None = setting(None, "the comparison's name in MLflow")
    experiment: list[str] = some(list, "MLflow's experiments; none: that of tracking.experiment")
    sweep: str | None = setting(None, "a sweep's run, by its name or id")
    tag: list[str] = some(list, "tags of the runs, NAME:VALUE")
    where: list[str] = some(list, "settings of the runs, SETTING=VALUE")
    metric: str | None = setting(None, "what is compared; null: the best of the task's own")
    goal: str = choice("auto", "auto", "max", "min", meaning="what is better of the metric; auto: by its name")
    baseline: list[str] = some(list, "a value of rows or columns to test against, SETTING=VALUE; none: loss=ce")
    rows: list[str] = some(lambda: ["loss"], "settings whose values are the rows")
    columns: list[str] = some(lambda: ["model"], "settings whose values are the columns")
    confidence: float = number(0.95, "of intervals; 1 - confidence is the level of tests", above=0, below=1)
    ui: str | None = setting(None, "address of MLflow's UI, for links")
    runs: str | None = setting(None, "folder of run folders; null: runs/ in the current folder")
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

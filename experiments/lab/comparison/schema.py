"""The settings of a comparison."""

from dataclasses import dataclass, field

from lab.config.fields import choice, number, setting, some
from lab.config.schema import TrackingConfig
from lab.config.settings import App, quoted


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

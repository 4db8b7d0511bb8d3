"""The settings of a sweep itself, in addition to those of its jobs."""

from dataclasses import dataclass, field

from lab.config.fields import number, setting


@dataclass
class SearchConfig:
    """Every combination of the values given."""

    name: str = setting("grid", "how jobs are chosen")


@dataclass
class OptunaConfig(SearchConfig):
    name: str = setting("optuna", "how jobs are chosen")
    trials: int = number(20, "total number of jobs", least=1)
    parallel: int = number(1, "number of jobs that are chosen at a time", least=1)
    seed: int = number(0, "seed of the choice", least=0)


SEARCHES: dict[str, type[SearchConfig]] = {"grid": SearchConfig, "optuna": OptunaConfig}


@dataclass
class SweepConfig:
    search: SearchConfig = field(default_factory=SearchConfig)

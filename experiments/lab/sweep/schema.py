"""The settings of a sweep itself, beside those of its jobs."""

from dataclasses import dataclass, field

from lab.config.fields import number


@dataclass
class SearchConfig:
    """Every combination of the values given."""

    name: str = "grid"


@dataclass
class OptunaConfig(SearchConfig):
    """trials: how many jobs in all. parallel: how many are chosen at a time. seed: of the choice."""

    name: str = "optuna"
    trials: int = number(20, least=1)
    parallel: int = number(1, least=1)
    seed: int = number(0, least=0)


SEARCHES: dict[str, type[SearchConfig]] = {"grid": SearchConfig, "optuna": OptunaConfig}


@dataclass
class SweepConfig:
    search: SearchConfig = field(default_factory=SearchConfig)

"""The metric that marks the best epoch, and early stopping by it."""

from dataclasses import dataclass
from math import inf, isnan

from lab.base.errors import unknown
from lab.config.schema import TrainerConfig

LOWER_IS_BETTER = ("loss", "ece", "error", "mae", "mse", "rmse", "brier", "nll", "ms", "seconds", "mib")


def is_lower_better(metric: str) -> bool:
    """Return whether a metric's name says that lower values are better."""
    return any(part in LOWER_IS_BETTER for part in metric.rpartition("/")[2].split("_"))


@dataclass
class Best:
    """The best evaluation so far. score: higher is better for any metric; stale: evaluations since then."""

    score: float = -inf
    epoch: int = 0
    values: dict[str, float] | None = None
    stale: int = 0


class Monitor:
    """Compare evaluations by one of their metrics, and equal ones by their loss.

    Args:
        settings: has `monitor`, `monitor_goal` and `patience`.
        default: the task's metric.
    """

    def __init__(self, settings: TrainerConfig, default: str) -> None:
        self.name, self.patience = settings.monitor or default, settings.patience
        self.goal = settings.monitor_goal
        if self.goal == "auto":
            self.goal = "min" if is_lower_better(self.name) else "max"
        self.best = Best()

    def check(self, values: dict[str, float]) -> None:
        """Raise UserError unless an evaluation with these values has the metric."""
        if self.name not in values:
            raise unknown(f"trainer.monitor={self.name}", self.name, values, show=80)

    def improves(self, values: dict[str, float], epoch: int) -> bool:
        """Compare an evaluation with the best so far; return whether it is better, or as good with a lower loss."""
        self.check(values)
        value = values[self.name]
        score = -inf if isnan(value) else -value if self.goal == "min" else value
        best = self.best
        if best.values is None or score > best.score:
            self.best = Best(score, epoch, values)
            return True
        stale = best.stale + (best.score > -inf)  # as long as there was no number, none was missed
        if score == best.score > -inf and values.get("loss", inf) < best.values.get("loss", inf):
            self.best = Best(score, epoch, values, stale)  # patience counts on: the metric has not improved
            return True
        best.stale = stale
        return False

    @property
    def gives_up(self) -> bool:
        """Return whether `patience` evaluations in a row brought no improvement."""
        return self.patience is not None and self.best.stale >= self.patience

    def tags(self) -> dict[str, str]:
        """Return tags of the metric by which sweeps and comparisons rank the run."""
        return {"monitor": self.name, "monitor_goal": self.goal}

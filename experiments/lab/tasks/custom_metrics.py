"""Custom metrics of an evaluation's probabilities and targets."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lab.base.errors import UserError
from lab.config.objects import find, made


class CustomMetrics:
    """Custom metrics, each of all probabilities (N, C) and targets of an evaluation.

    A metric is a function of (probability, target) that returns a number, or a torchmetrics.Metric, or its class.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        """Find the metrics.

        Raises:
            UserError: a metric is not found, or cannot be called.
        """
        self.targets = targets
        self.metrics = {name: _metric(f"task.metrics.{name}", target) for name, target in targets.items()}

    def values(self, probability: Tensor, target: Tensor) -> dict[str, float]:
        """Return the metrics.

        Raises:
            UserError: a metric fails, or does not return a number.
        """
        values = {}
        for name, metric in self.metrics.items():
            try:
                getattr(metric, "reset", lambda: None)()  # a torchmetrics.Metric accumulates over calls
                values[name] = float(metric(probability, target))
            except Exception as error:
                raise UserError(f"task.metrics.{name}={self.targets[name]}: {type(error).__name__}: {error}") from error
        return values


def _metric(setting: str, target: str) -> Any:
    found = made(setting, target, find(setting, target))
    if not callable(found):
        raise UserError(f"{setting}={target}: is a {type(found).__name__}; a function or a torchmetrics.Metric is expected.")
    return found

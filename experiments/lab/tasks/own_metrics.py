"""Custom metrics of an evaluation's probabilities and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lab.config.errors import UserError
from lab.config.objects import find, made
from lab.processes import distributed


class OwnMetrics:
    """Keep probabilities (N, C) and targets of an evaluation, and pass all of them to each metric at its end.

    A metric is a function of (probability, target) that returns a number, or a torchmetrics.Metric, or its class.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        """Find the metrics.

        Raises:
            UserError: a metric is not found, or cannot be called.
        """
        self.targets = targets
        self.metrics = {name: _metric(f"task.metrics.{name}", target) for name, target in targets.items()}
        self.probability: list[Tensor] = []
        self.target: list[Tensor] = []

    def add(self, probability: Tensor, target: Tensor) -> None:
        if self.metrics:
            self.probability.append(probability.float().cpu())
            self.target.append(target.cpu())

    def values(self) -> dict[str, float]:
        """Return the metrics over all ranks.

        Raises:
            UserError: a metric fails, or does not return a number.
        """
        if not self.metrics:
            return {}
        parts = distributed.gathered((torch.cat(self.probability), torch.cat(self.target)))
        probability, target = (torch.cat([each[part] for each in parts]) for part in (0, 1))
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

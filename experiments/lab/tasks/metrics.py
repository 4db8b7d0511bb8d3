"""What evaluations share: the loss, tensors of all samples, bins of probabilities, and metrics of the user's own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.config.objects import find, made
from lab.processes import distributed


class Counts:
    """Sum the loss over the batches of an evaluation."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, divisor

    def add_loss(self, loss_sum: Tensor, divisor: Tensor) -> None:
        """Count a batch's loss before division, and its part of the divisor."""
        self.loss += torch.stack([loss_sum, divisor]).double()

    def mean_loss(self) -> float:
        """Return the loss over all ranks."""
        total, divisor = distributed.total(self.loss).tolist()
        return total / divisor if divisor else float("nan")


class AllSamples:
    """Keep tensors (N, ...) of all samples of an evaluation."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, ...]] = []

    def add(self, *tensors: Tensor) -> None:
        self.batches.append(tensors)

    def gathered(self) -> list[Tensor]:
        """Return the samples of all ranks, on the CPU."""
        own = [torch.cat(each).cpu() for each in zip(*self.batches, strict=True)]
        return [torch.cat(each) for each in zip(*distributed.gathered(own), strict=True)]


def binned(probability: Tensor, bins: int, *rows: Tensor) -> Tensor:
    """Return sums (bins, len(rows)) of rows (N,) by bins of their samples' probability (N,); float64."""
    place = (probability * bins).long().clamp(0, bins - 1)
    chosen = (place[:, None] == torch.arange(bins, device=place.device)).double()
    return chosen.T @ torch.stack(rows, dim=1).double()


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

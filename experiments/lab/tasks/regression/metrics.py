"""Figures of predicted numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.tasks.counts import Counts, Kept
from lab.tasks.custom_metrics import CustomMetrics


@dataclass
class RegressionResult:
    """figures: mae, rmse, bias and r2 of each target (K,). prediction and target: (N, K)."""

    values: dict[str, float]
    figures: dict[str, Tensor]
    prediction: Tensor
    target: Tensor

    def tree(self) -> dict[str, Any]:
        return {"targets": {name: each.tolist() for name, each in self.figures.items()}}


class RegressionCounts(Counts):
    """Keep every sample's prediction, because the picture of residuals shows them."""

    def __init__(self, device: torch.device, own: Mapping[str, str]) -> None:
        """Make empty counts; own: the targets of custom metrics, by name."""
        super().__init__(device)
        self.own, self.kept = CustomMetrics(own), Kept()

    def add(self, prediction: Tensor, target: Tensor, loss_sum: Tensor, share: Tensor) -> None:
        self.kept.add(prediction, target)
        self.add_loss(loss_sum, share)

    def result(self) -> RegressionResult:
        """Return the result over all ranks; R² is 1 - Σ (y - x)² / Σ (y - ȳ)², and nan where all targets are equal."""
        said, wanted = self.kept.gathered()
        prediction, target = said.double(), wanted.double()
        difference, around = prediction - target, target - target.mean(0)
        squared, spread = difference.square().sum(0), around.square().sum(0)
        figures = {
            "mae": difference.abs().mean(0),
            "rmse": (squared / len(target)).sqrt(),
            "bias": difference.mean(0),
            "r2": torch.where(spread > 0, 1 - squared / spread, torch.nan),
        }
        values = {name: figures[name].mean().item() for name in ("mae", "rmse")} | {
            "r2": figures["r2"].nanmean().item(),
            "loss": self.mean_loss(),
            "samples": float(len(target)),
        }
        return RegressionResult(values | self.own.values(said.float(), wanted), figures, prediction.float(), target.float())

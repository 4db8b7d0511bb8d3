"""Figures of predicted numbers, and their picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.base.files import save_figure
from lab.tasks.metrics import AllSamples, Counts, CustomMetrics


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
        self.own, self.samples = CustomMetrics(own), AllSamples()

    def add(self, prediction: Tensor, target: Tensor, loss_sum: Tensor, share: Tensor) -> None:
        self.samples.add(prediction, target)
        self.add_loss(loss_sum, share)

    def result(self) -> RegressionResult:
        """Return the result over all ranks; R² is 1 - Σ (y - x)² / Σ (y - ȳ)², and nan where all targets are equal."""
        said, wanted = self.samples.gathered()
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


MOST = 12  # targets that are drawn
POINTS = 5000  # samples that are drawn of each


def residual_picture(result: RegressionResult, names: list[str], path: Path) -> None:
    """Draw for each target its predictions beside the true values, and the distribution of the residuals."""
    from matplotlib.figure import Figure

    shown = names[:MOST]
    figure = Figure(figsize=(9, 3.4 * len(shown)), layout="constrained")
    step = -(-len(result.target) // POINTS)
    for (left, right), number in zip(figure.subplots(len(shown), 2, squeeze=False), range(len(shown)), strict=True):
        true, said = (values[::step, number].tolist() for values in (result.target, result.prediction))
        residual = (result.prediction[:, number] - result.target[:, number]).tolist()
        lowest, highest = min(true + said), max(true + said)
        left.plot([lowest, highest], [lowest, highest], "--", color="grey")
        left.scatter(true, said, s=6, alpha=0.5)
        figures = " · ".join(f"{title} {result.figures[key][number]:.4g}" for key, title in (("r2", "R²"), ("mae", "MAE")))
        left.set(xlabel=f"true {shown[number]}", ylabel="predicted", title=figures)
        right.locator_params(axis="x", nbins=6)  # long numbers would overlap
        right.hist(residual, bins=40)
        right.axvline(0, linestyle="--", color="grey")
        right.set(xlabel=f"residual of {shown[number]}: predicted - true", ylabel="samples")
    save_figure(figure, path, dpi=110)

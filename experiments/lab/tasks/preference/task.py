"""The preference task: a reward model of images, trained on pairs with one preferred image.

The model gives every image a reward; the first image of a pair is preferred with probability σ(r₁ - r₂).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.config.loss_schema import BradleyTerryConfig
from lab.config.schema import TrainConfig
from lab.data.sets import Data, Loader, Norm
from lab.processes import distributed
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor
from lab.tasks.inference import classifier, image_size, prepared_as, reader
from lab.tasks.losses import Criterion
from lab.tasks.metrics import Counts, binned
from lab.tasks.plots import calibration_picture
from lab.tasks.preference import DigitPairsConfig
from lab.tasks.preference.data import PairBatch, load_pairs
from lab.tasks.task import BaseTask


@dataclass
class PreferenceResult:
    values: dict[str, float]
    calibration: list[list[float]]  # for each bin of predicted probability: pairs, sum of the votes' shares, sum of the probabilities

    def tree(self) -> dict[str, Any]:
        return {"calibration": self.calibration}


class PreferenceCounts(Counts):
    """Sum over batches of held-out pairs."""

    def __init__(self, bins: int, device: torch.device) -> None:
        super().__init__(device)
        self.calibration = torch.zeros(bins, 3, dtype=torch.float64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # right, as voted, margin

    def add(self, lead: Tensor, truth: Tensor, share: Tensor, loss_sum: Tensor, divisor: Tensor) -> None:
        """Count one batch.

        Args:
            lead: (N,) the first's reward minus the second's.
            truth: (N,) 1 if the first is the better, else 0.
            share: (N,) share of the votes for the first.
            loss_sum: the batch's loss before division.
            divisor: the batch's part of the divisor.
        """
        first = lead > 0
        right, voted = (first == (given > 0.5) for given in (truth, share))
        margin = torch.where(truth > 0.5, lead, -lead)
        self.sums += torch.stack([right.sum(), voted.sum(), margin.sum()]).double()
        self.add_loss(loss_sum, divisor)
        probability = lead.sigmoid()
        self.calibration += binned(probability, len(self.calibration), torch.ones_like(share), share, probability)

    def result(self) -> PreferenceResult:
        """Return the result over all ranks."""
        for counts in (self.calibration, self.sums):
            distributed.total(counts)
        pairs, share, probability = self.calibration.cpu().unbind(1)
        right, voted, margin = self.sums.tolist()
        count = pairs.sum().item() or 1
        values = {
            "accuracy": right / count,
            "agreement": voted / count,
            "margin": margin / count,
            "ece": (share - probability).abs().sum().item() / count,
            "loss": self.mean_loss(),
            "samples": pairs.sum().item(),
        }
        return PreferenceResult(values, self.calibration.tolist())


class Preference(BaseTask):
    monitor = "accuracy"
    score_names: tuple[str, ...] = ("agreement",)
    line = "held-out pairs {accuracy:.2%} right · {agreement:.2%} as voted · margin {margin:.3f} · loss {loss:.4f} · ECE {ece:.4f}"
    table: Mapping[str, str] = {
        "held-out pairs right": "{accuracy:.2%}",
        "held-out pairs as voted": "{agreement:.2%}",
        "mean margin": "{margin:.3f}",
        "calibration error": "{ece:.4f}",
    }

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        super().__init__(config, data, device)
        self.criterion: Criterion | BradleyTerryConfig = (
            config.loss if isinstance(config.loss, BradleyTerryConfig) else Criterion(config.loss, config.data, 1, data.groups, device)
        )

    def model(self) -> nn.Module:
        return self.network(1, image_size(self.config))

    def normalizer(self, batch: PairBatch) -> Tensor:
        return torch.full((), float(len(batch)), device=batch.images.device)

    def loss(self, output: Tensor, batch: PairBatch, normalizer: Tensor) -> Tensor:
        """Return the loss; Bradley-Terry gives all pairs equal weight, and other losses use the pairs' weights and groups."""
        rewards, terms = output.view(-1, 2), self.criterion
        if isinstance(terms, Criterion):
            return terms(rewards[:, :1] - rewards[:, 1:], replace(batch, target=batch.target[:, None]), normalizer)
        from lossforge.losses import bradley_terry_loss

        chosen = (batch.target < 0.5).long()[:, None]
        preferred, other = (rewards.gather(1, place)[:, 0] for place in (chosen, 1 - chosen))
        hyper = terms.margin, terms.label_smoothing, terms.center_rewards_coefficient
        return bradley_terry_loss(preferred, other, *hyper, "sum", normalizer=normalizer)

    def lead(self, output: Tensor) -> Tensor:
        """Return the first's reward minus the second's, (N,)."""
        first, second = output.float().view(-1, 2).unbind(1)
        return first - second

    def scores(self, output: Tensor, batch: PairBatch) -> Tensor:
        """Count pairs whose preferred image has the larger reward."""
        return ((self.lead(output) > 0) == (batch.target > 0.5)).sum()[None]

    def counts(self, loader: Loader) -> PreferenceCounts:
        return PreferenceCounts(self.settings.calibration_bins, self.device)

    def count(self, counts: PreferenceCounts, output: Tensor, batch: PairBatch) -> None:
        assert batch.truth is not None
        assert batch.share is not None
        counts.add(self.lead(output), batch.truth, batch.share, *self.whole_loss(output, batch))

    def samples(self, output: Tensor, batch: PairBatch) -> list[dict[str, Any]]:
        assert batch.truth is not None
        first, names = self.lead(output).sigmoid(), ("second", "first")
        return [
            {"true": names[true], "predicted": names[p > 0.5], "probability": max(p, 1 - p), "correct": int(true == (p > 0.5))}
            for true, p in zip(batch.truth.bool().tolist(), first.tolist(), strict=True)
        ]

    def pictures(self, result: PreferenceResult, folder: Path) -> list[Path]:
        path = folder / "calibration.png"
        calibration_picture(result, path, "share of votes for the first", "probability that the first is preferred")
        return [path]


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Preference:
    return Preference(config, load_pairs(cast(DigitPairsConfig, config.data), device, config.seed, saved), device)


@dataclass
class Reward(Prediction):
    """The reward that a model of preferences gives one image."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"reward": self.scores[0]}]

    def line(self) -> str:
        return f"reward {self.scores[0]:.3f}"


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to its reward."""
    size = image_size(config)
    model, read = classifier(config, classes, asked.norm, size), reader(config.data, size, asked.norm)
    return model, lambda image: Reward(["reward"], [float(model(read(image).to(asked.device)))])


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to their rewards, to export."""
    size = image_size(config)
    model = classifier(config, classes, norm, size)
    return Exportable(Images(model, norm), model, [len(norm.mean), size, size], "reward", prepare=prepared_as(config.data, size, norm))

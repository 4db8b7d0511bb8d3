"""The classification task: images of one class each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lab.base.fonts import letters_of
from lab.config.schema import ImagesConfig, TrainConfig
from lab.data.augment import Mix
from lab.data.batch import Batch
from lab.data.load import load_data
from lab.data.sets import Data, Loader, Norm
from lab.processes.distributed import own_seed
from lab.tasks.classification.metrics import ClassificationCounts, ClassificationResult
from lab.tasks.heads import HeadInput, sum_of_rows
from lab.tasks.losses import Criterion
from lab.tasks.models import model_norm
from lab.tasks.plots import calibration_picture, confusion_picture
from lab.tasks.task import ClassifierTask, table_of


class Classification(ClassifierTask):
    monitor = "top1"
    score_names: tuple[str, ...] = ("top1",)
    line = "held-out top-1 {top1:.2%} · loss {loss:.4f} · ECE {ece:.4f}"
    table: Mapping[str, str] = {
        "held-out top-1": "{top1:.2%}",
        "balanced accuracy": "{balanced_accuracy:.2%}",
        "calibration error": "{ece:.4f}",
    }

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        images = cast(ImagesConfig, config.data)
        criterion = Criterion(config.loss, images, len(data.classes), data.groups, device, data.counts)
        super().__init__(config, data, criterion, images.image_size, device)
        if len(data.classes) > 5:
            self.score_names = ("top1", "top5")
            self.line = self.line.replace(" ·", " · top-5 {top5:.2%} ·", 1)
            self.table = {"held-out top-1": "{top1:.2%}", "held-out top-5": "{top5:.2%}", **self.table}
        self.counts(data.val)  # checks the metrics before training starts
        self.mix = Mix(images.mixup, images.cutmix, images.mix_probability, device, own_seed(config.seed))

    def prepare(self, batch: Batch, *, training: bool) -> Batch:
        return self.mix(batch) if training else batch

    def state(self) -> dict[str, Any]:
        return self.mix.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.mix.load_state(state)

    def scores(self, output: Tensor | HeadInput, batch: Batch) -> Tensor:
        """Count top-1 hits, and top-5 hits with more than five classes; for mixed samples the class with the larger share counts."""
        target = batch.target
        if batch.target_b is not None and batch.lam is not None and batch.lam < 0.5:
            target = batch.target_b

        def hits(logits: Tensor, target: Tensor) -> Tensor:
            found = logits.topk(5 if "top5" in self.score_names else 1).indices == target[:, None]
            return torch.stack([found[:, 0].sum(), found.sum()][: len(self.score_names)])

        return sum_of_rows(hits, output, target)

    def counts(self, loader: Loader) -> ClassificationCounts:
        return ClassificationCounts(
            len(self.data.classes),
            self.settings.calibration_bins,
            self.data.groups,
            self.device,
            self.settings.metrics,
            self.criterion.activation,
        )

    def count(self, counts: ClassificationCounts, output: Tensor, batch: Batch) -> None:
        probability = self.criterion.probabilities(output.float())
        counts.add(probability, batch.target, batch.group, *self.whole_loss(output, batch), batch.index)

    def samples(self, output: Tensor, batch: Batch) -> list[dict[str, Any]]:
        probability = self.criterion.probabilities(output.float())
        best, guess = probability.max(1)
        of_truth, names = probability.gather(1, batch.target[:, None])[:, 0], self.data.classes
        columns = (batch.target.tolist(), guess.tolist(), best.tolist(), of_truth.tolist())
        return [
            {"true": names[true], "predicted": names[said], "probability": p, "probability_of_true": q, "correct": int(true == said)}
            for true, said, p, q in zip(*columns, strict=True)
        ]

    def per_class(self, result: ClassificationResult) -> list[dict[str, Any]]:
        confusion = torch.tensor(result.confusion, dtype=torch.float64)
        right, there, said = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        figures = {"samples": there.long(), "precision": right / said, "recall": right / there, "f1": 2 * right / (there + said)}
        return table_of(self.data.classes, figures)

    def pictures(self, result: ClassificationResult, folder: Path) -> list[Path]:
        confusion, calibration = folder / "confusion_matrix.png", folder / "calibration.png"
        with letters_of(self.data.classes):
            confusion_picture(result, self.data.classes, confusion)
        calibration_picture(result, calibration)
        return [confusion, calibration]

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        rows = super().rows(best)
        if self.data.groups:
            weights = self.criterion.group_weight
            use = f"loss weights {weights.tolist()}" if weights is not None else "measured only: the loss has no group weights"
            shown = ", ".join(f"{best[f'top1_group_{number}']:.2%}" for number in range(self.data.groups))
            rows["top-1 by group"] = f"{shown} ({use})"
        return rows


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Classification:
    data = load_data(cast(ImagesConfig, config.data), model_norm(config.model, saved), device, config.seed, saved)
    return Classification(config, data, device)

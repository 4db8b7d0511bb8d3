"""A task owns what a batch means: from batch to loss, and from outputs to metrics and pictures. The trainer knows none of it."""

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lab.config.loss_schema import SigmoidConfig
from lab.config.schema import ClassificationConfig, ClassifierConfig, ImagesConfig, TrainConfig
from lab.data.augment import Mix
from lab.data.batch import Batch
from lab.data.sets import Data, Sets
from lab.tasks.fonts import letters_of
from lab.tasks.heads import HeadInput, open_head, sum_of_rows
from lab.tasks.losses import Criterion
from lab.tasks.metrics import ClassificationCounts, ClassificationResult
from lab.tasks.models import build_model, set_prior
from lab.tasks.plots import calibration_picture, confusion_picture
from lab.train.distributed import own_seed


class Mixing(Protocol):
    """What a training batch goes through on its way to the model."""

    def __call__(self, batch: Any) -> Any: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...


class Task(Protocol):
    """What the trainer asks of a task."""

    monitor: str  # the metric whose highest value marks the best checkpoint
    score_names: tuple[str, ...]  # what is counted of the training batches themselves
    mix: Mixing

    @property
    def data(self) -> Sets: ...

    def model(self) -> nn.Module: ...

    def share(self, batch: Any) -> Tensor:
        """What the batch adds to the loss's divisor."""
        ...

    def loss(self, output: Any, batch: Any, normalizer: Tensor) -> Tensor: ...

    def scores(self, output: Any, batch: Any) -> Tensor:
        """(len(score_names),) sums over the batch's samples."""
        ...

    def counts(self) -> Any: ...

    def count(self, counts: Any, output: Any, batch: Any) -> None: ...

    def pictures(self, result: Any, folder: Path) -> list[Path]: ...

    def headline(self, result: Any) -> str:
        """An evaluation in one line."""
        ...

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        """The best evaluation's rows of the final table."""
        ...


class Classification:
    monitor = "top1"
    score_names: tuple[str, ...] = ("top1", "top5")

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        self.config, self.data, self.device = config, data, device
        self.settings, self.images = cast(ClassificationConfig, config.task), cast(ImagesConfig, config.data)
        self.criterion = Criterion(config.loss, self.images, len(data.classes), data.groups, device, data.counts)
        self.mix: Mixing = Mix(self.images.mixup, self.images.cutmix, self.images.mix_probability, device, own_seed(config.seed))

    def model(self) -> nn.Module:
        classes = len(self.data.classes)
        architecture = cast(ClassifierConfig, self.config.model)
        model = build_model(architecture, channels=self.data.channels, classes=classes, image_size=self.images.image_size)
        if isinstance(self.config.loss, SigmoidConfig) and self.config.loss.prior_bias:
            set_prior(model, classes)
        if self.config.loss.fused_head:
            open_head(model, (self.data.channels, self.images.image_size, self.images.image_size))
        return model

    def share(self, batch: Batch) -> Tensor:
        return self.criterion.share(batch)

    def loss(self, output: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch, normalizer)

    def scores(self, output: Tensor | HeadInput, batch: Batch) -> Tensor:
        """Hits among the first and the first five; of mixed samples the class with the larger share counts."""
        target = batch.target
        if batch.target_b is not None and batch.lam is not None and batch.lam < 0.5:
            target = batch.target_b

        def hits(logits: Tensor, target: Tensor) -> Tensor:
            found = logits.topk(min(5, logits.shape[1])).indices == target[:, None]
            return torch.stack([found[:, 0].sum(), found.sum()])

        return sum_of_rows(hits, output, target)

    def counts(self) -> ClassificationCounts:
        return ClassificationCounts(len(self.data.classes), self.settings.calibration_bins, self.data.groups, self.device)

    def count(self, counts: ClassificationCounts, output: Tensor, batch: Batch) -> None:
        one = torch.ones((), device=output.device)
        loss = self.loss(output, batch, one)
        counts.add(self.criterion.probabilities(output.float()), batch.target, batch.group, loss.float(), self.share(batch))

    def pictures(self, result: ClassificationResult, folder: Path) -> list[Path]:
        confusion, calibration = folder / "confusion_matrix.png", folder / "calibration.png"
        with letters_of(self.data.classes):
            confusion_picture(result, self.data.classes, confusion)
        calibration_picture(result, calibration)
        return [confusion, calibration]

    def headline(self, result: ClassificationResult) -> str:
        values = result.values
        return f"held-out top-1 {values['top1']:.2%} · top-5 {values['top5']:.2%} · loss {values['loss']:.4f} · ECE {values['ece']:.4f}"

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        rows = {
            "held-out top-1": f"{best['top1']:.2%}",
            "held-out top-5": f"{best['top5']:.2%}",
            "balanced accuracy": f"{best['balanced_accuracy']:.2%}",
            "calibration error": f"{best['ece']:.4f}",
        }
        if self.data.groups:
            weights = self.criterion.group_weight
            use = f"loss weights {weights.tolist()}" if weights is not None else "measured only: the loss has no group weights"
            shown = ", ".join(f"{best[f'top1_group_{number}']:.2%}" for number in range(self.data.groups))
            rows["top-1 by group"] = f"{shown} ({use})"
        return rows

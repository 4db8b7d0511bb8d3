"""A task owns what a batch means: from batch to loss, and from outputs to metrics and pictures. The trainer knows none of it."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lab.batch import Batch
from lab.data import Data
from lab.losses import SOFTMAX, Criterion
from lab.metrics import ClassificationCounts, ClassificationResult
from lab.models import build_model, set_prior
from lab.plots import calibration_picture, confusion_picture
from lab.schema import SigmoidConfig, TrainConfig


class Counts(Protocol):
    def result(self) -> Any: ...


class Task(Protocol):
    """What the trainer asks of a task."""

    monitor: str  # the metric whose highest value marks the best checkpoint

    def model(self) -> nn.Module: ...

    def share(self, batch: Batch) -> Tensor:
        """What the batch adds to the loss's divisor."""
        ...

    def loss(self, output: Tensor, batch: Batch, normalizer: Tensor) -> Tensor: ...

    def counts(self) -> Any: ...

    def count(self, counts: Any, output: Tensor, batch: Batch) -> None: ...

    def pictures(self, result: Any, folder: Path) -> list[Path]: ...


class Classification:
    monitor = "top1"

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        self.config, self.data, self.device = config, data, device
        self.criterion = Criterion(config.loss, config.data, len(data.classes), data.groups, device)

    def model(self) -> nn.Module:
        classes = len(self.data.classes)
        model = build_model(self.config.model, channels=self.data.channels, classes=classes, image_size=self.config.data.image_size)
        if isinstance(self.config.loss, SigmoidConfig) and self.config.loss.prior_bias and self.config.loss.name not in SOFTMAX:
            set_prior(model, classes)
        return model

    def share(self, batch: Batch) -> Tensor:
        return self.criterion.share(batch)

    def loss(self, output: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch, normalizer)

    def counts(self) -> ClassificationCounts:
        return ClassificationCounts(len(self.data.classes), self.config.task.calibration_bins, self.data.groups, self.device)

    def count(self, counts: ClassificationCounts, output: Tensor, batch: Batch) -> None:
        one = torch.ones((), device=output.device)
        loss = self.loss(output, batch, one)
        counts.add(self.criterion.probabilities(output.float()), batch.target, batch.group, loss.float(), self.share(batch))

    def pictures(self, result: ClassificationResult, folder: Path) -> list[Path]:
        confusion, calibration = folder / "confusion_matrix.png", folder / "calibration.png"
        confusion_picture(result, self.data.classes, confusion)
        calibration_picture(result, calibration)
        return [confusion, calibration]

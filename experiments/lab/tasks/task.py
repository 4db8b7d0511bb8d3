"""A task defines what a batch means: from batch to loss, and from outputs to metrics and pictures. The trainer knows none of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lab.config.loss_schema import SigmoidConfig
from lab.config.schema import ClassifierConfig, TrainConfig
from lab.data.batch import Batch
from lab.data.sets import Sets
from lab.tasks.heads import HeadInput, open_head
from lab.tasks.losses import Criterion
from lab.tasks.models import build_model, set_prior


class Task(Protocol):
    """What the trainer asks of a task.

    For each batch, in this order: `prepare`, the model's forward, `loss` and `scores` in training, `count` in an evaluation.
    """

    monitor: str  # the metric whose highest value marks the best checkpoint
    score_names: tuple[str, ...]  # what is counted of the training batches themselves
    notes: Sequence[str]  # on the data, for the person at the keyboard

    @property
    def data(self) -> Sets:
        """What it trains on and is evaluated on."""
        ...

    def model(self) -> nn.Module:
        """A new model, on the CPU."""
        ...

    def prepare(self, batch: Any, *, training: bool) -> Any:
        """The batch as the model and the loss take it: mixed, matched with anchors, with a teacher's logits, or as it comes."""
        ...

    def normalizer(self, batch: Any) -> Tensor:
        """What a prepared batch adds to the loss's divisor, 0-d."""
        ...

    def loss(self, output: Any, batch: Any, normalizer: Tensor) -> Tensor:
        """The batch's loss, 0-d: its samples' sum over `normalizer`, which is that of all batches of an update."""
        ...

    def scores(self, output: Any, batch: Any) -> Tensor:
        """(len(score_names),) sums over the batch's samples."""
        ...

    def counts(self, loader: Any) -> Any:
        """Counters of a new evaluation of this loader's samples; their `result()` has `values`, by name, and `tree()` for the record."""
        ...

    def count(self, counts: Any, output: Any, batch: Any) -> None:
        """Count a batch of an evaluation."""
        ...

    def samples(self, output: Any, batch: Any) -> list[dict[str, Any]]:
        """What the model says of each sample, as columns of a table; empty where the result's files have it."""
        ...

    def per_class(self, result: Any) -> list[dict[str, Any]]:
        """An evaluation's figures of each class, as columns of a table; empty where there are no classes."""
        ...

    def pictures(self, result: Any, folder: Path) -> list[Path]:
        """Draw an evaluation's pictures into a folder, and return their paths."""
        ...

    def headline(self, result: Any) -> str:
        """An evaluation in one line."""
        ...

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        """The best evaluation's rows of the final table."""
        ...

    def state(self) -> dict[str, Any]:
        """What `prepare` draws its chances from, so that a continued run draws on."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...


def table_of(classes: list[str], figures: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A row a class from figures (C,); one that is 0 / 0 is left empty."""
    columns = {"class": classes} | {name: ["" if value != value else value for value in each.tolist()] for name, each in figures.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Stateless:
    """Of tasks whose batches come as they are to be; without tables, unless a task makes some."""

    notes: Sequence[str] = ()

    def prepare(self, batch: Any, *, training: bool) -> Any:
        return batch

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass

    def samples(self, output: Any, batch: Any) -> list[dict[str, Any]]:
        return []

    def per_class(self, result: Any) -> list[dict[str, Any]]:
        return []


class ClassifierTask(Stateless):
    """What tasks share whose model is a classifier and whose loss is a `Criterion` of its logits."""

    channels = 3
    data: Any  # Sets, and what a task's own data has beside

    def __init__(self, config: TrainConfig, criterion: Criterion, image_size: int, device: torch.device) -> None:
        self.config, self.criterion, self.image_size, self.device = config, criterion, image_size, device

    def prior(self) -> float:
        """The probability that a class starts with under a loss of sigmoids."""
        return 1 / max(len(self.data.classes), 2)

    def model(self) -> nn.Module:
        architecture, loss = cast(ClassifierConfig, self.config.model), self.config.loss
        model = build_model(architecture, channels=self.channels, classes=len(self.data.classes), image_size=self.image_size)
        if isinstance(loss, SigmoidConfig) and loss.prior_bias:
            set_prior(model, self.prior())
        if loss.fused_head:
            open_head(model, (self.channels, self.image_size, self.image_size))
        return model

    def normalizer(self, batch: Batch) -> Tensor:
        return self.criterion.normalizer(batch)

    def loss(self, output: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch, normalizer)

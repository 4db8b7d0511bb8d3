"""A task maps batches to losses, and outputs to metrics and pictures. The trainer is the same for all tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from lab.config.loss_schema import SigmoidConfig
from lab.config.schema import TrainConfig
from lab.data.batch import Batch
from lab.data.sets import Data
from lab.tasks.heads import HeadInput, open_head
from lab.tasks.inference import mean_of_probabilities
from lab.tasks.losses import Criterion
from lab.tasks.models import build_classifier, set_prior

SHOWN = 16
"""The most images of the first training batch that are drawn."""


class Task(Protocol):
    """The methods that the trainer calls on a task; those with a body are right for a task that does not change batches and has no tables.

    For each batch, in this order: `prepare`, the model's forward, `loss` and `scores` in training, `count` in an evaluation.
    """

    monitor: str  # the metric whose highest value marks the best checkpoint
    score_names: tuple[str, ...]  # figures that are counted on training batches
    line: str = ""  # an evaluation in one line: a format of its values
    table: Mapping[str, str] = {}  # the rows of the final table: formats of the best evaluation's values
    notes: Sequence[str] = ()  # messages about the data, for the user
    data: Data  # to train on and to evaluate on

    def model(self) -> nn.Module:
        """Return a new model, on the CPU."""

    def prepare(self, batch: Any, *, training: bool) -> Any:
        """Return the batch as model and loss take it: mixed, matched with anchors, with a teacher's logits, or unchanged."""
        return batch

    def other_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the model's inputs after the images of a prepared batch, such as captions."""
        return ()

    def normalizer(self, batch: Any) -> Tensor:
        """Return a prepared batch's part of the loss's divisor, 0-d."""

    def loss(self, output: Any, batch: Any, normalizer: Tensor) -> Tensor:
        """Return the batch's loss, 0-d: the sum over its samples, divided by `normalizer`, the divisor of all batches of an update."""

    def scores(self, output: Any, batch: Any) -> Tensor:
        """Return sums over the batch's samples, (len(score_names),)."""

    def counts(self, loader: Any) -> Any:
        """Return counters for an evaluation of this loader's samples; their `result()` has `values`, by name, and `tree()` to record."""

    def count(self, counts: Any, output: Any, batch: Any) -> None:
        """Count a batch of an evaluation."""

    def samples(self, output: Any, batch: Any) -> list[dict[str, Any]]:
        """Return the model's prediction for each sample, as columns of a table; empty if another file has them."""
        return []

    def per_class(self, result: Any) -> list[dict[str, Any]]:
        """Return an evaluation's figures of each class, as columns of a table; empty if there are no classes."""
        return []

    def pictures(self, result: Any, folder: Path) -> list[Path]:
        """Draw an evaluation's pictures into a folder, and return their paths."""

    def first_batch(self, batch: Any) -> list[tuple[Image.Image, str]]:
        """Return images of a prepared training batch as the model sees them, with labels drawn in or as a title; empty for none."""
        return []

    def headline(self, result: Any) -> str:
        """Return an evaluation in one line."""
        return self.line.format_map(result.values)

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        """Return the best evaluation's rows of the final table."""
        return {title: text.format_map(best) for title, text in self.table.items()}

    def state(self) -> dict[str, Any]:
        """Return the state of the random generators of `prepare`, so that a continued run draws the same numbers."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a value of `state`."""
        return


def table_of(classes: list[str], figures: dict[str, Tensor], title: str = "class") -> list[dict[str, Any]]:
    """Return a row for each class from figures (C,); a figure of 0 / 0 is empty. title: of the column with the names."""
    columns = {title: classes} | {name: ["" if value != value else value for value in each.tolist()] for name, each in figures.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class BaseTask(Task):
    """Base of tasks whose settings may have metrics of the user's own, and whose evaluations count the loss."""

    data: Any  # Data, with a task's own additions

    def __init__(self, config: TrainConfig, data: Any, device: torch.device) -> None:
        self.config, self.data, self.device = config, data, device
        self.settings: Any = config.task
        self.notes = data.notes

    def network(self, classes: int, image_size: int) -> nn.Module:
        """Return the classifier of the settings, of so many outputs."""
        return build_classifier(self.config, channels=self.data.channels, classes=classes, image_size=image_size)

    def seen(self, batch: Any) -> list[Image.Image]:
        """Return the first images of a batch as pictures in RGB, without normalisation; of several channels three, of one its grey."""
        images, norm = batch.images[:SHOWN].detach().float().cpu(), self.data.norm
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (norm.mean, norm.std))
        pixels = ((images * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        return [Image.fromarray(each[..., :3] if each.shape[2] >= 3 else each[..., 0]).convert("RGB") for each in pixels]

    def whole_loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return a batch's loss before division, and its part of the divisor, for an evaluation."""
        share = self.normalizer(batch)
        return self.loss(output, batch, torch.ones_like(share)).float(), share

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        return super().rows(best) | {f"held-out {name}": f"{best[name]:.4f}" for name in getattr(self.settings, "metrics", ())}


class ClassifierTask(BaseTask):
    """Base of tasks whose model is a classifier and whose loss is a `Criterion` of its logits."""

    def __init__(self, config: TrainConfig, data: Any, criterion: Criterion, image_size: int, device: torch.device) -> None:
        super().__init__(config, data, device)
        self.criterion, self.image_size = criterion, image_size

    def first_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        """Return images with their class; of a mixup both classes, with their shares, of several labels all."""
        images, classes = self.seen(batch), dict(enumerate(self.data.classes))
        target, other, share = (getattr(batch, name, None) for name in ("target", "target_b", "lam"))
        if target is None:
            return []
        if target.ndim > 1:
            labels = [(row > 0.5).nonzero().view(-1).tolist() for row in target[: len(images)].cpu()]
            titles = [", ".join(str(classes.get(label, label)) for label in each) or "no class" for each in labels]
        else:
            titles = [str(classes.get(label, label)) for label in target[: len(images)].tolist()]
        if other is not None and share is not None:
            mixed = [classes.get(label, label) for label in other[: len(images)].tolist()]
            titles = [f"{one} {share:.2f}, {two} {1 - share:.2f}" for one, two in zip(titles, mixed, strict=True)]
        return list(zip(images, titles, strict=True))

    def prior(self) -> float:
        """Return the probability with which a class starts under a loss of sigmoids."""
        return 1 / max(len(self.data.classes), 2)

    def model(self) -> nn.Module:
        loss, model = self.config.loss, self.network(len(self.data.classes), self.image_size)
        if isinstance(loss, SigmoidConfig) and loss.prior_bias:
            set_prior(model, self.prior())
        if loss.fused_head:
            open_head(model, (self.data.channels, self.image_size, self.image_size))
        return model

    def merged(self, outputs: list[Tensor]) -> Tensor:
        """Return logits of the mean probabilities of several views."""
        return mean_of_probabilities(outputs, self.criterion.activation)

    def normalizer(self, batch: Batch) -> Tensor:
        return self.criterion.normalizer(batch)

    def loss(self, output: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch, normalizer)

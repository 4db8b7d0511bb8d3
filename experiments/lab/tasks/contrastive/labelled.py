"""An image encoder, trained on images of one class each: features of a class are similar, or those of two views of an image."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.base.fonts import letters_of
from lab.config.schema import ImagesConfig, TrainConfig
from lab.data.augment import random_affine
from lab.data.batch import Batch
from lab.data.sets import Data
from lab.processes import distributed
from lab.tasks.contrastive.metrics import NeighbourCounts, NeighbourResult
from lab.tasks.contrastive.model import Embedded, Embedder, batch_loss
from lab.tasks.inference import image_size
from lab.tasks.models import build_model
from lab.tasks.plots import matrix_picture
from lab.tasks.task import BaseTask, table_of


class Labelled(BaseTask):
    monitor = "recall1"
    score_names: tuple[str, ...] = ("cosine",)
    line = "among {samples:.0f} held-out images recall@1 {recall1:.2%} · @5 {recall5:.2%} · loss {loss:.4f}"
    table: Mapping[str, str] = {f"held-out recall@{most}": f"{{recall{most}:.2%}}" for most in (1, 5)}

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        super().__init__(config, data, device)
        images = cast(ImagesConfig, config.data)
        for name in ("mixup", "cutmix"):
            if given := getattr(images, name):
                raise UserError(f"data.{name}={given}: task=contrastive needs one class an image, which it blends. Use data.{name}=0.")
        for name in ("batch_size", "eval_batch_size"):
            if getattr(images, name) == 1:
                raise UserError(f"data.{name}=1: task=contrastive compares the images of a batch; at least 2 are expected.")
        self.criterion, self.of_views = batch_loss(config.loss), config.loss.takes == "views"
        self.random = torch.Generator(device).manual_seed(distributed.own_seed(config.seed))
        if config.trainer.accumulate > 1 or distributed.ranks() > 1:
            self.notes = [*self.notes, f"each image is compared within its own batch and process alone, {images.batch_size} at most"]

    def model(self) -> nn.Module:
        return embedder(self.config, len(self.data.classes), self.data.channels)

    def first_batch(self, batch: Batch) -> list[tuple[Image.Image, str]]:
        return [(image, self.data.classes[label]) for image, label in zip(self.seen(batch), batch.target.tolist(), strict=False)]

    def prepare(self, batch: Batch, *, training: bool) -> Batch:
        """Return the batch, with another view of each image for losses of such; the views of an evaluation are the same each time.

        Raises:
            UserError: the images have weights.
        """
        if batch.weight is not None:
            raise UserError(
                "data.class_weight, data.class_balance, data.csv: task=contrastive takes no weights of images; "
                "data.sampler=weighted draws by them."
            )
        if not self.of_views:
            return batch
        random = self.random if training else torch.Generator(self.device).manual_seed(0)
        return replace(batch, view=random_affine(batch.images, random))

    def state(self) -> dict[str, Any]:
        return {"random": self.random.get_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["random"].shape == self.random.get_state().shape:  # the states of GPU and CPU generators differ
            self.random.set_state(state["random"])

    def other_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return () if batch.view is None else (batch.view,)

    def normalizer(self, batch: Batch) -> Tensor:
        return torch.full((), float(len(batch)), device=batch.images.device)

    def loss(self, output: Embedded, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch) * len(batch) / normalizer

    def scores(self, output: Embedded, batch: Batch) -> Tensor:
        return self._cosines(output, batch).sum()[None]

    def counts(self, loader: Any) -> NeighbourCounts:
        return NeighbourCounts(len(self.data.classes), self.device)

    def count(self, counts: NeighbourCounts, output: Embedded, batch: Batch) -> None:
        counts.add(output.features, batch.target, *self.whole_loss(output, batch))

    def samples(self, output: Embedded, batch: Batch) -> list[dict[str, Any]]:
        """Return each image's class, and its mean cosine with the images of the class in its batch."""
        classes = [self.data.classes[label] for label in batch.target.tolist()]
        return [{"true": name, "cosine": cosine} for name, cosine in zip(classes, self._cosines(output, batch).tolist(), strict=True)]

    def per_class(self, result: NeighbourResult) -> list[dict[str, Any]]:
        return table_of(self.data.classes, {"samples": result.images, "recall1": result.recall})

    def pictures(self, result: NeighbourResult, folder: Path) -> list[Path]:
        path = folder / "neighbours.png"
        with letters_of(self.data.classes):
            matrix_picture(result.confusion, self.data.classes, "classes of the most similar images", path)
        return [path]

    def _cosines(self, output: Embedded, batch: Batch) -> Tensor:
        """Return the mean cosine of each image with those of its class in the batch, itself among them, (N,)."""
        unit = F.normalize(output.features, dim=1)
        members = F.one_hot(batch.target, len(self.data.classes)).to(unit.dtype)
        return (unit * (members.T @ unit)[batch.target]).sum(1) / members.sum(0)[batch.target]


def embedder(config: TrainConfig, classes: int, channels: int) -> Embedder:
    width = cast(Any, config.task).width
    image = build_model(cast(Any, config.model), channels=channels, classes=width, image_size=image_size(config))
    return Embedder(image, width, classes if config.loss.takes in ("proxies", "cosines") else 0)

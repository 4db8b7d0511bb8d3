"""Images with the set of their boxes' classes, for task=multilabel."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from lab.base.errors import UserError
from lab.config.schema import TrainConfig
from lab.data.augment import random_affine
from lab.data.batch import Batch
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split
from lab.detectors.annotations.coco_file import CocoFile
from lab.detectors.detection.data import DetectionLoader, load_detection_data, size_of
from lab.detectors.detection.inference import batches, prepared_as
from lab.detectors.schema import DetectionDataConfig
from lab.tasks.multilabel import MultilabelConfig


class BoxLabels:
    """The label sets of images with boxes: a lab.tasks.multilabel.task.LabelSets."""

    def __init__(self, config: TrainConfig) -> None:
        """Check the settings.

        Raises:
            UserError: data.rect=true, which gives each batch another size and reads the images in another order.
        """
        self.data, self.in_memory = cast(DetectionDataConfig, config.data), cast(MultilabelConfig, config.task).in_memory
        if self.data.rect:
            raise UserError("data.rect=true: task=multilabel takes images of one size. Use data.rect=false.")

    @property
    def size(self) -> list[int]:
        """Return height and width of an image."""
        return list(size_of(self.data, None))

    @property
    def side(self) -> int:
        return self.size[0]

    def load(self, norm: Norm, device: torch.device, seed: int, saved: Norm | None) -> tuple[Data, Tensor, int, None]:
        for name in ("horizontal_flip", "photometric") if self.in_memory and self.data.augment else ():
            if given := getattr(self.data, name):
                raise UserError(f"data.{name}={given}: 0 is expected with task.in_memory=true, which only turns, scales and shifts images.")
        loader = HeldLabelSets if self.in_memory else LabelSetLoader
        data = load_detection_data(self.data, None, norm, device, seed, loader, square=True)
        return data, labelled_images(data.train.file), len(data.train.file), None

    def reader(self, norm: Norm) -> Callable[[Image.Image], Tensor]:
        batch_of = batches(self.data, self.size, norm)
        return lambda image: batch_of(image).images

    def prepared_as(self, norm: Norm) -> dict[str, Any]:
        return prepared_as(self.data, self.size, norm)


def labelled_images(file: CocoFile) -> Tensor:
    """Return how many images have each class (C,), as float32."""
    present = [file.labels[file.rows(i)][~file.crowd[file.rows(i)]].unique() for i in range(len(file))]
    return torch.bincount(torch.cat(present), minlength=len(file.classes)).float()


class LabelSetLoader(DetectionLoader):
    """Images with the set of their boxes' classes, without boxes that a crop removed."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield Batch(batch.images, multi_hot(batch.labels, len(self.file.classes)), batch.index)


class HeldLabelSets(MemoryLoader):
    """Like `LabelSetLoader`, but all images are held on the device, and rotated, scaled and shifted a little there."""

    def __init__(
        self,
        file: CocoFile,
        config: DetectionDataConfig,
        fixed_size: list[int] | None,
        norm: Norm,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.file = file
        read = list(DetectionLoader(file, config, fixed_size, norm, torch.device("cpu"), None).read())
        targets = torch.cat([multi_hot(batch.labels, len(file.classes)) for batch in read])
        split = Split(torch.cat([batch.images for batch in read]), targets, file.files)
        super().__init__(split, Annotations(), config.eval_batch_size if seed is None else config.batch_size, device, norm)
        if seed is not None:
            self.shuffled(seed, random_affine if config.augment else None)


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Return (N, C) of 0 and 1 from labels (N, K), which are -1 where there are none."""
    present = torch.zeros(len(labels), classes + 1, device=labels.device)
    return present.scatter_(1, labels.where(labels >= 0, classes), 1.0)[:, :classes]

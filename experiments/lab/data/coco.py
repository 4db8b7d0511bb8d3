"""A COCO data set as samples and batches."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from lab.data.coco_file import CocoFile
from lab.data.seeds import seeded
from lab.tasks.detection.augment import Prepare
from lab.tasks.detection.batch import DetectionBatch


@dataclass
class Sample:
    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (B, 4) xyxy in pixels of `image`
    labels: Tensor  # (B,)
    original: tuple[int, int]  # height, width of the file
    index: int
    image_id: int


class CocoImages(Dataset[Sample]):
    """Samples of a COCO file, prepared; crowds are not among their boxes.

    A sample is asked for by its position and a seed, so that its augmentation does not depend on which process prepares it.
    """

    def __init__(self, file: CocoFile, prepare: Prepare) -> None:
        self.file, self.prepare = file, prepare

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, place: tuple[int, int]) -> Sample:
        position, seed = place
        file = self.file
        pixels = tv_tensors.Image(torch.from_numpy(np.array(file.open(position))).permute(2, 0, 1))
        alone = ~file.crowd[file.rows(position)]
        boxes, labels = file.boxes[file.rows(position)][alone], file.labels[file.rows(position)][alone]
        with seeded(seed):
            image, corners, labels = self.prepare(pixels, torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1).float(), labels)
        return Sample(image, corners, labels, file.sizes[position], position, file.image_ids[position])


class Collate:
    """Images side by side in one padded tensor, still uint8.

    Args:
        fixed_size: height and width of every batch; None pads to the batch's largest image.
        divisor: what the padded height and width are multiples of.
        fill: (3,) colour of the padding.
        boxes: K of every batch; None takes the next power of two, at least 8.
    """

    def __init__(self, fixed_size: list[int] | None, divisor: int, fill: list[int], boxes: int | None) -> None:
        self.fixed_size, self.divisor, self.boxes = fixed_size, divisor, boxes
        self.fill = torch.tensor(fill, dtype=torch.uint8).view(3, 1, 1)

    def __call__(self, samples: list[Sample]) -> DetectionBatch:
        sizes = torch.tensor([sample.image.shape[-2:] for sample in samples])
        height, width = self.fixed_size or (-(-sizes.amax(0) // self.divisor) * self.divisor).tolist()
        most = self.boxes or power_of_two(max(len(sample.labels) for sample in samples))
        images = self.fill.repeat(len(samples), 1, height, width)
        boxes, labels = torch.zeros(len(samples), most, 4), torch.full((len(samples), most), -1)
        for row, sample in enumerate(samples):
            images[row, :, : sizes[row, 0], : sizes[row, 1]] = sample.image
            boxes[row, : len(sample.boxes)] = sample.boxes
            labels[row, : len(sample.labels)] = sample.labels
        return DetectionBatch(
            images,
            boxes,
            labels,
            sizes,
            torch.tensor([sample.original for sample in samples]),
            torch.tensor([sample.index for sample in samples]),
            torch.tensor([sample.image_id for sample in samples]),
        )


def power_of_two(count: int, least: int = 8) -> int:
    return max(least, 1 << (count - 1).bit_length()) if count else least

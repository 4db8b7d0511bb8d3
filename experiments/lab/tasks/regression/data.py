"""Images whose targets are numbers."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.data.sets import Data, Norm, Split, digits, memory_data, norm_of, resize_all
from lab.tasks.regression import DigitTurnsConfig

TARGETS = ["turn", "size"]


def digit_turns(config: DigitTurnsConfig, device: torch.device, seed: int, saved: Norm | None) -> Data:
    """Turn and scale every digit once; no digit is in two parts."""
    known = digits(config)
    turns = replace(known.mapped(lambda split, part: turned(split, config, part)), classes=TARGETS)
    counts = torch.full((len(TARGETS),), len(turns.train.keys))
    return memory_data(turns, config, norm_of(turns.train.images, saved), device, seed, counts=counts)


def turned(split: Split, config: DigitTurnsConfig, part: int) -> Split:
    """Return the images turned and scaled, with targets (N, 2): degrees and factor."""
    random = torch.Generator().manual_seed(3 * config.turn_seed + part)
    share = torch.rand(len(split.images), 2, generator=random)
    smallest, largest = config.sizes
    degrees, size = (2 * share[:, 0] - 1) * config.turn, smallest + share[:, 1] * (largest - smallest)
    angle = degrees * (math.pi / 180)
    cos, sin, none = torch.cos(angle) / size, torch.sin(angle) / size, torch.zeros_like(size)
    matrix = torch.stack([cos, -sin, none, sin, cos, none], dim=1).view(-1, 2, 3)
    images = resize_all(split.images, config.image_size)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return Split(F.grid_sample(images, grid, align_corners=False), torch.stack([degrees, size], dim=1), split.keys)


def spread(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (K,) of targets (N, K); the deviation of equal targets counts as 1."""
    values = targets.double()
    deviation = values.std(0, correction=0)
    return values.mean(0).float(), torch.where(deviation > 0, deviation, 1.0).float()

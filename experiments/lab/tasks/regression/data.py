"""Images whose targets are numbers."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.config.errors import UserError
from lab.config.schema import DigitsConfig
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split, digits, norm_of, resize_all
from lab.tasks.regression.spec import DigitTurnsConfig

TARGETS = ["turn", "size"]


def digit_turns(config: DigitTurnsConfig, device: torch.device, seed: int, saved: Norm | None) -> Data:
    """Turn and scale every digit once; no digit is in two parts."""
    if len(config.sizes) != 2 or config.sizes[0] > config.sizes[1]:
        raise UserError(f"data.sizes={config.sizes}: the smallest and the largest size are expected, such as [0.5,1.0].")
    known = digits(DigitsConfig(held_out=config.held_out, split_seed=config.split_seed, test=config.test))
    splits = [turned(part, config, number) for number, part in enumerate((known.train, known.val, known.test)) if part]
    mean, std = norm_of(splits[0].images, saved)
    make = partial(MemoryLoader, notes=Annotations(), device=device, norm=(mean, std))
    plain, val, *test = (partial(make, split, batch_size=config.eval_batch_size) for split in splits)
    train = make(splits[0], batch_size=config.batch_size).shuffled(seed, None)
    counts = torch.full((len(TARGETS),), train.samples)
    norm = Norm(mean.tolist(), std.tolist())
    return Data(TARGETS, 1, norm, train, val(), 0, counts, test[0]() if test else None, known.held_out, plain)


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

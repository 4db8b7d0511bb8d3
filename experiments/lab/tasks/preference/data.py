"""Pairs of handwritten digits with the preferences of simulated annotators."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.data.augment import random_affine
from lab.data.batch import Batch
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split, digits, memory_data, norm_of
from lab.tasks.preference import DigitPairsConfig


@dataclass
class PairBatch(Batch):
    """Pair i is images 2i and 2i + 1; its target is 1 if the first is preferred. Weights and groups belong to pairs."""

    truth: Tensor | None = None  # (pairs,) 1 if the first digit is the larger, else 0
    share: Tensor | None = None  # (pairs,) share of the votes for the first

    def __len__(self) -> int:
        return self.target.shape[0]


@dataclass
class PairSplit(Split):
    """Pairs of images (N, 2, C, H, W), with truth and share as in PairBatch."""

    truth: Tensor = field(kw_only=True)
    share: Tensor = field(kw_only=True)


class PairLoader(MemoryLoader):
    def __init__(self, split: PairSplit, notes: Annotations, batch_size: int, device: torch.device, norm: Norm) -> None:
        super().__init__(split, notes, batch_size, device, norm)
        self.truth, self.share = split.truth.to(device), split.share.to(device)

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            truth, share = self.truth[batch.index], self.share[batch.index]
            images = batch.images.flatten(0, 1)
            yield PairBatch(images, batch.target, batch.index, batch.weight, batch.group, truth=truth, share=share)


@dataclass
class Pairs:
    digits: Tensor  # (P, 2) positions
    truth: Tensor  # (P,) as in PairBatch
    share: Tensor  # (P,)
    group: Tensor  # (P,) of annotators

    @property
    def preferred(self) -> Tensor:
        return (self.share > 0.5).float()

    @property
    def weight(self) -> Tensor:
        return (2 * self.share - 1).abs()


def load_pairs(config: DigitPairsConfig, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Draw training pairs from training digits, and held-out and test pairs from other digits.

    Args:
        config: the settings of the pairs.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        saved: mean and standard deviation of a saved model; None computes them from the training images.
    """
    if config.votes % 2 == 0:
        raise UserError(f"data.votes={config.votes}: an odd number is expected, so that no pair is tied.")
    if not config.rationality:
        raise UserError("data.rationality: one number for each group of annotators is expected; none is given.")
    known, counts = digits(config).resized(config.image_size), (config.train_pairs, config.val_pairs, config.test_pairs)
    groups = len(config.rationality) if len(config.rationality) > 1 else 0

    def paired(split: Split, part: int) -> Split:
        pairs = draw_pairs(split.targets, counts[part], config, part)
        notes = Annotations(pairs.weight if config.votes > 1 else None, pairs.group if groups else None)
        keys = ["-".join(split.keys[i] for i in pair) for pair in pairs.digits.tolist()]
        return PairSplit(split.images[pairs.digits], pairs.preferred, keys, notes, truth=pairs.truth, share=pairs.share)

    drawn, norm = replace(known.mapped(paired), classes=["reward"]), norm_of(known.train.images, saved)
    data = memory_data(drawn, config, norm, device, seed, loader=PairLoader, augment=_each, counts=torch.tensor(counts[:1]))
    return replace(data, groups=groups)


def draw_pairs(labels: Tensor, count: int, config: DigitPairsConfig, part: int) -> Pairs:
    """Draw pairs of different digits, with votes of annotators who follow Bradley and Terry.

    Args:
        labels: (N,) the digits to choose from.
        count: number of pairs.
        config: votes, rationality and seed.
        part: 0 for training, 1 for held-out and 2 for test pairs, which are drawn from different random numbers.
    """
    random = np.random.default_rng([config.pair_seed, part])
    values = labels.numpy()
    pairs = random.integers(len(values), size=(count, 2))
    while (same := values[pairs[:, 0]] == values[pairs[:, 1]]).any():
        pairs[same, 1] = random.integers(len(values), size=int(same.sum()))
    difference = values[pairs[:, 0]] - values[pairs[:, 1]]
    group = random.integers(len(config.rationality), size=count)
    chance = 1 / (1 + np.exp(-np.asarray(config.rationality)[group] * difference))
    share = random.binomial(config.votes, chance) / config.votes
    truth, share = (torch.tensor(each, dtype=torch.float32) for each in (difference > 0, share))
    return Pairs(torch.from_numpy(pairs), truth, share, torch.from_numpy(group))


def _each(images: Tensor, generator: Any) -> Tensor:
    """Augment both images of each pair independently. images: (N, 2, C, H, W)"""
    return random_affine(images.flatten(0, 1), generator).view_as(images)

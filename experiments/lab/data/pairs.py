"""Pairs of handwritten digits with the preferences of simulated annotators."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.config.errors import UserError
from lab.config.task_schema import DigitPairsConfig
from lab.data.augment import wobble
from lab.data.batch import Batch
from lab.data.samples import Annotations
from lab.data.sets import Data, MemoryLoader, Norm, Split, digits, norm_of, resized


@dataclass
class PairBatch(Batch):
    """Pair i is images 2i and 2i + 1; its target is 1 where the first is preferred. Weights and groups are the pairs'."""

    def __len__(self) -> int:
        return self.target.shape[0]


class PairLoader(MemoryLoader):
    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            yield PairBatch(batch.images.flatten(0, 1), batch.target, batch.index, batch.weight, batch.group)


@dataclass
class PairData(Data):
    truth: Tensor  # (held-out pairs,) 1 where the first digit is the larger
    share: Tensor  # (held-out pairs,) share of the votes for the first


@dataclass
class Pairs:
    digits: Tensor  # (P, 2) positions
    truth: Tensor  # (P,) 1 where the first digit is the larger, else 0
    share: Tensor  # (P,) share of the votes for the first
    group: Tensor  # (P,) of annotators

    @property
    def preferred(self) -> Tensor:
        return (self.share > 0.5).float()

    @property
    def weight(self) -> Tensor:
        return (2 * self.share - 1).abs()


def load_pairs(config: DigitPairsConfig, device: torch.device, seed: int, saved: Norm | None = None) -> PairData:
    """Training pairs of training digits and held-out pairs of held-out digits.

    Args:
        config: the pairs.
        device: where batches are wanted.
        seed: of the order and the augmentation.
        saved: what a saved model was trained with; None computes it from the training images.
    """
    if config.votes % 2 == 0:
        raise UserError(f"data.votes={config.votes}: an odd number is expected, so that no pair is tied.")
    if not config.rationality:
        raise UserError("data.rationality: one number for each group of annotators is expected; none is given.")
    _, *splits = digits(config)
    counts = (config.train_pairs, config.val_pairs)
    drawn = [draw_pairs(split.targets, count, config, part) for part, (split, count) in enumerate(zip(splits, counts, strict=True))]
    images = [resized(split.images, config.image_size) for split in splits]
    norm = norm_of(images[0], saved)
    make = partial(PairLoader, device=device, norm=norm)
    held_out, several = drawn[1], len(config.rationality) > 1
    train, val = (
        make(
            Split(pixels[pairs.digits], pairs.preferred, []),
            Annotations(pairs.weight if config.votes > 1 else None, pairs.group if several else None),
            batch_size,
        )
        for pixels, pairs, batch_size in zip(images, drawn, (config.batch_size, config.eval_batch_size), strict=True)
    )
    return PairData(
        ["reward"],
        1,
        Norm(norm[0].tolist(), norm[1].tolist()),
        train.shuffled(seed, _each if config.augment else None),
        val,
        len(config.rationality) if several else 0,
        torch.tensor([len(drawn[0].truth)]),
        held_out.truth.to(device),
        held_out.share.to(device),
    )


def draw_pairs(labels: Tensor, count: int, config: DigitPairsConfig, part: int) -> Pairs:
    """Pairs of different digits, judged by annotators who follow Bradley and Terry.

    Args:
        labels: (N,) the digits to choose from.
        count: of pairs.
        config: votes, rationality and seed.
        part: 0 for training, 1 for held-out pairs, which are drawn from different random numbers.
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
    """Both images of a pair move, each in its own way. images: (N, 2, C, H, W)"""
    return wobble(images.flatten(0, 1), generator).view_as(images)

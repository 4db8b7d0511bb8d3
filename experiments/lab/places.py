"""Which samples come when: the order of an epoch follows from seed and epoch, so that any batch can be the first."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lab import distributed
from lab.errors import UserError
from lab.seeds import seed_of


class Shares:
    """How the samples of an epoch are shared out: every batch among all ranks.

    A batch has `batch_size` samples a rank; the last one has what is left, as even as can be, and is joined with the one before where
    it has fewer samples than there are ranks. So all ranks have as many batches, none of them empty, and a sample is in one batch of one.

    Raises:
        UserError: there are fewer samples than ranks.
    """

    def __init__(self, samples: int, batch_size: int, place: tuple[int, int] | None = None) -> None:
        """place: another rank and number of ranks than those of this process."""
        self.rank, self.ranks = place or (distributed.rank(), distributed.ranks())
        if samples < self.ranks:
            raise UserError(f"{samples} samples cannot be shared out among {self.ranks} processes: start no more than there are samples.")
        whole = batch_size * self.ranks
        self.sizes = [whole] * (samples // whole)
        if rest := samples % whole:
            if rest < self.ranks and self.sizes:
                self.sizes[-1] += rest
            else:
                self.sizes.append(rest)

    def __len__(self) -> int:
        return len(self.sizes)

    def of(self, order: Tensor) -> list[Tensor]:
        """This rank's part of each batch, of samples (N,) in the order of the epoch."""
        return [batch[self.rank :: self.ranks] for batch in order.split(self.sizes)]


class Places(Sampler[list[tuple[int, int]]]):
    """Batches of positions in the data set, each with the seed of its augmentation; shuffled where a seed is given.

    Each iteration is the epoch after the one before, unless `begin` says otherwise. It counts from its first batch on: a DataLoader
    with workers makes an iterator that it never uses.
    """

    def __init__(self, samples: int, batch_size: int, seed: int | None) -> None:
        self.samples, self.seed = samples, seed
        self.shares = Shares(samples, batch_size)
        self.begin(1)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration be this epoch's, from its batch number `batch` on."""
        self.epoch, self.batch = epoch, batch

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, first = torch.arange(self.samples), self.batch
        seeds = torch.zeros_like(order)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
            order = torch.randperm(self.samples, generator=generator)
            seeds = torch.randint(2**62, (self.samples,), generator=generator)
        self.begin(self.epoch + 1)
        for places, their_seeds in zip(self.shares.of(order)[first:], self.shares.of(seeds)[first:], strict=True):
            yield list(zip(places.tolist(), their_seeds.tolist(), strict=True))

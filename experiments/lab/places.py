"""Which samples come when: the order of an epoch follows from seed and epoch, so that any batch can be the first."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from lab.seeds import seed_of


class Places(Sampler[tuple[int, int]]):
    """Positions in the data set, each with the seed of its augmentation; shuffled where a seed is given.

    Each iteration is the epoch after the one before, unless `begin` says otherwise.
    Several ranks take turns; at the end the first positions come again, so that every rank has as many.
    """

    def __init__(self, samples: int, batch_size: int, seed: int | None) -> None:
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank, self.ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
        self.begin(1)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration be this epoch's, from its batch number `batch` on."""
        self.epoch, self.batch = epoch, batch

    def __len__(self) -> int:
        return -(-self.samples // self.ranks)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order, first = torch.arange(self.samples), self.batch * self.batch_size
        seeds = torch.zeros_like(order)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
            order = torch.randperm(self.samples, generator=generator)
            seeds = torch.randint(2**62, (self.samples,), generator=generator)
        self.begin(self.epoch + 1)
        turns = (torch.arange(len(self) * self.ranks)[self.rank :: self.ranks] % self.samples)[first:]
        return iter(list(zip(order[turns].tolist(), seeds[turns].tolist(), strict=True)))

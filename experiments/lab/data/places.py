"""Which samples come when: the order of an epoch follows from seed and epoch, so that any batch can be the first."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lab.config.errors import UserError
from lab.data.seeds import seed_of
from lab.train import distributed


class Shares:
    """How the samples of an epoch are shared out: every batch among all ranks.

    A batch has `batch_size` samples a rank; the last one has what is left, as even as can be. Where that is less than two samples a rank,
    which batch norm cannot normalise by, the last two batches have as many each, or are one. So all ranks have as many batches, none
    of one sample but where the batch size or the number of samples leaves no choice, and a sample is in one batch of one rank.

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
            least = 2 * self.ranks
            if rest < least and self.sizes:
                rest += self.sizes.pop()
                if rest >= 2 * least:
                    self.sizes.append(rest - rest // 2)
                    rest //= 2
            self.sizes.append(rest)

    def __len__(self) -> int:
        return len(self.sizes)

    def of(self, order: Tensor) -> list[Tensor]:
        """This rank's part of each batch, of samples (N,) in the order of the epoch."""
        return [batch[self.rank :: self.ranks] for batch in order.split(self.sizes)]


class Places(Sampler[list[tuple[int, int]]]):
    """Batches of positions in the data set, each with the seed of its augmentation: once through in order, or, where a seed is given,
    shuffled epochs without an end, from the one that `begin` names.
    """

    def __init__(self, samples: int, batch_size: int, seed: int | None) -> None:
        self.samples, self.seed = samples, seed
        self.shares = Shares(samples, batch_size)
        self.begin(1)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration begin at this epoch's batch number `batch`."""
        self.epoch, self.batch = epoch, batch

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        if self.seed is None:
            order = torch.arange(self.samples)
            yield from self._batches(order, torch.zeros_like(order), 0)
            return
        epoch, first = self.epoch, self.batch
        while True:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            order = torch.randperm(self.samples, generator=generator)
            yield from self._batches(order, torch.randint(2**62, (self.samples,), generator=generator), first)
            epoch, first = epoch + 1, 0

    def _batches(self, order: Tensor, seeds: Tensor, first: int) -> Iterator[list[tuple[int, int]]]:
        for places, theirs in zip(self.shares.of(order)[first:], self.shares.of(seeds)[first:], strict=True):
            yield list(zip(places.tolist(), theirs.tolist(), strict=True))


class Epochs:
    """What a DataLoader makes of `Places`, an epoch at a time.

    Training data is read on without an end: while an epoch's last batches are trained on, and while the model is evaluated and saved,
    the workers prepare the next epoch's first ones. Each iteration is the epoch after the one before, unless `begin` says otherwise.
    """

    def __init__(self, loader: "DataLoader[Any]", places: Places) -> None:
        self.loader, self.places = loader, places
        self.coming: Iterator[Any] | None = None
        self.next = (1, 0)  # epoch, and number of the batch

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration be this epoch's, from its batch number `batch` on."""
        if (epoch, batch) != self.next:
            self.next, self.coming = (epoch, batch), None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches()
        except UserError as error:
            # a worker's error comes with the traceback in front
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def _batches(self) -> Iterator[Any]:
        if self.places.seed is None:
            yield from self.loader
            return
        epoch, batch = self.next
        if self.coming is None:
            self.places.begin(epoch, batch)
            self.coming = iter(self.loader)
        while self.next[0] == epoch:
            made = next(self.coming)
            batch += 1
            self.next = (epoch, batch) if batch < len(self.places) else (epoch + 1, 0)
            yield made

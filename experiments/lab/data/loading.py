"""Which samples an epoch has and in which order, loading by worker processes, and how workers end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate, get_worker_info

from lab.base.errors import UserError
from lab.base.process import launched_here
from lab.base.seeds import seed_of
from lab.config.objects import find
from lab.config.schema import SAMPLERS, ImagesConfig
from lab.processes import distributed

MOST_WORKERS = 16  # if data.workers is null


def order_of(samples: int, chances: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the positions of an epoch in their order: shuffled, or with chances (N,) drawn with replacement in proportion to them."""
    if chances is None:
        return torch.randperm(samples, generator=generator)
    limits = chances.double().cumsum(0)
    drawn = torch.rand(samples, dtype=torch.float64, generator=generator) * limits[-1]
    return torch.searchsorted(limits, drawn, right=True).clamp_(max=samples - 1)


def chances_of(config: ImagesConfig, targets: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return each training sample's chance to be drawn (N,), not normalised; None for each once.

    Args:
        config: has data.sampler.
        targets: class indices (N,), several labels (N, C) of 0 and 1, or numbers (N, K).
        weight: the samples' weights (N,), if the data has some.

    Raises:
        UserError: the data has no classes or weights, or the user's function fails or returns something else.
    """
    sampler = config.sampler
    if sampler is None:
        return None
    if sampler == "balanced":
        return _balanced(targets)
    if sampler == "weighted":
        if weight is None:
            raise UserError("data.sampler=weighted: the images have no weights; give data.weight, data.csv, data.class_weight or another.")
        return _checked(f"data.sampler={sampler}", weight, len(targets))
    if ":" not in sampler:
        raise UserError(f"data.sampler={sampler}: {', '.join(SAMPLERS)}, or a function as module:name or path/to/file.py:name is expected.")
    try:
        return _checked(f"data.sampler={sampler}", find("data.sampler", sampler)(targets), len(targets))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data.sampler={sampler}: fails: {type(error).__name__}: {error}") from error


def _balanced(targets: Tensor) -> Tensor:
    """Let every class be drawn as often; of several labels each counts by the inverse of its number of images."""
    if targets.ndim == 1:
        return (1 / torch.bincount(targets).double())[targets]
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise UserError("data.sampler=balanced: balances classes, and the labels are numbers; name a function that returns their chances.")
    chances = (targets / targets.sum(0).clamp(min=1)).double().sum(1)
    return torch.where(chances > 0, chances, chances[chances > 0].min())


def _checked(setting: str, given: Any, samples: int) -> Tensor:
    chances = torch.as_tensor(given).double()
    expected = f"finite numbers of at least 0, one for each of the {samples} training images, not all 0, are expected"
    if tuple(chances.shape) != (samples,):
        raise UserError(f"{setting}: gives numbers of shape {tuple(chances.shape)}; {expected}.")
    if bool((wrong := ~(chances.isfinite() & (chances >= 0))).any()) or not chances.sum() > 0:
        came = f"the number {chances[wrong][0]:g}" if wrong.any() else "only 0"
        raise UserError(f"{setting}: gives {came}; {expected}.")
    return chances


class Shares:
    """How the samples of an epoch are divided among all ranks, batch by batch.

    A batch has `batch_size` samples a rank; the last batch has the rest, divided as evenly as possible. If that is less than two samples a
    rank, which batch norm cannot normalise, the last two batches get equal sizes or become one. So all ranks have equally many batches, a
    batch has one sample only if the batch size or the number of samples allows no other, and each sample is in one batch of one rank.

    Raises:
        UserError: there are fewer samples than ranks.
    """

    def __init__(self, samples: int, batch_size: int, rank_of: tuple[int, int] | None = None) -> None:
        """Divide samples; `rank_of` is (rank, number of ranks), this process's if None."""
        self.rank, self.ranks = rank_of or (distributed.rank(), distributed.ranks())
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
        """Return this rank's part of each batch, from samples (N,) in the order of the epoch."""
        return [batch[self.rank :: self.ranks] for batch in order.split(self.sizes)]


class SeededBatches(Sampler[list[tuple[int, int]]]):
    """Batches of positions in the data set, each position with the seed of its augmentation.

    Without a seed it goes once through all positions in order, each its own seed. With a seed it gives shuffled epochs without end,
    beginning with the epoch that `begin` names. An epoch's order depends only on the seed and the epoch's number, so that any batch can be
    the first.
    """

    def __init__(self, samples: int, batch_size: int, seed: int | None, chances: Tensor | None = None) -> None:
        self.samples, self.seed, self.chances = samples, seed, chances
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
            yield from self._batches(order, order, 0)
            return
        epoch, first = self.epoch, self.batch
        while True:
            generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
            order = order_of(self.samples, self.chances, generator)
            yield from self._batches(order, torch.randint(2**62, (self.samples,), generator=generator), first)
            epoch, first = epoch + 1, 0

    def _batches(self, order: Tensor, seeds: Tensor, first: int) -> Iterator[list[tuple[int, int]]]:
        for positions, theirs in zip(self.shares.of(order)[first:], self.shares.of(seeds)[first:], strict=True):
            yield list(zip(positions.tolist(), theirs.tolist(), strict=True))


class Epochs:
    """Divide the batches that a DataLoader makes from `SeededBatches` into epochs.

    Training data is read without end: while the model trains on an epoch's last batches, and while it is evaluated and saved, the workers
    prepare the first batches of the next epoch. Each iteration is the next epoch, unless `begin` names another.
    """

    def __init__(self, loader: "DataLoader[Any]", sampler: SeededBatches) -> None:
        self.loader, self.sampler = loader, sampler
        self.coming: Iterator[Any] | None = None
        self.next = (1, 0)  # epoch, and number of the batch

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Let the next iteration be this epoch, from its batch number `batch` on."""
        if (epoch, batch) != self.next:
            self.next, self.coming = (epoch, batch), None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches()
        except UserError as error:
            # a worker's error begins with its traceback
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def _batches(self) -> Iterator[Any]:
        if self.sampler.seed is None:
            yield from self.loader
            return
        epoch, batch = self.next
        if self.coming is None:
            self.sampler.begin(epoch, batch)
            self.coming = iter(self.loader)
        while self.next[0] == epoch:
            made = next(self.coming)
            batch += 1
            self.next = (epoch, batch) if batch < len(self.sampler) else (epoch + 1, 0)
            yield made


class InSharedMemory:
    """Make a batch from samples, and move it to shared memory if a worker makes it.

    Otherwise torch would move it in a thread that sends it to the run's process. An error there, such as exhausted shared memory, loses the
    batch, and the run's process waits for it forever. Here it reaches the run's process like any error of a sample.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if get_worker_info() is not None:
            _share(batch)
        return batch


def _share(value: Any) -> None:
    if isinstance(value, Tensor):
        value.share_memory_()
    elif is_dataclass(value):
        _share([getattr(value, item.name) for item in fields(value)])
    elif isinstance(value, Mapping):
        _share(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _share(each)


class Reading(Protocol):
    """Settings of loading by workers."""

    batch_size: int
    eval_batch_size: int
    workers: int | None


class WorkerLoader:
    """Base class of loaders of data sets of files.

    Args:
        dataset: returns a sample for its position and a seed.
        config: batch sizes and workers.
        device: the device of the batches.
        seed: the seed of order and augmentation; None for data that is evaluated.
        collate: makes a batch from samples; None for torch's.
        chances: of the samples to be drawn (N,); None for each once.
    """

    def __init__(
        self,
        dataset: Any,
        config: Reading,
        device: torch.device,
        seed: int | None,
        collate: Callable[[list[Any]], Any] | None = None,
        chances: Tensor | None = None,
    ) -> None:
        train, workers = seed is not None, number_of_workers(config.workers)
        self.device, self.samples = device, len(dataset)
        sampler = SeededBatches(len(dataset), config.batch_size if train else config.eval_batch_size, seed, chances)
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=InSharedMemory(collate or default_collate),
            # the workers' seeds, which nothing uses, must not be drawn from the global generator
            generator=torch.Generator(),
            num_workers=workers,
            worker_init_fn=ignore_signals,
            persistent_workers=train and workers > 0,
            pin_memory=device.type == "cuda",
        )
        self.epochs = Epochs(loader, sampler)

    def __len__(self) -> int:
        return len(self.epochs.sampler)

    def begin(self, epoch: int, batch: int = 0) -> None:
        self.epochs.begin(epoch, batch)


def number_of_workers(wanted: int | None) -> int:
    """Return the wanted number, but at most the number of cores; for None, this process's share of the cores, up to MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0))
    if wanted is None:
        return max(1, min(MOST_WORKERS, cores // launched_here()))
    return min(wanted, cores)


def ignore_signals(_worker: int) -> None:
    """Make a new worker ignore signals that go to all processes; only the run's own process ends it.

    Ctrl-C and a closed terminal's SIGHUP go to every process of its group, and a scheduler's SIGTERM often to every process of the job.
    A worker that dies from it would end the run before its checkpoint is written.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    """Wait for SIGTERM from the run's process, and end this worker."""
    run = multiprocessing.parent_process()
    while run is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != run.pid:
        pass
    os._exit(0)

"""Several processes that train one model together, started by torchrun: who this one is, and what all of them add up to.

Without torchrun there is one process, and every function here does nothing or says so. A rank is the number of a process, 0 the first's.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lab.errors import UserError

# a rank that writes a checkpoint or computes a metric alone keeps the others waiting for it
TIMEOUT_MINUTES = 30


def launched() -> int:
    """How many processes torchrun started; 1 without it. Known before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() > 1 else 0


def refuse_several(app: str) -> None:
    """Raise UserError where torchrun started several processes of an app that runs in one."""
    if launched() > 1:
        raise UserError(f"{app} runs in one process; torchrun started {launched()}. Start it by uv run {app} ...")


def start(device: torch.device) -> None:
    """Meet the other processes, if there are any: over NCCL on GPUs, over gloo on CPU."""
    from datetime import timedelta

    if launched() == 1 or torch.distributed.is_initialized():
        return
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=timedelta(minutes=TIMEOUT_MINUTES)
    )


def stop() -> None:
    if ranks() > 1:
        torch.distributed.destroy_process_group()


def _met() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    return torch.distributed.get_rank() if _met() else 0


def ranks() -> int:
    """How many processes have met."""
    return torch.distributed.get_world_size() if _met() else 1


def total(value: Tensor) -> Tensor:
    """The sum over all ranks, in place; on a GPU the host does not wait for it."""
    if ranks() > 1:
        torch.distributed.all_reduce(value)
    return value


def highest(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The largest of each value over all ranks, which give the same names; waits for the device."""
    if ranks() == 1:
        return dict(values)
    together = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX)
    return dict(zip(values, together.tolist(), strict=True))


def of_highest(value: dict[str, Any], key: str) -> dict[str, Any]:
    """The `value` of the rank whose entry `key` is the largest, on every rank."""
    if ranks() == 1:
        return value
    numbers: list[Any] = [None] * ranks()
    torch.distributed.all_gather_object(numbers, value[key])
    together = [value]
    torch.distributed.broadcast_object_list(together, src=numbers.index(max(numbers)))
    return together[0]


def own_seed(seed: int) -> int:
    """A seed of this rank's own; the first rank's is the given one."""
    return seed + 1_000_003 * rank()


@contextmanager
def in_turn() -> Iterator[None]:
    """The first rank alone, then the first one of every other host, then the rest: what one downloads or draws the others find."""
    if ranks() == 1:
        yield
        return
    turn = 0 if rank() == 0 else 1 if local_rank() == 0 else 2
    for _ in range(turn):
        torch.distributed.barrier()
    yield
    for _ in range(2 - turn):
        torch.distributed.barrier()


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their running statistics of batch norms, each of which saw its own part of the batches."""
    if ranks() == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = [value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None]
    if kept:
        mean = total(torch.cat(kept)) / ranks()
        torch._foreach_copy_(kept, list(mean.split([value.numel() for value in kept])))


class Shares:
    """How the samples of an epoch are shared out: every batch among all ranks.

    A batch has `batch_size` samples a rank; the last one has what is left, as even as can be, and is joined with the one before where it has
    fewer samples than there are ranks. So all ranks have the same number of batches, none of them empty, and a sample is in one batch of one rank.

    Raises:
        UserError: there are fewer samples than ranks.
    """

    def __init__(self, samples: int, batch_size: int, place: tuple[int, int] | None = None) -> None:
        """place: another rank and number of ranks than those of this process."""
        self.rank, self.ranks = place or (rank(), ranks())
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

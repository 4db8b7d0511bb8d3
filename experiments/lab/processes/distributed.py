"""Several processes that train one model, started by torchrun: ranks, and reductions over all ranks.

Without torchrun there is one process, and these functions return its own values. A rank is the number of a process, from 0.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lab.base.process import launched, local_rank
from lab.base.seeds import seed_of

# while one rank writes a checkpoint or computes a metric, the other ranks wait
TIMEOUT_MINUTES = 30
# A model keeps its process group, and with it gloo's threads; one that lets go of a tensor while Python ends aborts the process
GLOO_RESTS_S = 0.5


def start(device: torch.device) -> None:
    """Initialise the process group, if there are other processes: NCCL on GPUs, gloo on CPU."""
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
        gloo = torch.distributed.get_backend() == "gloo"
        torch.distributed.destroy_process_group()
        if gloo:
            time.sleep(GLOO_RESTS_S)


def _met() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    return torch.distributed.get_rank() if _met() else 0


def ranks() -> int:
    """Return the number of ranks."""
    return torch.distributed.get_world_size() if _met() else 1


def total(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place; on a GPU the host does not wait."""
    if ranks() > 1:
        torch.distributed.all_reduce(value)
    return value


def all_max(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Return the largest of each value over all ranks, which must give the same names; waits for the device."""
    if ranks() == 1:
        return dict(values)
    together = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX)
    return dict(zip(values, together.tolist(), strict=True))


def from_largest(value: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the `value` of the rank whose entry `key` is the largest, on every rank."""
    if ranks() == 1:
        return value
    numbers = gathered(value[key])
    together = [value]
    torch.distributed.broadcast_object_list(together, src=numbers.index(max(numbers)))
    return together[0]


def own_seed(seed: int) -> int:
    """Return a different seed for each rank; the first rank gets the given one."""
    return seed_of(seed, rank()) if rank() else seed


def anywhere(flag: bool, device: torch.device) -> bool:
    """Return whether the condition holds on any rank; waits for the device if there are several ranks."""
    return bool(all_max({"flag": float(flag)}, device)["flag"])


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [value]
    if ranks() > 1:
        values = [None] * ranks()
        torch.distributed.all_gather_object(values, value)
    return values


def broadcast(value: Any) -> Any:
    """Return the first rank's value, on every rank."""
    values = [value]
    if ranks() > 1:
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def in_turn() -> Iterator[None]:
    """Run the block on the first rank, then on the first of every other host, then on the rest; later ranks find downloaded files.

    An error ends a turn, too, so that the next ranks do not wait for a process that has ended.
    """
    if ranks() == 1:
        yield
        return
    turn = 0 if rank() == 0 else 1 if local_rank() == 0 else 2
    for _ in range(turn):
        torch.distributed.barrier()
    try:
        yield
    finally:
        for _ in range(2 - turn):
            torch.distributed.barrier()


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their batch norms' running statistics, because each rank saw only its part of the batches."""
    if ranks() == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = [value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None]
    if kept:
        mean = total(torch.cat(kept)) / ranks()
        torch._foreach_copy_(kept, list(mean.split([value.numel() for value in kept])))

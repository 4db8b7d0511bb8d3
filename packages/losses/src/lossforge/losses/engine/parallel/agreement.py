"""Tell the processes of a group, before a loss of rows that are spread over them, how many each has and whether it refuses them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge.losses.engine.parallel.ring import exchanged
from lossforge.losses.engine.parallel.shards import membership

REFUSED = -1
"""In place of a process's number of rows where it refuses its arguments."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RefusedByAllError(ValueError):
    """What processes gave does not fit together, or one of them refused its own. Every process of the group raises it."""


class Agreed(NamedTuple):
    """What all processes of a group know.

    Attributes:
        group: the process group.
        rank: of this process in the group.
        rows: of each process, how many rows it has.
        columns: of each process, how many columns it has.
        first, second: of each process, a flag.
    """

    group: Any
    rank: int
    rows: Sequence[int]
    columns: Sequence[int]
    first: Sequence[bool]
    second: Sequence[bool]


def agreed(group: Any, of: str, x: Tensor, columns: int, graded: bool, flags: tuple[bool, bool] = (False, False)) -> Agreed:
    """Exchange what this process gives, and check that it fits together.

    Args:
        group: a process group, or a DeviceMesh of one dimension.
        of: what the loss calls x, in messages.
        x: (N, D), this process's rows. Their number alone may differ from those of others.
        columns: how many columns this process has.
        graded: whether anything requires a gradient.
        flags: two that may differ.
    """
    group, rank, world = membership(group)
    numbers = [len(x), columns, x.shape[1], DTYPES.index(x.dtype), graded, *flags]
    rows, counts, widths, kinds, gradients, *found = zip(*exchanged(numbers, x.device, group, world), strict=True)
    if REFUSED in rows:
        refusing = [r for r, n in enumerate(rows) if n == REFUSED]
        raise RefusedByAllError(f"{of} and all other arguments must be accepted in every process of group, refused in processes {refusing}")
    same = {"width": widths, "dtype": [DTYPES[k] for k in kinds], "need of gradients": [bool(f) for f in gradients]}
    for what, each in same.items():
        if len(set(each)) > 1:
            raise RefusedByAllError(f"{of} must have the same {what} in all processes of group, got {[*each]}")
    first, second = ([bool(f) for f in each] for each in found)
    return Agreed(group, rank, rows, counts, first, second)


def tell_refusal(group: Any, arguments: Sequence[object]) -> None:
    """Take part in the exchange of sizes in the name of a call that is refused, so that no other process waits for this one."""
    try:
        group, _, world = membership(group)
    except (TypeError, ValueError):  # then there is nobody to tell
        return
    given = [t.device for t in arguments if isinstance(t, Tensor)]
    exchanged([REFUSED] * 7, device_of_exchange(dist.get_backend_config(group), given), group, world)


def device_of_exchange(backends: str, given: Sequence[torch.device]) -> torch.device:
    """Return the device on which the other processes exchange their sizes: that of the features, if anything here tells.

    Args:
        backends: of the group, one for each type of device, such as "cpu:gloo,cuda:nccl".
        given: the devices of the arguments. A scalar may be on the CPU beside features on a GPU; what is refused may be on any device.
    """
    served = [each.split(":")[0] for each in backends.split(",")]
    for device in given:
        if device.type in served and device.type != "cpu":
            return device
    return torch.device("cpu") if "cpu" in served else torch.device("cuda", torch.cuda.current_device())

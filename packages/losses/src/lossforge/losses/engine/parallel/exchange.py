"""Collectives that run beside the computation, on a stream of their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of high priority. A product fills the GPU, and a collective of equal priority would begin after its last tile."""
    return torch.cuda.Stream(device, priority=-1)


class Exchange:
    """Collectives that were started and may still run."""

    def __init__(self, collectives: Callable[[], None], device: torch.device) -> None:
        """Start collectives on what the current stream has computed so far. They must not allocate memory that is used afterwards."""
        self.collectives: Callable[[], None] | None = collectives  # which holds their tensors until they have ended
        self.device, self.done = device, None
        if device.type != "cuda":
            collectives()
            return
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            collectives()  # c10d runs a collective that is not asynchronous on the current stream
        self.done = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait until the collectives have ended."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)
        self.collectives = None


def sum_into(to: Tensor, part: Tensor, group: Any) -> Exchange:
    """Start to sum a part over the processes, in its own memory and dtype, and to store the sum in `to`, which may be the part."""

    def collectives() -> None:
        dist.all_reduce(part, group=group)
        if to is not part:
            to.copy_(part)

    return Exchange(collectives, part.device)

"""Parts of features that go round a ring of processes, one process further at each step.

While a process computes with the part that is here, the next one arrives from the process after it. What each process adds for a part
(a gradient, sums of exponentials) follows the part one step later, and comes home after the last step.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lossforge.losses.engine.parallel.shards import all_gathered

ADDED = 64
"""The tag of what is added for a part; the part's own tensors have smaller ones."""


class Part(NamedTuple):
    """What travels of a process.

    Attributes:
        features: (M, D).
        labels: (M,), or None.
        lse: (2, M), the log-sum-exp of each of them over all processes' rows, or None.
        grads: (M,), the upstream gradient of each, or None.
    """

    features: Tensor
    labels: Tensor | None = None
    lse: Tensor | None = None
    grads: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]

    def empty(self, columns: int) -> "Part":
        """Return memory for the part of a process that has so many columns."""
        features = self.features.new_empty((columns, self.features.shape[1]))
        lse = None if self.lse is None else self.lse.new_empty((2, columns))
        labels, grads = (None if t is None else t.new_empty(columns) for t in (self.labels, self.grads))
        return Part(features, labels, lse, grads)


class Moves(NamedTuple):
    """Tensors on their way, which are kept until they have arrived, so that nothing else is written to their memory."""

    works: Sequence[Any] = ()
    tensors: Sequence[Tensor] = ()

    def wait(self) -> None:
        for each in self.works:
            each.wait()


class Ring(NamedTuple):
    """The processes of a group.

    Attributes:
        group: the process group.
        rank: of this process in the group.
        rows: of each process, how many rows it has.
        columns: of each process, how many columns its part has.
    """

    group: Any
    rank: int
    rows: Sequence[int]
    columns: Sequence[int]

    @property
    def world(self) -> int:
        return len(self.rows)

    def around(self, part: Part, step: Callable[[int, Part], Tensor | None], add: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        """Bring the part of each process by, and return what all processes add for this process's part.

        Args:
            part: this process's.
            step: from a process and its part to what this process adds for it, (M, …); None: nothing, in every process.
            add: joins what processes before have added with what this one adds.
        """
        added: Tensor | None = None
        adding = Moves()
        for k in range(self.world):
            origin = (self.rank + k) % self.world
            next_columns = self.columns[(origin + 1) % self.world]
            following, moving = part, Moves()
            if k + 1 < self.world:
                following = part.empty(next_columns)
                moving = self._move(part.tensors, following.tensors)
            own = step(origin, part)
            if own is not None:
                adding.wait()
                own = own if added is None else add(added, own)
                added = own if self.world == 1 else own.new_empty((next_columns, *own.shape[1:]))
                adding = self._move([own], [added], ADDED) if self.world > 1 else Moves()
            moving.wait()
            part = following
        adding.wait()
        return added

    def _move(self, outgoing: list[Tensor], incoming: list[Tensor], tag: int = 0) -> Moves:
        """Start to send tensors to the process before this one, and to receive from the one after it."""
        before, after = (dist.get_global_rank(self.group, (self.rank + step) % self.world) for step in (-1, 1))
        moves = []
        for operation, tensors, peer in ((dist.isend, outgoing, before), (dist.irecv, incoming, after)):
            for number, t in enumerate(tensors):
                if t.numel():
                    moves.append(dist.P2POp(operation, t, peer, self.group, tag + number))
        return Moves(dist.batch_isend_irecv(moves) if moves else (), [*outgoing, *incoming])


def exchanged(numbers: Sequence[int], device: torch.device, group: Any, world: int) -> list[list[int]]:
    """Return the numbers of each process.

    On CUDA this is done beside the device's queue: the host waits for the other hosts, not for kernels that have been launched.
    """
    beside = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
    with beside:
        found: list[list[int]] = all_gathered(torch.tensor(numbers, device=device), group, world).tolist()
    return found

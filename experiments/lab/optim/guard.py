"""Non-finite losses: found, counted and kept on the device, so that no step waits for the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lab.data.batch import Tensors
from lab.processes import distributed


@dataclass
class BadBatch:
    tensors: dict[str, Tensor]
    update: Tensor


class Guard:
    """Count updates whose loss is not finite, and keep the batch that ended the longest streak.

    `total`, `streak` and `longest` are 0-d tensors on the device. Once `longest` has reached `limit`, the saved batch stays.
    """

    def __init__(self, model: nn.Module, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.total, self.streak, self.longest = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
        buffers = list(model.buffers())
        self.buffers = [[buffer for buffer in buffers if buffer.dtype == dtype] for dtype in {buffer.dtype for buffer in buffers}]
        self.batches: dict[tuple[object, ...], BadBatch] = {}

    @contextmanager
    def buffers_undone(self) -> Iterator[list[Tensor]]:
        """Yield a list for the flag "this update is bad"; a bad update leaves running statistics as they were.

        A model has hundreds of buffers, so those of a dtype are copied as one tensor.
        """
        copies = [_joined(group) for group in self.buffers]
        verdict: list[Tensor] = []
        yield verdict
        for group, copy in zip(self.buffers, copies, strict=True):
            kept = torch.where(verdict[0], copy, _joined(group)).split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [value.view_as(buffer) for value, buffer in zip(kept, group, strict=True)])

    def see(self, batch: Tensors, bad: Tensor, update: int) -> None:
        """Keep this micro-batch if its loss is bad."""
        tensors = batch.tensors()
        shape = _shape(tensors)
        if shape not in self.batches:
            self.batches[shape] = BadBatch({name: value.clone() for name, value in tensors.items()}, torch.full_like(self.total, -1))
        slot = self.batches[shape]
        take = bad & (self.longest < self.limit)
        slot.tensors = {name: torch.where(take, value, slot.tensors[name]) for name, value in tensors.items()}
        slot.update = torch.where(take, update, slot.update)

    def count(self, bad: Tensor) -> None:
        """Count one update."""
        self.total += bad
        self.streak = torch.where(bad, self.streak + 1, 0)
        self.longest = torch.maximum(self.longest, self.streak)

    def evidence(self) -> dict[str, Tensor | int]:
        """Return the last bad micro-batch and the number of its update; waits for the device."""
        slots = [(int(slot.update), slot) for slot in self.batches.values()]
        update, slot = max(slots, key=lambda pair: pair[0])
        return {"update": update} | {name: value.cpu() for name, value in slot.tensors.items()}

    def state(self) -> dict[str, Any]:
        """Return the counters, and the saved batch if there is one; waits for the device."""
        counters = {name: getattr(self, name) for name in ("total", "streak", "longest")}
        return {**counters, "evidence": distributed.from_largest(self.evidence(), "update") if self.longest else None}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in ("total", "streak", "longest"):
            getattr(self, name).copy_(state[name])
        if state["evidence"] is not None:
            tensors = {name: value.to(self.total.device) for name, value in state["evidence"].items() if name != "update"}
            self.batches[_shape(tensors)] = BadBatch(tensors, torch.full_like(self.total, state["evidence"]["update"]))


def _shape(tensors: dict[str, Tensor]) -> tuple[object, ...]:
    return tuple((name, tuple(value.shape)) for name, value in tensors.items())


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])

"""Undo bad optimiser steps on the device, so that the host need not wait to know whether they are bad.

torch's GradScaler waits for its flag before each step of an optimiser that is not fused.
"""

from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from lab.processes.parallel import own_part

CHUNK = 2**26  # bytes that are copied at a time; this takes three times as much memory


class Copies:
    """Copies of tensors, restored if a flag on the device is set. A model has hundreds of tensors, so they are copied in a few launches."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.groups = list(_groups(tensors))
        self.copies = [_joined(group) for group in self.groups]

    @torch.no_grad()
    def put_back(self, bad: Tensor) -> None:
        """Restore all tensors if `bad`, 0-d bool."""
        for group, copy in zip(self.groups, self.copies, strict=True):
            kept = torch.where(bad, copy, _joined(group)).split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [value.view_as(tensor) for value, tensor in zip(kept, group, strict=True)])


class LateFlag:
    """A flag that is copied from the device to the host without waiting."""

    def __init__(self, flag: Tensor) -> None:
        self.value, self.copied = flag, None
        if flag.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def __bool__(self) -> bool:
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.value)


class Undo:
    """Step an optimiser, and undo steps that a flag on the device marks as bad: all state is then bitwise as before.

    Parameters and state on the device are copied before a step, which doubles their memory while it runs, and restored right after a bad
    one. Values on the host, such as counts of steps, and entries that a step added are restored before the next step. The host then waits
    for the last update's flag, which is ready long before the device has finished its queued work.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.flag: LateFlag | None = None
        self.put_back: list[Callable[[], Any]] = []

    def step(self, bad: Tensor) -> None:
        self.settle()
        before = [(mapping, {key: _same(value) for key, value in mapping.items()}) for mapping in self._mappings()]
        values = [value for _, old in before for value in old.values()]
        leaves = tree_leaves([value for value in values if isinstance(value, (Tensor, list, tuple))])
        tensors = {id(leaf): own_part(leaf) for leaf in leaves if isinstance(leaf, Tensor)}.values()
        copies = Copies(tensor for tensor in tensors if tensor.device == bad.device)
        self.put_back = [partial(tensor.copy_, tensor.clone()) for tensor in tensors if tensor.device != bad.device]
        self.put_back += [partial(value.setstate, value.getstate()) for value in values if isinstance(value, Random)]
        self.optimizer.step()
        copies.put_back(bad)
        for mapping, old in before:
            self.put_back += [partial(mapping.pop, key) for key in mapping if key not in old]
            self.put_back += [partial(mapping.update, {key: old[key]}) for key in mapping if key in old and _differ(mapping[key], old[key])]
        self.flag = LateFlag(bad)

    def settle(self) -> None:
        """Apply the last step's flag to the host's values, too."""
        if self.flag is not None and self.flag:
            for put_back in self.put_back:
                put_back()
        self.flag, self.put_back = None, []

    def _mappings(self) -> list[dict[Any, Any]]:
        """Return the dicts in which an optimiser keeps values: by parameter, by group, and its attributes."""
        owners = [self.optimizer, getattr(self.optimizer, "_base_optimizer", None)]  # the latter is what timm's Lookahead steps with
        states = [owner.state for owner in owners if owner is not None]
        entries = [entry for state in states for entry in state.values() if isinstance(entry, dict)]
        return [*states, *entries, *self.optimizer.param_groups, *(vars(owner) for owner in owners if owner is not None)]


def _same(value: Any) -> Any:
    """Return the value itself; copy lists, because a step may change them in place."""
    return tree_map(lambda leaf: leaf, value) if isinstance(value, list) else value


def _differ(value: Any, old: Any) -> bool:
    if not (isinstance(value, list) and isinstance(old, list)):
        return value is not old
    (leaves, tree), (others, same) = tree_flatten(value), tree_flatten(old)
    return tree != same or any(leaf is not other for leaf, other in zip(leaves, others, strict=True))


def _groups(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Yield groups of tensors of one dtype, each of at most CHUNK bytes or of one tensor."""
    group: list[Tensor] = []
    size = 0
    for tensor in sorted((tensor for tensor in tensors if tensor.numel()), key=lambda tensor: str(tensor.dtype)):
        if group and (tensor.dtype != group[0].dtype or size + tensor.nbytes > CHUNK):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])

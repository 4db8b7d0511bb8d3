"""Optimiser steps that are undone on the device if the update was bad, so that the host need not wait to know."""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from lab.processes.parallel import own_part

CHUNK = 2**26  # bytes that are compared at a time: they take three times as much


class Copies:
    """Copies of tensors, restored by a flag on the device. It takes few launches: a model has hundreds of tensors."""

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
    """A flag on its way from the device to the host."""

    def __init__(self, flag: Tensor) -> None:
        self.value, self.arrived = flag, None
        if flag.is_cuda:
            self.value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def __bool__(self) -> bool:
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.value)


class Undo:
    """Steps an optimiser, and undoes steps that a flag on the device marks as bad: all state is then bitwise as before.

    Parameters and state on the device are copied before a step, which takes as much memory again while it runs, and put back at once.
    The host's own values, counts of steps for example, and entries that a step made are put back before the next step: the host then
    waits for the last update's flag, which the device knows long before it has done the work in hand.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.flag: LateFlag | None = None
        self.put_back: list[Callable[[], Any]] = []

    def step(self, bad: Tensor) -> None:
        self.settle()
        before = [(place, {key: _same(value) for key, value in place.items()}) for place in self._places()]
        values = [value for _, old in before for value in old.values()]
        tensors = {id(leaf): own_part(leaf) for value in values for leaf in _tensors(value)}.values()
        copies = Copies(tensor for tensor in tensors if tensor.device == bad.device)
        self.put_back = [_copied_back(tensor) for tensor in tensors if tensor.device != bad.device]
        self.put_back += [_drawn_back(value) for value in values if isinstance(value, Random)]
        self.optimizer.step()
        copies.put_back(bad)
        for place, old in before:
            self.put_back += [_set_back(place, old, key) for key in place if key not in old or _differ(place[key], old[key])]
        self.flag = LateFlag(bad)

    def settle(self) -> None:
        """Apply the last step's flag to the host's values, too."""
        if self.flag is not None and self.flag:
            for put_back in self.put_back:
                put_back()
        self.flag, self.put_back = None, []

    def _places(self) -> list[dict[Any, Any]]:
        """Where an optimiser keeps values: by parameter, by group, and its own attributes."""
        owners = [self.optimizer, getattr(self.optimizer, "_base_optimizer", None)]  # the latter is what timm's Lookahead steps with
        states = [owner.state for owner in owners if owner is not None]
        entries = [entry for state in states for entry in state.values() if isinstance(entry, dict)]
        return [*states, *entries, *self.optimizer.param_groups, *(vars(owner) for owner in owners if owner is not None)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [value] if isinstance(value, Tensor) else []


def _same(value: Any) -> Any:
    """The value itself, but lists copied, because a step may change them in place."""
    return tree_map(lambda leaf: leaf, value) if isinstance(value, list) else value


def _differ(value: Any, old: Any) -> bool:
    if not (isinstance(value, list) and isinstance(old, list)):
        return value is not old
    (leaves, tree), (others, same) = tree_flatten(value), tree_flatten(old)
    return tree != same or any(leaf is not other for leaf, other in zip(leaves, others, strict=True))


def _copied_back(tensor: Tensor) -> Callable[[], Any]:
    copy = tensor.clone()
    return lambda: tensor.copy_(copy)


def _drawn_back(generator: Random) -> Callable[[], Any]:
    state = generator.getstate()
    return lambda: generator.setstate(state)


def _set_back(place: dict[Any, Any], old: dict[Any, Any], key: Any) -> Callable[[], Any]:
    if key not in old:
        return lambda: place.pop(key)
    value = old[key]
    return lambda: place.update({key: value})


def _groups(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype, CHUNK bytes or one tensor at a time."""
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

"""Tensors of different shapes, where torch's function broadcasts them: the same result, and the same warning."""

import warnings

import torch
from torch import Tensor


def of_one_shape(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, by name, in the shape that they broadcast to, with torch's warning where their own shapes differ.

    Raises:
        ValueError: they do not broadcast.
    """
    (first, x), *others = tensors.items()
    for name, t in others:
        if t.shape != x.shape:
            if not _broadcast(t, x):
                wanted = f"{name} must have the shape of {first}, {tuple(x.shape)}, or broadcast with it"
                raise ValueError(f"{wanted}, got {tuple(t.shape)}")
            _warn(first, x, name, t, frames=6)
    same = all(t.shape == x.shape for _, t in others)
    return tuple(tensors.values()) if same else torch.broadcast_tensors(*tensors.values())


def with_target(input: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Return an input and its floating target in the shape that they broadcast to, with torch's warning where their shapes differ.

    All else is returned as it is: an integer target of another shape holds class indices, and shapes that do not broadcast are refused
    where the template checks them.
    """
    both = isinstance(input, Tensor) and isinstance(target, Tensor) and target.is_floating_point()
    if not both or target.shape == input.shape or not _broadcast(target, input):
        return input, target
    _warn("input", input, "target", target, frames=5)
    return torch.broadcast_tensors(input, target)


def _broadcast(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


def _warn(first: str, x: Tensor, name: str, t: Tensor, frames: int) -> None:
    """Warn as torch's losses do. frames: from here to the user's call, past the definition and the public function."""
    if torch.compiler.is_compiling():  # which cannot trace a warning
        return
    warnings.warn(
        f"Using a {name} size ({t.size()}) that is different to the {first} size ({x.size()}). "
        "This will likely lead to incorrect results due to broadcasting. Please ensure they have the same size.",
        stacklevel=frames,
    )

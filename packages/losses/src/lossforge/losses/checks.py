"""Checks of arguments: before any launch, from shapes, dtypes, devices and options alone, unless a target's values are asked for."""

import math
import os
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn import _reduction

R = TypeVar("R", bound=str)
REDUCTIONS = ("none", "mean", "sum")
MODES = (None, "forward", "backward")
EMPTY = ("nan", "zero")
VALIDATE = os.environ.get("LOSSFORGE_VALIDATE", "0").lower() in ("1", "true", "yes")
"""Whether class indices of CUDA tensors are checked too, at the price of a host synchronisation a call: LOSSFORGE_VALIDATE=1."""


def legacy_reduction(size_average: bool | None, reduce: bool | None, reduction: R) -> R:
    """The reduction, with torch's deprecated size_average and reduce still understood."""
    if size_average is not None or reduce is not None:
        return cast(R, _reduction.legacy_get_string(size_average, reduce))
    return reduction


def one_of(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, exclusive: bool = False) -> None:
    """A finite number in [low, high], or above low where `exclusive`."""
    if isinstance(value, (Tensor, bool)) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (low < value if exclusive else low <= value) or not value <= high or not -math.inf < value < math.inf:
        bounds = f"{'above' if exclusive else 'at least'} {low:g}" if low > -math.inf else ""
        bounds += (" and " if bounds else "") + f"at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name} must be finite{' and ' if bounds else ''}{bounds}, got {value!r}")


def whole_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def floating(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if not t.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {t.dtype}")


def beside(name: str, t: Tensor, x: Tensor, of: str = "input") -> None:
    if t.device != x.device:
        raise ValueError(f"{name} must be on the device of {of}, {x.device}, got {t.device}")


def floating_beside(name: str, t: object, x: Tensor, of: str = "input") -> None:
    floating(name, t)
    assert isinstance(t, Tensor)
    beside(name, t, x, of)


def broadcasts(name: str, t: Tensor, x: Tensor) -> None:
    """t expands to the shape of x."""
    if t.ndim > x.ndim or any(a not in (1, b) for a, b in zip(reversed(t.shape), reversed(x.shape), strict=False)):
        raise ValueError(f"{name} must broadcast to the shape of input, {tuple(x.shape)}, got {tuple(t.shape)}")


def integer(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must be of an integer dtype, got {t.dtype}")


def indices(
    name: str,
    t: object,
    shape: Sequence[int] | None,
    x: Tensor,
    low: int,
    end: int,
    ignored: int | None,
    validate: bool | None,
    dtypes: Sequence[torch.dtype] = (torch.int32, torch.int64),
) -> Tensor:
    """t as the kernels read it, of one of `dtypes` or else int64: `ignored`, or at least `low` and below `end`.

    The values are read on the host: always on CPU, on CUDA where asked.
    """
    integer(name, t)
    assert isinstance(t, Tensor)
    if shape is not None and t.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
    beside(name, t, x)
    if t.device.type == "cpu" or (VALIDATE if validate is None else validate):
        in_range(name, t, low, end, ignored)
    return t if t.dtype in dtypes else t.long()


def in_range(name: str, t: Tensor, low: int, end: int, ignored: int | None) -> None:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    t = t.long()
    outside = (t < low) | (t >= end)
    if ignored is not None:
        outside &= t != ignored
    if outside.any():
        at = outside.nonzero()[0].tolist()
        allowed = f"{low} to {end - 1}" + ("" if ignored is None else f", or {ignored} where ignored")
        raise IndexError(f"{name} must hold {allowed}, got {int(t[tuple(at)])} at row {at[0] if len(at) == 1 else tuple(at)}")

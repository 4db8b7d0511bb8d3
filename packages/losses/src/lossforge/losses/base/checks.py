"""Checks of arguments: before any launch, from shapes, dtypes, devices and options alone, unless a target's values are asked for."""

import difflib
import functools
import inspect
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeGuard, TypeVar, Unpack, cast, get_origin

import torch
from torch import Tensor, nn

from lossforge.kernels.call import Head, Logits
from lossforge.kernels.torch_internals import in_forward_mode, transformed
from lossforge.losses.base.namespace import NAMESPACE, OPERATORS

P = ParamSpec("P")
R = TypeVar("R")
Name = TypeVar("Name", bound=str)

REDUCTIONS = ("none", "mean", "sum")
MODES = (None, "forward", "backward")
EMPTY = ("nan", "zero")


def limits() -> tuple[float, float]:
    """Return the smallest normal float32, whose reciprocal is finite, too, and the largest finite one.

    They stand here and not in globals, which torch.compile(dynamic=True) takes for inputs: it would trace a call twice.
    """
    return 1.1754943508222875e-38, 3.4028234663852886e38


VALIDATE = os.environ.get("LOSSFORGE_VALIDATE", "0").lower() in ("1", "true", "yes")
"""Whether class indices of CUDA tensors are checked too, at the price of a host synchronisation a call: LOSSFORGE_VALIDATE=1."""


def legacy_reduction(size_average: bool | None, reduce: bool | None, reduction: Name, frames: int = 4) -> Name:
    """Return the reduction, with torch's deprecated size_average and reduce still understood.

    frames: from here to the user's call, at which the warning points. The definition and its public function lie between.
    """
    if size_average is not None or reduce is not None:
        meant = "none" if reduce is False else "sum" if size_average is False else "mean"
        warnings.warn(f"size_average and reduce are deprecated: pass reduction={meant!r} instead", stacklevel=frames)
        return cast(Name, meant)
    return reduction


def one_of(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def unexpected(owner: str, name: str, accepted: Iterable[str]) -> TypeError:
    """Return the error for a keyword that `owner` does not take."""
    accepted = list(accepted)
    near = difflib.get_close_matches(name, accepted, 1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    if name.startswith("return_") and "outputs" in accepted:
        meant = ": outputs takes the names of the results beside the first."
    return TypeError(f"{owner}() got an unexpected keyword argument {name!r}{meant} It takes {', '.join(accepted)}")


def only(accepted: Collection[str], given: Iterable[str], owner: str) -> None:
    """Refuse a keyword that `owner` does not take."""
    for name in given:
        if name not in accepted:
            raise unexpected(owner, name, accepted)


def bound(
    owner: str,
    by_position: Sequence[str],
    accepted: Collection[str],
    needed: Iterable[str],
    args: Sequence[Any],
    named: Mapping[str, Any],
    hints: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return the arguments of a call by name, as Python binds them.

    by_position, accepted, needed: the names of the arguments by position, of all, and of those without a default. hints: what may be meant
    where an argument is given twice.
    """
    if len(args) > len(by_position):
        raise TypeError(f"{owner}() takes {', '.join(by_position) or 'nothing'} by position, the rest by name, got {len(args)}")
    only(accepted, named, owner)
    given = dict(zip(by_position[: len(args)], args, strict=True))  # torch.compile of torch 2.9 takes strict=False for True
    for name in named:
        if name in given:
            raise TypeError(f"{owner}() got {name} twice, by position and by name{hints.get(name, '')}")
    given.update(named)
    for name in needed:
        if name not in given:
            raise TypeError(f"{owner}() needs {name}. It takes {', '.join(accepted)}")
    return given


def names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, without those of `*args` and `**options`."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def keywords(function: Callable[..., Any]) -> list[str] | None:
    """Return all names that a function takes; None where it checks them itself."""
    taken: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            taken.append(parameter.name)
        elif get_origin(parameter.annotation) is Unpack:
            taken += parameter.annotation.__args__[0].__annotations__
        else:
            return None
    return taken


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Answer a keyword that `function` does not take with all those that it takes, and check its flags."""
    owner, accepted, flags = function.__qualname__, names(function), flags_of(inspect.signature(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        only(accepted, kwargs, owner)
        all_strided(accepted, args, kwargs)
        return function(*with_flags(flags, args, kwargs), **kwargs)

    return with_own_code(call, function.__name__)


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function's errors name its arguments as it does. names: by the name in the checks that losses share."""
    shared = re.compile(rf"\b({'|'.join(names)})\b")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, IndexError) as error:
                raise type(error)(shared.sub(lambda found: names[found[0]], str(error))) from None

        call.definition = call  # type: ignore[attr-defined]  # what a fused loss checks its arguments by
        return with_own_code(call, function.__name__)

    return decorate


def with_own_code(wrapper: Callable[P, R], name: str) -> Callable[P, R]:
    """Give a wrapper a code object of its own, because torch.compile counts the graphs of a code object, and stops at eight."""
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    return wrapper


class Flag(NamedTuple):
    """A parameter that is True or False: its place among the arguments, and whether it may be None."""

    place: int
    optional: bool


def flags_of(signature: inspect.Signature) -> dict[str, Flag]:
    """Return the parameters that are True or False."""
    taken = enumerate(signature.parameters.values())
    return {p.name: Flag(place, p.annotation is not bool) for place, p in taken if p.annotation in (bool, bool | None)}


def with_flags(flags: Mapping[str, Flag], args: Sequence[Any], named: dict[str, Any]) -> Sequence[Any]:
    """Check the flags of a call. Those of numpy and torch become True or False: in `named`, and in the arguments that are returned."""
    for name, (place, optional) in flags.items():
        by_name = name in named
        if not by_name and place >= len(args):
            continue
        given = named[name] if by_name else args[place]
        if isinstance(given, bool) or (optional and given is None):
            continue
        value = flag(name, given)
        if by_name:
            named[name] = value
        else:
            args = [*args[:place], value, *args[place + 1 :]]
    return args


def of_host(name: str, value: object) -> Any:
    """Return a 0-d tensor on the CPU or a scalar of numpy as Python's number, anything else as it is."""
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            raise TypeError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)} and {value.dtype}")
        if value.device.type != "cpu":
            raise ValueError(
                f"{name} must be a number or a 0-d tensor on the CPU, got one on {value.device}, which only waiting for the device can "
                "read: keep it on the CPU"
            )
        without_gradient(name, value)
        return value.item()
    if type(value) not in (bool, int, float) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def told(value: object) -> str:
    """Return a number as a message shows it: a long one by its size."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf, exclusive: bool = False, below: bool = False) -> float:
    """Return the value as a finite number in [low, high]: above low where `exclusive`, below high where `below`.

    It is 0 or a normal number of float32, in which kernels compute: so its reciprocal is finite, too.

    A tensor whose value is not known yet (torch.compile, fake tensors) becomes a 0-d float64 tensor, and is checked when the graph runs.
    """
    if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu" and not known(value):
        without_gradient(name, value)
        return OPERATORS.number(value.detach(), name, low, high, exclusive, below)
    value = of_host(name, value)
    if not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    in_range = (low < value if exclusive else low <= value) and (value < high if below else value <= high)
    if not in_range or not -math.inf < value < math.inf:
        bounds = f"{'above' if exclusive else 'at least'} {low:g}" if low > -math.inf else ""
        bounds += (" and " if bounds else "") + f"{'below' if below else 'at most'} {high:g}" if high < math.inf else ""
        raise ValueError(f"{name} must be finite{' and ' if bounds else ''}{bounds}, got {told(value)}")
    if isinstance(value, (int, float)):
        in_float32(name, value)
    return 1.0 * value  # type: ignore[operator,return-value]  # traced numbers behave as floats


def in_float32(name: str, value: float) -> None:
    """Refuse a number that is neither 0 nor a normal number of float32."""
    least, most = limits()
    if value != 0 and not least <= abs(value) <= most:
        raise ValueError(f"{name} must be 0 or of a size from {least:.3g} to {most:.3g}, the range of float32, got {told(value)}")


def factor(what: str, value: float) -> None:
    """Refuse a factor that options together make too large for float32; infinity is that of a normalizer of 0."""
    _, most = limits()
    if isinstance(value, float) and most < abs(value) < math.inf:
        raise ValueError(f"{what} must be at most {most:.3g} in size, the range of float32, got {value:.3g}")


def without_gradient(name: str, value: Tensor) -> None:
    """Refuse a tensor that requires grad, where the loss gives it none."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} has no gradient, got a tensor that requires grad: detach it")


def known(t: Tensor) -> bool:
    """Whether the host can read t now: it is neither traced nor a subclass, such as fake tensors are."""
    return type(t) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


def to_read(t: Tensor, validate: bool | None) -> bool:
    """Whether the host checks the values of t now: on the CPU, and on CUDA where asked."""
    asked = t.device.type == "cpu" or (VALIDATE if validate is None else validate)
    return bool(asked) and known(t) and not transformed(t)


def nonzero(value: float) -> bool:
    """Whether a checked number may differ from 0: one that torch.compile traces may."""
    return isinstance(value, Tensor) or value != 0


def is_parameter(value: object, x: object) -> TypeGuard[Tensor]:
    """Whether a value is used as a tensor. A 0-d tensor on the CPU is a number, unless x is on the CPU too and it is differentiated."""
    if not isinstance(value, Tensor):
        return False
    if value.ndim or value.device.type != "cpu" or not isinstance(x, (Tensor, Head)):
        return True
    return x.device.type == "cpu" and (value.requires_grad or transformed(value) or in_forward_mode(value))


def whole_number(name: str, value: object) -> int:
    value = of_host(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be a whole number, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be a whole number of 64 bits, got {told(value)}")
    return value  # type: ignore[return-value]  # traced numbers behave as integers


def several(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the members of a sequence of numbers."""
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        shape = f" of shape {tuple(values.shape)}" if hasattr(values, "shape") else ""
        raise TypeError(f"{name} must be a sequence of numbers, got {type(values).__name__}{shape}")
    return list(values)


def flag(name: str, value: object) -> bool:
    found = value if isinstance(value, Tensor) and value.ndim else of_host(name, value)
    if not isinstance(found, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return found


def tensor(name: str, t: object) -> Tensor:
    """Return a tensor as it is; refuse anything else."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    strided(name, t)
    return t


def real(name: str, value: object) -> Tensor:
    """Return a tensor of any dtype but complex ones; refuse anything else."""
    t = tensor(name, value)
    if t.is_complex():
        raise TypeError(f"{name} must hold real numbers, got {t.dtype}")
    return t


def strided(name: str, t: Tensor) -> None:
    """Refuse a tensor whose memory does not hold its elements by strides, or holds floating numbers of a byte."""
    if t.is_floating_point() and t.itemsize < 2:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16 where it is floating, got {t.dtype}: convert it first")
    if t.layout is torch.strided and not (t.is_nested or t.is_quantized):
        return
    if t.is_nested:
        kind, dense = "a nested tensor", "torch.nested.to_padded_tensor"
    elif t.is_quantized:
        kind, dense = f"a quantized one of {t.dtype}", f"{name}.dequantize()"
    else:
        kind, dense = f"one of layout {t.layout}", f"{name}.to_dense()"
    raise TypeError(f"{name} must be a strided tensor, got {kind}: make it dense by {dense}")


def all_strided(names: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check the tensors of a call. names: of its positional parameters, in their order."""
    for name, t in zip(names[: len(args)], args[: len(names)], strict=True):  # torch 2.9 traces zip of one length alone
        if isinstance(t, Tensor):
            strided(name, t)
    for name, t in named.items():
        if isinstance(t, Tensor):
            strided(name, t)


def with_values(name: str, t: Tensor) -> None:
    """Refuse a tensor of the meta device, where the host needs its values."""
    if t.device.type == "meta":
        raise ValueError(f"{name} must hold values, got a tensor on meta, which has a shape and no values")


def floating(name: str, t: object) -> None:
    if not isinstance(t, (Tensor, Head)):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if isinstance(t, Tensor):
        strided(name, t)
    if not t.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {t.dtype}")


def whole(name: str, t: object) -> None:
    """Check what kernels read: a floating tensor that is not spread over processes."""
    floating(name, t)
    if type(t).__name__ == "DTensor":
        how = f"gather it first, with {name}.full_tensor(), or give its whole rows of this process, with {name}.to_local()"
        raise TypeError(f"{name} must be a whole tensor, got a DTensor {tuple(cast(Tensor, t).shape)}: {how}")


def beside(name: str, t: Logits, x: Tensor, of: str = "input") -> None:
    if t.device != x.device:
        raise ValueError(f"{name} must be on the device of {of}, {x.device}, got {t.device}")


def floating_beside(name: str, t: object, x: Tensor, of: str = "input") -> None:
    floating(name, t)
    assert isinstance(t, (Tensor, Head))
    beside(name, t, x, of)


def expands(t: Tensor, shape: Sequence[int]) -> bool:
    """Return whether t broadcasts to a shape. Sizes are compared by ==, because `in` is False for a size that torch.compile traces."""
    return t.ndim <= len(shape) and all(a == 1 or a == b for a, b in zip(reversed(t.shape), reversed(shape), strict=False))


def fits(name: str, t: Tensor, condition: bool, needed: str, *sizes: object) -> None:
    """Refuse a tensor whose shape does not meet a condition. needed: what the tensor must do, with {} for each of `sizes`."""
    if not condition:
        told = [str(tuple(each)).replace("'", "") if isinstance(each, tuple) else each for each in sizes]
        raise ValueError(f"{name} must {needed.format(*told)}, got {tuple(t.shape)}")


def broadcasts(name: str, t: Tensor, x: Tensor, of: str = "input") -> None:
    fits(name, t, expands(t, x.shape), f"broadcast to the shape of {of}, {{}}", x.shape)


def same_dimensions(tensors: Mapping[str, object]) -> None:
    """Check that tensors, by name, have equally many dimensions, as torch asks where broadcasting would hide a mistake."""
    shapes = [tuple(t.shape) for t in tensors.values() if isinstance(t, Tensor)]
    if len({len(shape) for shape in shapes}) > 1:
        *names, last = tensors
        raise ValueError(f"{', '.join(names)} and {last} must have the same number of dimensions, got {', '.join(map(str, shapes))}")


def integer(name: str, value: object) -> None:
    t = tensor(name, value)
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        meant = f": did you mean {name}.long()?" if t.is_floating_point() else ""
        raise TypeError(f"{name} must be of an integer dtype, got {t.dtype}{meant}")


ONE_CLASS = ": for a label a row, of the only class, did you mean target.view_as(input)?"


def dense(t: Tensor, x: Tensor, rows: Sequence[int], where: str = "") -> None:
    """Check that a floating target has the shape of input. rows: the shape that class indices have; where: when it has input's."""
    if t.shape != x.shape:
        meant = ""
        if t.shape == torch.Size(rows):
            one = t.numel() == x.numel()
            meant = ONE_CLASS if one else f" of {t.dtype}: for class indices did you mean target.long()?"
        raise ValueError(f"target must have the shape of input, {tuple(x.shape)}{where}, got {tuple(t.shape)}{meant}")


def ignores_none(ignore_index: int, needs: str = "class indices as target, got a dense one") -> None:
    """Refuse an ignore_index but the default where nothing holds an index. needs: what it needs, and what came."""
    if ignore_index != -100:
        raise ValueError(
            f"ignore_index needs {needs}, with ignore_index={ignore_index}: leave it at -100, and leave out such rows and pixels yourself"
        )


class Allowed(NamedTuple):
    """Which class indices are allowed: `ignored`, or at least `low` and below `end`; whether values on CUDA are checked too."""

    low: int
    end: int
    ignored: int | None
    validate: bool | None


def indices(
    name: str,
    t: object,
    x: Tensor,
    allowed: Allowed,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.int32, torch.int64),
) -> Tensor:
    """t as the kernels read it, of one of `dtypes` or else int64.

    The values are read on the host: always on CPU, on CUDA where asked; but not under transforms of torch.func.
    """
    integer(name, t)
    assert isinstance(t, Tensor)
    if shape is not None and t.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
    beside(name, t, x)
    low, end, ignored, validate = allowed
    if (t.device.type == "cpu" or (VALIDATE if validate is None else validate)) and not transformed(x, t):
        if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter):  # there are no values yet
            checked: Tensor = OPERATORS.checked_indices(t, name, low, end, ignored)
            t = checked
        else:
            in_range(name, t, low, end, ignored)
    return t if t.dtype in dtypes else t.long()


def in_range(name: str, t: Tensor, low: int, end: int | None, ignored: int | None) -> None:
    """Check the values of a tensor of integers. end: below which they must be; None for no limit."""
    t = t.long()
    outside = t < low
    if end is not None:
        outside |= t >= end
    if ignored is not None:
        outside &= t != ignored
    if outside.any():
        at = outside.nonzero()[0].tolist()
        allowed = (f"be at least {low}" if end is None else f"hold {low} to {end - 1}") + (
            "" if ignored is None else f", or {ignored} where ignored"
        )
        meant = ONE_CLASS if name == "target" and end == 1 and low < 0 else ""
        raise IndexError(f"{name} must {allowed}, got {int(t[tuple(at)])} at row {at[0] if len(at) == 1 else tuple(at)}{meant}")


def unflipped(name: str, boxes: Tensor, centered: bool) -> None:
    """Check the values of boxes (..., 4), where the host can read them now: not while torch.compile traces."""
    if not known(boxes) or transformed(boxes):
        return
    flipped = (boxes[..., 2:] < (0.0 if centered else boxes[..., :2])).any(-1)
    if flipped.any():
        at = tuple(flipped.nonzero()[0].tolist())
        allowed = "(cx, cy, w, h) with w and h of at least 0" if centered else "(x1, y1, x2, y2) with x1 <= x2 and y1 <= y2"
        where = "" if not at else f" at pair {at[0] if len(at) == 1 else at}"
        raise ValueError(f"{name} must hold boxes {allowed}, got {tuple(boxes[at].tolist())}{where}")


def _checked_indices(t: Tensor, name: str, low: int, end: int, ignored: int | None) -> Tensor:
    in_range(name, t, low, end, ignored)
    return t.clone()  # operators return no argument


_SCHEMA = "checked_indices(Tensor t, str name, SymInt low, SymInt end, SymInt? ignored) -> Tensor"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.impl("checked_indices", _checked_indices, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::checked_indices", lambda t, *_: torch.empty_like(t), lib=_LIBRARY)

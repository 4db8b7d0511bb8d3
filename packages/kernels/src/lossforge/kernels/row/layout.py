"""How rows lie in memory: what the launches of the row-wise template read and write, with Slots, and what their tiles follow from."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.engine.launch import Layout, Slot, slots
from lossforge.kernels.engine.layout import Strided, broadcast, collapse, per_row
from lossforge.kernels.row.rows import Logits, RowLoss, Target
from lossforge.kernels.row.sweep import Config


class Rows(NamedTuple):
    """Tensors of shape (N, C, d…) as (outer, rows, classes), with the strides of each."""

    outer: int
    rows: int
    classes: int
    strides: list[tuple[int, int, int]]


def as_rows(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Rows | None:
    """Tensors already expanded to one shape (N, C, d…). None where N, d… join into more than two dimensions."""
    n, classes, *rest = shape
    sizes, steps = collapse([n, *rest], [[s[0], *s[2:]] for s in strides], reorder=False)
    if len(sizes) > 2:
        return None
    missing = 2 - len(sizes)
    outer, rows = [1] * missing + sizes
    steps = [[0] * missing + step for step in steps]
    return Rows(outer, rows, classes, [(o, r, s[1]) for (o, r), s in zip(steps, strides, strict=True)])


class Spec(NamedTuple):
    """A loss over rows, but for its tensors' memory: the formula and what every launch of it must know.

    bias: (C,), contiguous; tau times it is added to the logits, which are then not soft-capped.

    target: (N, d…) integers, or probabilities of the shape of x. spread, focus: of Labels, for integers without smoothing. divisor: 0-d, on
    the device; total and values are multiplied by scale / divisor. counted: in its place, a forward launch counts the class indices itself
    (see reduce.counts_itself).
    """

    phi: Callable[..., Any]
    target: Tensor
    target_b: Tensor | None = None
    lam: Tensor | None = None
    weight: Tensor | None = None
    hyper: tuple[float, ...] = ()
    ignore_index: int = -100
    smoothing: float | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    z_loss: float | None = None
    bias: Tensor | None = None
    tau: float = 1.0
    spread: float | None = None
    focus: float | None = None
    scale: float = 1.0
    divisor: Tensor | None = None
    empty_is_zero: bool = False
    counted: bool = False


class Operands(NamedTuple):
    """Tensors that both launches take, in the order of their Slots: a layout or a Slot each, None where absent."""

    x: Any
    target: Any
    target_b: Any
    lam: Any
    gradient: Any
    weight: Any
    bias: Any
    divisor: Any


class Numbers(NamedTuple):
    """Floats of a Spec beside its hyper-parameters, which follow them: whether each is given, or its Slot, None where it is not."""

    scale: Any
    smoothing: Any
    logit_scale: Any
    softcap: Any
    z_loss: Any
    tau: Any
    spread: Any
    focus: Any


class Kind(NamedTuple):
    """What a Spec tells a plan beside the layouts of its tensors."""

    phi: Callable[..., Any]
    ignore_index: int
    empty_is_zero: bool
    given: tuple[bool, ...]  # Numbers
    hyper: int  # how many
    counted: bool


def operands_of(spec: Spec, x: Tensor, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    return x, spec.target, spec.target_b, spec.lam, gradient, spec.weight, spec.bias, spec.divisor


def kind_of(spec: Spec) -> Kind:
    numbers = (spec.smoothing, spec.logit_scale, spec.softcap, spec.z_loss, spec.bias, spec.spread, spec.focus)
    return Kind(spec.phi, spec.ignore_index, spec.empty_is_zero, (True, *[v is not None for v in numbers]), len(spec.hyper), spec.counted)


def floats_of(spec: Spec) -> tuple[float, ...]:
    numbers = (spec.smoothing, spec.logit_scale, spec.softcap, spec.z_loss, spec.tau, spec.spread, spec.focus)
    return spec.scale, *[v or 0.0 for v in numbers], *spec.hyper


class Prepared(NamedTuple):
    """A launch's arguments that say what is read, with Slots, and what its tiles follow from."""

    x: Logits
    target: Target
    gradient: Strided
    loss: RowLoss
    rows: Rows
    rows_adjacent: bool
    config: Config  # but for the tiles


def alignment(tensors: Sequence[tuple[Layout, tuple[int, int, int]]], classes: int) -> tuple[int, int]:
    """(ALIGN, SHIFT) of the kernels: 16 bytes in elements where memory is read and written so, 1 where nothing is known.

    tensors: that have the classes, with their strides as rows.
    """
    vector = 16 // min(one[2].itemsize for one, _ in tensors)
    if not all(one[4] and strides[2] == 1 for one, strides in tensors):
        return 1, 1
    _, own = tensors[0]
    if all(n % vector == 0 for n in (classes, *[s for _, strides in tensors for s in strides[:2]])):
        return vector, 1
    alike = all((own[k] - strides[k]) % vector == 0 for _, strides in tensors for k in (0, 1))
    return 1, vector if alike and classes > 8192 else 1


def prepare(kind: Kind, layouts: tuple[Layout | None, ...], floats_at: int) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    given = Operands(*layouts)
    t = slots(Operands, [one is not None for one in layouts])
    f = Numbers(*(Slot(floats_at + i) if one else None for i, one in enumerate(kind.given)))
    hyper = tuple(Slot(floats_at + len(f) + i) for i in range(kind.hyper))
    shape = given.x[0]
    probabilities = given.target[2].is_floating_point
    read = {
        "index_a": (t.target, given.target) if not probabilities else (None, None),
        "index_b": (t.target_b, given.target_b),
        "lam": (t.lam, given.lam),
        "dense": (t.target, given.target) if probabilities else (None, None),
        "gradient": (t.gradient, given.gradient),
    }
    strides = [given.x[1]]
    for name, (_, one) in read.items():
        if one is not None:
            expanded = broadcast(one[0], one[1], shape) if name in ("dense", "gradient") else per_row(one[0], one[1], shape, 1)
            strides.append(expanded)
    rows = as_rows(shape, strides)
    if rows is None:
        return None
    own, *others = rows.strides
    rest = iter(others)
    strided = [Strided() if one is None else Strided(slot, *next(rest)) for slot, one in read.values()]
    *target, gradient = strided
    align, shift = alignment([(given.x, own), *([] if given.gradient is None else [(given.gradient, rows.strides[-1])])], rows.classes)
    adjacent = own[1] == 1 and own[2] != 1 and rows.rows > 1
    dense = probabilities or (f.smoothing is not None and given.weight is not None)
    return Prepared(
        Logits(t.x, *own, rows.classes, f.logit_scale, f.softcap, t.bias, f.tau),
        Target(*target, t.weight, kind.ignore_index, f.smoothing, f.spread, f.focus),
        gradient,
        RowLoss(kind.phi, hyper, f.z_loss, f.scale, t.divisor),
        rows,
        adjacent,
        Config(
            0,
            0,
            # a tile may reach beyond the row, and a block of rows beyond the rows
            WIDE=max(max(s[2] for s in rows.strides) * (rows.classes + 65536), rows.rows + 65536) >= 2**31,
            ALIGN=align,
            SHIFT=shift,
            MULTIPLE=16 if adjacent and rows.rows % 16 == 0 else 1,
            EMPTY_IS_ZERO=kind.empty_is_zero,
            DENSE=dense,
            EVEN=f.smoothing is not None and not dense,
        ),
    )


def copied(spec: Spec, x: Tensor, gradient: Tensor | None) -> tuple[Spec, Tensor, Tensor | None]:
    """Contiguous copies of what a launch reads, which can always be addressed, and a new gradient to copy back."""
    copies = {name: t.contiguous() for name in ("target", "target_b", "lam") if (t := getattr(spec, name)) is not None}
    fresh = None if gradient is None else torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
    return spec._replace(**copies), x.contiguous(), fresh

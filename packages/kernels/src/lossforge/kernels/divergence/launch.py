"""Host side of the divergence template: how its rows lie in memory, and the launches."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.divergence.backward import GradOutput, divergence_backward_kernel
from lossforge.kernels.divergence.kernel import STATS, Outputs, divergence_kernel
from lossforge.kernels.divergence.rows import Formula, Marks
from lossforge.kernels.engine.launch import PLANS, Layout, Plan, Slot, chip, layout, slots
from lossforge.kernels.engine.layout import Strided, broadcast, per_row
from lossforge.kernels.engine.reduce import NO_SUM, Sum, new_sum
from lossforge.kernels.row.layout import Rows, alignment, as_rows
from lossforge.kernels.row.rows import Logits
from lossforge.kernels.row.sweep import Config
from lossforge.kernels.tiles import backward_tiles, divergence_tiles, most_registers, resident_pair_tiles, tried


class Divergence(NamedTuple):
    """A formula: terms(log p, log q, p, q, unit, *hyper) → (f, ∂f/∂ln p, ∂f/∂ln q), as formulas/divergence.py has them.

    sums: for KL, whose value the first sweep finds, a function from it to (Σ ∂f/∂ln p, Σ ∂f/∂ln q).
    """

    terms: Callable[..., Any]
    sums: Callable[..., Any] | None = None


class DivergenceSpec(NamedTuple):
    """A divergence, but for the memory of the logits: the formula and what every launch of it must know.

    teacher: (N, C, d…). labels (integers, of which ignore_index leaves a row out), weight (0 does, too): (N, d…). swap: the logits play q's
    part. divisor: 0-d, on the device; total and values are multiplied by scale / divisor. counted: in its place, a forward launch counts
    the labels itself (see reduce.counts_itself).
    """

    formula: Divergence
    teacher: Tensor
    labels: Tensor | None = None
    weight: Tensor | None = None
    hyper: tuple[float, ...] = ()
    swap: bool = False
    temperature: float = 1.0
    ignore_index: int = -100
    scale: float = 1.0
    divisor: Tensor | None = None
    empty_is_zero: bool = False
    counted: bool = False


class Operands(NamedTuple):
    """Tensors that both launches take, in the order of their Slots: a layout or a Slot each, None where absent."""

    x: Any
    teacher: Any
    labels: Any
    weight: Any
    gradient: Any
    divisor: Any


class Kind(NamedTuple):
    """What a spec tells a plan beside the layouts of its tensors."""

    formula: Divergence
    hyper: int  # how many
    swap: bool
    ignore_index: int
    empty_is_zero: bool
    counted: bool


def _operands(spec: DivergenceSpec, x: Tensor, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    return x, spec.teacher, spec.labels, spec.weight, gradient, spec.divisor


def _kind(spec: DivergenceSpec) -> Kind:
    return Kind(spec.formula, len(spec.hyper), spec.swap, spec.ignore_index, spec.empty_is_zero, spec.counted)


def _floats(spec: DivergenceSpec) -> tuple[float, ...]:
    return 1.0 / spec.temperature, spec.scale, *spec.hyper


class Prepared(NamedTuple):
    """A launch's arguments that say what is read, with Slots, and what its tiles follow from."""

    x: Logits
    teacher: Logits
    marks: Marks
    gradient: Strided
    formula: Formula
    rows: Rows
    rows_adjacent: bool
    config: Config  # but for the tiles


def _prepare(kind: Kind, layouts: tuple[Layout | None, ...], floats_at: int) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    given = Operands(*layouts)
    t = slots(Operands, [one is not None for one in layouts])
    shape = given.x[0]
    strides = [given.x[1], given.teacher[1]]
    for one in (given.labels, given.weight):
        if one is not None:
            strides.append(per_row(one[0], one[1], shape, 1))
    if given.gradient is not None:
        strides.append(broadcast(given.gradient[0], given.gradient[1], shape))
    rows = as_rows(shape, strides)
    if rows is None:
        return None
    own, others, *rest = rows.strides
    remaining = iter(rest)
    labels, weight, gradient = (
        Strided() if one is None else Strided(slot, *next(remaining))
        for one, slot in ((given.labels, t.labels), (given.weight, t.weight), (given.gradient, t.gradient))
    )
    written = [] if given.gradient is None else [(given.gradient, rows.strides[-1])]
    align, shift = alignment([(given.x, own), (given.teacher, others), *written], rows.classes)
    hyper = tuple(Slot(floats_at + 2 + i) for i in range(kind.hyper))
    adjacent = own[1] == 1 and own[2] != 1 and rows.rows > 1
    return Prepared(
        Logits(t.x, *own, rows.classes),
        Logits(t.teacher, *others, rows.classes),
        Marks(labels, weight, kind.ignore_index),
        gradient,
        Formula(*kind.formula, hyper, Slot(floats_at), Slot(floats_at + 1), t.divisor),
        rows,
        adjacent,
        Config(
            0,
            0,
            TENSORS=2,
            WIDE=max(s[2] for s in rows.strides) * (rows.classes + 65536) >= 2**31,  # a tile may reach beyond the row
            ALIGN=align,
            SHIFT=shift,
            MULTIPLE=16 if adjacent and rows.rows % 16 == 0 else 1,
            EMPTY_IS_ZERO=kind.empty_is_zero,
            SWAP=kind.swap,
        ),
    )


@functools.lru_cache(maxsize=PLANS)
def _forward_plan(kind: Kind, layouts: tuple[Layout | None, ...], total: bool, stats: bool, tried: object) -> Plan | None:
    """total: the sum of the rows, else one value a row. tried: tiles.tried()."""
    outputs_at = sum(one is not None for one in layouts)
    sums_at = outputs_at + (not total) + stats
    p = _prepare(kind, layouts, sums_at + 3 * total)
    if p is None:
        return None
    given = Operands(*layouts)
    rows = p.rows.rows
    tiles = divergence_tiles(p.rows.classes, min(given.x[2].itemsize, given.teacher[2].itemsize), p.rows_adjacent)
    blocks = triton.cdiv(rows, tiles.rows)
    counted = math.prod(given.labels[0]) if kind.counted else 0
    whole = slots(Sum, [True] * 3, sums_at) if total else None
    if total and not stats and given.gradient is not None:
        plan = _resident_plan(kind, p, given, whole, counted)
        if plan is not None:
            return plan
    return Plan(
        divergence_kernel,
        (p.rows.outer * blocks,),
        given.x[3],
        (
            p.x,
            p.teacher,
            p.marks,
            p.gradient,
            Outputs(None if total else Slot(outputs_at), Slot(sums_at - 1) if stats else None),
            whole,
            p.formula,
            rows,
            blocks,
            counted,
        ),
        config=p.config._replace(
            BR=tiles.rows,
            BC=tiles.classes,
            VEC=tiles.vector,
            ONE_TILE=tiles.one,
            SHIFT=1 if tiles.one else p.config.SHIFT,
            COUNT=counted > 0,
        ),
        num_warps=tiles.warps,
    )


def _resident_plan(kind: Kind, p: Prepared, given: Operands, sum: Any, counted: int) -> Plan | None:
    """Total and gradient by resident_divergence.py, where it applies and pays."""
    itemsize, on_chip = given.x[2].itemsize, chip(given.x[3])
    alike = p.config.ALIGN > 1 and p.rows.outer == 1 and itemsize == given.teacher[2].itemsize
    if on_chip is None or not alike:
        return None
    multiprocessors, shared = on_chip
    tiles = resident_pair_tiles(p.rows.classes, itemsize, kind.formula.sums is None, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.divergence.resident import resident_divergence_kernel
        from lossforge.kernels.row.chunks import Chunks
    except ImportError:  # its Gluon is not known: gluon.py
        return None
    chunks = triton.cdiv(p.rows.classes, tiles.chunk)
    ring = min(chunks, tiles.ring)
    return Plan(
        resident_divergence_kernel,
        (min(p.rows.rows, multiprocessors * tiles.programs),),
        given.x[3],
        (p.x, p.teacher, p.marks, p.gradient, sum, p.formula, p.rows.rows, counted),
        config=Chunks(
            CHUNK=tiles.chunk,
            K=tiles.ring,
            P=chunks - ring,
            VEC=p.config.ALIGN,
            W=tiles.warps,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=kind.empty_is_zero,
            N=ring,
            HELD=min(tiles.held, ring),
            SWAP=kind.swap,
        ),
        num_warps=tiles.warps,
        **most_registers(tiles.warps, tiles.programs),
    )


def divergence(
    spec: DivergenceSpec, x: Tensor, *, total: bool = True, stats: bool = False, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """One launch over logits x (N, C, d…): the loss as a total or per row, the statistics that backward needs, and the gradient."""
    operands = _operands(spec, x, gradient)
    plan = _forward_plan(_kind(spec), tuple([layout(t) for t in operands]), total, stats, tried())
    if plan is None:
        spec, copy, fresh = _copied(spec, x, gradient)
        out = divergence(spec, copy, total=total, stats=stats, gradient=fresh)
        if gradient is not None and fresh is not None:
            gradient.copy_(fresh)
        return out
    loss = None if total else torch.empty((x.shape[0], *x.shape[2:]), dtype=torch.float32, device=x.device)
    kept = torch.empty((STATS, x.numel() // x.shape[1]), dtype=torch.float32, device=x.device) if stats else None
    sum = new_sum(plan.grid[0], x.device) if total else NO_SUM
    plan.launch((*operands, loss, kept, *sum), _floats(spec))
    result = sum.total if total else loss
    assert result is not None
    return result, kept


def planned_divergence(spec: DivergenceSpec, x: Tensor, gradient: Tensor | None) -> Callable[..., Tensor] | None:
    """`divergence` for nothing but total and gradient: ((x, teacher, _, labels, weight, …), divisor, gradient) → total.

    For tensors of these layouts and a spec otherwise the same. None where copies would be needed.
    """
    layouts = tuple([layout(t) for t in _operands(spec, x, gradient)])
    plan = _forward_plan(_kind(spec), layouts, True, False, tried())
    if plan is None:
        return None
    programs, device, floats = plan.grid[0], x.device, _floats(spec)

    def total(tensors: Sequence[Tensor | None], divisor: Tensor | None, gradient: Tensor | None) -> Tensor:
        x, teacher, _, labels, weight, *_ = tensors
        sum = new_sum(programs, device)
        plan.launch((x, teacher, labels, weight, gradient, divisor, *sum), floats)
        assert sum.total is not None
        return sum.total

    return total


def _copied(spec: DivergenceSpec, x: Tensor, gradient: Tensor | None) -> tuple[DivergenceSpec, Tensor, Tensor | None]:
    """Contiguous copies of what a launch reads, which can always be addressed, and a new gradient to copy back."""
    copies = {name: t.contiguous() for name in ("teacher", "labels", "weight") if (t := getattr(spec, name)) is not None}
    fresh = None if gradient is None else torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
    return spec._replace(**copies), x.contiguous(), fresh


@functools.lru_cache(maxsize=PLANS)
def _backward_plan(kind: Kind, layouts: tuple[Layout | None, ...], upstream: Layout, tried: object) -> Plan | None:
    start = sum(one is not None for one in layouts)
    p = _prepare(kind, layouts, start + 2)
    if p is None:
        return None
    tiles = backward_tiles(p.rows.classes, p.config.SHIFT, p.rows_adjacent)
    shift = 1 if tiles.rows > 1 else p.config.SHIFT
    blocks = triton.cdiv(p.rows.rows, tiles.rows)
    return Plan(
        divergence_backward_kernel,
        (p.rows.outer * blocks, triton.cdiv(p.rows.classes + shift - 1, tiles.classes)),
        Operands(*layouts).x[3],
        (
            p.x,
            p.teacher,
            p.marks,
            p.gradient,
            Slot(start),
            GradOutput(Slot(start + 1), 1 if upstream[0] else 0),
            p.formula,
            p.rows.rows,
            blocks,
        ),
        config=p.config._replace(BR=tiles.rows, BC=tiles.classes, SHIFT=shift, BACKWARD=True),
        num_warps=tiles.warps,
    )


def divergence_backward(spec: DivergenceSpec, x: Tensor, stats: Tensor, upstream: Tensor, gradient: Tensor) -> None:
    """Write the gradient for the gradient that arrives at a launch's result: 0-d for a total, else per row."""
    operands = _operands(spec, x, gradient)
    upstream = upstream.contiguous()
    arriving = layout(upstream)
    assert arriving is not None
    plan = _backward_plan(_kind(spec), tuple([layout(t) for t in operands]), arriving, tried())
    if plan is not None:
        plan.launch((*operands, stats, upstream), _floats(spec))
        return
    spec, copy, fresh = _copied(spec, x, gradient)
    assert fresh is not None
    divergence_backward(spec, copy, stats, upstream, fresh)
    gradient.copy_(fresh)

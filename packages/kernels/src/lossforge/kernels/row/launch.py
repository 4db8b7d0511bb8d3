"""Host side of the row-wise template: how rows lie in memory, tile sizes, and the launches."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import PLANS, Layout, Plan, chip, layout, slots
from lossforge.kernels.engine.reduce import NO_SUM, Sum, new_sum
from lossforge.kernels.row.backward import GradOutputs, rowwise_backward_kernel
from lossforge.kernels.row.backward import Kept as KeptPointers
from lossforge.kernels.row.kernel import Outputs, rowwise_kernel
from lossforge.kernels.row.layout import Kind, Numbers, Operands, Prepared, Spec, copied, floats_of, kind_of, operands_of, prepare
from lossforge.kernels.tiles import backward_tiles, forward_tiles, most_registers, resident_tiles, tried


@functools.lru_cache(maxsize=PLANS)
def _forward_plan(
    kind: Kind,
    layouts: tuple[Layout | None, ...],
    wanted: tuple[bool, ...],
    total: bool,
    z_total: bool,
    tried: object,  # tiles.tried()
) -> Plan | None:
    """wanted: of Outputs."""
    outputs_at = sum(one is not None for one in layouts)
    sums_at = outputs_at + sum(wanted)
    p = prepare(kind, layouts, sums_at + 3 * total + 3 * z_total)
    if p is None:
        return None
    out = slots(Outputs, wanted, outputs_at)
    sums = (slots(Sum, [True] * 3, sums_at) if total else None, slots(Sum, [True] * 3, sums_at + 3) if z_total else None)
    given = Operands(*layouts)
    gradient = given.gradient is not None
    rows, classes = p.rows.rows, p.rows.classes
    counted = math.prod(given.target[0]) if kind.counted else 0
    if gradient and total and not (z_total or any(wanted)):
        plan = _resident_plan(kind, p, given, sums[0], counted)
        if plan is not None:
            return plan
    focus = Numbers(*kind.given).focus
    # where a lane sums single classes, those of a focus take as many registers
    tiles = forward_tiles(classes, given.x[2].itemsize, p.rows_adjacent, p.config.DENSE or (p.rows_adjacent and focus), gradient)
    if focus and not p.rows_adjacent:
        tiles = tiles._replace(rows=min(tiles.rows, 64))  # of more, registers do not hold a pair's terms
    blocks = triton.cdiv(rows, tiles.rows)
    return Plan(
        rowwise_kernel,
        (p.rows.outer * blocks,),
        given.x[3],
        (p.x, p.target, p.gradient, out, sums, p.loss, rows, blocks, counted),
        config=p.config._replace(
            BR=tiles.rows,
            BC=tiles.classes,
            VEC=tiles.vector,
            STAGES=tiles.stages,
            ONE_TILE=tiles.one,
            SHIFT=1 if tiles.one else p.config.SHIFT,
            COUNT=counted > 0,
            ENTROPY=out.entropy is not None,
            CORRECT=out.correct is not None,
            ALL_ROWS=out.lse is not None or out.entropy is not None,
        ),
        num_warps=tiles.warps,
    )


def _resident_plan(kind: Kind, p: Prepared, given: Operands, sum: Any, counted: int) -> Plan | None:
    """Total and gradient by resident.py, where it applies and pays."""
    given_of = Numbers(*kind.given)
    changed = given_of.logit_scale or given_of.softcap or given_of.focus
    plain = not (p.config.DENSE or changed or given.target[2].is_floating_point)
    on_chip = chip(given.x[3])
    if on_chip is None or not plain or max(p.config.ALIGN, p.config.SHIFT) == 1 or p.rows.outer != 1:
        return None
    bias, smoothing = given.bias is not None, bool(given_of.smoothing)
    if given.target_b is not None and (p.config.SHIFT > 1 or bias):
        return None  # more than registers hold
    multiprocessors, shared = on_chip
    itemsize = given.x[2].itemsize
    tiles = resident_tiles(p.rows.classes, itemsize, p.config.SHIFT, given.target_b is not None, smoothing, bias, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.row.chunks import Chunks
        from lossforge.kernels.row.resident import resident_kernel
    except ImportError:  # its Gluon is not known: gluon.py
        return None
    programs = multiprocessors * tiles.programs
    if bias:
        programs -= programs % p.config.SHIFT  # each takes rows so far apart that they begin at the same lane
    too_many = (itemsize == 2 and tiles.held > 0) or (smoothing and p.config.SHIFT > 1)  # registers, left to the compiler
    return Plan(
        resident_kernel,
        (min(p.rows.rows, programs),),
        given.x[3],
        (p.x, p.target, p.gradient, sum, p.loss, p.rows.rows, counted),
        config=Chunks(
            CHUNK=tiles.chunk,
            K=tiles.ring,
            P=tiles.held,
            VEC=max(p.config.ALIGN, p.config.SHIFT),
            W=tiles.warps,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=kind.empty_is_zero,
            SHIFT=p.config.SHIFT,
            B=tiles.ring if bias else 0,
        ),
        num_warps=tiles.warps,
        **(most_registers(tiles.warps, tiles.programs) if too_many else {}),
    )


def rowwise(
    spec: Spec,
    x: Tensor,
    *,
    total: bool = True,
    z_loss: bool = False,
    lse: bool = False,
    entropy: bool = False,
    correct: bool = False,
    stats: bool = False,
    gradient: Tensor | None = None,
) -> Outputs:
    """One launch over logits x (N, C, d…): the loss as a total or per row, the asked further outputs, and the gradient into `gradient`."""
    operands = operands_of(spec, x, gradient)
    wanted = (not total, z_loss and not total, lse, entropy, correct, stats)
    plan = _forward_plan(kind_of(spec), tuple([layout(t) for t in operands]), wanted, total, total and z_loss, tried())
    if plan is None:
        spec, copy, fresh = copied(spec, x, gradient)
        out = rowwise(spec, copy, total=total, z_loss=z_loss, lse=lse, entropy=entropy, correct=correct, stats=stats, gradient=fresh)
        if gradient is not None and fresh is not None:
            gradient.copy_(fresh)
        return out
    out = _new_outputs(x, wanted) if any(wanted) else NO_OUTPUTS
    sum = new_sum(plan.grid[0], x.device) if total else NO_SUM
    z_sum = new_sum(plan.grid[0], x.device, second=True) if total and z_loss else NO_SUM
    plan.launch((*operands, *out, *sum, *z_sum), floats_of(spec))
    return Outputs(sum.total, z_sum.total, *out[2:]) if total else out


def planned_rowwise(spec: Spec, x: Tensor, gradient: Tensor | None) -> Callable[..., Tensor] | None:
    """`rowwise` for nothing but total and gradient: ((x, target, target_b, lam, weight, bias, …), divisor, gradient) → total.

    For tensors of these layouts and a Spec otherwise the same. None where copies would be needed.
    """
    layouts = tuple([layout(t) for t in operands_of(spec, x, gradient)])
    plan = _forward_plan(kind_of(spec), layouts, (False,) * len(NO_OUTPUTS), True, False, tried())
    if plan is None:
        return None
    programs, device, floats = plan.grid[0], x.device, floats_of(spec)

    def total(tensors: Sequence[Tensor | None], divisor: Tensor | None, gradient: Tensor | None) -> Tensor:
        x, target, target_b, lam, weight, bias, *_ = tensors
        sum = new_sum(programs, device)
        plan.launch((x, target, target_b, lam, gradient, weight, bias, divisor, *sum), floats)
        assert sum.total is not None
        return sum.total

    return total


NO_OUTPUTS = Outputs(None, None, None, None, None, None)


def _new_outputs(x: Tensor, wanted: Sequence[bool]) -> Outputs:
    rows = (x.shape[0], *x.shape[2:])
    shapes = [(rows, torch.float32)] * 4 + [(rows, torch.bool), ((3, x.numel() // x.shape[1]), torch.float32)]
    made = [torch.empty(s, dtype=d, device=x.device) if one else None for one, (s, d) in zip(wanted, shapes, strict=True)]
    return Outputs(*made)


class Kept(NamedTuple):
    """What only the backward launch takes: what forward returned, and the gradients that arrive at its outputs."""

    stats: Any
    row_entropy: Any
    loss: Any
    z_loss: Any
    lse: Any
    entropy: Any


@functools.lru_cache(maxsize=PLANS)
def _backward_plan(kind: Kind, layouts: tuple[Layout | None, ...], kept: tuple[Layout | None, ...], tried: object) -> Plan | None:
    """kept: of Kept."""
    start = sum(one is not None for one in layouts)
    p = prepare(kind, layouts, start + sum(one is not None for one in kept))
    if p is None:
        return None
    stats, row_entropy, *arriving = slots(Kept, [one is not None for one in kept], start)
    loss, z_loss, lse, entropy = arriving
    loss_stride, z_stride = (0 if one is None or len(one[0]) == 0 else 1 for one in kept[2:4])
    tiles = backward_tiles(p.rows.classes, p.config.SHIFT, p.rows_adjacent)
    shift = 1 if tiles.rows > 1 else p.config.SHIFT
    blocks = triton.cdiv(p.rows.rows, tiles.rows)
    return Plan(
        rowwise_backward_kernel,
        (p.rows.outer * blocks, triton.cdiv(p.rows.classes + shift - 1, tiles.classes)),
        Operands(*layouts).x[3],
        (
            p.x,
            p.target,
            p.gradient,
            KeptPointers(stats, row_entropy),
            GradOutputs(loss, loss_stride, z_loss, z_stride, lse, entropy),
            p.loss,
            p.rows.rows,
            blocks,
        ),
        config=p.config._replace(
            BR=tiles.rows,
            BC=tiles.classes,
            SHIFT=shift,
            BACKWARD=True,
            ENTROPY=entropy is not None,
            ALL_ROWS=lse is not None or entropy is not None,
        ),
        num_warps=tiles.warps,
    )


def rowwise_backward(
    spec: Spec,
    x: Tensor,
    stats: Tensor,
    *,
    loss: Tensor | None,
    z_loss: Tensor | None = None,
    lse: Tensor | None = None,
    entropy: Tensor | None = None,
    row_entropy: Tensor | None = None,
    gradient: Tensor,
) -> None:
    """Write the gradient for the gradients that arrive at a launch's outputs: 0-d for totals, else per row. row_entropy: as returned."""
    arriving = [None if t is None else t.contiguous() for t in (loss, z_loss, lse, entropy)]
    kept = (stats, row_entropy if entropy is not None else None, *arriving)
    operands = operands_of(spec, x, gradient)
    plan = _backward_plan(kind_of(spec), tuple([layout(t) for t in operands]), tuple([layout(t) for t in kept]), tried())
    if plan is not None:
        plan.launch((*operands, *kept), floats_of(spec))
        return
    spec, copy, fresh = copied(spec, x, gradient)
    assert fresh is not None
    rowwise_backward(spec, copy, stats, loss=loss, z_loss=z_loss, lse=lse, entropy=entropy, row_entropy=row_entropy, gradient=fresh)
    gradient.copy_(fresh)

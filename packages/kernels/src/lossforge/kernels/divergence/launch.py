"""Host side of the divergence template: tiles, and the launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import DivergenceCall, Formulas, TopKCall, empty
from lossforge.kernels.divergence.backward import divergence_backward_kernel
from lossforge.kernels.divergence.kernel import divergence_kernel
from lossforge.kernels.engine.launch import Plan, Template, Turn, chip, launch, sum_slots
from lossforge.kernels.engine.reduce import Counting, count, counts_itself
from lossforge.kernels.row.layout import RowLayout, row_layout
from lossforge.kernels.row.rows import Logits
from lossforge.kernels.tiles import COUNTED, backward_tiles, divergence_tiles, most_registers, resident_pair_tiles


class Numbers(NamedTuple):
    """inverse: 1 / temperature. scale: of the loss, over its divisor."""

    inverse: float
    scale: float

    @staticmethod
    def of(call: DivergenceCall | TopKCall) -> "Numbers":
        rows = call.x.numel() // call.x.shape[1]
        known = call.reduction == "mean" and call.normalizer is None and not call.counted
        return Numbers(inverse=1.0 / call.temperature, scale=float(call.loss_scale / rows if known else call.loss_scale))


class Wanted(NamedTuple):
    """What a forward launch is to give. divisor: 0-d; counted: in its place the launch counts the labels. out: per row, else the total."""

    divisor: Tensor | None
    counted: bool
    gradient: Tensor | None
    out: Tensor | None
    stats: Tensor | None


class Prepared(NamedTuple):
    x: Logits
    teacher: Logits
    strided: Any  # labels, weight, gradient
    at: RowLayout


def _prepare(call: DivergenceCall, gradient: Any) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    at = row_layout(call.x.shape, (call.x, call.target, call.labels, call.weight, gradient), 2, gradient)
    if at is None:
        return None
    x, teacher, *strided = at.strided
    return Prepared(Logits(*x, at.classes, None, None), Logits(*teacher, at.classes, None, None), strided, at)


def _plan(call: DivergenceCall, wanted: Wanted, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, wanted.gradient)
    if p is None:
        return None
    tiles = divergence_tiles(p.at.classes, min(call.x.itemsize, call.target.itemsize), p.at.adjacent)
    blocks = triton.cdiv(p.at.rows, tiles.rows)
    counted = call.labels.numel() if wanted.counted and call.labels is not None else 0
    total = wanted.out is None
    if total and wanted.stats is None and wanted.gradient is not None:
        plan = _resident(call, wanted, numbers, formulas, p)
        if plan is not None:
            return plan
    return Plan(
        divergence_kernel,
        (p.at.outer * blocks,),
        (
            p.x,
            p.teacher,
            *p.strided,
            wanted.out,
            wanted.stats,
            sum_slots() if total else None,
            wanted.divisor,
            call.hyper,
            numbers.inverse,
            numbers.scale,
            call.ignore_index,
            p.at.rows,
            blocks,
            counted,
        ),
        totals=int(total),
        terms=formulas.formula,
        sums=formulas.sums,
        SWAP=call.swap,
        EMPTY_IS_ZERO=call.empty_is_zero,
        ONE_TILE=tiles.one,
        COUNT=COUNTED if counted else 0,
        SHIFT=1 if tiles.one else p.at.shift,
        BR=tiles.rows,
        BC=tiles.classes,
        VEC=tiles.vector,
        num_warps=tiles.warps,
        **p.at.constants,
    )


def _resident(call: DivergenceCall, wanted: Wanted, numbers: Numbers, formulas: Formulas, p: Prepared) -> Plan | None:
    """Total and gradient by resident.py, where it applies and pays."""
    itemsize, on_chip = call.x.itemsize, chip(call.x.get_device())
    if on_chip is None or p.at.align == 1 or p.at.outer != 1 or itemsize != call.target.itemsize:
        return None
    multiprocessors, shared = on_chip
    tiles = resident_pair_tiles(p.at.classes, itemsize, formulas.sums is None, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.divergence.resident import resident_divergence_kernel
    except ImportError:  # its Gluon is not known: engine/gluon.py
        return None
    chunks = triton.cdiv(p.at.classes, tiles.chunk)
    ring = min(chunks, tiles.ring)
    return Plan(
        resident_divergence_kernel,
        (min(p.at.rows, multiprocessors * tiles.programs),),
        (
            p.x,
            p.teacher,
            *p.strided,
            sum_slots(),
            wanted.divisor,
            call.hyper,
            numbers.inverse,
            numbers.scale,
            call.ignore_index,
            p.at.rows,
            call.labels.numel() if wanted.counted and call.labels is not None else 0,
        ),
        totals=1,
        terms=formulas.formula,
        sums=formulas.sums,
        SWAP=call.swap,
        EMPTY_IS_ZERO=call.empty_is_zero,
        COUNT=COUNTED if wanted.counted else 0,
        CHUNK=tiles.chunk,
        N=ring,
        P=chunks - ring,
        K=tiles.ring,
        HELD=min(tiles.held, ring),
        VEC=p.at.align,
        W=tiles.warps,
        num_warps=tiles.warps,
        **most_registers(tiles.warps, tiles.programs),
    )


FORWARD = Template(_plan, writes=("gradient",))


def find_divisor(call: DivergenceCall | TopKCall, turn: Turn | None = None) -> Tensor | None:
    """Return what a mean divides by: the weights of the rows not left out."""
    if not call.counted:
        return call.normalizer
    if call.weight is None:
        assert call.labels is not None
        return count(Counting(call.labels, None, None, None, call.x.shape[1], call.ignore_index, 1.0), turn)
    kept = call.weight if call.labels is None else torch.where(call.labels != call.ignore_index, call.weight, 0)
    return kept.sum(dtype=torch.float32)


def counts_labels(call: DivergenceCall | TopKCall) -> bool:
    """Whether a launch may find the divisor itself."""
    return call.counted and call.weight is None and call.labels is not None and counts_itself(call.labels, None)


def forward(
    call: DivergenceCall, formulas: Formulas, gradients: Sequence[Tensor | None], keep: bool, alone: bool = False, turn: Turn | None = None
) -> tuple[Tensor | None, ...]:
    """As element.launch.forward."""
    itself = alone and counts_labels(call)
    divisor = None if itself else find_divisor(call, turn)
    each, _, kept = call.shapes(keep)
    out, stats = empty(call.x, each if call.reduction == "none" else None), empty(call.x, kept)
    wanted = Wanted(divisor, itself, gradients[0], out, stats)
    totals = launch(FORWARD, call, wanted, Numbers.of(call), formulas, turn=turn)
    return totals[0] if totals else out, divisor if call.counted else None, stats


class Arriving(NamedTuple):
    """What the backward launch takes beside the call: what forward kept, and the gradient that arrives."""

    divisor: Tensor | None
    stats: Tensor
    grad_output: Tensor
    gradient: Tensor


def _plan_backward(call: DivergenceCall, a: Arriving, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, a.gradient)
    if p is None:
        return None
    tiles = backward_tiles(p.at.classes, p.at.shift, p.at.adjacent)
    shift = 1 if tiles.rows > 1 else p.at.shift
    blocks = triton.cdiv(p.at.rows, tiles.rows)
    return Plan(
        divergence_backward_kernel,
        (p.at.outer * blocks, triton.cdiv(p.at.classes + shift - 1, tiles.classes)),
        (
            p.x,
            p.teacher,
            *p.strided,
            a.stats,
            a.grad_output,
            1 if a.grad_output.ndim else 0,
            a.divisor,
            call.hyper,
            numbers.inverse,
            numbers.scale,
            call.ignore_index,
            p.at.rows,
            blocks,
        ),
        terms=formulas.formula,
        SWAP=call.swap,
        EMPTY_IS_ZERO=call.empty_is_zero,
        SHIFT=shift,
        BR=tiles.rows,
        BC=tiles.classes,
        num_warps=tiles.warps,
        **p.at.constants,
    )


BACKWARD = Template(_plan_backward, writes=("gradient",))


def backward(
    call: DivergenceCall,
    formulas: Formulas,
    kept: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
) -> None:
    """As element.launch.backward."""
    (divisor, stats), (arriving,) = kept, grad_outputs
    if divisor is None:
        divisor = find_divisor(call)
    if stats is None:
        stats = forward(call._replace(normalizer=divisor), formulas, [None], True)[2]
    assert stats is not None
    assert arriving is not None
    launch(BACKWARD, call, Arriving(divisor, stats, arriving.contiguous(), gradients[0]), Numbers.of(call), formulas)

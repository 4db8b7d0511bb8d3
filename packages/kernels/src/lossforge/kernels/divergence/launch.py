"""Host side of the divergence template: tiles, and the launches."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import DivergenceCall, Formulas, TopKCall
from lossforge.kernels.divergence.backward import GradOutput, divergence_backward_kernel
from lossforge.kernels.divergence.kernel import Outputs, divergence_kernel
from lossforge.kernels.divergence.rows import Formula, Marks
from lossforge.kernels.engine.launch import Plan, Recording, Template, chip, launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided
from lossforge.kernels.engine.reduce import Counting, count, counts_itself
from lossforge.kernels.row.layout import RowLayout, logits_of, row_layout, scale_of
from lossforge.kernels.row.rows import Logits
from lossforge.kernels.tiles import backward_tiles, divergence_tiles, most_registers, resident_pair_tiles


class Numbers(NamedTuple):
    """inverse: 1 / temperature. rate: log₂ e / temperature. scale: of the loss, over its divisor."""

    inverse: float
    rate: float
    scale: float

    @staticmethod
    def of(call: DivergenceCall | TopKCall) -> "Numbers":
        return Numbers(1.0 / call.temperature, math.log2(math.e) / call.temperature, scale_of(call))


class Wanted(NamedTuple):
    """What a forward launch is to give. divisor: 0-d; counted: in its place the launch counts the labels. out: per row, else the total."""

    divisor: Tensor | None
    counted: bool
    gradient: Tensor | None
    out: Tensor | None
    stats: Tensor | None


class Prepared(NamedTuple):
    """The kernels' arguments that say what is read and computed, and the layout."""

    x: Logits
    teacher: Logits
    marks: Marks
    gradient: Strided
    formula: Formula
    at: RowLayout


def _prepare(call: DivergenceCall, numbers: Numbers, formulas: Formulas, gradient: Any, divisor: Any) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    at = row_layout(call.x.shape, (call.x, call.target, call.labels, call.weight, gradient), 2, gradient)
    if at is None:
        return None
    x, teacher, labels, weight, to = at.strided
    return Prepared(
        logits_of(x, at.classes),
        logits_of(teacher, at.classes),
        Marks(labels, weight),
        to,
        Formula(formulas.formula, formulas.sums, call.hyper, numbers.inverse, numbers.rate, numbers.scale, divisor, call.ignore_index),
        at,
    )


def _plan(call: DivergenceCall, wanted: Wanted, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, numbers, formulas, wanted.gradient, wanted.divisor)
    if p is None:
        return None
    tiles = divergence_tiles(p.at.classes, min(call.x.itemsize, call.target.itemsize), p.at.adjacent)
    blocks = p.at.blocks(tiles)
    counted = call.labels.numel() if wanted.counted and call.labels is not None else 0
    total = wanted.out is None
    if total and wanted.stats is None and wanted.gradient is not None:
        plan = _resident(call, p, formulas.sums is None, counted)
        if plan is not None:
            return plan
    return Plan(
        divergence_kernel,
        (p.at.outer * blocks,),
        (
            p.x,
            p.teacher,
            p.marks,
            p.gradient,
            Outputs(wanted.out, wanted.stats),
            sum_slots() if total else None,
            p.formula,
            p.at.rows,
            blocks,
            counted,
        ),
        totals=int(total),
        config=p.at.config(tiles, TENSORS=2, COUNT=counted > 0, EMPTY_IS_ZERO=call.empty_is_zero, SWAP=call.swap),
        num_warps=tiles.warps,
    )


def _resident(call: DivergenceCall, p: Prepared, slopes: bool, counted: int) -> Plan | None:
    """Total and gradient by resident.py, where it applies and pays."""
    itemsize, on_chip = call.x.itemsize, chip(call.x.get_device())
    if on_chip is None or p.at.align == 1 or p.at.outer != 1 or itemsize != call.target.itemsize:
        return None
    multiprocessors, shared = on_chip
    tiles = resident_pair_tiles(p.at.classes, itemsize, slopes, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.divergence.resident import resident_divergence_kernel
        from lossforge.kernels.row.chunks import Chunks
    except ImportError:  # its Gluon is not known: engine/gluon.py
        return None
    chunks = triton.cdiv(p.at.classes, tiles.chunk)
    ring = min(chunks, tiles.ring)
    return Plan(
        resident_divergence_kernel,
        (min(p.at.rows, multiprocessors * tiles.programs),),
        (p.x, p.teacher, p.marks, p.gradient, sum_slots(), p.formula, p.at.rows, counted),
        totals=1,
        config=Chunks(
            CHUNK=tiles.chunk,
            K=tiles.ring,
            P=chunks - ring,
            VEC=p.at.align,
            W=tiles.warps,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=call.empty_is_zero,
            N=ring,
            HELD=min(tiles.held, ring),
            SWAP=call.swap,
        ),
        num_warps=tiles.warps,
        **most_registers(tiles.warps, tiles.programs),
    )


FORWARD = Template(_plan, writes=("gradient",))


def find_divisor(call: DivergenceCall | TopKCall, recording: Recording | None = None) -> Tensor | None:
    """Return what a mean divides by: the weights of the rows not left out."""
    if not call.counted:
        return call.normalizer
    if call.weight is None:
        assert call.labels is not None
        return count(Counting(call.labels, None, None, None, call.x.shape[1], call.ignore_index, 1.0), recording)
    kept = call.weight if call.labels is None else torch.where(call.labels != call.ignore_index, call.weight, 0)
    return kept.sum(dtype=torch.float32)


def counts_labels(call: DivergenceCall | TopKCall) -> bool:
    """Whether a launch may find the divisor itself."""
    return call.counted and call.weight is None and call.labels is not None and counts_itself(call.labels, None)


def forward(
    call: DivergenceCall,
    formulas: Formulas,
    gradients: Sequence[Tensor | None],
    keep: bool,
    alone: bool = False,
    recording: Recording | None = None,
) -> tuple[Tensor | None, ...]:
    """As element.launch.forward."""
    itself = alone and counts_labels(call)
    divisor = None if itself else find_divisor(call, recording)
    each, _, kept = call.shapes(keep)
    out = new_like(recording, call.x, each if call.reduction == "none" else None)
    stats = new_like(recording, call.x, kept)
    wanted = Wanted(divisor, itself, gradients[0], out, stats)
    totals = launch(FORWARD, call, wanted, Numbers.of(call), formulas, recording=recording)
    return totals[0] if totals else out, divisor if call.counted else None, stats


class Arriving(NamedTuple):
    """What the backward launch takes beside the call: what forward kept, and the gradient that arrives."""

    divisor: Tensor | None
    stats: Tensor
    grad_output: Tensor
    gradient: Tensor


def _plan_backward(call: DivergenceCall, a: Arriving, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, numbers, formulas, a.gradient, a.divisor)
    if p is None:
        return None
    tiles = backward_tiles(p.at.classes, p.at.shift, p.at.adjacent)
    grad_output = GradOutput(a.grad_output, int(a.grad_output.ndim > 0))
    return Plan(
        divergence_backward_kernel,
        p.at.backward_grid(tiles),
        (p.x, p.teacher, p.marks, p.gradient, a.stats, grad_output, p.formula, p.at.rows, p.at.blocks(tiles)),
        config=p.at.config(tiles, TENSORS=2, EMPTY_IS_ZERO=call.empty_is_zero, SWAP=call.swap, BACKWARD=True),
        num_warps=tiles.warps,
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

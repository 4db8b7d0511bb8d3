"""Host side of topk/kernel.py: the launches."""

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, TopKCall
from lossforge.kernels.divergence.backward import GradOutput
from lossforge.kernels.divergence.kernel import Outputs
from lossforge.kernels.divergence.launch import Numbers, counts_labels, find_divisor
from lossforge.kernels.divergence.rows import Marks
from lossforge.kernels.engine.launch import Plan, Recording, Template, launch, new_like, sum_slots
from lossforge.kernels.row.layout import logits_of, row_layout
from lossforge.kernels.tiles import forward_tiles
from lossforge.kernels.topk.kernel import Entries, Softening, topk_kernel


class Wanted(NamedTuple):
    """What a launch is to give. divisor: 0-d; counted: in its place the launch counts the labels. out: per row.

    grad_output: what arrives at the loss; stats are then read, else written.
    """

    divisor: Tensor | None
    counted: bool
    gradient: Tensor | None
    out: Tensor | None
    stats: Tensor | None
    grad_output: Tensor | None


def _plan(call: TopKCall, wanted: Wanted, numbers: Numbers) -> Plan | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    tensors = (call.x, call.indices, call.target, call.labels, call.weight, wanted.gradient)
    at = row_layout(call.x.shape, tensors, 1, wanted.gradient)
    if at is None:
        return None
    x, indices, log_q, labels, weight, gradient = at.strided
    tiles = forward_tiles(at.classes, call.x.itemsize, at.adjacent, at.adjacent, True)
    blocks = at.blocks(tiles)
    counted = call.labels.numel() if wanted.counted and call.labels is not None else 0
    total = wanted.out is None and wanted.grad_output is None
    k = call.indices.shape[1]
    return Plan(
        topk_kernel,
        (at.outer * blocks,),
        (
            logits_of(x, at.classes),
            Entries(indices, log_q, k),
            Marks(labels, weight),
            gradient,
            Outputs(wanted.out, wanted.stats),
            GradOutput(wanted.grad_output, int(wanted.grad_output is not None and wanted.grad_output.ndim > 0)),
            sum_slots() if total else None,
            Softening(numbers.inverse, numbers.rate, numbers.scale, wanted.divisor, call.ignore_index),
            at.rows,
            blocks,
            counted,
        ),
        totals=int(total),
        config=at.config(
            tiles,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=call.empty_is_zero,
            RENORMALIZE=call.renormalize,
            TAIL=call.tail,
            KP=triton.next_power_of_2(k),
        )._replace(SHIFT=1),
        num_warps=tiles.warps,
    )


TOPK = Template(_plan, writes=("gradient",))


def forward(
    call: TopKCall,
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
    wanted = Wanted(divisor, itself, gradients[0], out, stats, None)
    totals = launch(TOPK, call, wanted, Numbers.of(call), recording=recording)
    return totals[0] if totals else out, divisor if call.counted else None, stats


def backward(
    call: TopKCall, formulas: Formulas, kept: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> None:
    """As element.launch.backward."""
    (divisor, stats), (arriving,) = kept, grad_outputs
    if divisor is None:
        divisor = find_divisor(call)
    if stats is None:
        stats = forward(call._replace(normalizer=divisor), formulas, [None], True)[2]
    assert stats is not None
    assert arriving is not None
    launch(TOPK, call, Wanted(divisor, False, gradients[0], None, stats, arriving.contiguous()), Numbers.of(call))

"""Host side of the row-wise template: tiles, and the launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lossforge.kernels.call import Formulas, RowCall
from lossforge.kernels.engine.launch import Plan, Template, chip, launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided
from lossforge.kernels.engine.reduce import Counting, count, counts_itself
from lossforge.kernels.row.backward import GradOutputs, Kept, rowwise_backward_kernel
from lossforge.kernels.row.kernel import Outputs, rowwise_kernel
from lossforge.kernels.row.layout import RowLayout, logits_of, row_layout, scale_of
from lossforge.kernels.row.rows import Labels, Logits, RowLoss, Target
from lossforge.kernels.tiles import backward_tiles, forward_tiles, most_registers, resident_tiles


class Numbers(NamedTuple):
    """The call's numbers as the kernels take them, None where they change nothing. scale: of the loss, over its divisor."""

    scale: float
    smoothing: float | None
    logit_scale: float | None
    softcap: float | None
    z_loss: float | None
    tau: float | None
    spread: float | None
    focus: float | None

    @staticmethod
    def of(call: RowCall) -> "Numbers":
        return Numbers(
            scale=scale_of(call),
            smoothing=call.label_smoothing or None,
            logit_scale=None if call.logit_scale == 1.0 else call.logit_scale,
            softcap=call.softcap,
            z_loss=call.z_loss if call.z_loss or call.outputs[0] else None,
            tau=None if call.bias is None else call.tau,
            spread=call.spread or None,
            focus=call.focus if call.spread else None,
        )


class Wanted(NamedTuple):
    """What a forward launch is to give beside Outputs, of which without `loss` there is the total.

    divisor: 0-d; counted: in its place the launch counts the class indices.
    """

    divisor: Tensor | None
    counted: bool
    gradient: Tensor | None
    z_total: bool


class Prepared(NamedTuple):
    """The kernels' arguments that say what is read and computed, and the layout."""

    x: Logits
    target: Target
    gradient: Strided
    loss: RowLoss
    at: RowLayout
    dense: bool


def _prepare(call: RowCall, numbers: Numbers, formulas: Formulas, gradient: Any, divisor: Any) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    probabilities = call.target.is_floating_point()
    index, dense = (None, call.target) if probabilities else (call.target, None)
    at = row_layout(call.x.shape, (call.x, index, call.target_b, call.lam, dense, gradient), 1, gradient)
    if at is None:
        return None
    x, index_a, index_b, lam, probability, to = at.strided
    labels = Labels(call.weight, call.ignore_index, numbers.smoothing, numbers.spread, numbers.focus)
    return Prepared(
        logits_of(x, at.classes)._replace(scale=numbers.logit_scale, softcap=numbers.softcap, bias_ptr=call.bias, tau=numbers.tau),
        Target(index_a, index_b, lam, probability, labels),
        to,
        RowLoss(formulas.formula, call.hyper, numbers.z_loss, numbers.scale, divisor),
        at,
        dense=probabilities or (numbers.smoothing is not None and call.weight is not None),
    )


def _plan(call: RowCall, wanted: Wanted, out: Outputs, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, numbers, formulas, wanted.gradient, wanted.divisor)
    if p is None:
        return None
    total, z_total = out.loss is None, wanted.z_total
    counted = call.target.numel() if wanted.counted else 0
    if wanted.gradient is not None and total and not z_total and not any(one is not None for one in out):
        plan = _resident(call, wanted, numbers, p)
        if plan is not None:
            return plan
    focus = numbers.focus is not None
    # where a lane sums single classes, those of a focus take as many registers
    tiles = forward_tiles(p.at.classes, call.x.itemsize, p.at.adjacent, p.dense or (p.at.adjacent and focus), wanted.gradient is not None)
    if focus and not p.at.adjacent:
        tiles = tiles._replace(rows=min(tiles.rows, 64))  # of more, registers do not hold a pair's terms
    blocks = p.at.blocks(tiles)
    totals = total + z_total
    sums = sum_slots(0, totals) if total else None, sum_slots(1, totals) if z_total else None
    return Plan(
        rowwise_kernel,
        (p.at.outer * blocks,),
        (p.x, p.target, p.gradient, out, sums, p.loss, p.at.rows, blocks, counted),
        totals=totals,
        config=p.at.config(
            tiles,
            STAGES=tiles.stages,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=call.empty_is_zero,
            DENSE=p.dense,
            EVEN=numbers.smoothing is not None and not p.dense,
            ENTROPY=out.entropy is not None,
            CORRECT=out.correct is not None,
            ALL_ROWS=out.lse is not None or out.entropy is not None,
        ),
        num_warps=tiles.warps,
    )


def _resident(call: RowCall, wanted: Wanted, numbers: Numbers, p: Prepared) -> Plan | None:
    """Total and gradient by resident.py, where it applies and pays."""
    at, pair, bias = p.at, call.target_b is not None, call.bias is not None
    changed = any(n is not None for n in (numbers.logit_scale, numbers.softcap, numbers.focus))
    on_chip = chip(call.x.get_device())
    if on_chip is None or p.dense or changed or call.target.is_floating_point() or max(at.align, at.shift) == 1 or at.outer != 1:
        return None
    if pair and (at.shift > 1 or bias):
        return None  # more than registers hold
    multiprocessors, shared = on_chip
    itemsize, smoothing = call.x.itemsize, numbers.smoothing is not None
    tiles = resident_tiles(at.classes, itemsize, at.shift, pair, smoothing, bias, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.row.chunks import Chunks
        from lossforge.kernels.row.resident import resident_kernel
    except ImportError:  # its Gluon is not known: engine/gluon.py
        return None
    programs = multiprocessors * tiles.programs
    if bias:
        programs -= programs % at.shift  # each takes rows so far apart that they begin at the same lane
    counted = call.target.numel() if wanted.counted else 0
    return Plan(
        resident_kernel,
        (min(at.rows, programs),),
        (p.x, p.target, p.gradient, sum_slots(), p.loss, at.rows, counted),
        totals=1,
        config=Chunks(
            CHUNK=tiles.chunk,
            K=tiles.ring,
            P=tiles.held,
            VEC=max(at.align, at.shift),
            W=tiles.warps,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=call.empty_is_zero,
            SHIFT=at.shift,
            B=tiles.ring if bias else 0,
        ),
        num_warps=tiles.warps,
        **most_registers(tiles.warps, tiles.programs),
    )


FORWARD = Template(_plan, writes=("gradient",))


def _divisor(call: RowCall) -> Tensor | None:
    if not call.counted:
        return call.normalizer
    lam, weight = (None, None) if call.mean_of_rows else (call.lam, call.weight)
    return count(Counting(call.target, call.target_b, lam, weight, call.x.shape[1], call.ignore_index, 1.0))


def forward(
    call: RowCall,
    formulas: Formulas,
    gradients: Sequence[Tensor | None],
    keep: bool,
    alone: bool = False,
) -> tuple[Tensor | None, ...]:
    """As element.launch.forward."""
    itself = alone and call.counted and not (call.weight is not None and call.mean_of_rows) and counts_itself(call.target, call.target_b)
    divisor = None if itself else _divisor(call)
    shapes = call.shapes(keep)
    each = call.reduction == "none"
    made = [new_like(call.x, shape) if each or i > 1 else None for i, shape in enumerate(shapes[:5])]
    loss, z_loss, lse, entropy, correct = made
    out = Outputs(loss, z_loss, lse, entropy, correct, new_like(call.x, shapes[6]))
    z_total = not each and call.outputs[0]
    totals = launch(FORWARD, call, Wanted(divisor, itself, gradients[0], z_total), out, Numbers.of(call), formulas)
    if not each:
        made[0], made[1] = totals[0], totals[1] if z_total else None
    return *made, divisor if call.counted else None, out.stats


class Arriving(NamedTuple):
    """What the backward launch takes beside the call: what forward kept, and the gradients that arrive at its results."""

    divisor: Tensor | None
    stats: Tensor
    row_entropy: Tensor | None
    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    gradient: Tensor


def _plan_backward(call: RowCall, a: Arriving, numbers: Numbers, formulas: Formulas) -> Plan | None:
    p = _prepare(call, numbers, formulas, a.gradient, a.divisor)
    if p is None:
        return None
    loss_stride, z_stride = (0 if t is None or t.ndim == 0 else 1 for t in (a.loss, a.z_loss))
    tiles = backward_tiles(p.at.classes, p.at.shift, p.at.adjacent)
    grad_outputs = GradOutputs(a.loss, loss_stride, a.z_loss, z_stride, a.lse, a.entropy)
    return Plan(
        rowwise_backward_kernel,
        p.at.backward_grid(tiles),
        (p.x, p.target, p.gradient, Kept(a.stats, a.row_entropy), grad_outputs, p.loss, p.at.rows, p.at.blocks(tiles)),
        config=p.at.config(
            tiles,
            EMPTY_IS_ZERO=call.empty_is_zero,
            DENSE=p.dense,
            EVEN=numbers.smoothing is not None and not p.dense,
            ENTROPY=a.entropy is not None,
            ALL_ROWS=a.lse is not None or a.entropy is not None,
            BACKWARD=True,
        ),
        num_warps=tiles.warps,
    )


BACKWARD = Template(_plan_backward, writes=("gradient",))


def backward(
    call: RowCall, formulas: Formulas, kept: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> None:
    """As element.launch.backward."""
    divisor, stats, row_entropy = kept
    if divisor is None:
        divisor = _divisor(call)
    if stats is None:
        plain = call._replace(outputs=[False] * 4)
        stats = forward(plain._replace(normalizer=divisor), formulas, [None], True)[6]
    assert stats is not None
    loss, z_loss, lse, entropy = (None if t is None else t.contiguous() for t in grad_outputs)
    arriving = Arriving(divisor, stats, None if entropy is None else row_entropy, loss, z_loss, lse, entropy, gradients[0])
    launch(BACKWARD, call, arriving, Numbers.of(call), formulas)

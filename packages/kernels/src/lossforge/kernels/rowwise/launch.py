"""Host side of the row-wise template: tiles, and the launches."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lossforge.kernels.call import NO_OUTPUTS, Formulas, RowwiseCall
from lossforge.kernels.engine.launch import Launch, Launcher, chip, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import stepped
from lossforge.kernels.engine.reduce import Counting, count, counts_itself
from lossforge.kernels.rowwise.kernel import GradOutputs, Kept, Outputs, rowwise_backward_kernel, rowwise_kernel
from lossforge.kernels.rowwise.layout import RowLayout, row_layout, scale_of
from lossforge.kernels.rowwise.rows import Labels, RowLoss, Target
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
    angle: float | None
    margin: float | None

    @staticmethod
    def of(call: RowwiseCall) -> "Numbers":
        return Numbers(
            scale=scale_of(call),
            smoothing=call.label_smoothing or None,
            logit_scale=None if call.logit_scale == 1.0 else call.logit_scale,
            softcap=call.softcap,
            z_loss=call.z_loss if call.z_loss or call.outputs[0] else None,
            tau=None if call.bias is None else call.tau,
            spread=call.spread or None,
            focus=call.focus if call.spread else None,
            angle=call.angle if call.angle or call.margin else None,
            margin=call.margin if call.angle or call.margin else None,
        )


class Wanted(NamedTuple):
    """What a launch is to give beside its Outputs, of which without `loss` there is the total.

    divisor: 0-d; counted: in its place the launch counts the class indices.
    """

    divisor: Tensor | None
    counted: bool
    gradient: Tensor | None
    z_total: bool


class Columns(NamedTuple):
    """Which classes the logits are of, for a backward launch of a part of them: from `first` on, of `classes` in all."""

    first: int | None
    classes: int | None


ALL = Columns(None, None)


class Prepared(NamedTuple):
    """What the kernels read and compute: their arguments (logits, target, gradient), the loss, the layout, what they are compiled for."""

    given: tuple[Any, ...]
    loss: RowLoss
    at: RowLayout
    constants: dict[str, bool]


def _prepare(call: RowwiseCall, wanted: Wanted, numbers: Numbers, formulas: Formulas, columns: Columns = ALL) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    probabilities = call.target.is_floating_point()
    index, probability = (None, call.target) if probabilities else (call.target, None)
    at = row_layout(call.x.shape, (call.x, index, call.target_b, call.lam, probability, wanted.gradient), 1, wanted.gradient)
    if at is None:
        return None
    x, index_a, index_b, lam, dense, gradient = at.strided
    logits = at.logits(x)._replace(scale=numbers.logit_scale, softcap=numbers.softcap, bias_ptr=call.bias, tau=numbers.tau)
    labels = Labels(
        weight_ptr=call.weight,
        ignore=call.ignore_index,
        smoothing=numbers.smoothing,
        spread=numbers.spread,
        focus=numbers.focus,
        first=columns.first,
        classes=columns.classes,
        **({} if numbers.angle is None else _turn(numbers.angle, numbers.margin)),
    )
    all_classes = probabilities or (numbers.smoothing is not None and call.weight is not None)
    return Prepared(
        (logits, Target(index_a, index_b, lam, dense, labels), gradient),
        RowLoss(formulas.formula, tuple(call.hyper), numbers.z_loss, numbers.scale, wanted.divisor),
        at,
        {"EMPTY_IS_ZERO": call.empty_is_zero, "DENSE": all_classes, "EVEN": numbers.smoothing is not None and not all_classes},
    )


def _turn(angle: float, margin: float | None) -> dict[str, Any]:
    """Return the numbers of Labels that say how the target's logit is changed."""
    return {"cosine": math.cos(angle), "sine": math.sin(angle), "beyond": angle * math.sin(angle), "margin": margin}


def _make(call: RowwiseCall, wanted: Wanted, out: Outputs, numbers: Numbers, formulas: Formulas) -> Launch | None:
    p = _prepare(call, wanted, numbers, formulas)
    if p is None:
        return None
    total = out.loss is None
    counted = call.target.numel() if wanted.counted else 0
    if wanted.gradient is not None and not wanted.z_total and not any(one is not None for one in out):
        resident = _resident(call, counted, numbers, p)
        if resident is not None:
            return resident
    focus, dense, adjacent = numbers.focus is not None, p.constants["DENSE"], p.at.adjacent
    # where a lane sums single classes, those of a focus take as many registers
    tiles = forward_tiles(p.at.classes, call.x.itemsize, adjacent, dense or (adjacent and focus), wanted.gradient is not None)
    if focus and not adjacent:
        tiles = tiles._replace(rows=min(tiles.rows, 64))  # of more, registers do not hold a pair's terms
    totals = total + wanted.z_total
    sums = sum_slots(0) if total else None, sum_slots(1) if wanted.z_total else None
    return p.at.launch(
        rowwise_kernel,
        tiles,
        (*p.given, out, sums, p.loss),
        counted,
        totals,
        STAGES=tiles.stages,
        ENTROPY=out.entropy is not None,
        CORRECT=out.correct is not None,
        ARGMAX=out.argmax is not None,
        SQUARES=out.log_p2 is not None,
        MEAN=out.mean_logit is not None,
        ALL_ROWS=any(t is not None for t in (out.lse, out.entropy, out.argmax, out.log_p2, out.mean_logit)),
        **p.constants,
    )


def _resident(call: RowwiseCall, counted: int, numbers: Numbers, p: Prepared) -> Launch | None:
    """Total and gradient by resident.py, where it applies and pays."""
    at, pair, bias = p.at, call.target_b is not None, call.bias is not None
    changed = any(n is not None for n in (numbers.logit_scale, numbers.softcap, numbers.focus, numbers.angle))
    on_chip = chip(call.x.get_device())
    if on_chip is None or p.constants["DENSE"] or changed or max(at.align, at.shift) == 1 or at.outer != 1:
        return None
    if pair and (at.shift > 1 or bias):
        return None  # more than registers hold
    multiprocessors, shared = on_chip
    tiles = resident_tiles(at.classes, call.x.itemsize, at.shift, pair, numbers.smoothing is not None, bias, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.rowwise.chunks import Chunks
        from lossforge.kernels.rowwise.resident import resident_kernel
    except ImportError:  # its Gluon is not known: engine/gluon.py
        return None
    programs = multiprocessors * tiles.programs
    if bias:
        programs -= programs % at.shift  # so that all rows of a program begin at the same lane
    config = Chunks(
        tiles.chunk,
        K=tiles.ring,
        P=tiles.held,
        VEC=max(at.align, at.shift),
        W=tiles.warps,
        COUNT=counted > 0,
        EMPTY_IS_ZERO=call.empty_is_zero,
        SHIFT=at.shift,
        B=tiles.ring if bias else 0,
    )
    arguments = (*p.given, sum_slots(), p.loss, at.rows, counted)
    limits = most_registers(tiles.warps, tiles.programs)
    return Launch(resident_kernel, (min(at.rows, programs),), arguments, totals=1, config=config, num_warps=tiles.warps, **limits)


def _make_backward(
    call: RowwiseCall, wanted: Wanted, kept: Kept, grad_outputs: GradOutputs, numbers: Numbers, columns: Columns, formulas: Formulas
) -> Launch | None:
    p = _prepare(call, wanted, numbers, formulas, columns)
    if p is None:
        return None
    entropy = grad_outputs.entropy is not None
    return p.at.launch(
        rowwise_backward_kernel,
        backward_tiles(p.at.classes, p.at.shift, p.at.adjacent),
        (*p.given, kept, grad_outputs, p.loss),
        ENTROPY=entropy,
        ALL_ROWS=grad_outputs.lse is not None or entropy,
        **p.constants,
    )


FORWARD = Launcher(_make, writes=("gradient",))
BACKWARD = Launcher(_make_backward, writes=("gradient",))


def _divisor(call: RowwiseCall) -> Tensor | None:
    if not call.counted:
        return call.normalizer
    lam, weight = (None, None) if call.mean_of_rows else (call.lam, call.weight)
    return count(Counting(call.target, call.target_b, lam, weight, call.x.shape[1], call.ignore_index, 1.0))


def forward(
    call: RowwiseCall,
    formulas: Formulas,
    gradients: Sequence[Tensor | None],
    keep: bool,
    alone: bool = False,
) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    itself = alone and call.counted and not (call.weight is not None and call.mean_of_rows) and counts_itself(call.target, call.target_b)
    divisor = None if itself else _divisor(call)
    each = call.reduction == "none"
    *results, _, stats = call.shapes(keep)
    made = [new_like(call.x, shape) if each or i > 1 else None for i, shape in enumerate(results)]
    loss, z_loss, lse, entropy, correct, argmax, log_p2, mean_logit = made
    out = Outputs(loss, z_loss, lse, entropy, correct, argmax, log_p2, mean_logit, new_like(call.x, stats))
    z_total = not each and call.outputs[0]
    totals = FORWARD.ready(call, Wanted(divisor, itself, gradients[0], z_total), out, Numbers.of(call), formulas).start()
    if not each:
        made[0], made[1] = totals[0], totals[1] if z_total else None
    return *made, divisor if call.counted else None, out.stats


def backward(
    call: RowwiseCall,
    formulas: Formulas,
    kept: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor],
    columns: tuple[int | None, int | None] = ALL,
) -> None:
    """As elementwise.launch.backward.

    Args:
        columns: (first, classes) where logits, gradient, probabilities and bias are those of the classes from `first` on, of so many in
            all. Class indices and weights count all classes. Then forward's statistics must be given.
    """
    divisor, stats, row_entropy = kept
    if divisor is None:
        divisor = _divisor(call)
    if stats is None:
        plain = call._replace(outputs=NO_OUTPUTS, normalizer=divisor)
        stats = forward(plain, formulas, [None], True)[-1]
    assert stats is not None
    of_loss, of_z_loss = map(stepped, grad_outputs[:2])
    lse, entropy = map(in_order, grad_outputs[2:])
    BACKWARD.ready(
        call,
        Wanted(divisor, False, gradients[0], False),
        Kept(stats, None if entropy is None else row_entropy),
        GradOutputs(*of_loss, *of_z_loss, lse, entropy),
        Numbers.of(call),
        Columns(*columns),
        formulas,
    ).start()

"""Host side of the row-wise template: tiles, and the launches."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lossforge.kernels.call import NO_OUTPUTS, Formulas
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.classes.rowwise.kernel import GradOutputs, Kept, Outputs, rowwise_backward_kernel, rowwise_kernel
from lossforge.kernels.classes.rowwise.layout import RowLayout, Wanted, mean_of_rows, row_layout
from lossforge.kernels.classes.rowwise.rows import Labels, Logits, RowLoss, Target
from lossforge.kernels.engine.launch import Launch, Sum, addressed, chip, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Strided, Tensors, stepped
from lossforge.kernels.engine.reduce import count, counts_itself
from lossforge.kernels.plans import in_order
from lossforge.kernels.tiles import backward_tiles, forward_tiles, most_registers, resident_tiles

Columns = tuple[int | None, int | None]
"""Which classes the logits are of, for a backward launch of a part of them: from which on, and of how many in all."""
ALL: Columns = (None, None)
ABSENT = Strided()


def logits_of(call: RowwiseCall[Any], x: Strided, classes: int, factors: Strided = ABSENT) -> Logits:
    """Return logits as the kernels see them. Numbers that change nothing are None, here and in the other records."""
    scale = None if call.logit_scale == 1.0 else call.logit_scale
    tau = None if call.bias is None else call.tau
    return Logits(*x, classes, scale, call.softcap, call.bias, tau, *factors[:3])


def labels_of(call: RowwiseCall[Any], columns: Columns = ALL) -> Labels:
    """Return what all rows' targets share."""
    margins: dict[str, float] = {}
    if call.moves_target():
        angle = call.angle
        margins = {"cos_m": math.cos(angle), "sin_m": math.sin(angle), "mm": angle * math.sin(angle), "margin": call.margin}
    return Labels(
        weight_ptr=call.weight,
        ignore=call.ignore_index,
        smoothing=call.label_smoothing or None,
        spread=call.spread or None,
        focus=call.focus if call.spread else call.power or None,
        margin_ptr=call.margins,
        first=columns[0],
        classes=columns[1],
        **margins,
    )


def row_loss(call: RowwiseCall[Any], formulas: Formulas, divisor: Tensor | None) -> RowLoss:
    """Return what becomes of a row. divisor: of the values, 0-d, but for the number of rows."""
    z_loss = call.z_loss if call.z_loss or call.outputs[0] else None
    weight, power = call.entropy_weight or None, call.power or None
    return RowLoss(formulas.formula, tuple(call.hyper), z_loss, mean_of_rows(call), divisor, weight, call.parameter, power)


def outputs_of(call: RowwiseCall[Any], like: Tensor, keep: bool) -> Outputs:
    """Return new tensors for the results of each row; the losses are among them where no totals are asked for."""
    *results, _, stats = call.shapes(keep)
    made = [new_like(like, shape) if call.reduction == "none" or i > 1 else None for i, shape in enumerate(results)]
    return Outputs._make([*made, new_like(like, stats)])


def flags_of(out: Outputs) -> dict[str, bool]:
    """Return the fields of a Config that say which outputs there are."""
    present = {"ENTROPY": out.entropy, "CORRECT": out.correct, "ARGMAX": out.argmax, "SQUARES": out.log_p2, "MEAN": out.mean_logit}
    all_rows = any(t is not None for t in (out.lse, out.entropy, out.argmax, out.log_p2, out.mean_logit))
    return {**{name: t is not None for name, t in present.items()}, "ALL_ROWS": all_rows}


def sums_of(call: RowwiseCall[Any]) -> tuple[Sum | None, Sum | None]:
    """Return where a launch adds up the loss and the z-loss."""
    total = call.reduction != "none"
    return sum_slots(0) if total else None, sum_slots(1) if total and call.outputs[0] else None


def results_of(out: Outputs, totals: tuple[Tensor, ...], divisor: Tensor | None) -> Results:
    """Return the results, and what is kept for backward. totals: of the loss, and of the z-loss, unless there is one of each row."""
    loss, z_loss = (*totals, None)[:2] if totals else out[:2]
    return loss, z_loss, *out[2:-1], divisor, out.stats


class Prepared(NamedTuple):
    """What the kernels read and compute: their arguments (logits, target, gradient), the loss, the layout, what they are compiled for."""

    given: tuple[Any, ...]
    loss: RowLoss
    at: RowLayout
    constants: dict[str, bool]


def _prepare(call: RowwiseCall, wanted: Wanted, formulas: Formulas, columns: Columns = ALL) -> Prepared | None:
    """None where the dimensions of the tensors beside the classes do not join into two."""
    probabilities = call.target.is_floating_point()
    index, probability = (None, call.target) if probabilities else (call.target, None)
    tensors = (call.x, index, call.target_b, call.lam, probability, call.row_scale, wanted.gradient)
    at = row_layout(call.x.shape, tensors, 1, wanted.gradient)
    if at is None:
        return None
    x, index_a, index_b, lam, dense, factors, gradient = at.strided
    smoothing = bool(call.label_smoothing)
    all_classes = probabilities or (smoothing and call.weight is not None)
    return Prepared(
        (logits_of(call, x, at.classes, factors), Target(index_a, index_b, lam, dense, labels_of(call, columns)), gradient),
        row_loss(call, formulas, wanted.divisor),
        at,
        {"EMPTY_IS_ZERO": call.empty_is_zero, "DENSE": all_classes, "EVEN": smoothing and not all_classes},
    )


def _make(call: RowwiseCall, wanted: Wanted, out: Outputs, formulas: Formulas) -> Launch | None:
    p = _prepare(call, wanted, formulas)
    if p is None:
        return None
    sums = sums_of(call)
    totals = sum(one is not None for one in sums)
    if wanted.gradient is not None and totals < 2 and not any(one is not None for one in out):
        resident = _resident(call, wanted.counted, p)
        if resident is not None:
            return resident
    focus, dense, adjacent = p.given[1].labels.focus is not None, p.constants["DENSE"], p.at.adjacent
    # where a lane sums single classes, those of a focus take as many registers
    tiles = forward_tiles(p.at.classes, call.x.itemsize, adjacent, dense or (adjacent and focus), wanted.gradient is not None)
    if focus and not adjacent:
        tiles = tiles._replace(rows=min(tiles.rows, 64))  # of more, registers do not hold a pair's terms
    arguments = (*p.given, out, sums, p.loss)
    return p.at.launch(rowwise_kernel, tiles, arguments, wanted.counted, totals, STAGES=tiles.stages, **flags_of(out), **p.constants)


def _resident(call: RowwiseCall, counted: int, p: Prepared) -> Launch | None:
    """Total and gradient by resident.py, where it applies and pays."""
    at, pair, bias = p.at, call.target_b is not None, call.bias is not None
    of_logits = call.logit_scale != 1.0 or call.softcap is not None or call.row_scale is not None
    changed = of_logits or call.spread or call.power or call.moves_target()
    on_chip = chip(call.x.get_device())
    if p.given[2].ptr.itemsize != call.x.itemsize:
        return None
    if on_chip is None or p.constants["DENSE"] or changed or max(at.align, at.shift) == 1 or at.outer != 1:
        return None
    if pair and (at.shift > 1 or bias):
        return None  # more than registers hold
    multiprocessors, shared = on_chip
    tiles = resident_tiles(at.classes, call.x.itemsize, at.shift, pair, p.constants["EVEN"], bias, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.classes.rowwise.chunks import Chunks
        from lossforge.kernels.classes.rowwise.resident import resident_kernel
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
    columns: Columns, call: RowwiseCall, wanted: Wanted, kept: Kept, grad_outputs: GradOutputs, formulas: Formulas
) -> Launch | None:
    p = _prepare(call, wanted, formulas, columns)
    if p is None:
        return None
    tiles, entropy = backward_tiles(p.at.classes, p.at.shift, p.at.adjacent), grad_outputs.entropy is not None
    arguments, all_rows = (*p.given, kept, grad_outputs, p.loss), grad_outputs.lse is not None or entropy
    return p.at.launch(rowwise_backward_kernel, tiles, arguments, ENTROPY=entropy, ALL_ROWS=all_rows, **p.constants)


def divisor_of(call: RowwiseCall) -> Tensor | None:
    if not call.counted:
        return call.normalizer
    weight = None if call.mean_of_rows else call.weight
    lam = None if call.mean_of_rows or call.target_b is None else call.lam
    return count(call.target, call.x.shape[1], call.ignore_index, target_b=call.target_b, lam=lam, weight=weight)


def forward(call: RowwiseCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """Compute the results, their divisor and the statistics as engine.template.Launches says."""
    itself = alone and call.counted and not (call.weight is not None and call.mean_of_rows) and counts_itself(call.target, call.target_b)
    divisor = None if itself else divisor_of(call)
    out = outputs_of(call, call.x, keep)
    totals = addressed(_make, call, Wanted(divisor, call.target.numel() if itself else 0, gradients[0]), out, formulas).start()
    return results_of(out, totals, divisor if call.counted else None)


def gradients_of(grad_outputs: Tensors) -> GradOutputs:
    """Return the gradients of loss, z-loss, lse and entropy as the kernels see them."""
    loss, z_loss, lse, entropy = grad_outputs
    return GradOutputs(*stepped(loss), *stepped(z_loss), in_order(lse), in_order(entropy))


def backward(
    call: RowwiseCall,
    formulas: Formulas,
    kept: Tensors,
    grad_outputs: Tensors,
    gradients: Sequence[Tensor],
    columns: Columns = ALL,
) -> None:
    """Write the gradient as engine.template.Launches says.

    Args:
        columns: (first, classes) where logits, gradient, probabilities and bias are those of the classes from `first` on, of so many in
            all. Class indices and weights count all classes. Then forward's statistics must be given.
    """
    divisor, stats, row_entropy = kept
    if divisor is None:
        divisor = divisor_of(call)
    if stats is None:
        plain = call._replace(outputs=call.outputs if call.entropy_weight else NO_OUTPUTS, normalizer=divisor)
        _, _, _, row_entropy, *_, stats = forward(plain, formulas, [None], True)
    given = gradients_of(grad_outputs)
    known = Kept(stats, row_entropy if given.entropy is not None or call.entropy_weight else None)
    make = functools.partial(_make_backward, columns)
    addressed(make, call, Wanted(divisor, 0, gradients[0]), known, given, formulas).start()

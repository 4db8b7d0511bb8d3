"""Host side of the losses with a teacher: tiles, and the launches."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.calls import LOG2E, DivergenceCall, TopKCall
from lossforge.kernels.classes.divergence.kernel import GradOutput, Outputs, divergence_backward_kernel, divergence_kernel
from lossforge.kernels.classes.divergence.rows import Formula, Marks
from lossforge.kernels.classes.rowwise.layout import RowLayout, Wanted, mean_of_rows, row_layout
from lossforge.kernels.classes.rowwise.rows import Logits
from lossforge.kernels.engine.launch import Launch, addressed, chip, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Tensors, stepped
from lossforge.kernels.engine.reduce import count, counts_itself
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.plans import computed
from lossforge.kernels.tiles import backward_tiles, divergence_tiles, most_registers, resident_pair_tiles

Call = DivergenceCall | TopKCall
C = TypeVar("C", DivergenceCall, TopKCall)


def formula_of(call: Call, divisor: Tensor | None, terms: Any = None, averaged: Any = None, hyper: Sequence[float] = ()) -> Formula:
    rates = 1.0 / call.temperature, LOG2E / call.temperature
    formula = Formula(terms, averaged, tuple(hyper), *rates, mean_of_rows(call), divisor, call.ignore_index)
    return formula._replace(**call.of_formula)


def _make(
    formulas: Formulas, call: DivergenceCall, wanted: Wanted, out: Outputs, grad_output: GradOutput, known: bool = False
) -> Launch | None:
    """None where the dimensions of the tensors beside the classes do not join into two. known: whether out.stats is known."""
    at = row_layout(call.x.shape, (call.x, call.target, call.labels, call.weight, call.target_lse, wanted.gradient), 2, wanted.gradient)
    if at is None:
        return None
    x, teacher, labels, weight, lse, gradient = at.strided
    formula = formula_of(call, wanted.divisor, formulas.formula, None if known else formulas.averaged, call.hyper)
    formula = formula._replace(blend=formulas.blend)
    given = (Logits(*x, at.classes), Logits(*teacher, at.classes), Marks(labels, weight, lse), gradient)
    cosine = formulas.formula is None
    constants = {"EMPTY_IS_ZERO": call.empty_is_zero, "SWAP": call.swap}
    if grad_output.ptr is not None:
        tiles = backward_tiles(at.classes, at.shift, at.adjacent)
        return at.launch(
            divergence_backward_kernel, tiles, (*given, out.stats, grad_output, formula), TENSORS=2, COSINE=cosine, **constants
        )
    total = out.loss is None
    fewer = cosine or formula.blend is not None  # which resident.py does not have
    if total and out.stats is None and out.entropy is None and wanted.gradient is not None and not fewer:
        resident = _resident(call, at, given, formula, wanted.counted, COUNT=wanted.counted > 0, **constants)
        if resident is not None:
            return resident
    itemsizes = call.x.itemsize, call.target.itemsize
    # without a limit the compiler took 55 registers for total variation; with one, 168 bytes of a capped row did not fit
    lean = formula.averaged is None and not cosine and at.align > 1 and max(itemsizes) == 2 and not _capped(formula)
    constants |= {"ENTROPY": out.entropy is not None, "COSINE": cosine}
    arguments = (*given, out, sum_slots() if total else None, formula)
    sweeps = divergence_tiles(at.classes, min(itemsizes), at.adjacent, lean, formula.blend is not None)
    if known:
        sweeps, constants = sweeps._replace(one=False), {**constants, "KNOWN": True}
    return at.launch(divergence_kernel, sweeps, arguments, wanted.counted, int(total), TENSORS=2, **constants)


def _capped(formula: Formula) -> bool:
    """Return whether logits are centred or capped, or scaled by different numbers."""
    return any(each is not None for each in (formula.center, formula.cap_x, formula.cap_t, formula.ratio))


def _resident(
    call: DivergenceCall, at: RowLayout, given: tuple[Any, ...], formula: Formula, counted: int, **constants: Any
) -> Launch | None:
    """Total and gradient by resident.py, where it applies and pays."""
    itemsize, on_chip = call.x.itemsize, chip(call.x.get_device())
    written = given[3].ptr.itemsize
    if _capped(formula) or formula.hard is not None:
        return None  # which resident.py does not have
    if on_chip is None or at.align == 1 or at.outer != 1 or not itemsize == call.target.itemsize == written:
        return None
    multiprocessors, shared = on_chip
    tiles = resident_pair_tiles(at.classes, itemsize, formula.averaged is None, shared)
    if tiles is None:
        return None
    try:
        from lossforge.kernels.classes.divergence.resident import resident_divergence_kernel
        from lossforge.kernels.classes.rowwise.chunks import Chunks
    except ImportError:  # its Gluon is not known: engine/gluon.py
        return None
    chunks = triton.cdiv(at.classes, tiles.chunk)
    ring = min(chunks, tiles.ring)
    held = min(tiles.held, ring)
    config = Chunks(tiles.chunk, K=tiles.ring, P=chunks - ring, VEC=at.align, W=tiles.warps, N=ring, HELD=held, **constants)
    arguments = (*given, sum_slots(), formula, at.rows, counted)
    grid = (min(at.rows, multiprocessors * tiles.programs),)
    limits = most_registers(tiles.warps, tiles.programs)
    return Launch(resident_divergence_kernel, grid, arguments, totals=1, config=config, num_warps=tiles.warps, **limits)


def _divisor(call: Call) -> Tensor | None:
    """Return what a mean divides by: the weights of the rows not left out."""
    if not call.counted:
        return call.normalizer
    if call.weight is None:
        assert call.labels is not None
        return count(call.labels, call.x.shape[1], call.ignore_index)
    if call.labels is None:
        return computed(_total, call.weight)
    return computed(functools.partial(_total, ignore_index=call.ignore_index), call.weight, call.labels)


def _total(weight: Tensor, labels: Tensor | None = None, ignore_index: int = 0) -> Tensor:
    kept = weight if labels is None else torch.where(labels != ignore_index, weight, 0)
    return kept.sum(dtype=torch.float32)


@dataclass(frozen=True)
class FromTeacher(Generic[C]):
    """Forward and backward of a template whose rows have a teacher. make: its launch; None where the layouts cannot be addressed."""

    make: Callable[[Any, C, Wanted, Outputs, GradOutput], Launch | None]

    def start(
        self, call: C, formulas: Formulas | None, wanted: Wanted, out: Outputs, grad_output: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Launch forward, or where a gradient arrives backward, and return the totals."""
        make = functools.partial(self.make, formulas)
        return addressed(make, call, wanted, out, GradOutput(*stepped(grad_output))).start()

    def forward(self, call: C, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
        """Compute the loss, its divisor and the statistics as engine.template.Launches says."""
        itself = alone and call.counted and call.weight is None and call.labels is not None and counts_itself(call.labels, None)
        counted, divisor = (call.labels.numel(), None) if itself and call.labels is not None else (0, _divisor(call))
        each, *beside, _, kept = call.shapes(keep)
        further: list[Tensor | None] = [new_like(call.x, shape) for shape in beside]
        out = Outputs(new_like(call.x, each) if call.reduction == "none" else None, new_like(call.x, kept), *further)
        totals = self.start(call, formulas, Wanted(divisor, counted, gradients[0]), out)
        return totals[0] if totals else out.loss, *further, divisor if call.counted else None, out.stats

    def backward(self, call: C, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
        """Write the gradient as engine.template.Launches says."""
        divisor, stats = kept
        if divisor is None:
            divisor = _divisor(call)
        if stats is None:
            stats = self.forward(call._replace(normalizer=divisor), formulas, [None], True)[-1]
        self.start(call, formulas, Wanted(divisor, 0, gradients[0]), Outputs(None, stats), grad_outputs[0])


_LAUNCH: Launches = FromTeacher(_make)
forward, backward = _LAUNCH.forward, _LAUNCH.backward


def sums_of(call: DivergenceCall, formulas: Formulas, stats: Tensor) -> Results:
    """Return each row's loss as a sum over the classes of a call with reduction "none", where the softmaxes are over more classes.

    stats: (5, rows), of the softmaxes, as forward keeps them. Their Σ h is written, of the call's classes.
    """
    each, *_ = call.shapes(False)
    out = Outputs(new_like(call.x, each), stats)
    FromTeacher(functools.partial(_make, known=True)).start(call, formulas, Wanted(None, 0, None), out)
    return (out.loss,)

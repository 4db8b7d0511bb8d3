"""Host side of the template of margins between a row's classes: tiles, and the launch."""

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, MarginsCall
from lossforge.kernels.elementwise.kernel import Formula
from lossforge.kernels.elementwise.launch import Wanted
from lossforge.kernels.engine.launch import Launch, Launcher, in_order, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, constants
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.margins.kernel import Matrix, Targets, Tile, margins_kernel, swept_row, whole_rows
from lossforge.kernels.tiles import PROGRAMS, margin_tiles


def _matrix(t: Tensor | None) -> Matrix:
    return Matrix() if t is None else Matrix(t, *t.stride())


def _make(call: MarginsCall, wanted: Wanted, formulas: Formulas) -> Launch:
    upstream, factor = wanted.upstream
    n, classes = call.x.shape
    lists = call.target.ndim == 2
    tiles = margin_tiles(classes, lists)
    reach = max((tiles.classes + classes) * t.stride(1) for t in (call.x, wanted.gradient) if t is not None)
    arguments = (
        _matrix(call.x),
        _matrix(wanted.gradient),
        _matrix(upstream),
        _matrix(wanted.out),
        constants(Targets(call.target, call.weight, call.target.shape[1] if lists else 1, LISTS=lists)),
        tuple(call.hyper),
        constants(Scaling(wanted.scale, call.normalizer, factor, call.empty_is_zero)),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        constants(Tile(classes, ROWS=tiles.rows, CLASSES=tiles.classes, WIDE=reach >= 2**31)),
        n,
    )
    take = whole_rows if tiles.classes >= classes else swept_row
    grid = (min(triton.cdiv(n, tiles.rows), PROGRAMS),)
    return Launch(margins_kernel, grid, arguments, totals=int(wanted.total), take=take, num_warps=tiles.warps)


MARGINS = Launcher(_make, writes=("out", "gradient"))


def _scale(call: MarginsCall) -> float:
    rows, classes = call.x.shape
    known = call.reduction == "mean" and call.normalizer is None
    return float(call.loss_scale / classes / (rows if known else 1))


def _ordered(call: MarginsCall) -> MarginsCall:
    return call._replace(target=in_order(call.target), weight=in_order(call.weight))


def forward(call: MarginsCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    out = new_like(call.x, call.shapes(keep)[0]) if call.reduction == "none" else None
    totals = MARGINS.ready(_ordered(call), Wanted(_scale(call), out=out, gradient=gradients[0]), formulas).start()
    return (totals[0] if out is None else out,)


def backward(call: MarginsCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (grad_output,) = grad_outputs
    assert grad_output is not None
    MARGINS.ready(_ordered(call), Wanted(_scale(call), grad_output=grad_output, gradient=gradients[0]), formulas).start()

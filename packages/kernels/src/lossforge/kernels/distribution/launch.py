"""Host side of the template of distributions over bins: how its tensors lie in memory, and the launch."""

import triton
from torch import Tensor

from lossforge.kernels.boxes.kernel import Boxes
from lossforge.kernels.boxes.launch import arrange
from lossforge.kernels.call import DistributionCall, Formulas
from lossforge.kernels.distribution.kernel import Bins, distribution_kernel
from lossforge.kernels.elementwise.kernel import Formula, Outputs, Space
from lossforge.kernels.elementwise.launch import Wanted
from lossforge.kernels.engine.launch import Launch, Launcher, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, constants, strided
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.tiles import PROGRAMS, bin_tiles


def _make(call: DistributionCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    upstream, factor = wanted.upstream
    wide, by_row = (call.x, wanted.gradient), (call.target, call.weight, upstream, wanted.out)
    arranged = arrange([t for t in wide if t is not None], [t for t in by_row if t is not None])
    if arranged is None:
        return None
    g, steps = arranged
    strides, step = iter(g.strides), iter(steps)
    x, gradient = (Boxes() if t is None else Boxes(*strided(t, strides), next(step)) for t in wide)
    target, weight, grad_output, out = (strided(t, strides) for t in by_row)
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, bin_tiles(count)
    wide_bins = (tiles.bins + tiles.tail) * max(s or 0 for s in steps) >= 2**31
    bins = Bins(x, gradient, target, COUNT=count, SIZE=tiles.bins, TAIL=tiles.tail, WIDE=wide_bins)
    arguments = (
        constants(bins),
        weight,
        Outputs(grad_output, out, Strided()),
        tuple(call.hyper),
        constants(Scaling(wanted.scale, call.normalizer, factor, call.empty_is_zero)),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        constants(Space(g.n1, g.n2, COLUMNS=None, FLAT=g.flat, BIG=g.big(n, tiles.rows), BLOCK=tiles.rows)),
        n,
    )
    grid = (min(triton.cdiv(n, tiles.rows), PROGRAMS),)
    return Launch(distribution_kernel, grid, arguments, totals=int(wanted.total), num_warps=tiles.warps)


DISTRIBUTION = Launcher(_make, writes=("out", "gradient"), expands={"weight": lambda call: call.target.shape})


def _scale(call: DistributionCall) -> float:
    known = call.reduction == "mean" and call.normalizer is None
    return float(call.loss_scale / call.target.numel() if known else call.loss_scale)


def forward(call: DistributionCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    out = new_like(call.x, call.shapes(keep)[0]) if call.reduction == "none" else None
    totals = DISTRIBUTION.ready(call, Wanted(_scale(call), out=out, gradient=gradients[0]), formulas).start()
    return (totals[0] if out is None else out,)


def backward(call: DistributionCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (grad_output,) = grad_outputs
    assert grad_output is not None
    DISTRIBUTION.ready(call, Wanted(_scale(call), grad_output=grad_output, gradient=gradients[0]), formulas).start()

"""Host side of the template of rows of vectors: how they lie in memory, tiles, and the launch."""

import triton
from torch import Tensor

from lossforge.kernels.boxes.kernel import Boxes
from lossforge.kernels.boxes.launch import arrange
from lossforge.kernels.call import Formulas, VectorsCall
from lossforge.kernels.elementwise.kernel import Outputs, Space
from lossforge.kernels.engine.launch import Launch, Launcher, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, constants, strided
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.pointwise.launch import Wanted
from lossforge.kernels.tiles import PROGRAMS, vector_tiles
from lossforge.kernels.vectors.kernel import Formula, Vectors, vectors_kernel


def _make(call: VectorsCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    upstream, factor = wanted.upstream
    wide = (call.x, call.y, call.z, wanted.gradient_x, wanted.gradient_y, wanted.gradient_z)
    by_row = (call.label, call.weight, upstream, wanted.out)
    arranged = arrange([t for t in wide if t is not None], [t for t in by_row if t is not None])
    if arranged is None:
        return None
    g, steps = arranged
    strides, step = iter(g.strides), iter(steps)
    x, y, z, dx, dy, dz = (Boxes() if t is None else Boxes(*strided(t, strides), next(step)) for t in wide)
    label, weight, grad_output, out = (strided(t, strides) for t in by_row)
    count = call.x.shape[-1]
    n, tiles = call.x.numel() // count, vector_tiles(count)
    far = (count + tiles.size) * max(s or 0 for s in steps) >= 2**31
    space = Space(g.n1, g.n2, COLUMNS=None, FLAT=g.flat, BIG=g.big(n, tiles.rows), BLOCK=tiles.rows)
    special = formulas.special
    arguments = (
        constants(Vectors(x, y, z, dx, dy, dz, COUNT=count, SIZE=tiles.size, WIDE=far)),
        label,
        weight,
        Outputs(grad_output, out, Strided()),
        tuple(call.hyper),
        constants(Scaling(wanted.scale, call.normalizer, factor, call.empty_is_zero)),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula, formulas.terms, formulas.slopes),
        Formula(*special) if isinstance(special, tuple) else Formula(),
        formulas.applies,
        constants(space),
        n,
    )
    grid = (min(triton.cdiv(n, tiles.rows), PROGRAMS),)
    return Launch(vectors_kernel, grid, arguments, totals=int(wanted.total), num_warps=tiles.warps)


VECTORS = Launcher(
    _make,
    writes=("out", "gradient_x", "gradient_y", "gradient_z"),
    expands={"weight": lambda call: call.x.shape[:-1]},
)


def _scale(call: VectorsCall) -> float:
    known = call.reduction == "mean" and call.normalizer is None
    return float(call.loss_scale * call.x.shape[-1] / call.x.numel() if known else call.loss_scale)


def forward(call: VectorsCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward, with a gradient of each tensor."""
    out = new_like(call.x, call.shapes(keep)[0]) if call.reduction == "none" else None
    totals = VECTORS.ready(call, Wanted(_scale(call), None, out, *gradients), formulas).start()
    return (totals[0] if out is None else out,)


def backward(call: VectorsCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward, with a gradient of each tensor."""
    (grad_output,) = grad_outputs
    assert grad_output is not None
    VECTORS.ready(call, Wanted(_scale(call), grad_output, None, *gradients), formulas).start()

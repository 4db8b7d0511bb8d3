"""Host side of the template of several tensors: how they lie in memory, and the launch."""

from typing import NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, PointwiseCall
from lossforge.kernels.elementwise.kernel import Formula, Outputs, Space
from lossforge.kernels.elementwise.launch import geometry
from lossforge.kernels.engine.launch import Launch, Launcher, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, broadcast, constants, strided
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.pointwise.kernel import Three, pointwise_kernel
from lossforge.kernels.tiles import PROGRAMS, element_tiles, most_registers


class Wanted(NamedTuple):
    """As elementwise.launch.Wanted, with a gradient of each tensor."""

    scale: float
    grad_output: Tensor | None = None
    out: Tensor | None = None
    gradient_x: Tensor | None = None
    gradient_y: Tensor | None = None
    gradient_z: Tensor | None = None

    @property
    def upstream(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what arrives at each element, and what arrives at all."""
        return (self.grad_output, None) if self.grad_output is not None and self.grad_output.ndim else (None, self.grad_output)

    @property
    def total(self) -> bool:
        return self.out is None and self.grad_output is None


def _make(call: PointwiseCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    grad_output, factor = wanted.upstream
    gradients = (wanted.gradient_x, wanted.gradient_y, wanted.gradient_z)
    each = (call.x, call.y, call.z, *gradients, call.weight, grad_output, wanted.out)
    g = geometry(call.x.shape, [broadcast(t.shape, t.stride(), call.x.shape) for t in each if t is not None], None)
    if g is None:
        return None
    steps = iter(g.strides)
    x, y, z, dx, dy, dz, weight, upstream, out = [strided(t, steps) for t in each]
    n = call.x.numel()
    read = sum(t is not None for t in (call.x, call.y, call.z, call.weight))
    tiles = element_tiles(n, call.x.itemsize, read, False, False, False, formulas.special is not None, formulas.heavy)
    space = Space(g.n1, g.n2, COLUMNS=None, FLAT=g.flat, BIG=g.big(n, tiles.block), BLOCK=tiles.block, STAGES=tiles.stages)
    arguments = (
        Three(x, y, z),
        Three(dx, dy, dz),
        weight,
        Outputs(upstream, out, Strided()),
        tuple(call.hyper),
        constants(Scaling(wanted.scale, call.normalizer, factor, call.empty_is_zero)),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        Formula(formulas.special),
        formulas.applies,
        constants(space),
        n,
    )
    meta = {"num_warps": tiles.warps, **most_registers(tiles.warps, tiles.programs)}
    return Launch(pointwise_kernel, (min(triton.cdiv(n, tiles.block), PROGRAMS),), arguments, totals=int(wanted.total), **meta)


POINTWISE = Launcher(_make, writes=("out", "gradient_x", "gradient_y", "gradient_z"), expands={"weight": lambda call: call.x.shape})


def _scale(call: PointwiseCall) -> float:
    known = call.reduction == "mean" and call.normalizer is None
    return float(call.loss_scale / call.x.numel() if known else call.loss_scale)


def forward(call: PointwiseCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward, with a gradient of each tensor."""
    out = new_like(call.x, call.shapes(keep)[0]) if call.reduction == "none" else None
    totals = POINTWISE.ready(call, Wanted(_scale(call), None, out, *gradients), formulas).start()
    return (totals[0] if out is None else out,)


def backward(call: PointwiseCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward, with a gradient of each tensor."""
    (grad_output,) = grad_outputs
    assert grad_output is not None
    POINTWISE.ready(call, Wanted(_scale(call), grad_output, None, *gradients), formulas).start()

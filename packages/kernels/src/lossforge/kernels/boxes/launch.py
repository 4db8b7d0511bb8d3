"""Host side of the template of boxes: how its tensors lie in memory, and the launch."""

from collections.abc import Sequence
from typing import Any

import triton
from torch import Tensor

from lossforge.kernels.boxes.kernel import Boxes, Pairs, boxes_kernel
from lossforge.kernels.call import BoxesCall, Formulas
from lossforge.kernels.elementwise.kernel import Formula, Outputs, Space
from lossforge.kernels.elementwise.launch import Geometry, Wanted, geometry
from lossforge.kernels.engine.launch import Launch, Launcher, new_like, sum_slots
from lossforge.kernels.engine.layout import Strided, Tensors, broadcast, constants, strided
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.tiles import PROGRAMS, box_tiles


def arrange(boxes: Sequence[Any], pairwise: Sequence[Any]) -> tuple[Geometry, list[int | None]] | None:
    """Return the launch's pairs as (n0, n1, n2) with each tensor's strides there, and the coordinates' strides of boxes not in order.

    None where more than three dimensions remain. So for rows of any width in place of boxes.
    """
    *shape, width = boxes[0].shape
    strides: list[Sequence[int]] = []
    steps: list[int | None] = []
    for t in boxes:
        pair, step = t.stride()[:-1], t.stride()[-1]
        whole = step == 1 and all(n == 1 or s % width == 0 for n, s in zip(shape, pair, strict=True))
        strides.append([s // width for s in pair] if whole else pair)
        steps.append(None if whole else step)
    strides += [broadcast(t.shape, t.stride(), shape) for t in pairwise]
    g = geometry(shape, strides, None)
    if g is None:
        return None
    for i, step in enumerate(steps):
        if step is None and g.strides[i]:  # boxes of neighbours, in another order than the launch's
            g.strides[i] = tuple(width * s for s in g.strides[i])
            steps[i] = 1
    return g._replace(columns=None), steps


def _make(call: BoxesCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    upstream, factor = wanted.upstream
    boxes = (call.boxes1, call.boxes2, wanted.gradient, wanted.gradient2)
    pairwise = (call.weight, upstream, wanted.out)
    arranged = arrange([t for t in boxes if t is not None], [t for t in pairwise if t is not None])
    if arranged is None:
        return None
    g, steps = arranged
    strides, step = iter(g.strides), iter(steps)
    boxes1, boxes2, gradient1, gradient2 = (Boxes() if t is None else Boxes(*strided(t, strides), next(step)) for t in boxes)
    weight, grad_output, out = (strided(t, strides) for t in pairwise)
    n = call.boxes1.numel() // 4
    tiles = box_tiles(n, call.boxes1.itemsize)
    space = Space(g.n1, g.n2, COLUMNS=None, FLAT=g.flat, BIG=g.big(n, tiles.block), BLOCK=tiles.block)
    arguments = (
        constants(Pairs(boxes1, boxes2, gradient1, gradient2, call.centered)),
        weight,
        Outputs(grad_output, out, Strided()),
        tuple(call.hyper),
        constants(Scaling(wanted.scale, call.normalizer, factor, call.empty_is_zero)),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        constants(space),
        n,
    )
    grid = (min(triton.cdiv(n, tiles.block), PROGRAMS),)
    return Launch(boxes_kernel, grid, arguments, totals=int(wanted.total), num_warps=tiles.warps)


BOXES = Launcher(_make, writes=("out", "gradient", "gradient2"), expands={"weight": lambda call: call.boxes1.shape[:-1]})


def _scale(call: BoxesCall) -> float:
    known = call.reduction == "mean" and call.normalizer is None
    return float(call.loss_scale * 4 / call.boxes1.numel() if known else call.loss_scale)


def forward(call: BoxesCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward, with a gradient of each box."""
    out = new_like(call.boxes1, call.shapes(keep)[0]) if call.reduction == "none" else None
    wanted = Wanted(_scale(call), out=out, gradient=gradients[0], gradient2=gradients[1])
    totals = BOXES.ready(call, wanted, formulas).start()
    return (totals[0] if out is None else out,)


def backward(call: BoxesCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward, with a gradient of each box."""
    (grad_output,) = grad_outputs
    assert grad_output is not None
    BOXES.ready(call, Wanted(_scale(call), grad_output=grad_output, gradient=gradients[0], gradient2=gradients[1]), formulas).start()

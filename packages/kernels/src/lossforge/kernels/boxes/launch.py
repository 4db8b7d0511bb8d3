"""Host side of the template of boxes: how its tensors lie in memory, and the launch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lossforge.kernels.boxes.call import BoxesCall
from lossforge.kernels.boxes.kernel import Boxes, Pairs, boxes_kernel
from lossforge.kernels.call import Formulas
from lossforge.kernels.elementwise.kernel import Outputs
from lossforge.kernels.elementwise.launch import Geometry, OneLaunch, Wanted, geometry, launch_of_tiles
from lossforge.kernels.engine.launch import Launch
from lossforge.kernels.engine.layout import Strided, Tensors, broadcast, constants, strided
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.tiles import box_tiles


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


class Arranged(NamedTuple):
    """Tensors of rows: those with a width, in their order, and those with one element a row; an absent one has no pointer."""

    geometry: Geometry
    wide: list[Boxes]
    by_row: list[Strided]
    furthest: int  # the largest stride along a width


def arranged(wide: Tensors, by_row: Tensors) -> Arranged | None:
    """Return the tensors as a kernel sees them; None where their dimensions do not join into three."""
    found = arrange([t for t in wide if t is not None], [t for t in by_row if t is not None])
    if found is None:
        return None
    g, steps = found
    strides, step = iter(g.strides), iter(steps)
    rows = [Boxes() if t is None else Boxes(*strided(t, strides), next(step)) for t in wide]
    return Arranged(g, rows, [strided(t, strides) for t in by_row], max(s or 0 for s in steps))


def _make(call: BoxesCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    found = arranged((call.boxes1, call.boxes2, *wanted.gradients), (call.weight, wanted.upstream[0], wanted.out))
    if found is None:
        return None
    boxes1, boxes2, gradient1, gradient2 = found.wide
    weight, grad_output, out = found.by_row
    n = call.boxes1.numel() // 4
    tiles = box_tiles(call.boxes1.itemsize)
    pairs = constants(Pairs(boxes1, boxes2, gradient1, gradient2, call.centered))
    given, space = (pairs, weight, Outputs(grad_output, out, Strided())), found.geometry.space(n, tiles.block)
    return launch_of_tiles(boxes_kernel, call, wanted, given, formulas, space, n, num_warps=tiles.warps)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.boxes1.shape[:-1])
forward, backward = _LAUNCH.forward, _LAUNCH.backward

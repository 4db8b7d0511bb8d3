"""The template of losses of pairs of boxes.

A loss adds a formula of the four coordinates of both boxes and of hyper-parameters, f(x1, y1, x2, y2, u1, v1, u2, v2, *hyper) →
(value, its derivatives in these eight). Formats, weights, reduction, scaling and addressing are the template's. One launch gives the value,
the gradient of one box or of both, or all of these.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.element.kernel import coordinates
from lossforge.kernels.engine.layout import address, load, store
from lossforge.kernels.engine.reduce import divided, finish


class Boxes(NamedTuple):
    """Boxes as a kernel sees them: layout.Strided over the pairs, and the stride of the coordinates.

    Without the latter: boxes in the order of the pairs, one's four coordinates next to each other.
    """

    ptr: Tensor | None = None
    s0: int | None = None
    s1: int | None = None
    s2: int | None = None
    step: int | None = None


@triton.jit
def load_boxes(t, at, mask, rest, BLOCK: tl.constexpr):
    """Four tiles of coordinates in float32; where boxes are in order, a lane reads whole boxes."""
    if t.step is None:
        i = tl.arange(0, 4 * BLOCK)
        where = t.ptr + 4 * at[0] + i
        if mask is None:
            tile = tl.load(where)
        else:
            tile = tl.load(where, mask=i < 4 * rest, other=0.0)
        even, odd = tl.split(tl.reshape(tile.to(tl.float32), [BLOCK, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        first = address(t, at)
        second = first + t.step
        third = second + t.step
        a = load_tile(first, mask)
        b = load_tile(second, mask)
        c = load_tile(third, mask)
        d = load_tile(third + t.step, mask)
    return a, b, c, d


@triton.jit
def load_tile(where, mask):
    if mask is None:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=mask, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def store_boxes(t, at, mask, rest, a, b, c, d, BLOCK: tl.constexpr):
    if t.step is None:
        i = tl.arange(0, 4 * BLOCK)
        tile = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * BLOCK])
        if mask is None:
            tl.store(t.ptr + 4 * at[0] + i, tile)
        else:
            tl.store(t.ptr + 4 * at[0] + i, tile, mask=i < 4 * rest)
    else:
        first = address(t, at)
        second = first + t.step
        third = second + t.step
        tl.store(first, a, mask=mask)
        tl.store(second, b, mask=mask)
        tl.store(third, c, mask=mask)
        tl.store(third + t.step, d, mask=mask)


@triton.jit
def corners(x, y, w, h):
    """(x1, y1, x2, y2) of a box given by its centre and sides."""
    return x - 0.5 * w, y - 0.5 * h, x + 0.5 * w, y + 0.5 * h


@triton.jit
def store_gradient(t, at, mask, rest, factor, x1, y1, x2, y2, CENTERED: tl.constexpr, BLOCK: tl.constexpr):
    """Derivatives in the corners, taken to the format of the box and times `factor`."""
    if CENTERED:
        half = 0.5 * factor
        store_boxes(t, at, mask, rest, (x1 + x2) * factor, (y1 + y2) * factor, (x2 - x1) * half, (y2 - y1) * half, BLOCK)
    else:
        store_boxes(t, at, mask, rest, x1 * factor, y1 * factor, x2 * factor, y2 * factor, BLOCK)


@triton.jit
def one_tile(
    start,
    mask,
    rest,
    boxes1,
    boxes2,
    weight,
    upstream,
    out,
    gradient1,
    gradient2,
    hyper,
    scale,
    factor,
    n1,
    n2,
    formula: tl.constexpr,
    CENTERED: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values of one tile; gradients and values are stored where they are asked for. A mask of None: all inside."""
    at = coordinates(start, tl.arange(0, BLOCK), 0, n1, n2, None, FLAT, BIG, 1)
    x1, y1, x2, y2 = load_boxes(boxes1, at, mask, rest, BLOCK)
    u1, v1, u2, v2 = load_boxes(boxes2, at, mask, rest, BLOCK)
    if CENTERED:
        x1, y1, x2, y2 = corners(x1, y1, x2, y2)
        u1, v1, u2, v2 = corners(u1, v1, u2, v2)
    value, dx1, dy1, dx2, dy2, du1, dv1, du2, dv2 = formula(x1, y1, x2, y2, u1, v1, u2, v2, *hyper)
    w = 1.0
    if weight.ptr is not None:
        w = load(weight, at, mask, 0.0).to(tl.float32)
    factor = w * factor
    if upstream.ptr is not None:
        factor *= load(upstream, at, mask, 0.0).to(tl.float32)
    if gradient1.ptr is not None:
        store_gradient(gradient1, at, mask, rest, factor, dx1, dy1, dx2, dy2, CENTERED, BLOCK)
    if gradient2.ptr is not None:
        store_gradient(gradient2, at, mask, rest, factor, du1, dv1, du2, dv2, CENTERED, BLOCK)
    value = value * w
    if mask is not None:
        value = tl.where(mask, value, 0.0)
    if out.ptr is not None:
        store(out, at, mask, value * scale)
    return value


@triton.jit(do_not_specialize=("n",))
def boxes_kernel(
    boxes1,  # this and the next: Boxes
    boxes2,
    weight,  # this and the next two, one a pair: Strided
    upstream,
    out,
    gradient1,  # this and the next: Boxes
    gradient2,
    factor_ptr,  # 0-d upstream
    divisor_ptr,
    sum,
    hyper,
    scale,
    n,
    n1,
    n2,
    formula: tl.constexpr,
    CENTERED: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes tiles `num_programs` apart: full ones without masks, and one program the rest."""
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    factor = scale
    if factor_ptr is not None:
        factor *= tl.load(factor_ptr).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    full = n // BLOCK + first * 0
    rest = (n - full * BLOCK).to(tl.int32)
    # fmt: off
    for k in range(tl.cdiv(full - first, programs)):
        part += one_tile(
            (first + k * programs) * BLOCK, None, rest, boxes1, boxes2, weight, upstream, out, gradient1, gradient2, hyper, scale, factor,
            n1, n2, formula, CENTERED, FLAT, BIG, BLOCK,
        )
    if (rest > 0) & (full % programs == first):
        part += one_tile(
            full * BLOCK, tl.arange(0, BLOCK) < rest, rest, boxes1, boxes2, weight, upstream, out, gradient1, gradient2, hyper, scale,
            factor, n1, n2, formula, CENTERED, FLAT, BIG, BLOCK,
        )
    # fmt: on
    if sum is not None:
        finish(tl.sum(part, 0), sum, scale)

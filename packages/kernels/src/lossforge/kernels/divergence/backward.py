"""The second launch of the divergence template's classic split: the gradient from both tensors and the statistics that forward kept."""

import triton
import triton.language as tl

from lossforge.kernels.divergence.rows import both, divergence_gradient, row_weight
from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.math import LOG2E
from lossforge.kernels.row.rows import columns, in_row, leftovers, near, row_start, store_tile, whole


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def divergence_backward_kernel(
    x,
    teacher,
    labels,
    weight,
    gradient,
    stats_ptr,
    upstream_ptr,
    upstream_stride,  # 0 where one gradient arrives for all rows
    divisor_ptr,
    hyper,
    inverse,
    scale,
    ignore,
    rows_outer,
    blocks,
    terms: tl.constexpr,
    SWAP: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """One tile of the gradient from kept statistics; the second grid axis walks the classes."""
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    program = tl.program_id(0).to(tl.int64)
    outer = program // blocks
    row = (program - outer * blocks).to(tl.int32) * BR + tl.arange(0, BR)
    inside = row < rows_outer // ROWS * ROWS
    w, keep = row_weight(labels, weight, ignore, outer, row, inside)
    mask = keep[:, None]
    if ROWS > 1:
        mask = inside[:, None]
    start, first = row_start(x, outer, row, ALIGN, SHIFT)
    begin, _ = row_start(teacher, outer, row, ALIGN, SHIFT)
    to, _ = row_start(gradient, outer, row, ALIGN, SHIFT)
    classes = x.classes
    if ALIGN > 1:
        classes = classes // ALIGN * ALIGN
    lanes = tl.program_id(1) * BC + tl.arange(0, BC)
    here = in_row(columns(lanes, first, SHIFT), classes, SHIFT)
    end = classes
    if SHIFT > 1:
        end += tl.max(first, 0)
    tile_x, tile_t = both(x, teacher, start, begin, lanes, mask & near(lanes, end, here, SHIFT), 0.0, WIDE, "")

    at = outer * rows_outer + row
    rows = (tl.num_programs(0) // blocks).to(tl.int64) * rows_outer
    top_x = tl.load(stats_ptr + at, mask=inside, other=0.0)
    ls_x = tl.load(stats_ptr + rows + at, mask=inside, other=0.0)
    top_t = tl.load(stats_ptr + 2 * rows + at, mask=inside, other=0.0)
    ls_t = tl.load(stats_ptr + 3 * rows + at, mask=inside, other=0.0)
    h_sum = tl.load(stats_ptr + 4 * rows + at, mask=inside, other=0.0)
    upstream = tl.load(upstream_ptr + at * upstream_stride, mask=inside, other=0.0).to(tl.float32)
    share = tl.where(keep, upstream * w * scale * inverse, 0.0)
    rate = inverse * LOG2E
    stats_of = (top_x[:, None], ls_x[:, None], top_t[:, None], ls_t[:, None])
    g = divergence_gradient(tile_x, tile_t, *stats_of, rate, h_sum[:, None], share[:, None], terms, hyper, SWAP)  # 0 in rows not kept
    if ROWS > 1:
        g = tl.where(keep[:, None], g, 0.0)
    store_tile(g, gradient, to, lanes, inside[:, None] & whole(lanes, first, end, here, SHIFT), WIDE, "")
    if SHIFT > 1:
        if tl.program_id(1) == 0:
            rest, left = leftovers(first, end, classes, SHIFT)
            few_x, few_t = both(x, teacher, start, begin, rest, keep[:, None] & left, 0.0, WIDE, "")
            few = divergence_gradient(few_x, few_t, *stats_of, rate, h_sum[:, None], share[:, None], terms, hyper, SWAP)
            store_tile(few, gradient, to, rest, inside[:, None] & left, WIDE, "")

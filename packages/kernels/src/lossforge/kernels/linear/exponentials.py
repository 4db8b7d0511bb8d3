"""A scalar loss of rows and its gradient in three products: the first stores e^(z - c), with one offset c a row.

The gradient of the logits is these exponentials times one factor v a row, known once the row is summed. The target's entry differs.
`linear_finish_kernel` writes the target's such that the same factor holds for it. So the gradient of the input is v · (E · weight), that of
the weight Eᵀ · (v · input), and no pass over the logits is left.

c is AHEAD above the largest logit of some classes. bfloat16 has the exponents of float32, which hold a maximum from AHEAD below c to REACH
above it. A row whose maximum is higher raises its offset. The device lists such rows and copies the input's after one another, and a second
launch computes their products once more. It ends at once where there are none.
"""

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise import rows
from lossforge.kernels.classes.rowwise.kernel import add_up
from lossforge.kernels.classes.rowwise.results import row_value, store_results
from lossforge.kernels.classes.rowwise.sweep import row_address
from lossforge.kernels.engine.layout import halves_of
from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.linear.kernel import Half, factor, joined, maxima, span_of_rows, store_own, store_parts
from lossforge.kernels.math import LOG2E, exp2

REACH = tl.constexpr(60.0)
AHEAD = tl.constexpr(40.0)
SAMPLE = tl.constexpr(256)  # classes among whose logits is the offset
COPIED = tl.constexpr(64)  # features of rows that are copied at once
LEAST = tl.constexpr(1e-30)  # in place of a factor of p that is 0 where that of the target is not: z-loss can make it so


@triton.jit(do_not_specialize=("count",))
def linear_offsets_kernel(x, target, sample_ptr, shares_ptr, again_ptr, count, sampled, step, config: tl.constexpr):
    """Store each row's offset; inf for a row whose results nobody asked for.

    Args:
        sample_ptr: (count, sampled), the logits of every step-th class.
        again_ptr: the list of rows, which this empties.
    """
    span = span_of_rows(count, x.classes, config)
    column = tl.arange(0, SAMPLE)[None, :]
    here = span.inside[:, None] & (column < sampled)
    z = tl.load(sample_ptr + span.row.to(tl.int64)[:, None] * sampled + column, mask=here, other=0.0)
    top = tl.max(tl.where(here, rows.transform(z, x, column * step, here), float("-inf")), 1)
    t = tl.load(target.a.ptr + span.row, mask=span.inside, other=target.labels.ignore)
    c = tl.maximum(top, rows.LOWEST) + AHEAD
    if not config.ALL_ROWS:
        c = tl.where(t == target.labels.ignore, float("inf"), c)
    tl.store(shares_ptr + span.row, c, mask=span.inside)
    tl.store(again_ptr, 0, mask=tl.program_id(0) == 0)


@triton.jit
def exponentials(z, tile, x, target, given, out, config):
    """Store the exponentials of a tile, times the slope of a cap, 0 in rows that do not count; and what is summed over each half."""
    HALF: tl.constexpr = config.BN // 2
    inside = tile.row < tile.rows
    t = tl.load(target.a.ptr + tile.row, mask=inside, other=-1)
    counts = t != target.labels.ignore
    if target.lam.ptr is not None:
        counts = counts & (tl.load(row_address(target.lam, 0, tile.row), mask=inside, other=0.0) != 0.0)
    c = factor(given.shares_ptr, 0, tile)
    halves = halves_of(z)
    for i in tl.static_range(2):
        j = 2 * tile.j + i
        column = j * HALF + tl.arange(0, HALF)[None, :]
        here = column < x.classes
        store_own(halves[i], t, j * HALF, column, inside, tile, x, given)
        capped = rows.transform(halves[i], x, column, here)
        seen = tl.where(here, capped, float("-inf"))
        m = tl.maximum(tl.max(seen, 1), rows.LOWEST)
        step = seen - c[:, None]
        e = exp2(step * LOG2E)
        store_parts(Half(seen, m, step, e, column, here, j), tile, inside, given, config)
        if x.softcap is not None:
            s = capped / x.softcap
            e *= 1.0 - s * s
        e = tl.where(counts[:, None], e, 0.0)
        if config.AGAIN:
            width = out.s0 // 8 * 8  # of the memory of a row; the compiler learns that 8 elements have one mask, and stores them at once
            at = out.ptr + (tile.row.to(tl.int64) * width)[:, None] + column
            tl.store(at, e.to(out.ptr.dtype.element_ty), mask=inside[:, None] & (column < width))
        else:
            out.store([tile.begin, j * HALF], e.to(out.dtype))


@triton.jit(do_not_specialize=("count",))
def linear_raise_kernel(given, input_ptr, listed_ptr, depth, count, across, classes, config: tl.constexpr):
    """Raise the offsets of rows whose maximum is out of reach, list these rows, and copy the input's.

    The list's order varies from run to run. No result follows from it, because a row's bits do not depend on its place.

    Args:
        input_ptr: (count, depth).
        listed_ptr: (count, depth), to which rows are copied in the order of the list.
    """
    span = span_of_rows(count, classes, config)
    top = maxima(given.parts_ptr, span, across)
    c = tl.load(given.shares_ptr + span.row, mask=span.inside, other=float("inf"))
    high = top > c + REACH
    tl.debug_barrier()  # a block has more threads than rows: several threads read an offset, and one writes over it
    tl.store(given.shares_ptr + span.row, top, mask=high)
    number = high.to(tl.int32)
    some = tl.sum(number, 0)
    place = tl.atomic_add(given.again_ptr, some, mask=some > 0) + tl.cumsum(number, 0) - number
    tl.store(given.again_ptr + 1 + place, span.row, mask=high)
    source, to = (span.row.to(tl.int64) * depth)[:, None], (place.to(tl.int64) * depth)[:, None]
    for k in range(0, tl.where(some > 0, depth, 0), COPIED):
        column = k + tl.arange(0, COPIED)[None, :]
        mask = high[:, None] & (column < depth)
        tl.store(listed_ptr + to + column, tl.load(input_ptr + source + column, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=("count",))
def linear_finish_kernel(
    x, target, given, e_ptr, stride, factors_ptr, out, sums, loss, count, across, planes: tl.constexpr, config: tl.constexpr
):
    """Sum the exponentials of rows; compute results and factors, and write the exponentials of the targets.

    Args:
        x: Logits, whose memory holds the target's z alone.
        stride: from a row of exponentials to the next.
        factors_ptr: v of each row.
        out: Outputs.
        sums: a Sum or None each: of the loss, of the z-loss.
        loss: RowLoss.
        count: rows.
        across: halves of tiles.
        planes: Config of the product.
        config: that of the row-wise template.
    """
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of_rows(count, x.classes, config)
    terms = rows.row_terms(target, span.outer, span.row, span.inside, x)
    read = span.inside if config.ALL_ROWS else terms.keep
    c = tl.load(given.shares_ptr + span.row, mask=read, other=0.0)
    found = joined(given.parts_ptr, c, 1, x, terms, span, across, planes)
    s, reference = found.s, c
    if planes.MAXIMA:
        found = joined(given.parts_ptr, None, planes.MAXIMA, x, terms, span, across, planes)
        reference = found.m
    of_row = row_value(found, terms, 0.0, target, loss, config)
    add_up(of_row.loss, of_row.z_loss, sums, scale)
    of_p = tl.where(of_row.p_share == 0.0, LEAST * of_row.c_a, of_row.p_share)
    v = tl.where(terms.keep, tl.where(terms.valid, scale, float("nan")) * of_p / s, 0.0)
    own = exp2((terms.logit_a - c) * LOG2E) - tl.where(of_row.c_a == 0.0, 0.0, of_row.c_a / of_p * s)
    if x.softcap is not None:
        u = terms.logit_a / x.softcap
        own *= 1.0 - u * u
    if x.scale is not None:
        v *= x.scale
    tl.store(factors_ptr + span.row, v, mask=span.inside)
    store_results(out, of_row, found, terms, scale, reference, span, config)
    at = e_ptr + span.row.to(tl.int64) * stride + terms.a
    tl.store(at, own.to(e_ptr.dtype.element_ty), mask=terms.keep & (terms.a >= 0))


@triton.jit(do_not_specialize=("count",))
def linear_scale_kernel(to, x, factors_ptr, count, columns, FINITE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Store a matrix times a factor a row.

    Args:
        to, x: Strided, by rows and columns; perhaps the same.
        FINITE: with 0 in place of what is not finite.
    """
    row, column = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = row < count
    here = inside[:, None] & (column < columns)[None, :]
    value = tl.load(x.ptr + row[:, None] * x.s0 + column[None, :] * x.s1, mask=here, other=0.0).to(tl.float32)
    if FINITE:
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    factor = tl.load(factors_ptr + row, mask=inside, other=0.0)
    tl.store(to.ptr + row[:, None] * to.s0 + column[None, :] * to.s1, (value * factor[:, None]).to(to.ptr.dtype.element_ty), mask=here)

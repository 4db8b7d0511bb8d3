"""The template of losses in which a row of C classes passes through one softmax.

A loss adds φ(z, *hyper) → (φ, φ′) of z = lse - x_t = -ln p_t of a row's class t; a row's loss is Σ c φ(z) over its classes, c their
class weights and shares of a mixup pair. What targets give to all classes (probabilities, label smoothing) counts by -ln p itself; what
the loss gives to all, by spread · p^focus (-ln p): see focus.py. Targets, weights, smoothing, z-loss, ignored rows, reduction,
scaling and addressing are the template's. One launch gives values, gradient, or both in two sweeps of a row (one where the row fits a
tile); the classic split keeps each row's statistics and sweeps again in backward.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.reduce import finish
from lossforge.kernels.math import log
from lossforge.kernels.row.focus import spread_of, spread_row, spread_shares
from lossforge.kernels.row.rows import (
    Known,
    Shares,
    Slope,
    Summed,
    Sums,
    dense_tile,
    hard_loss,
    logits,
    origin,
    row_terms,
    slope_tile,
    softmax_of,
    softmax_tile,
    write_slopes,
)
from lossforge.kernels.row.sweep import (
    COUNTED,
    Reading,
    columns,
    in_row,
    place_of,
    scaled,
    span_of,
    start_of,
    store_stats,
    store_tile,
    stored_tile,
)


class Outputs(NamedTuple):
    """Per-row results, contiguous over the rows. stats (3, rows): max, log-sum and the share of p in the gradient, for backward."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    stats: Tensor | None


@triton.jit
def add_up(value, z_value, sums, scale):
    """Hand in the program's part of the total and of the z-loss's."""
    if sums[0] is not None:
        finish(tl.sum(value, 0), sums[0], scale)
    if sums[1] is not None:
        finish(tl.sum(z_value, 0), sums[1], scale)


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def rowwise_kernel(
    x,  # Logits
    target,  # Target
    gradient,  # Strided
    out,  # Outputs
    sums,  # a Sum or None each: of the loss, of the z-loss
    loss,  # RowLoss
    rows_outer,  # rows an outer index
    blocks,  # of BR rows, an outer index
    counted,  # rows of class indices
    config: tl.constexpr,
):
    scale = scaled(loss, target.a, target.labels.weight_ptr, target.labels.ignore, tl.arange(0, COUNTED), counted, x.classes, config)
    span = span_of(x, rows_outer, blocks, config)
    inside = span.inside
    each = 0.0  # d of every class where EVEN
    if config.EVEN:
        each = target.labels.smoothing / span.classes
    terms = row_terms(target, span.outer, span.row, inside, x)
    keep, valid = terms.keep, terms.valid
    read = inside if config.ALL_ROWS else keep
    # where a program reads neighbouring rows at once, what is not kept is read with the others
    first_mask, second_mask = read[:, None], keep[:, None]
    if config.MULTIPLE > 1:
        first_mask, second_mask = inside[:, None], inside[:, None]

    zero = tl.full([config.BR], 0.0, tl.float32)
    if config.ONE_TILE:
        lanes = tl.arange(0, config.BC)
        column = columns(lanes, span, config)
        here = in_row(column, span, config)
        mask = inside[:, None] & here
        tile = logits(stored_tile(x, start_of(x, span, config), lanes, mask, float("-inf"), "", config), x, column, mask, float("-inf"))
        d = dense_tile(target, span, inside, column, x, config)
        found = softmax_tile(tile, d, here, column, Sums(x, target, Known(span, terms, zero)), config)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None else ""
        if config.EVEN:
            zero = origin(x, span)
        full = None if config.BR == 1 else first_mask
        found = softmax_of(Sums(x, target, Known(span, terms, zero)), Reading(inside[:, None], full, float("-inf"), EVICT, read), config)
    top, total, d_row, d_dot = found.m, found.s, found.d_sum, found.d_dot
    if config.EVEN:
        d_row = tl.full([config.BR], 0.0, tl.float32) + target.labels.smoothing
        d_dot = d_dot * each

    ls = log(total)
    lse = top + ls
    value = tl.full([config.BR], 0.0, tl.float32)
    q = tl.full([config.BR], 0.0, tl.float32)
    h, h_share, h_shift, c_a, c_b, square = q, q, q, q, q, q
    if target.labels.focus is not None:
        h = spread_of(terms.c_a + terms.c_b, ls, target.labels)
        value, q = spread_row(d_row, d_dot, ls, h, target.labels.focus)
    if target.a.ptr is not None:
        of_a, c_a = hard_loss(terms.c_a, terms.logit_a, top, ls, loss)
        value += of_a
        q += c_a
    if target.b.ptr is not None:
        of_b, c_b = hard_loss(terms.c_b, terms.logit_b, top, ls, loss)
        value += of_b
        q += c_b
    if config.DENSE or config.EVEN:
        value += d_row * ls - d_dot
        q += d_row
    p_share = q
    if loss.z_loss is not None:
        square = loss.z_loss * lse * lse
        value += square
        p_share += 2.0 * loss.z_loss * lse
    value = tl.where(keep, tl.where(valid & (total == total), value, float("nan")), 0.0)
    z_value = tl.where(keep, square, 0.0)

    if not config.ONE_TILE:  # here, where no write of the second sweep has to be waited for
        add_up(value, z_value, sums, scale)
    place = place_of(span)
    if out.loss is not None:
        tl.store(out.loss + place, value * scale, mask=inside)
    if out.z_loss is not None:
        tl.store(out.z_loss + place, z_value * scale, mask=inside)
    if out.lse is not None:
        tl.store(out.lse + place, lse, mask=inside)
    if config.ENTROPY:
        tl.store(out.entropy + place, ls - found.u / total, mask=inside)
    if config.CORRECT:
        tl.store(out.correct + place, (found.ahead == 0) & (terms.a >= 0) & valid & (lse == lse), mask=inside)
    if out.stats is not None:
        store_stats(out.stats, (tl.where(read, top, 0.0), tl.where(read, ls, 0.0), tl.where(read, q, 0.0)), span)

    if gradient.ptr is not None:
        shrink = tl.where(valid, scale, float("nan"))
        p_share = tl.where(keep, p_share * shrink / total, 0.0)  # rows not kept: their tiles are 0 - top = 0, their gradient 0
        q_share = tl.where(keep, shrink, 0.0)
        if target.labels.focus is not None:
            h_share, h_shift = spread_shares(shrink * h, ls, target.labels)
            h_share, h_shift = tl.where(keep, h_share, 0.0), tl.where(keep, h_shift, 0.0)
        top = tl.where(keep, top, 0.0)
        shares = Shares(top, p_share, q_share, q_share * c_a, q_share * c_b, h_share, h_shift, q_share[:, None] * each)
        to = start_of(gradient, span, config)
        rows = Summed(span, to, terms, shares, keep)
        if config.ONE_TILE:
            g = slope_tile(tile, column, d, Slope(x, target, gradient, rows), True, config)
            store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, mask, "", config)
        else:
            write_slopes(Slope(x, target, gradient, rows), second_mask, config)
    if config.ONE_TILE:
        add_up(value, z_value, sums, scale)

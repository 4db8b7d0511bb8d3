"""Device functions of the row-wise template: from a row's sums to its results, and from upstream gradients to the factors of its own."""

from collections import namedtuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise import rows, sweep
from lossforge.kernels.classes.rowwise.additions import powers_of, powers_slope, slope_factors, spread_of, spread_row
from lossforge.kernels.math import exp, log

RowValue = namedtuple("RowValue", "ls loss z_loss q p_share c_a c_b h powers by_powers")
"""Of rows: ls = ln Σ exp(x - m), the loss without its scale and the part of it that is z-loss; the factor q of p in the gradient, without
z-loss and with it (p_share); c φ′ of both hard targets; h: the result of `spread_of` or `powers_slope`; powers, by_powers:
Σ p^k and the slope by it, 0 without a power k."""


@triton.jit
def row_value(found, terms, each, target, loss, config):
    """Return the RowValue of rows whose sums are known. each: with EVEN, the target of every class."""
    d_row, d_dot = found.d_sum, found.d_dot
    if config.EVEN:
        d_row = tl.full([config.BR], 0.0, tl.float32) + target.labels.smoothing
        d_dot = d_dot * each
    ls = log(found.s)
    lse = found.m + ls
    value = tl.full([config.BR], 0.0, tl.float32)
    q = tl.full([config.BR], 0.0, tl.float32)
    h, c_a, c_b, square, powers, by_powers = q, q, q, q, q, q
    if loss.power is not None:
        powers = powers_of(d_row, ls, loss.power)
    if target.labels.spread is not None:
        h = spread_of(terms.c_a + terms.c_b, ls, target.labels)
        value, q = spread_row(d_row, d_dot, ls, h, target.labels.focus)
    if target.a.ptr is not None:
        of_a, c_a, by_a = rows.hard_loss(terms.c_a, terms.a, terms.logit_a, found.m, ls, powers, target, loss)
        by_powers += by_a
        if loss.entropy_weight is not None:
            held = rows.held_weight(ls - found.u / found.s, loss)
            of_a, c_a = of_a * held, c_a * held
        value += of_a
        q += c_a
    if target.b.ptr is not None:
        of_b, c_b, by_b = rows.hard_loss(terms.c_b, terms.b, terms.logit_b, found.m, ls, powers, target, loss)
        value += of_b
        q += c_b
        by_powers += by_b
    if loss.power is not None:
        q -= loss.power * by_powers * powers
        h = powers_slope(by_powers, ls, loss.power)
    if config.DENSE or config.EVEN:
        dense = d_row * ls - d_dot
        if config.DENSE and target.labels.weight_ptr is not None:  # an infinite weight's product with ls may be nan
            dense = tl.where(d_dot == float("-inf"), float("inf"), dense)
        value += dense
        q += d_row
    p_share = q
    if loss.z_loss is not None:
        square = loss.z_loss * lse * lse
        value += square
        p_share += 2.0 * loss.z_loss * lse
    value = tl.where(terms.keep, tl.where(terms.valid & (found.s == found.s), value, float("nan")), 0.0)
    return RowValue(ls, value, tl.where(terms.keep, square, 0.0), q, p_share, c_a, c_b, h, powers, by_powers)


@triton.jit
def store_results(out, of_row, found, terms, scale, zero, span, config):
    """Store the results of rows, and what backward takes of those that are read."""
    place, inside = sweep.place_of(span), span.inside
    read = inside if config.ALL_ROWS else terms.keep
    lse = found.m + of_row.ls
    if out.loss is not None:
        tl.store(out.loss + place, of_row.loss * scale, mask=inside)
    if out.z_loss is not None:
        tl.store(out.z_loss + place, of_row.z_loss * scale, mask=inside)
    if out.lse is not None:
        tl.store(out.lse + place, lse, mask=inside)
    if config.ENTROPY:
        tl.store(out.entropy + place, of_row.ls - found.u / found.s, mask=inside)
    if config.CORRECT:
        tl.store(out.correct + place, (found.ahead == 0) & (terms.a >= 0) & terms.valid & (lse == lse), mask=inside)
    if config.ARGMAX:
        tl.store(out.argmax + place, tl.where(found.best < rows.NONE, found.best, 0), mask=inside)
    if config.SQUARES:
        tl.store(out.log_p2 + place, log(found.squares) - 2.0 * of_row.ls, mask=inside)
    if config.MEAN:
        tl.store(out.mean_logit + place, zero + found.above / span.classes, mask=inside)
    if out.stats is not None:
        sweep.store_stats(out.stats, (tl.where(read, found.m, 0.0), tl.where(read, of_row.ls, 0.0), tl.where(read, of_row.q, 0.0)), span)


@triton.jit
def row_shares(kept, terms, grad_outputs, target, loss, scale, span, config):
    """Return the Shares of rows for gradients of their results. a and b are without c φ′; margin_slope is 1.

    kept: of each row its index among all, and what forward kept: m, ls, q, and the pointer to all entropies, if these have a gradient.
    """
    place, top, ls, q, entropy_ptr = kept
    inside = span.inside
    if grad_outputs.lse is None and not config.ENTROPY:  # forward may have kept nan of rows that do not count, for further results
        top, ls = tl.where(terms.keep, top, 0.0), tl.where(terms.keep, ls, 0.0)
    p_share = tl.full([config.BR], 0.0, tl.float32)
    q_share = tl.full([config.BR], 0.0, tl.float32)
    if grad_outputs.loss is not None:
        of_loss = tl.load(grad_outputs.loss + place * grad_outputs.loss_stride, mask=inside, other=0.0).to(tl.float32) * scale
        q_share += of_loss
        p_share += of_loss * q
        if loss.z_loss is not None:
            p_share += of_loss * 2.0 * loss.z_loss * (top + ls)
    if grad_outputs.z_loss is not None:
        of_z = tl.load(grad_outputs.z_loss + place * grad_outputs.z_stride, mask=inside, other=0.0).to(tl.float32) * scale
        p_share += of_z * 2.0 * loss.z_loss * (top + ls)
    p_share = tl.where(terms.keep, tl.where(terms.valid, p_share, float("nan")), 0.0)
    q_share = tl.where(terms.keep, q_share, 0.0)
    if grad_outputs.lse is not None:  # a row of -inf has no slope: there e^-ls is infinite
        of_lse = tl.load(grad_outputs.lse + place, mask=inside, other=0.0).to(tl.float32)
        p_share += tl.where(ls == float("-inf"), 0.0, of_lse)
    inverse = exp(-ls)  # nan in a row of nan, which has gradient 0 where none of its results has one
    p_share = tl.where(p_share == 0.0, 0.0, p_share * inverse)
    h_share = tl.full([config.BR], 0.0, tl.float32)
    h_shift = tl.full([config.BR], 0.0, tl.float32)
    if target.labels.spread is not None:
        h_share, h_shift = slope_factors(spread_of(q_share * (terms.c_a + terms.c_b), ls, target.labels), ls, target.labels)
    if config.ENTROPY:
        of_entropy = tl.load(grad_outputs.entropy + place, mask=inside, other=0.0).to(tl.float32)
        h_share = tl.where(of_entropy == 0.0, 0.0, of_entropy * inverse)
        h_shift = tl.where(of_entropy == 0.0, 0.0, h_share * (tl.load(entropy_ptr + place, mask=inside, other=0.0) - ls))
    even = tl.full([config.BR, 1], 0.0, tl.float32)
    if config.EVEN:
        even = q_share[:, None] * (target.labels.smoothing / rows.all_classes(target, span.classes))
    return rows.Shares(top, p_share, q_share, q_share, q_share, h_share, h_shift, even, tl.full([config.BR], 1.0, tl.float32))

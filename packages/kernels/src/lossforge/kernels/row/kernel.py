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

from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.math import exp, log
from lossforge.kernels.row import rows, sweep
from lossforge.kernels.row.focus import spread_of, spread_row, spread_shares


class Outputs(NamedTuple):
    """Per-row results, contiguous over the rows. stats (3, rows): max, log-sum and the share of p in the gradient, for backward."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    stats: Tensor | None


class Kept(NamedTuple):
    """What forward returned: its statistics and each row's entropy."""

    stats: Tensor
    entropy: Tensor | None


class GradOutputs(NamedTuple):
    """Gradients of the outputs: per row where the stride is 1, one for all where it is 0; None where there is none."""

    loss: Tensor | None
    loss_stride: int
    z_loss: Tensor | None
    z_stride: int
    lse: Tensor | None
    entropy: Tensor | None


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
    scale = sweep.scaled(
        loss, target.a, target.labels.weight_ptr, target.labels.ignore, tl.arange(0, sweep.COUNTED), counted, x.classes, config
    )
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside = span.inside
    each = 0.0  # d of every class where EVEN
    if config.EVEN:
        each = target.labels.smoothing / span.classes
    terms = rows.row_terms(target, span.outer, span.row, inside, x)
    keep, valid = terms.keep, terms.valid
    read = inside if config.ALL_ROWS else keep

    zero = tl.full([config.BR], 0.0, tl.float32)
    if config.ONE_TILE:
        lanes, column, here, mask = sweep.edge(0, inside[:, None], span, config)
        stored = sweep.stored_tile(x, sweep.start_of(x, span, config), lanes, mask, float("-inf"), "", config)
        tile = rows.logits(stored, x, column, mask, float("-inf"))
        d = rows.dense_tile(target, span, inside, column, x, config)
        found = rows.softmax_tile(tile, d, here, column, rows.Sums(x, target, rows.Known(span, terms, zero)), config)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None else ""
        if config.EVEN:
            zero = rows.origin(x, span)
        full = None if config.BR == 1 else sweep.read_mask(read, span, config)
        found = rows.softmax_of(
            rows.Sums(x, target, rows.Known(span, terms, zero)), sweep.Reading(inside[:, None], full, float("-inf"), EVICT, read), config
        )
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
        of_a, c_a = rows.hard_loss(terms.c_a, terms.logit_a, top, ls, loss)
        value += of_a
        q += c_a
    if target.b.ptr is not None:
        of_b, c_b = rows.hard_loss(terms.c_b, terms.logit_b, top, ls, loss)
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
    place = sweep.place_of(span)
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
        sweep.store_stats(out.stats, (tl.where(read, top, 0.0), tl.where(read, ls, 0.0), tl.where(read, q, 0.0)), span)

    if gradient.ptr is not None:
        shrink = tl.where(valid, scale, float("nan"))
        p_share = tl.where(keep, p_share * shrink / total, 0.0)  # rows not kept: their tiles are 0 - top = 0, their gradient 0
        q_share = tl.where(keep, shrink, 0.0)
        if target.labels.focus is not None:
            h_share, h_shift = spread_shares(shrink * h, ls, target.labels)
            h_share, h_shift = tl.where(keep, h_share, 0.0), tl.where(keep, h_shift, 0.0)
        top = tl.where(keep, top, 0.0)
        shares = rows.Shares(top, p_share, q_share, q_share * c_a, q_share * c_b, h_share, h_shift, q_share[:, None] * each)
        to = sweep.start_of(gradient, span, config)
        summed = rows.Summed(span, to, terms, shares, keep)
        if config.ONE_TILE:
            g = rows.slope_tile(tile, column, d, rows.Slope(x, target, gradient, summed), True, config)
            sweep.store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, mask, "", config)
        else:
            rows.write_slopes(rows.Slope(x, target, gradient, summed), config)
    if config.ONE_TILE:
        add_up(value, z_value, sums, scale)


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def rowwise_backward_kernel(x, target, gradient, kept, grad_outputs, loss, rows_outer, blocks, config: tl.constexpr):
    """The second launch of the classic split: one tile of the gradient from kept statistics; the second grid axis walks the classes, all
    or those from labels.first on."""
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside, place = span.inside, sweep.place_of(span)
    terms = rows.row_terms(target, span.outer, span.row, inside, x)
    keep = terms.keep
    read = inside if config.ALL_ROWS else keep
    stored = sweep.read_one((x,), span, read, config)
    top, ls, q = sweep.load_stats(kept.stats, 3, span)
    c_a, c_b = terms.c_a, terms.c_b
    if target.a.ptr is not None:
        _, c_a = rows.hard_loss(c_a, terms.logit_a, top, ls, loss)
    if target.b.ptr is not None:
        _, c_b = rows.hard_loss(c_b, terms.logit_b, top, ls, loss)
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
    p_share = tl.where(keep, tl.where(terms.valid, p_share, float("nan")), 0.0)
    q_share = tl.where(keep, q_share, 0.0)
    if grad_outputs.lse is not None:
        p_share += tl.load(grad_outputs.lse + place, mask=inside, other=0.0).to(tl.float32)
    inverse = exp(-ls)
    p_share *= inverse
    h_share = tl.full([config.BR], 0.0, tl.float32)
    h_shift = tl.full([config.BR], 0.0, tl.float32)
    if target.labels.focus is not None:
        h_share, h_shift = spread_shares(spread_of(q_share * (terms.c_a + terms.c_b), ls, target.labels), ls, target.labels)
    if config.ENTROPY:
        h_share = tl.load(grad_outputs.entropy + place, mask=inside, other=0.0).to(tl.float32) * inverse
        h_shift = h_share * (tl.load(kept.entropy + place, mask=inside, other=0.0) - ls)
    even = tl.full([config.BR, 1], 0.0, tl.float32)
    if config.EVEN:
        even = q_share[:, None] * (target.labels.smoothing / rows.all_classes(target, span.classes))
    shares = rows.Shares(top, p_share, q_share, q_share * c_a, q_share * c_b, h_share, h_shift, even)
    sweep.write_one(
        stored,
        (x,),
        rows.Slope(x, target, gradient, rows.Summed(span, sweep.start_of(gradient, span, config), terms, shares, read)),
        rows.write_slope,
        config,
    )

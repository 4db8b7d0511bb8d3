"""The template of losses in which a row of C classes passes through one softmax.

A loss supplies φ(z, *hyper) → (φ, φ′) for z = lse - x_t = -ln p_t of a row's class t. A row's loss is Σ c φ(z) over its hard targets, where
c are their class weights and shares of a mixup pair. Targets of all classes (probabilities, label smoothing) add -ln p of each class times
its target. A loss that adds a term for every class adds spread · p^focus (-ln p): see additions.py. The template handles targets, weights,
smoothing, z-loss, ignored rows, reduction, scaling and addressing. One launch gives values, gradient, or both in two sweeps of a row (one
where the row fits a tile). The classic split keeps each row's statistics and sweeps again in backward.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.rowwise import rows, sweep
from lossforge.kernels.classes.rowwise.additions import powers_slope, slope_factors, with_margin
from lossforge.kernels.classes.rowwise.results import row_shares, row_value, store_results
from lossforge.kernels.engine.reduce import divided, finish


class Outputs(NamedTuple):
    """Results of each row, contiguous over the rows. stats (3, rows), for backward: maximum, log-sum, the gradient's factor of p;
    with a power k (5, rows): Σ p^k, and the slope by it."""

    loss: Tensor | None
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    argmax: Tensor | None
    log_p2: Tensor | None
    mean_logit: Tensor | None
    stats: Tensor | None


class Kept(NamedTuple):
    """What forward keeps for backward: statistics, and each row's entropy."""

    stats: Tensor | None
    entropy: Tensor | None


class GradOutputs(NamedTuple):
    """Gradients of the outputs; None where there is none. With stride 1 one for each row, with stride 0 one for all."""

    loss: Tensor | None
    loss_stride: int
    z_loss: Tensor | None
    z_stride: int
    lse: Tensor | None
    entropy: Tensor | None


@triton.jit
def add_up(value, z_value, sums, scale):
    """Add the program's part to the total, and to the z-loss's total."""
    if sums[0] is not None:
        finish(tl.sum(value, 0), sums[0], scale)
    if sums[1] is not None:
        finish(tl.sum(z_value, 0), sums[1], scale)


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def rowwise_kernel(x, target, gradient, out, sums, loss, rows_outer, blocks, counted, config: tl.constexpr):
    """Compute the results of rows, their totals, and the gradient.

    Args:
        x: Logits.
        target: Target.
        gradient: Strided.
        out: Outputs.
        sums: a Sum or None each: of the loss, of the z-loss.
        loss: RowLoss.
        rows_outer: rows an outer index.
        blocks: blocks of BR rows in an outer index.
        counted: rows of class indices.
    """
    scale = sweep.scaled(
        loss, target.a, target.labels.weight_ptr, target.labels.ignore, tl.arange(0, sweep.COUNTED), counted, x.classes, config
    )
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside = span.inside
    factor = rows.row_factor(x, span.outer, span.row, inside)
    each = 0.0  # d of every class
    if config.EVEN:
        each = target.labels.smoothing / span.classes
    terms = rows.row_terms(target, span.outer, span.row, inside, x)
    keep, valid = terms.keep, terms.valid
    read = inside if config.ALL_ROWS else keep

    zero = tl.full([config.BR], 0.0, tl.float32)
    if config.ONE_TILE:
        lanes, column, here, mask = sweep.edge(0, inside[:, None], span, config)
        stored = sweep.stored_tile(x, sweep.start_of(x, span, config), lanes, mask, float("-inf"), "", config)
        tile = with_margin(rows.logits(stored, x, column, mask, float("-inf"), factor), column, target, terms)
        d = rows.dense_tile(target, span, inside, column, x, config)
        found = rows.softmax_tile(tile, d, here, column, rows.SoftmaxOp(x, target, rows.RowInputs(span, terms, zero, factor)), config)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None else ""
        if config.EVEN or config.MEAN:
            zero = rows.origin(x, span)
        full = None if config.BR == 1 else sweep.read_mask(read, span, config)
        found = rows.softmax_of(
            rows.SoftmaxOp(x, target, rows.RowInputs(span, terms, zero, factor)),
            sweep.Reading(inside[:, None], full, float("-inf"), EVICT, read),
            config,
        )
    of_row = row_value(found, terms, each, target, loss, config)
    if not config.ONE_TILE:  # before the second sweep, so that no write of it has to be waited for
        add_up(of_row.loss, of_row.z_loss, sums, scale)
    store_results(out, of_row, found, terms, scale, zero, span, config)
    if loss.power is not None and out.stats is not None:
        tl.store(sweep.stats_at(out.stats, 3, span), tl.where(read, of_row.powers, 0.0), mask=inside)
        tl.store(sweep.stats_at(out.stats, 4, span), tl.where(read, of_row.by_powers, 0.0), mask=inside)

    if gradient.ptr is not None:
        shrink = tl.where(valid, scale, float("nan"))
        p_share = tl.where(
            keep, of_row.p_share * shrink / found.s, 0.0
        )  # rows not kept have tiles of 0 and a maximum of 0, so their gradient is 0
        q_share = tl.where(keep, shrink, 0.0)
        h_share = tl.full([config.BR], 0.0, tl.float32)
        h_shift = h_share
        if target.labels.focus is not None:
            h_share, h_shift = slope_factors(shrink * of_row.h, of_row.ls, target.labels)
            h_share, h_shift = tl.where(keep, h_share, 0.0), tl.where(keep, h_shift, 0.0)
        top = tl.where(keep, found.m, 0.0)
        even = tl.full([config.BR, 1], 0.0, tl.float32)
        if config.EVEN:
            even = q_share[:, None] * each
        slope = rows.margin_slope(x, target, span, terms)
        shares = rows.Shares(top, p_share, q_share, q_share * of_row.c_a, q_share * of_row.c_b, h_share, h_shift, even, slope)
        to = sweep.start_of(gradient, span, config)
        stats = rows.RowStats(span, to, terms, shares, keep, factor)
        if config.ONE_TILE:
            g = rows.slope_tile(tile, column, d, rows.GradientOp(x, target, gradient, stats), True, config)
            sweep.store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, mask, "", config)
        else:
            rows.write_slopes(rows.GradientOp(x, target, gradient, stats), config)
    if config.ONE_TILE:
        add_up(of_row.loss, of_row.z_loss, sums, scale)


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def rowwise_backward_kernel(x, target, gradient, kept, grad_outputs, loss, rows_outer, blocks, config: tl.constexpr):
    """Write one tile of the gradient from kept statistics: the second launch of the classic split. The grid's second axis is the tile of
    the row, over all classes or those from labels.first on."""
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside, place = span.inside, sweep.place_of(span)
    factor = rows.row_factor(x, span.outer, span.row, inside)
    terms = rows.row_terms(target, span.outer, span.row, inside, x)
    read = inside if config.ALL_ROWS else terms.keep
    stored = sweep.read_one((x,), span, read, config)
    top, ls, q = sweep.load_stats(kept.stats, 3, span)
    powers, by_powers = q, q
    if loss.power is not None:
        powers = tl.load(sweep.stats_at(kept.stats, 3, span), mask=inside, other=0.0)
        by_powers = tl.load(sweep.stats_at(kept.stats, 4, span), mask=inside, other=0.0)
    c_a, c_b = terms.c_a, terms.c_b
    if target.a.ptr is not None:
        _, c_a, _ = rows.hard_loss(c_a, terms.a, terms.logit_a, top, ls, powers, target, loss)
        if loss.entropy_weight is not None:
            c_a *= rows.held_weight(tl.load(kept.entropy + place, mask=inside, other=0.0), loss)
    if target.b.ptr is not None:
        _, c_b, _ = rows.hard_loss(c_b, terms.b, terms.logit_b, top, ls, powers, target, loss)
    of_row = row_shares((place, top, ls, q, kept.entropy), terms, grad_outputs, target, loss, scale, span, config)
    h, shift = of_row.h, of_row.shift
    if loss.power is not None:
        h, shift = slope_factors(powers_slope(of_row.q * by_powers, ls, loss.power), ls, target.labels)
        h, shift = tl.where(terms.keep, h, 0.0), tl.where(terms.keep, shift, 0.0)
    slope = rows.margin_slope(x, target, span, terms)
    shares = rows.Shares(of_row.top, of_row.p, of_row.q, of_row.q * c_a, of_row.q * c_b, h, shift, of_row.even, slope)
    sweep.write_one(
        stored,
        (x,),
        rows.GradientOp(x, target, gradient, rows.RowStats(span, sweep.start_of(gradient, span, config), terms, shares, read, factor)),
        rows.write_slope,
        config,
    )

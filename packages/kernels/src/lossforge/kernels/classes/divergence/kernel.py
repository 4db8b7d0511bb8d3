"""The template of losses between the softmax p of a row's logits and the softmax q of a teacher's: D = Σⱼ f(ln pⱼ, ln qⱼ).

Both are softened by a temperature T: ln p = log_softmax(x / T). With hⱼ = ∂f/∂ln pⱼ, the gradient at x is (hⱼ - pⱼ Σ h) / T. x may be
scaled and soft-capped as it is read; the gradient at the stored logits then has another factor.

A row that fits a tile is read once. A longer one is swept three times: for the maxima and sums of both softmaxes, for D and Σ h, and for
the gradient. KL and cross entropy need no middle sweep: their sum is computed in the first one, and gives Σ h in closed form. One launch
gives values, gradient, or both. The classic split keeps each row's statistics and sweeps once more in backward. Where the statistics are
KNOWN before, the middle sweep is the only one: p and q are then over more classes than the row has here.

A row's loss may have a hard part, the cross entropy of its label, of logits that are not softened. Their log-sum and the entropy of p are
found by the first sweep, too.

With COSINE there are no softmaxes: D = 1 - cos(x, t) of the logits themselves, from Σ x², Σ t² and Σ x t in one sweep.

With a formula's `blend` a row's loss is a function of two numbers: the mean under q that the first sweep computes, and the sum that the
middle one does. The gradient of both is written in one sweep, with the derivatives of that function as factors of the row.

With SWAP logits and teacher change their roles p and q: KL(q ‖ p) becomes KL(p ‖ q).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.divergence import rows
from lossforge.kernels.classes.rowwise import sweep
from lossforge.kernels.engine.layout import longer
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.math import log


class Outputs(NamedTuple):
    """Results of each row: the loss, the statistics for backward, the entropy of p, and the acceptance Σ min(p, q).

    stats: maxima of the logits as read, and log-sums of x / T; but for top-k also those of the teacher, and Σ h; with a hard part the
    log-sum of x, too; with a blend its two derivatives. With KNOWN they are read, but for Σ h. With COSINE the factors of x and t in the
    gradient are in place of the teacher's.
    """

    loss: Tensor | None
    stats: Tensor | None
    entropy: Tensor | None = None
    acceptance: Tensor | None = None


class GradOutput(NamedTuple):
    """The gradient of the loss. With stride 0 one for all rows."""

    ptr: Tensor | None
    stride: int


@triton.jit
def kept(soft, keep):
    """Set the statistics of rows not kept to 0. Their elements were read as 0, so their gradient is 0 too."""
    x, t = tl.where(keep, soft.top_x, 0.0), tl.where(keep, soft.top_t, 0.0)
    return rows.Softmaxes(x, tl.where(keep, soft.ls_x, 0.0), t, tl.where(keep, soft.ls_t, 0.0))


@triton.jit
def columns_of(soft):
    return rows.Softmaxes(soft.top_x[:, None], soft.ls_x[:, None], soft.top_t[:, None], soft.ls_t[:, None])


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def divergence_kernel(x, teacher, marks, gradient, out, sum, formula, rows_outer, blocks, counted, config: tl.constexpr):
    """Compute the losses of rows or their total, and the gradient.

    Args:
        x, teacher: Logits.
        marks: Marks.
        gradient: Strided.
        out: Outputs.
        sum: Sum.
        formula: Formula.
        rows_outer: rows an outer index.
        blocks: blocks of BR rows in an outer index.
        counted: number of labels.
    """
    scale = sweep.scaled(formula, marks.labels, None, formula.ignore, tl.arange(0, sweep.COUNTED), counted, x.classes, config)
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside = span.inside
    w, keep = rows.row_weight(marks, formula.ignore, span.outer, span.row, inside)
    if formula.hard is not None:
        hard = rows.hard_of(x, marks, formula, span, keep)
    if config.ONE_TILE:
        lanes, _, _, here = sweep.edge(0, inside[:, None], span, config)
        one_x = sweep.stored_tile(x, sweep.start_of(x, span, config), lanes, here, float("-inf"), "", config)
        one_t = sweep.stored_tile(teacher, sweep.start_of(teacher, span, config), lanes, here, float("-inf"), "", config)
        one_x, one_t = rows.capped_both(one_x, one_t, sweep.columns(lanes, span, config), here, here, formula)
        if config.COSINE:
            soft, value = rows.cosine_tile(one_x, one_t, here, formula)
            h_sum, ls_1 = value * 0.0, soft.ls_x
        elif formula.blend is not None:
            soft, mean, mass, f, h, p, q = rows.one_blended(one_x, one_t, marks, span, keep, formula)
            value, accepted, of_mean, of_sum = formula.blend(mean, tl.sum(f, 1), mass, *formula.hyper)
            h_sum = tl.sum(h, 1)
            ls_1 = rows.log_sum_of(one_x, soft, formula)
        else:
            soft, f, h, p = rows.one_tile(one_x, one_t, formula, config.SWAP)
            value, h_sum = tl.sum(f, 1), tl.sum(h, 1)
            ls_1 = rows.log_sum_of(one_x, soft, formula)
        if out.entropy is not None:
            entropy = rows.entropy_of(one_x, soft, formula)
    else:
        EVICT: tl.constexpr = (
            "evict_last" if gradient.ptr is not None or formula.averaged is None or formula.blend is not None else "evict_first"
        )
        LATER: tl.constexpr = "evict_last" if gradient.ptr is not None else "evict_first"
        full = None if config.BR == 1 else sweep.read_mask(keep, span, config)
        if config.KNOWN:
            if formula.hard is None:
                top_x, ls_x, top_t, ls_t = sweep.load_stats(out.stats, 4, span)
                ls_1 = ls_x
            else:
                top_x, ls_x, top_t, ls_t, _, ls_1 = sweep.load_stats(out.stats, 6, span)
            soft = rows.Softmaxes(top_x, ls_x, top_t, ls_t)
        elif config.COSINE:
            found = sweep.sweep(
                rows.no_sums(config),
                (x, teacher),
                span,
                sweep.Reading(inside[:, None], full, float("-inf"), EVICT, keep),
                rows.add_squares,
                formula,
                config,
            )
            soft, value = rows.merge_squares(found, formula)
            h_sum, ls_1 = value * 0.0, soft.ls_x
        else:
            found = sweep.sweep(
                rows.no_sums(config),
                (x, teacher),
                span,
                sweep.Reading(inside[:, None], full, float("-inf"), EVICT, keep),
                rows.add_both,
                formula,
                config,
            )
            top_x, top_t = tl.max(found.m_x, 1), tl.max(found.m_t, 1)
            lanes = rows.Lanes(found.m_x, found.s_x, found.m_t, found.s_t, found.dot)
            total_x, total_t, dot = rows.merge_both(lanes, top_x[:, None], top_t[:, None], formula, config.SWAP)
            soft = rows.Softmaxes(top_x, log(total_x), top_t, log(total_t))
            ls_1 = soft.ls_x if formula.unsoftened is None else rows.merge_one(found, top_x, formula)
            if out.entropy is not None:
                entropy = soft.ls_x - rows.merge_own(found, top_x, formula) / total_x * formula.inverse
        if config.COSINE:
            tl.static_assert(not config.KNOWN, "a cosine of some classes has no sums of all")
        elif formula.blend is not None:
            tl.static_assert(not config.KNOWN, "a blend of some classes has no sums of all")
            mass = rows.mass_of(marks, span, keep, soft, formula)
            mean = mass * 0.0
            if formula.averaged is not None:
                mean, _ = rows.closed(dot, total_x, total_t, soft, formula, False)
            zero = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
            f, h = sweep.sweep(
                (zero, zero),
                (x, teacher),
                span,
                sweep.Reading(inside[:, None], full, float("-inf"), LATER, keep, True),
                rows.add_blended,
                rows.SlopesOp(formula, columns_of(soft), rows.Mass(mass[:, None])),
                config,
            )
            value, accepted, of_mean, of_sum = formula.blend(mean, tl.sum(f, 1), mass, *formula.hyper)
            h_sum = tl.sum(h, 1)
        elif formula.averaged is not None:
            value, h_sum = rows.closed(dot, total_x, total_t, soft, formula, config.SWAP)
        else:
            zero = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
            f, h = sweep.sweep(
                (zero, zero),
                (x, teacher),
                span,
                sweep.Reading(inside[:, None], full, float("-inf"), LATER, keep, True),
                rows.add_slopes,
                rows.SlopesOp(formula, columns_of(soft), rows.Mass(soft.ls_x[:, None])),
                config,
            )
            value, h_sum = tl.sum(f, 1), tl.sum(h, 1)
    if formula.hard is not None:
        value = rows.with_soft(value, formula) + formula.hard * rows.hard_loss(hard, soft.top_x, ls_1, formula)
    value = tl.where(keep, w * value, 0.0)

    if not config.ONE_TILE:
        if sum is not None:  # before the last sweep, so that no write of it has to be waited for
            finish(tl.sum(value, 0), sum, scale)
    if out.loss is not None:
        tl.store(out.loss + sweep.place_of(span), value * scale, mask=inside)
    if out.entropy is not None:
        tl.store(out.entropy + sweep.place_of(span), tl.where(keep, entropy, 0.0), mask=inside)
    if out.acceptance is not None:
        accepted = tl.clamp(accepted, 0.0, 1.0, tl.PropagateNan.ALL)
        tl.store(out.acceptance + sweep.place_of(span), tl.where(keep, accepted, 0.0), mask=inside)
    h_sum = tl.where(keep, h_sum, 0.0)
    blend = rows.no_blend(h_sum)
    if formula.blend is not None:
        blend = rows.Blend(mass, tl.where(keep, of_mean, 0.0), tl.where(keep, of_sum, 0.0))
    if not config.ONE_TILE or out.stats is not None:
        soft = kept(soft, keep)
        ls_1 = tl.where(keep, ls_1, 0.0)
    if out.stats is not None:
        stats = (soft.top_x, soft.ls_x, soft.top_t, soft.ls_t, h_sum)
        if formula.hard is not None:
            stats = longer(stats, ls_1)
        if formula.blend is not None:
            stats = longer(longer(stats, blend.of_mean), blend.of_sum)
        sweep.store_stats(out.stats, stats, span)

    if gradient.ptr is not None:
        share = tl.where(keep, w * scale * formula.inverse, 0.0)[:, None]
        of_hard = rows.no_hard(h_sum)
        if formula.hard is not None:
            of_hard = rows.hard_columns(hard, ls_1, tl.where(keep, w * scale, 0.0))
            share = tl.where(keep, formula.soft * formula.inverse, 0.0)[:, None]
        to = sweep.start_of(gradient, span, config)
        if config.ONE_TILE:
            if config.COSINE:
                g = (soft.top_t[:, None] * one_x + soft.ls_t[:, None] * one_t) * share
            elif formula.blend is not None:
                g = rows.blended_at_logits(h, p, q, h_sum[:, None], blend.of_mean[:, None], blend.of_sum[:, None], share, formula)
            else:
                g = rows.at_logits(h, p, h_sum[:, None], share)
            if formula.hard is not None:
                g = rows.with_hard(g, one_x, sweep.columns(lanes, span, config), soft.top_x[:, None], of_hard, formula)
            g = rows.at_stored(g, one_x, formula)
            sweep.store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, here, "", config)
        else:
            stats = rows.row_stats(span, to, columns_of(soft), h_sum, share, keep, of_hard, blend)
            # from the row's end, unless the sweep before it ended at the row's begin
            BACK: tl.constexpr = (formula.averaged is not None and formula.blend is None) or config.COSINE
            sweep.write_rows((x, teacher), rows.GradientOp(gradient, formula, stats), rows.write_slope, BACK, config)
    if config.ONE_TILE:
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def divergence_backward_kernel(x, teacher, marks, gradient, stats_ptr, grad_output, formula, rows_outer, blocks, config: tl.constexpr):
    """Write one tile of the gradient from kept statistics: the second launch of the classic split. The grid's second axis is the tile of
    the row."""
    scale = divided(formula.scale, formula.divisor_ptr, config.EMPTY_IS_ZERO)
    span = sweep.span_of(x, rows_outer, blocks, config)
    to = sweep.start_of(gradient, span, config)
    w, keep = rows.row_weight(marks, formula.ignore, span.outer, span.row, span.inside)
    if formula.hard is not None:
        hard = rows.hard_of(x, marks, formula, span, keep)
    stored = sweep.read_one((x, teacher), span, keep, config)
    of_loss = tl.load(grad_output.ptr + sweep.place_of(span) * grad_output.stride, mask=span.inside, other=0.0).to(tl.float32)
    factor = tl.where(keep, of_loss * w * scale, 0.0)
    top_x, ls_x, top_t, ls_t, h_sum = sweep.load_stats(stats_ptr, 5, span)
    if formula.hard is None:
        of_hard = rows.no_hard(h_sum)
        share = factor * formula.inverse
    else:
        of_hard = rows.hard_columns(hard, sweep.load_stat(stats_ptr, 5, span), factor)
        share = tl.where(keep, formula.soft * formula.inverse, 0.0)
    soft = rows.Softmaxes(top_x[:, None], ls_x[:, None], top_t[:, None], ls_t[:, None])
    blend = rows.no_blend(h_sum)
    if formula.blend is not None:
        AFTER: tl.constexpr = 5 if formula.hard is None else 6
        mass = rows.mass_of(marks, span, keep, rows.Softmaxes(top_x, ls_x, top_t, ls_t), formula)
        blend = rows.Blend(mass, sweep.load_stat(stats_ptr, AFTER, span), sweep.load_stat(stats_ptr, AFTER + 1, span))
    stats = rows.row_stats(span, to, soft, h_sum, share[:, None], keep, of_hard, blend)
    sweep.write_one(stored, (x, teacher), rows.GradientOp(gradient, formula, stats), rows.write_slope, config)

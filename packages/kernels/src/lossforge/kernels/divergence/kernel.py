"""The template of losses between the softmax p of a row's logits and the softmax q of a teacher's: D = Σⱼ f(ln pⱼ, ln qⱼ).

Both are softened by a temperature T: ln p = log_softmax(x / T). With hⱼ = ∂f/∂ln pⱼ, the gradient at x is (hⱼ - pⱼ Σ h) / T.

A row that fits a tile is read once. A longer one is swept: first for both softmaxes' maxima and sums, last for the gradient, and in
between for D and Σ h, unless the formula is KL, whose sum is carried along in the first sweep and gives Σ h in closed form. One launch
gives values, gradient, or both; the classic split keeps each row's statistics and sweeps once more in backward.

With SWAP the logits play q's part and the teacher p's: KL(q ‖ p) becomes KL(p ‖ q).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.divergence.rows import (
    Gradient,
    Slopes,
    Softmaxes,
    Summed,
    add_both,
    add_slopes,
    at_logits,
    closed,
    merge_both,
    no_lanes,
    one_tile,
    row_weight,
    write_slope,
)
from lossforge.kernels.engine.reduce import finish
from lossforge.kernels.math import log, widened
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
    sweep,
    write_rows,
)


class Outputs(NamedTuple):
    """Per row: the loss, and what backward needs: maximum and log-sum of the logits, but for top-k also of the teacher's, and Σ h.

    All but Σ h are in units of x / T.
    """

    loss: Tensor | None
    stats: Tensor | None


@triton.jit
def kept(soft, keep):
    """Rows not kept: all that is read of them is 0, so are their statistics, and their gradient."""
    x, t = tl.where(keep, soft.top_x, 0.0), tl.where(keep, soft.top_t, 0.0)
    return Softmaxes(x, tl.where(keep, soft.ls_x, 0.0), t, tl.where(keep, soft.ls_t, 0.0))


@triton.jit
def columns_of(soft):
    return Softmaxes(soft.top_x[:, None], soft.ls_x[:, None], soft.top_t[:, None], soft.ls_t[:, None])


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def divergence_kernel(
    x,  # Logits; and of the teacher
    teacher,
    marks,  # Marks
    gradient,  # Strided
    out,  # Outputs
    sum,  # Sum
    formula,  # Formula
    rows_outer,  # rows an outer index
    blocks,  # of BR rows, an outer index
    counted,  # labels
    config: tl.constexpr,
):
    scale = scaled(formula, marks.labels, None, formula.ignore, tl.arange(0, COUNTED), counted, x.classes, config)
    span = span_of(x, rows_outer, blocks, config)
    inside = span.inside
    w, keep = row_weight(marks, formula.ignore, span.outer, span.row, inside)
    # where a program reads neighbouring rows at once, what is not kept is read with the others
    mask = keep[:, None]
    if config.MULTIPLE > 1:
        mask = inside[:, None]
    if config.ONE_TILE:
        lanes = tl.arange(0, config.BC)
        here = inside[:, None] & in_row(columns(lanes, span, config), span, config)
        one_x = widened(stored_tile(x, start_of(x, span, config), lanes, here, float("-inf"), "", config))
        one_t = widened(stored_tile(teacher, start_of(teacher, span, config), lanes, here, float("-inf"), "", config))
        soft, f, h, p = one_tile(one_x, one_t, formula, config.SWAP)
        value, h_sum = tl.sum(f, 1), tl.sum(h, 1)
    else:
        EVICT: tl.constexpr = "evict_last" if gradient.ptr is not None or formula.sums is None else "evict_first"
        LATER: tl.constexpr = "evict_last" if gradient.ptr is not None else "evict_first"
        full = None if config.BR == 1 else mask
        edge = inside[:, None]
        found = sweep(no_lanes(config), (x, teacher), span, Reading(edge, full, float("-inf"), EVICT, keep), add_both, formula, config)
        top_x, top_t = tl.max(found.m_x, 1), tl.max(found.m_t, 1)
        total_x, total_t, dot = merge_both(found, top_x[:, None], top_t[:, None], formula, config.SWAP)
        soft = Softmaxes(top_x, log(total_x), top_t, log(total_t))
        if formula.sums is not None:
            value, h_sum = closed(dot, total_x, total_t, soft, formula, config.SWAP)
        else:
            zero = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
            f, h = sweep(
                (zero, zero),
                (x, teacher),
                span,
                Reading(edge, full, float("-inf"), LATER, keep, True),
                add_slopes,
                Slopes(formula, columns_of(soft)),
                config,
            )
            value, h_sum = tl.sum(f, 1), tl.sum(h, 1)
    value = tl.where(keep, w * value, 0.0)

    if not config.ONE_TILE:
        if sum is not None:  # handed in here, where no write of the last sweep has to be waited for
            finish(tl.sum(value, 0), sum, scale)
    if out.loss is not None:
        tl.store(out.loss + place_of(span), value * scale, mask=inside)
    h_sum = tl.where(keep, h_sum, 0.0)
    if not config.ONE_TILE or out.stats is not None:
        soft = kept(soft, keep)
    if out.stats is not None:
        store_stats(out.stats, (soft.top_x, soft.ls_x, soft.top_t, soft.ls_t, h_sum), span)

    if gradient.ptr is not None:
        share = tl.where(keep, w * scale * formula.inverse, 0.0)[:, None]
        to = start_of(gradient, span, config)
        if config.ONE_TILE:
            g = at_logits(h, p, h_sum[:, None], share)
            store_tile(tl.where(keep[:, None], g, 0.0), gradient, to, lanes, here, "", config)
        else:
            rows = Summed(span, to, columns_of(soft), h_sum[:, None], share, keep)
            BACK: tl.constexpr = formula.sums is not None  # else the sweep before it ended at the beginning
            write_rows((x, teacher), Gradient(gradient, formula, rows), mask, write_slope, BACK, config)
    if config.ONE_TILE:
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)

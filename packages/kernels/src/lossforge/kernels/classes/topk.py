"""KL divergence from a teacher's top-K logits: Σₖ qₖ (ln qₖ - ln p[iₖ]).

With a tail, the remaining probabilities of both, q₀ = 1 - Σ q and p₀ = 1 - Σ p[i], count as one more class. The gradient at the logits,
times T, is

    pⱼ (Σ q + q₀) - qⱼ    where j is one of the K,    pⱼ (Σ q + q₀ - q₀ / p₀)    elsewhere.

The reverse, R = Σₖ p[iₖ] rₖ with rₖ = ln p[iₖ] - ln qₖ, and p₀ r₀ with a tail, may have a share of the value. Its gradient is

    pⱼ (rⱼ + c)    where j is one of the K,    pⱼ (c + r₀)    elsewhere,

with c = -R and r₀ of the tail, or without one c = 1 - Σₖ p[iₖ] (rₖ + 1) and r₀ = -1.

A hard part, the cross entropy of a row's label, and the entropy of p are as in the divergence template.

One sweep of the row computes the softmax's maximum and sum. A second writes the gradient as if no class were one of the K, and then these
are overwritten. In the classic split backward is the same launch, which reads the first sweep's results. Logits may be scaled and
soft-capped as they are read, as in the divergence template.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.classes.calls import MOST, TopKCall
from lossforge.kernels.classes.divergence import rows
from lossforge.kernels.classes.divergence.kernel import GradOutput, Outputs
from lossforge.kernels.classes.divergence.launch import FromTeacher, formula_of
from lossforge.kernels.classes.divergence.rows import Marks, at_stored, capped, row_weight
from lossforge.kernels.classes.rowwise import sweep
from lossforge.kernels.classes.rowwise.layout import Wanted, row_layout
from lossforge.kernels.classes.rowwise.rows import LOWEST, Logits
from lossforge.kernels.engine.launch import Launch, sum_slots
from lossforge.kernels.engine.layout import Strided
from lossforge.kernels.engine.reduce import finish
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.math import LOG2E, exp, exp2, log
from lossforge.kernels.tiles import forward_tiles

LEAST = tl.constexpr(5.960464477539063e-08)  # 2⁻²⁴: a smaller 1 - Σ p[i] is rounding error
MOST_Q = tl.constexpr(MOST)


class Entries(NamedTuple):
    """The teacher's top K of each row: class indices and log-probabilities. Their tensors have K in place of the classes."""

    indices: Strided
    log_q: Strided
    k: int


RowStats = namedtuple("RowStats", "span to top rate shift share keep hard")
"""What is known of rows before their gradient is written: log₂ p = (x - top) · rate - shift; share: p's factor; to: where it begins.

hard: HardColumns."""
Softmax = namedtuple("Softmax", "top ls ls_1 entropy")
"""Maximum and log-sum of each row; the log-sum at T = 1, and the entropy, where they are wanted."""
Elsewhere = namedtuple("Elsewhere", "gradient rows formula")
"""The operation that writes the gradient of the classes that are not among the K."""
Members = namedtuple("Members", "index lq q logit valid good")
"""Each row's K entries (BR, KP): class, ln q, q, the class's logit, and whether it exists; good: whether all of a row are valid, and their
q probabilities."""


def _make(formulas: Any, call: TopKCall, wanted: Wanted, out: Outputs, grad_output: GradOutput) -> Launch | None:
    at = row_layout(call.x.shape, (call.x, call.indices, call.target, call.labels, call.weight, wanted.gradient), 1, wanted.gradient)
    if at is None:
        return None
    x, indices, log_q, labels, weight, gradient = at.strided
    k = call.indices.shape[1]
    total = out.loss is None and grad_output.ptr is None
    given = (Logits(*x, at.classes), Entries(indices, log_q, k), Marks(labels, weight), gradient)
    arguments = (*given, out, grad_output, sum_slots() if total else None, formula_of(call, wanted.divisor))
    tiles = forward_tiles(at.classes, call.x.itemsize, at.adjacent, at.adjacent, True)
    constants = {"EMPTY_IS_ZERO": call.empty_is_zero, "RENORMALIZE": call.renormalize, "TAIL": call.tail}
    constants["ENTROPY"] = out.entropy is not None
    return at.launch(topk_kernel, tiles, arguments, wanted.counted, int(total), KP=triton.next_power_of_2(k), **constants)


_LAUNCH: Launches = FromTeacher(_make)
forward, backward = _LAUNCH.forward, _LAUNCH.backward


@triton.jit
def members(entries, span, keep, x, formula, config):
    at = tl.arange(0, config.KP)[None, :]
    exists = keep[:, None] & (at < entries.k)
    row = span.row[:, None]
    index = tl.load(sweep.element_address(entries.indices, span.outer, row, at), mask=exists, other=-1)
    lq = tl.load(sweep.element_address(entries.log_q, span.outer, row, at), mask=exists, other=float("-inf")).to(tl.float32)
    valid = (index >= 0) & (index < x.classes)
    lq = tl.where(index == -1, float("-inf"), lq)
    valid = valid & (lq != float("-inf"))
    index = tl.where(lq == float("-inf"), -1, index)
    if config.RENORMALIZE:
        top = tl.maximum(tl.max(lq, 1), LOWEST)
        inverse = formula.inverse if formula.ratio is None else formula.inverse * formula.ratio
        step = (lq - top[:, None]) * inverse
        total = tl.sum(exp(step), 1)
        lq = step - log(tl.where(total == 0.0, 1.0, total))[:, None]  # 1: so that a row without entries has -inf, not nan
    logit = tl.load(sweep.element_address(x, span.outer, row, index), mask=valid, other=0.0).to(tl.float32)
    logit = capped(logit, None, formula.scale_x, formula.cap_x)
    wrong = tl.max(tl.where(valid | (index == -1), 0, 1), 1)
    q = exp(lq)
    good = wrong == 0
    if not config.RENORMALIZE:
        good = good & (tl.sum(q, 1) <= MOST_Q)
    return Members(tl.where(valid, index, -1).to(tl.int32), lq, q, logit, valid, good)


@triton.jit
def by_row(v):
    """Return v (BR,) as a factor of a tile's rows: a scalar if there is one row.

    Triton may broadcast a (1, 1) tensor over the tile in one layout, and then move the result into another layout through shared memory.
    """
    return tl.sum(v, 0) if v.shape[0] == 1 else v[:, None]


@triton.jit
def add_exponentials(lanes, tile, formula, config):
    """Add a tile (BR, BC) to the sums that each lane (BR, L) keeps of its VEC classes: s = Σ exp((x - m) / T), one of exp(x - m), own of
    exp((x - m) / T) (x - m)."""
    m, s, one, own = lanes
    x = capped(tile.stored[0].to(tl.float32), tile.mask, formula.scale_x, formula.cap_x)
    x = tl.reshape(sweep.mask_out_of_range(x, tile, config), [config.BR, config.BC // config.VEC, config.VEC])
    top = tl.maximum(m, tl.max(x, 2))
    step = x - top[:, :, None]
    fade, e = exp2((m - top) * formula.rate), exp2(step * formula.rate)
    if formula.unsoftened is not None:
        one = one * exp2((m - top) * formula.unsoftened) + tl.sum(exp2(step * formula.unsoftened), 2)
    if config.ENTROPY:
        own = tl.where(s == 0.0, 0.0, fade * (own + (m - top) * s)) + tl.sum(tl.where(e > 0.0, e * step, 0.0), 2)
    return top, s * fade + tl.sum(e, 2), one, own


@triton.jit
def write_elsewhere(state, tile, of, config):
    """Write the gradient of a tile as if none of its classes were among the K."""
    x = capped(tile.stored[0].to(tl.float32), None, of.formula.scale_x, of.formula.cap_x)
    g = exp2((x - of.rows.top[:, None]) * of.rows.rate - of.rows.shift[:, None]) * of.rows.share
    if of.formula.hard is not None:
        g = rows.with_hard(g, x, tile.column, by_row(of.rows.top), of.rows.hard, of.formula)
    sweep.write_tile(at_stored(g, x, of.formula), tile, of, config)
    return state


@triton.jit
def softmax_of(x, span, keep, formula, EVICT: tl.constexpr, config):
    """Return the Softmax of rows; 0 for rows not kept."""
    if config.ONE_TILE:
        lanes, _, _, mask = sweep.edge(0, span.inside[:, None], span, config)
        tile = sweep.stored_tile(x, sweep.start_of(x, span, config), lanes, mask, float("-inf"), EVICT, config).to(tl.float32)
        tile = capped(tile, mask, formula.scale_x, formula.cap_x)
        top = tl.max(tile, 1)
        ls = log(tl.sum(exp2((tile - top[:, None]) * formula.rate), 1))
        soft = rows.Softmaxes(top, ls, top, ls)
        ls_1 = rows.log_sum_of(tile, soft, formula)
        entropy = ls
        if config.ENTROPY:
            entropy = rows.entropy_of(tile, soft, formula)
    else:
        edge = span.inside[:, None]
        full = None if config.BR == 1 else edge
        m = tl.full([config.BR, config.BC // config.VEC], LOWEST, tl.float32)
        s = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
        lanes = (m, s, s, s)
        lanes = sweep.sweep(lanes, (x,), span, sweep.Reading(edge, full, float("-inf"), EVICT), add_exponentials, formula, config)
        m, s, one, own = lanes
        top = tl.max(m, 1)
        step = m - top[:, None]
        fade = exp2(step * formula.rate)
        total = tl.sum(s * fade, 1)
        ls = log(total)
        ls_1, entropy = ls, ls
        if formula.unsoftened is not None:
            ls_1 = log(tl.sum(one * exp2(step * formula.unsoftened), 1))
        if config.ENTROPY:
            entropy = ls - tl.sum(tl.where(s == 0.0, 0.0, fade * (own + s * step)), 1) / total * formula.inverse
    return Softmax(tl.where(keep, top, 0.0), tl.where(keep, ls, 0.0), tl.where(keep, ls_1, 0.0), tl.where(keep, entropy, 0.0))


@triton.jit(do_not_specialize=("rows_outer", "blocks", "counted"))
def topk_kernel(x, entries, marks, gradient, out, grad_output, sum, formula, rows_outer, blocks, counted, config: tl.constexpr):
    """Compute the losses of rows or their total, and the gradient; or the gradient alone.

    Args:
        x: Logits.
        entries: Entries.
        marks: Marks.
        gradient: Strided.
        out: divergence's Outputs; the statistics, max and log-sum, are read in backward, else written.
        grad_output: divergence's GradOutput.
        sum: Sum.
        formula: divergence's Formula, without terms and sums.
        counted: number of labels.
    """
    BACKWARD: tl.constexpr = grad_output.ptr is not None
    scale = sweep.scaled(formula, marks.labels, None, formula.ignore, tl.arange(0, sweep.COUNTED), counted, x.classes, config)
    span = sweep.span_of(x, rows_outer, blocks, config)
    inside = span.inside
    w, keep = row_weight(marks, formula.ignore, span.outer, span.row, inside)
    if formula.hard is not None:
        hard = rows.hard_of(x, marks, formula, span, keep)
    if BACKWARD:
        if formula.hard is None:
            top, ls = sweep.load_stats(out.stats, 2, span)
            ls_1 = ls
        else:
            top, ls, ls_1 = sweep.load_stats(out.stats, 3, span)
    else:
        top, ls, ls_1, entropy = softmax_of(x, span, keep, formula, "evict_last" if gradient.ptr is not None else "evict_first", config)
    own = members(entries, span, keep, x, formula, config)  # after the sweep, because the sweep needs the registers
    lp = (own.logit - top[:, None]) * formula.inverse - ls[:, None]
    p = tl.where(own.valid, exp(lp), 0.0)
    share = tl.sum(own.q, 1)  # p's factor in the gradient
    elsewhere = share
    value = tl.sum(tl.where(own.q == 0.0, 0.0, own.q * (own.lq - lp)), 1)
    if config.TAIL:
        left_q = tl.maximum(1.0 - share, 0.0)
        left_p = 1.0 - tl.sum(p, 1)
        counts = left_p > LEAST
        left_p = tl.maximum(left_p, LEAST)
        value += tl.where(left_q > 0.0, left_q * (log(left_q) - log(left_p)), 0.0)
        share += tl.where(counts, left_q, 0.0)
        elsewhere += tl.where(counts, left_q - left_q / left_p, 0.0)
    slope = p * by_row(share) - own.q
    if formula.reverse is not None:
        r = tl.where(p > 0.0, lp - own.lq, 0.0)
        backwards = tl.sum(p * r, 1)
        c = 1.0 - backwards - tl.sum(p, 1)
        r_left = c * 0.0 - 1.0
        if config.TAIL:
            r_tail = log(left_p) - log(tl.maximum(left_q, LEAST))
            backwards += left_p * r_tail
            c = tl.where(counts, -backwards, c)
            r_left = tl.where(counts, r_tail, r_left)
        value = (1.0 - formula.reverse) * value + formula.reverse * backwards
        slope = (1.0 - formula.reverse) * slope + formula.reverse * (p * (r + by_row(c)))
        elsewhere = (1.0 - formula.reverse) * elsewhere + formula.reverse * (c + r_left)
    if formula.hard is not None:
        value = rows.with_soft(value, formula) + formula.hard * rows.hard_loss(hard, top, ls_1, formula)
    value = tl.where(keep, tl.where(own.good & (ls == ls), w * value, float("nan")), 0.0)
    if not BACKWARD:
        if out.loss is not None:
            tl.store(out.loss + sweep.place_of(span), value * scale, mask=inside)
        if out.entropy is not None:
            tl.store(out.entropy + sweep.place_of(span), entropy, mask=inside)
        if out.stats is not None:
            if formula.hard is None:
                sweep.store_stats(out.stats, (top, ls), span)
            else:
                sweep.store_stats(out.stats, (top, ls, ls_1), span)
        if sum is not None:
            finish(tl.sum(value, 0), sum, scale)

    if gradient.ptr is not None:
        factor = w * scale
        if BACKWARD:
            factor *= tl.load(grad_output.ptr + sweep.place_of(span) * grad_output.stride, mask=inside, other=0.0).to(tl.float32)
        factor = tl.where(keep, tl.where(own.good, factor, float("nan")), 0.0)
        to, of_hard = sweep.start_of(gradient, span, config), rows.no_hard(factor)
        if formula.hard is None:
            factor *= formula.inverse
            elsewhere *= factor
            g = slope * by_row(factor)
        else:  # whose factor multiplies both parts
            share = tl.where(hard.valid, factor, float("nan"))
            of_hard = rows.HardColumns(by_row(hard.label.to(tl.int32)), by_row(ls_1), by_row(share))
            elsewhere *= formula.soft * formula.inverse
            g = rows.with_hard(slope * (formula.soft * formula.inverse), own.logit, own.index, by_row(top), of_hard, formula)
        stats = RowStats(span, to, top, formula.rate, ls * LOG2E, by_row(elsewhere), keep, of_hard)
        g = at_stored(g, own.logit, formula)
        sweep.write_rows((x,), Elsewhere(gradient, stats, formula), write_elsewhere, True, config)
        tl.debug_barrier()
        tl.store(sweep.element_address(gradient, span.outer, span.row[:, None], own.index), g, mask=own.valid & keep[:, None])

"""Device functions of the divergence template: a row's weight, the online softmaxes of logits and teacher, a formula over tiles of both."""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, LOG2E, exp2, widened
from lossforge.kernels.row.rows import stored_tile


@triton.jit
def row_weight(labels, weight, ignore, outer, row, inside):
    """(weight of each row, whether it counts): rows with the ignored label, or of weight 0, are left out."""
    w = tl.where(inside, 1.0, 0.0)
    keep = inside
    if labels.ptr is not None:
        label = tl.load(labels.ptr + outer * labels.s0 + row.to(tl.int64) * labels.s1, mask=inside, other=ignore)
        keep = keep & (label != ignore)
    if weight.ptr is not None:
        w = tl.load(weight.ptr + outer * weight.s0 + row.to(tl.int64) * weight.s1, mask=inside, other=0.0).to(tl.float32)
        keep = keep & (w != 0.0)
    return tl.where(keep, w, 0.0), keep


@triton.jit
def both(x, teacher, start, begin, lane, mask, other, WIDE: tl.constexpr, EVICT: tl.constexpr):
    """Tiles of logits and teacher, as rows.stored_tile has them, in float32."""
    own = stored_tile(x, start, lane, mask, other, WIDE, EVICT)
    return widened(own), widened(stored_tile(teacher, begin, lane, mask, other, WIDE, EVICT))


@triton.jit
def by_lane(tile, VEC: tl.constexpr):
    """A tile (BR, BC) as (BR, L, VEC): each lane's neighbouring classes."""
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // VEC, VEC])


@triton.jit
def step_up(m, x, rate):
    """Of a tile (…, L, V) and the lanes' maxima m (…, L): the new maxima, what old sums fade to, x - max, and exp of it."""
    top = tl.maximum(m, tl.max(x, -1))
    step = x - tl.expand_dims(top, -1)
    return top, exp2((m - top) * rate), step, exp2(step * rate)


@triton.jit
def weigh(dot, kept, fade, shift, e, ahead):
    """Σ e · ahead with a tile's, where both are relative to new maxima: `kept` is the faded Σ e, `shift` what `ahead` grew by.

    What has no mass adds nothing, infinitely far ahead as it may be.
    """
    return tl.where(kept == 0.0, 0.0, dot * fade + kept * shift) + tl.sum(tl.where(e == 0.0, 0.0, e * ahead), -1)


@triton.jit
def accumulate_both(m_x, s_x, m_t, s_t, dot, x, t, rate, DOT: tl.constexpr, SWAP: tl.constexpr):
    """Take tiles (…, L, V) into the running sums that each lane (…, L) keeps of its V classes, relative to its own maxima.

    s = Σ exp(x - m) of logits and teacher; with DOT, of q's exponentials e: dot = Σ e ((q's logit - q's m) - (p's logit - p's m)).
    """
    top_x, fade_x, step_x, e_x = step_up(m_x, x, rate)
    top_t, fade_t, step_t, e_t = step_up(m_t, t, rate)
    s_x *= fade_x
    s_t *= fade_t
    if DOT:
        shift = (m_t - top_t) - (m_x - top_x)
        if SWAP:
            dot = weigh(dot, s_x, fade_x, -shift, e_x, step_x - step_t)
        else:
            dot = weigh(dot, s_t, fade_t, shift, e_t, step_t - step_x)
    return top_x, s_x + tl.sum(e_x, -1), top_t, s_t + tl.sum(e_t, -1), dot


@triton.jit
def merge_both(m_x, s_x, m_t, s_t, dot, top_x, top_t, rate, DOT: tl.constexpr, SWAP: tl.constexpr):
    """Join the lanes (…, L) of each row, relative to its maxima top_x and top_t (…, 1) or scalar: s_x, s_t and dot."""
    step_x, step_t = m_x - top_x, m_t - top_t
    fade_x, fade_t = exp2(step_x * rate), exp2(step_t * rate)
    s_x *= fade_x
    s_t *= fade_t
    if DOT:
        if SWAP:
            dot = tl.where(s_x == 0.0, 0.0, dot * fade_x + s_x * (step_x - step_t))
        else:
            dot = tl.where(s_t == 0.0, 0.0, dot * fade_t + s_t * (step_t - step_x))
    return tl.sum(s_x, -1), tl.sum(s_t, -1), tl.sum(dot, -1)


@triton.jit
def closed(dot, total_x, total_t, ls_x, ls_t, inverse, sums: tl.constexpr, SWAP: tl.constexpr):
    """(KL, Σ h) of rows from what merge_both joined and its logarithms; sums: the formula's."""
    if SWAP:
        value = dot / total_x * inverse + (ls_t - ls_x)
        _, h_sum = sums(value)
    else:
        value = dot / total_t * inverse + (ls_x - ls_t)
        h_sum, _ = sums(value)
    return value, h_sum


@triton.jit
def log_softmax(x, top, ls, rate):
    """log₂ softmax and softmax of a tile; top and ls: its rows' maxima and log-sums (BR, 1), or of one row."""
    power = (x - top) * rate - ls * LOG2E
    return power, exp2(power)


@triton.jit
def value_and_slope(lp, lq, p, q, unit: tl.constexpr, terms: tl.constexpr, hyper, SWAP: tl.constexpr):
    """f and its derivative by the logarithm of the logits' softmax; unit: of lp and lq, as formulas take it."""
    if SWAP:
        f, _, h = terms(lq, lp, q, p, unit, *hyper)
    else:
        f, h, _ = terms(lp, lq, p, q, unit, *hyper)
    return f, h


@triton.jit
def of_tile(x, t, top_x, ls_x, top_t, ls_t, rate, terms: tl.constexpr, hyper, SWAP: tl.constexpr):
    """(f, h, p) of tiles of logits and teacher, from their rows' statistics, as log_softmax takes them."""
    lp, p = log_softmax(x, top_x, ls_x, rate)
    lq, q = log_softmax(t, top_t, ls_t, rate)
    f, h = value_and_slope(lp, lq, p, q, LN2, terms, hyper, SWAP)
    return f, h, p


@triton.jit
def at_logits(h, p, h_sum, share):
    return (h - p * h_sum) * share


@triton.jit
def divergence_gradient(x, t, top_x, ls_x, top_t, ls_t, rate, h_sum, share, terms: tl.constexpr, hyper, SWAP: tl.constexpr):
    """(h - p Σ h) · share of tiles of logits and teacher."""
    _, h, p = of_tile(x, t, top_x, ls_x, top_t, ls_t, rate, terms, hyper, SWAP)
    return at_logits(h, p, h_sum, share)

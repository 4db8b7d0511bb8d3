"""Device functions of the divergence template: a row's weight, the online softmaxes of logits and teacher, a formula over tiles of both."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.layout import Strided
from lossforge.kernels.math import LN2, LOG2E, exp2, log, product, tanh, widened
from lossforge.kernels.rowwise.rows import LOWEST
from lossforge.kernels.rowwise.sweep import mask_out_of_range, row_address, write_tile


class Marks(NamedTuple):
    """Labels of rows, with an ignored label, and weights of rows: they decide how much a row counts."""

    labels: Strided
    weight: Strided


class Formula(NamedTuple):
    """A formula of formulas/divergence.py and the factors of its values.

    Attributes:
        terms: (ln p, ln q, p, q, unit, *hyper) → (f, ∂f/∂ln p, ∂f/∂ln q).
        sums: of KL, whose value the first sweep computes: value → (Σ ∂f/∂ln p, Σ ∂f/∂ln q); else None.
        hyper: hyper-parameters of terms.
        inverse: 1 / T.
        rate: log₂ e / T, computed on the host, because the kernel would keep its own product in a register through its branches.
        scale: factor of the values.
        divisor_ptr: 0-d divisor of the values, or None.
        ignore: the label of rows that do not count.
        scale_x, cap_x, scale_t, cap_t: scale and soft cap of the logits and of the teacher's; None without.
    """

    terms: Callable[..., Any] | None
    sums: Callable[..., Any] | None
    hyper: Sequence[float]
    inverse: float
    rate: float
    scale: float
    divisor_ptr: Tensor | None
    ignore: int
    scale_x: float | None = None
    cap_x: float | None = None
    scale_t: float | None = None
    cap_t: float | None = None


Lanes = namedtuple("Lanes", "m_x s_x m_t s_t dot")
"""Sums over each lane's classes, or over rows when joined, relative to the maxima: s = Σ exp(x - m), for logits and teacher.

dot, for a formula with a closed form, with q's exponentials e: Σ e ((q's logit - q's m) - (p's logit - p's m))."""

Softmaxes = namedtuple("Softmaxes", "top_x ls_x top_t ls_t")
"""A row's maxima and log-sums of logits and teacher."""

RowStats = namedtuple("RowStats", "span to soft h_sum share keep")
"""What is known of rows after their sums. to: where their gradient begins. share: its factor. keep: which rows have one."""

GradientOp = namedtuple("GradientOp", "gradient formula rows")
"""The operation that writes the gradient."""

SlopesOp = namedtuple("SlopesOp", "formula soft")
"""The operation that sums f and h."""


@triton.jit
def row_weight(marks, ignore, outer, row, inside):
    """Return the weight of each row, and whether it counts. Rows with the ignored label or with weight 0 do not."""
    w = tl.where(inside, 1.0, 0.0)
    keep = inside
    if marks.labels.ptr is not None:
        label = tl.load(row_address(marks.labels, outer, row), mask=inside, other=ignore)
        keep = keep & (label != ignore)
    if marks.weight.ptr is not None:
        w = tl.load(row_address(marks.weight, outer, row), mask=inside, other=0.0).to(tl.float32)
        keep = keep & (w != 0.0)
    return tl.where(keep, w, 0.0), keep


@triton.jit
def capped(x, mask, scale, cap):
    """Return logits scaled and capped, -inf outside the mask; None: all are inside."""
    if scale is not None:
        x *= scale
    if cap is not None:
        x = cap * tanh(x / cap)
        if mask is not None:
            x = tl.where(mask, x, float("-inf"))
    return x


@triton.jit
def at_stored(g, x, formula):
    """Return the gradient of the logits as they are stored from that of the capped ones, x."""
    if formula.cap_x is not None:
        u = x / formula.cap_x
        g *= 1.0 - u * u
    if formula.scale_x is not None:
        g *= formula.scale_x
    return g


@triton.jit
def capped_both(x, t, mask, formula):
    """Return tiles of logits and teacher, scaled and capped."""
    return capped(x, mask, formula.scale_x, formula.cap_x), capped(t, mask, formula.scale_t, formula.cap_t)


@triton.jit
def both(tile, formula, config):
    """Return the tiles of logits and teacher in float32, scaled and capped."""
    x, t = capped_both(widened(tile.stored[0]), widened(tile.stored[1]), tile.mask, formula)
    return mask_out_of_range(x, tile, config), mask_out_of_range(t, tile, config)


@triton.jit
def by_lane(tile, config):
    """Reshape a tile (BR, BC) to (BR, L, VEC): each lane's neighbouring classes."""
    return tl.reshape(tile, [config.BR, config.BC // config.VEC, config.VEC])


@triton.jit
def step_up(m, x, rate):
    """Return, for a tile (…, L, V) and the lanes' maxima m (…, L): the new maxima, the factor of old sums, x - maximum, and its exp."""
    top = tl.maximum(m, tl.max(x, -1))
    step = x - tl.expand_dims(top, -1)
    return top, exp2((m - top) * rate), step, exp2(step * rate)


@triton.jit
def weigh(dot, kept, fade, shift, e, ahead):
    """Add a tile to Σ e · ahead, relative to new maxima. kept: the rescaled Σ e. shift: by how much the old terms of `ahead` grew.

    A class of probability 0 adds nothing, even if `ahead` is infinite.
    """
    return tl.where(kept == 0.0, 0.0, dot * fade + kept * shift) + tl.sum(tl.where(e == 0.0, 0.0, e * ahead), -1)


@triton.jit
def accumulate_both(lanes, x, t, formula, SWAP: tl.constexpr):
    """Add tiles (…, L, V) to the running sums of each lane (…, L)."""
    m_x, s_x, m_t, s_t, dot = lanes
    rate = formula.rate
    top_x, fade_x, step_x, e_x = step_up(m_x, x, rate)
    top_t, fade_t, step_t, e_t = step_up(m_t, t, rate)
    s_x *= fade_x
    s_t *= fade_t
    if formula.sums is not None:
        shift = (m_t - top_t) - (m_x - top_x)
        if SWAP:
            dot = weigh(dot, s_x, fade_x, -shift, e_x, step_x - step_t)
        else:
            dot = weigh(dot, s_t, fade_t, shift, e_t, step_t - step_x)
    return Lanes(top_x, s_x + tl.sum(e_x, -1), top_t, s_t + tl.sum(e_t, -1), dot)


@triton.jit
def merge_both(lanes, top_x, top_t, formula, SWAP: tl.constexpr):
    """Join the lanes (…, L) of each row, relative to its maxima top_x and top_t, (…, 1) or scalar: s_x, s_t and dot."""
    m_x, s_x, m_t, s_t, dot = lanes
    rate = formula.rate
    step_x, step_t = m_x - top_x, m_t - top_t
    fade_x, fade_t = exp2(step_x * rate), exp2(step_t * rate)
    s_x *= fade_x
    s_t *= fade_t
    if formula.sums is not None:
        if SWAP:
            dot = tl.where(s_x == 0.0, 0.0, dot * fade_x + s_x * (step_x - step_t))
        else:
            dot = tl.where(s_t == 0.0, 0.0, dot * fade_t + s_t * (step_t - step_x))
    return tl.sum(s_x, -1), tl.sum(s_t, -1), tl.sum(dot, -1)


@triton.jit
def closed(dot, total_x, total_t, soft, formula, SWAP: tl.constexpr):
    """Return (KL, Σ h) of rows from the results of merge_both and the log-sums."""
    if SWAP:
        value = dot / total_x * formula.inverse + (soft.ls_t - soft.ls_x)
        _, h_sum = formula.sums(value)
    else:
        value = dot / total_t * formula.inverse + (soft.ls_x - soft.ls_t)
        h_sum, _ = formula.sums(value)
    return value, h_sum


@triton.jit
def log_softmax(x, top, ls, formula):
    """Return log₂ softmax and softmax of a tile. top and ls: maxima and log-sums of its rows (BR, 1), or of one row."""
    power = (x - top) * formula.rate - ls * LOG2E
    return power, exp2(power)


@triton.jit
def value_and_slope(lp, lq, p, q, unit: tl.constexpr, formula, SWAP: tl.constexpr):
    """Return f and its derivative by the log-softmax of the logits. unit: of lp and lq, see formulas/divergence.py."""
    if SWAP:
        f, _, h = formula.terms(lq, lp, q, p, unit, *formula.hyper)
    else:
        f, h, _ = formula.terms(lp, lq, p, q, unit, *formula.hyper)
    return f, h


@triton.jit
def of_tile(x, t, soft, formula, SWAP: tl.constexpr):
    """Return (f, h, p) of tiles of logits and teacher. soft: their rows' statistics, as log_softmax takes them."""
    lp, p = log_softmax(x, soft.top_x, soft.ls_x, formula)
    lq, q = log_softmax(t, soft.top_t, soft.ls_t, formula)
    f, h = value_and_slope(lp, lq, p, q, LN2, formula, SWAP)
    return f, h, p


@triton.jit
def at_logits(h, p, h_sum, share):
    return (h - p * h_sum) * share


@triton.jit
def divergence_gradient(x, t, soft, h_sum, share, formula, SWAP: tl.constexpr):
    """Return (h - p Σ h) · share of tiles of logits and teacher."""
    _, h, p = of_tile(x, t, soft, formula, SWAP)
    return at_logits(h, p, h_sum, share)


@triton.jit
def one_tile(x, t, formula, SWAP: tl.constexpr):
    """Return (softmaxes, f, h, p) of rows that one tile holds."""
    rate = formula.rate
    top_x, top_t = tl.max(x, 1), tl.max(t, 1)
    step_x, step_t = x - top_x[:, None], t - top_t[:, None]
    e_x, e_t = exp2(step_x * rate), exp2(step_t * rate)
    total_x, total_t = tl.sum(e_x, 1), tl.sum(e_t, 1)
    ls_x, ls_t = log(total_x), log(total_t)
    p, q = product(e_x, (1.0 / total_x)[:, None]), product(e_t, (1.0 / total_t)[:, None])  # equal where the logits are equal
    lp, lq = step_x * formula.inverse - ls_x[:, None], step_t * formula.inverse - ls_t[:, None]
    f, h = value_and_slope(lp, lq, p, q, 1.0, formula, SWAP)
    return Softmaxes(top_x, ls_x, top_t, ls_t), f, h, p


@triton.jit
def no_lanes(config):
    m = tl.full([config.BR, config.BC // config.VEC], LOWEST, tl.float32)
    s = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
    return Lanes(m, s, m, s, s)


@triton.jit
def add_both(lanes, tile, formula, config):
    """Add a tile to the lanes' sums."""
    x, t = both(tile, formula, config)
    return accumulate_both(lanes, by_lane(x, config), by_lane(t, config), formula, config.SWAP)


@triton.jit
def add_slopes(sums, tile, of, config):
    """Add a tile's f and h to the lanes' sums."""
    x, t = both(tile, of.formula, config)
    f, h, _ = of_tile(x, t, of.soft, of.formula, config.SWAP)
    return sums[0] + tl.sum(by_lane(f, config), 2), sums[1] + tl.sum(by_lane(h, config), 2)


@triton.jit
def write_slope(state, tile, of, config):
    """Write the gradient of a tile."""
    x, t = capped_both(widened(tile.stored[0]), widened(tile.stored[1]), None, of.formula)
    g = divergence_gradient(x, t, of.rows.soft, of.rows.h_sum, of.rows.share, of.formula, config.SWAP)
    write_tile(at_stored(g, x, of.formula), tile, of, config)
    return state

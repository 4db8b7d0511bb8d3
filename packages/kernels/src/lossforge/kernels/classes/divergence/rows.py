"""Device functions of the divergence template: a row's weight, the online softmaxes of logits and teacher, a formula over tiles of both."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.calls import MOST_MORE
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.classes.rowwise.sweep import element_address, mask_out_of_range, row_address, write_tile
from lossforge.kernels.engine.layout import Strided
from lossforge.kernels.math import LN2, LOG2E, exp2, log, product, tanh, widened

MOST_RATIO = tl.constexpr(MOST_MORE)
SHORTEST = tl.constexpr(1e-8)  # in place of a smaller length of a row, as in torch.nn.functional.cosine_similarity


class Marks(NamedTuple):
    """Labels of rows, with an ignored label, and weights of rows: they decide how much a row counts.

    lse: the log-sums of the teacher's softened logits over all its classes, where a row has some of them.
    """

    labels: Strided
    weight: Strided
    lse: Strided = Strided()


class Formula(NamedTuple):
    """A formula of formulas/softmax.py and the factors of its values.

    Attributes:
        terms: (ln p, ln q, p, q, unit, *hyper) → (f, ∂f/∂ln p, ∂f/∂ln q).
        averaged: of a value that is a mean under q of a term linear in ln q and ln p, (ln q, ln p) → that term; else None. The first sweep
            computes such a value. Σ ∂f/∂ln p is then -1, and Σ ∂f/∂ln q is the value.
        hyper: hyper-parameters of terms, or of blend.
        inverse: 1 / T.
        rate: log₂ e / T, computed on the host, because the kernel would keep its own product in a register through its branches.
        scale: factor of the values.
        divisor_ptr: 0-d divisor of the values, or None.
        ignore: the label of rows that do not count.
        center: what is subtracted from the teacher's logits, one a class, or None.
        scale_x, cap_x, scale_t, cap_t: scale and soft cap of the logits and of the teacher's; None without. A scale without a cap is in
            `inverse` and `rate`: it multiplies differences of logits, which a common offset costs no digits.
        soft, hard: the weights of the divergence and of the label's cross entropy; hard is None without the latter.
        unsoftened: log₂ e, times `factor`, where the cross entropy needs a log-sum of its own, because T is not 1; else None.
        factor: the scale of the logits that `inverse` has; None for 1.
        ratio: the teacher's `inverse` over the logits'; None for 1.
        elsewhere: the label of rows whose class is not among these logits, which are some of all; None where they are all.
        reverse: of a teacher's top K, the share of KL(student ‖ teacher); None without.
        blend: (mean of averaged, Σ f, mass, *hyper) → (value, acceptance, the value's derivatives by both sums); None where Σ f, or the
            mean, is the value.
    """

    terms: Callable[..., Any] | None
    averaged: Callable[..., Any] | None
    hyper: Sequence[float]
    inverse: float
    rate: float
    scale: float
    divisor_ptr: Tensor | None
    ignore: int
    center: Tensor | None = None
    scale_x: float | None = None
    cap_x: float | None = None
    scale_t: float | None = None
    cap_t: float | None = None
    soft: float = 1.0
    hard: float | None = None
    unsoftened: float | None = None
    factor: float | None = None
    ratio: float | None = None
    elsewhere: int | None = None
    reverse: float | None = None
    blend: Callable[..., Any] | None = None


Lanes = namedtuple("Lanes", "m_x s_x m_t s_t dot")
"""Sums over each lane's classes, or over rows when joined, relative to the maxima: s = Σ exp(x - m), for logits and teacher.

dot, for a formula with `averaged`, with q's exponentials e: Σ e averaged(q's logit - q's m, p's logit - p's m)."""

Sums = namedtuple("Sums", "m_x s_x m_t s_t dot one own")
"""Lanes, and the sums of the logits alone: one = Σ exp(x - m) at T = 1, own = Σ exp((x - m) / T) (x - m)."""

Hard = namedtuple("Hard", "label logit here valid")
"""The label of each row, the logit of its class, whether that is here, and whether it exists or the row does not count."""

HardColumns = namedtuple("HardColumns", "label ls share")
"""The label, the log-sum at T = 1, and the factor of the gradient of both parts, each (BR, 1)."""

Softmaxes = namedtuple("Softmaxes", "top_x ls_x top_t ls_t")
"""A row's maxima and log-sums of logits and teacher."""

Blend = namedtuple("Blend", "mass of_mean of_sum")
"""The teacher's probability of a row's classes, and the derivatives of a blended value by its two sums."""

RowStats = namedtuple("RowStats", "span to soft h_sum share keep label ls_1 hard mass of_mean of_sum")
"""What is known of rows after their sums. to: where their gradient begins. share: its factor. keep: which rows have one.

label, ls_1, hard: HardColumns. mass, of_mean, of_sum: Blend."""

GradientOp = namedtuple("GradientOp", "gradient formula rows")
"""The operation that writes the gradient."""

Mass = namedtuple("Mass", "of_rows")
"""The teacher's probability of rows' classes, (BR, 1): a record, because a run-time field behind records costs these their constants."""

SlopesOp = namedtuple("SlopesOp", "formula soft mass")
"""The operation that sums f and h. mass: a Mass, of a formula with `blend`."""


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
def hard_of(x, marks, formula, span, keep):
    """Read the labels of rows and the logits of their classes, scaled and capped; before the gradient may take the logits' memory."""
    label = tl.load(row_address(marks.labels, span.outer, span.row), mask=keep, other=-1)
    exists = keep & (label >= 0) & (label < x.classes)
    logit = tl.load(element_address(x, span.outer, span.row, label), mask=exists, other=0.0).to(tl.float32)
    valid = exists | (keep == 0)
    if formula.elsewhere is not None:
        valid = valid | (label == formula.elsewhere)
    return Hard(label, capped(logit, None, formula.scale_x, formula.cap_x), exists, valid)


@triton.jit
def hard_loss(hard, top, ls, formula):
    """Return the cross entropy of rows' labels, 0 where these are elsewhere. ls: the log-sum at T = 1."""
    step = top - hard.logit
    if formula.factor is not None:
        step *= formula.factor
    nll = tl.where(hard.valid, step + ls, float("nan"))
    if formula.elsewhere is not None:
        nll = tl.where(hard.valid & (hard.here == 0), 0.0, nll)
    return nll


@triton.jit
def with_soft(value, formula):
    """Return a divergence times its weight, of weight 0 nothing, even if it is infinite."""
    return tl.where(formula.soft == 0.0, 0.0, formula.soft * value)


@triton.jit
def hard_columns(hard, ls, factor):
    """Return what the gradient with a hard part takes. factor: of the rows' gradients."""
    share = tl.where(hard.valid, factor, float("nan"))
    return HardColumns(hard.label.to(tl.int32)[:, None], ls[:, None], share[:, None])


@triton.jit
def no_blend(of_row):
    """Return a Blend that nothing reads, in the shape of a number a row."""
    return Blend(of_row, of_row, of_row)


@triton.jit
def no_hard(of_row):
    """Return HardColumns that nothing reads, in the shape of a number a row."""
    return HardColumns(of_row[:, None], of_row[:, None], of_row[:, None])


@triton.jit
def with_hard(g, x, column, top, hard, formula):
    """Return the gradient of both parts at a tile of capped logits x, from that of the divergence.

    The factor multiplies their sum, because an infinite one would make nan of slopes of both signs.
    """
    rate = LOG2E
    share = formula.hard
    if formula.factor is not None:
        rate = LOG2E * formula.factor
        share = formula.hard * formula.factor
    p = exp2((x - top) * rate - hard.ls * LOG2E)
    g = tl.where(formula.soft == 0.0, 0.0, g)
    return (g + (p - tl.where(column == hard.label, 1.0, 0.0)) * share) * hard.share


@triton.jit
def log_sum_of(x, soft, formula):
    """Return the log-sum at T = 1 of rows that one tile holds."""
    ls = soft.ls_x
    if formula.unsoftened is not None:
        ls = log(tl.sum(exp2((x - soft.top_x[:, None]) * formula.unsoftened), 1))
    return ls


@triton.jit
def entropy_of(x, soft, formula):
    """Return the entropy of rows that one tile holds."""
    lp = (x - soft.top_x[:, None]) * formula.inverse - soft.ls_x[:, None]
    p = exp2(lp * LOG2E)
    return -tl.sum(tl.where(p == 0.0, 0.0, p * lp), 1)


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
def capped_both(x, t, column, here, mask, formula):
    """Return tiles of logits and teacher in float32, the teacher's less the centre, scaled and capped. here: which classes exist."""
    x, t = widened(x), widened(t)
    if formula.center is not None:
        if here is None:
            t -= tl.load(formula.center + column)
        else:
            t -= tl.load(formula.center + column, mask=here, other=0.0)
    return capped(x, mask, formula.scale_x, formula.cap_x), capped(t, mask, formula.scale_t, formula.cap_t)


@triton.jit
def both(tile, formula, config):
    """Return the tiles of logits and teacher as capped_both does, -inf outside of the row."""
    x, t = capped_both(tile.stored[0], tile.stored[1], tile.column, tile.here, tile.mask, formula)
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
def rate_of_teacher(formula):
    rate = formula.rate
    if formula.ratio is not None:
        rate *= formula.ratio
    return rate


@triton.jit
def as_logits(step, formula):
    """Return differences of a teacher's logits in units of those of the logits: times `inverse` both are without unit."""
    if formula.ratio is not None:
        step *= formula.ratio
    return step


@triton.jit
def accumulate_both(lanes, x, t, formula, SWAP: tl.constexpr):
    """Add tiles (…, L, V) to the running sums of each lane (…, L)."""
    m_x, s_x, m_t, s_t, dot = lanes
    top_x, fade_x, step_x, e_x = step_up(m_x, x, formula.rate)
    top_t, fade_t, step_t, e_t = step_up(m_t, t, rate_of_teacher(formula))
    s_x *= fade_x
    s_t *= fade_t
    if formula.averaged is not None:
        step_t = as_logits(step_t, formula)
        shift_x, shift_t = m_x - top_x, as_logits(m_t - top_t, formula)
        if SWAP:
            dot = weigh(dot, s_x, fade_x, formula.averaged(shift_x, shift_t), e_x, formula.averaged(step_x, step_t))
        else:
            dot = weigh(dot, s_t, fade_t, formula.averaged(shift_t, shift_x), e_t, formula.averaged(step_t, step_x))
    return Lanes(top_x, s_x + tl.sum(e_x, -1), top_t, s_t + tl.sum(e_t, -1), dot)


@triton.jit
def merge_both(lanes, top_x, top_t, formula, SWAP: tl.constexpr):
    """Join the lanes (…, L) of each row, relative to its maxima top_x and top_t, (…, 1) or scalar: s_x, s_t and dot."""
    m_x, s_x, m_t, s_t, dot = lanes
    step_x, step_t = m_x - top_x, m_t - top_t
    fade_x, fade_t = exp2(step_x * formula.rate), exp2(step_t * rate_of_teacher(formula))
    s_x *= fade_x
    s_t *= fade_t
    if formula.averaged is not None:
        step_t = as_logits(step_t, formula)
        if SWAP:
            dot = tl.where(s_x == 0.0, 0.0, dot * fade_x + s_x * formula.averaged(step_x, step_t))
        else:
            dot = tl.where(s_t == 0.0, 0.0, dot * fade_t + s_t * formula.averaged(step_t, step_x))
    return tl.sum(s_x, -1), tl.sum(s_t, -1), tl.sum(dot, -1)


@triton.jit
def closed(dot, total_x, total_t, soft, formula, SWAP: tl.constexpr):
    """Return (value, Σ h) of rows from the results of merge_both and the log-sums."""
    if SWAP:
        value = dot / total_x * formula.inverse + formula.averaged(-soft.ls_x, -soft.ls_t)
        h_sum = value
    else:
        value = dot / total_t * formula.inverse + formula.averaged(-soft.ls_t, -soft.ls_x)
        h_sum = tl.where(value == value, -1.0, -1.0)  # -1 in the shape of value
    return value, h_sum


@triton.jit
def log_softmax(x, top, ls, rate):
    """Return log₂ softmax and softmax of a tile. top and ls: maxima and log-sums of its rows (BR, 1), or of one row."""
    power = (x - top) * rate - ls * LOG2E
    return power, exp2(power)


@triton.jit
def value_and_slope(lp, lq, p, q, unit: tl.constexpr, formula, SWAP: tl.constexpr):
    """Return f and its derivative by the log-softmax of the logits. unit: of lp and lq, see formulas/softmax.py."""
    if SWAP:
        f, _, h = formula.terms(lq, lp, q, p, unit, *formula.hyper)
    else:
        f, h, _ = formula.terms(lp, lq, p, q, unit, *formula.hyper)
    return f, h


@triton.jit
def of_tile(x, t, soft, formula, SWAP: tl.constexpr):
    """Return (f, h, p) of tiles of logits and teacher. soft: their rows' statistics, as log_softmax takes them."""
    lp, p = log_softmax(x, soft.top_x, soft.ls_x, formula.rate)
    lq, q = log_softmax(t, soft.top_t, soft.ls_t, rate_of_teacher(formula))
    f, h = value_and_slope(lp, lq, p, q, LN2, formula, SWAP)
    return f, h, p


@triton.jit
def mass_of(marks, span, keep, soft, formula):
    """Return the teacher's probability of the classes that rows have. It is nan where the log-sum over all is less than that of these."""
    mass = tl.where(keep, 1.0, 1.0)
    if marks.lse.ptr is not None:
        lse = tl.load(row_address(marks.lse, span.outer, span.row), mask=keep, other=0.0).to(tl.float32)
        more = as_logits(soft.top_t, formula) * formula.inverse + soft.ls_t - lse
        found = tl.minimum(exp2(more * LOG2E), 1.0, tl.PropagateNan.ALL)  # above 1 it is rounding
        mass = tl.where(keep, tl.where(more > MOST_RATIO, float("nan"), found), 1.0)
    return mass


@triton.jit
def blended_tile(x, t, soft, mass, formula):
    """Return (f, h, p, q) of tiles of logits and teacher for a formula with `blend`. q: of the classes here alone."""
    lp, p = log_softmax(x, soft.top_x, soft.ls_x, formula.rate)
    lq, q = log_softmax(t, soft.top_t, soft.ls_t, rate_of_teacher(formula))
    f, h, _ = formula.terms(lp, lq, p, q * mass, LN2)
    return f, h, p, q


@triton.jit
def blended_at_logits(h, p, q, h_sum, of_mean, of_sum, share, formula):
    """Return the gradient of a blended value from the slopes of its two sums."""
    g = (h - p * h_sum) * of_sum
    if formula.averaged is not None:
        g += (p - q) * of_mean
    return g * share


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
    top_x, top_t = tl.max(x, 1), tl.max(t, 1)
    step_x, step_t = x - top_x[:, None], t - top_t[:, None]
    e_x, e_t = exp2(step_x * formula.rate), exp2(step_t * rate_of_teacher(formula))
    total_x, total_t = tl.sum(e_x, 1), tl.sum(e_t, 1)
    ls_x, ls_t = log(total_x), log(total_t)
    p, q = product(e_x, (1.0 / total_x)[:, None]), product(e_t, (1.0 / total_t)[:, None])  # equal where the logits are equal
    lp, lq = step_x * formula.inverse - ls_x[:, None], as_logits(step_t, formula) * formula.inverse - ls_t[:, None]
    f, h = value_and_slope(lp, lq, p, q, 1.0, formula, SWAP)
    return Softmaxes(top_x, ls_x, top_t, ls_t), f, h, p


@triton.jit
def one_blended(x, t, marks, span, keep, formula):
    """Return (softmaxes, mean, mass, f, h, p, q) of rows that one tile holds, for a formula with `blend`. mean: of `averaged`, or 0."""
    top_x, top_t = tl.max(x, 1), tl.max(t, 1)
    step_t, step_x = t - top_t[:, None], x - top_x[:, None]
    e_x, e_t = exp2(step_x * formula.rate), exp2(step_t * rate_of_teacher(formula))
    total_x, total_t = tl.sum(e_x, 1), tl.sum(e_t, 1)
    soft = Softmaxes(top_x, log(total_x), top_t, log(total_t))
    p, q = product(e_x, (1.0 / total_x)[:, None]), product(e_t, (1.0 / total_t)[:, None])
    lp = step_x * formula.inverse - soft.ls_x[:, None]
    lq = as_logits(step_t, formula) * formula.inverse - soft.ls_t[:, None]
    mass = mass_of(marks, span, keep, soft, formula)
    f, h, _ = formula.terms(lp, lq, p, q * mass[:, None], 1.0)
    mean = mass * 0.0
    if formula.averaged is not None:
        mean = tl.sum(tl.where(q == 0.0, 0.0, q * formula.averaged(lq, lp)), 1)
    return soft, mean, mass, f, h, p, q


@triton.jit
def cosine_of(squares_x, squares_t, dot):
    """Return 1 - cos of rows, and the factors of x and t in its gradient, from Σ x², Σ t² and Σ x t. A length is at least SHORTEST.

    All are nan where a square overflows.
    """
    size_x, size_t = tl.maximum(tl.sqrt(squares_x), SHORTEST), tl.maximum(tl.sqrt(squares_t), SHORTEST)
    cos = tl.where((squares_x < float("inf")) & (squares_t < float("inf")), dot / size_x / size_t, float("nan"))
    return 1.0 - cos, tl.where(size_x > SHORTEST, cos / size_x / size_x, 0.0), -1.0 / size_x / size_t


@triton.jit
def cosine_tile(x, t, here, formula):
    """Return the Softmaxes and 1 - cos of rows that one tile holds: in place of the teacher's maximum and log-sum are the factors."""
    ls = tl.zeros([x.shape[0]], tl.float32)
    top = ls
    if formula.hard is not None:
        top = tl.max(x, 1)
        ls = log(tl.sum(exp2((x - top[:, None]) * formula.rate), 1))
    x, t = tl.where(here, x, 0.0), tl.where(here, t, 0.0)
    value, of_x, of_t = cosine_of(tl.sum(x * x, 1), tl.sum(t * t, 1), tl.sum(x * t, 1))
    return Softmaxes(top, ls, of_x, of_t), value


@triton.jit
def add_squares(sums, tile, formula, config):
    """Add a tile to the lanes' sums of a cosine, Σ x² in `one`, Σ t² in `own` and Σ x t in `dot`, and with a hard part to those of x."""
    x, t = both(tile, formula, config)
    m, s = sums.m_x, sums.s_x
    if formula.hard is not None:
        m, fade, _, e = step_up(sums.m_x, by_lane(x, config), formula.rate)
        s = s * fade + tl.sum(e, -1)
    if tile.here is not None:
        x, t = tl.where(tile.here, x, 0.0), tl.where(tile.here, t, 0.0)
    x, t = by_lane(x, config), by_lane(t, config)
    dot, one, own = sums.dot + tl.sum(x * t, -1), sums.one + tl.sum(x * x, -1), sums.own + tl.sum(t * t, -1)
    return Sums(m, s, sums.m_t, sums.s_t, dot, one, own)


@triton.jit
def merge_squares(sums, formula):
    """Return the Softmaxes, as cosine_tile does, and 1 - cos of rows from their lanes."""
    value, of_x, of_t = cosine_of(tl.sum(sums.one, 1), tl.sum(sums.own, 1), tl.sum(sums.dot, 1))
    ls = value * 0.0
    top = ls
    if formula.hard is not None:
        top = tl.max(sums.m_x, 1)
        ls = log(tl.sum(sums.s_x * exp2((sums.m_x - top[:, None]) * formula.rate), 1))
    return Softmaxes(top, ls, of_x, of_t), value


@triton.jit
def no_sums(config):
    m = tl.full([config.BR, config.BC // config.VEC], LOWEST, tl.float32)
    s = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
    return Sums(m, s, m, s, s, s, s)


@triton.jit
def add_both(sums, tile, formula, config):
    """Add a tile to the lanes' sums."""
    x, t = both(tile, formula, config)
    x, t = by_lane(x, config), by_lane(t, config)
    lanes = Lanes(sums.m_x, sums.s_x, sums.m_t, sums.s_t, sums.dot)
    found = accumulate_both(lanes, x, t, formula, config.SWAP)
    one, own = sums.one, sums.own
    if formula.unsoftened is not None:
        _, fade, _, e = step_up(sums.m_x, x, formula.unsoftened)
        one = one * fade + tl.sum(e, -1)
    if config.ENTROPY:
        top, fade, step, e = step_up(sums.m_x, x, formula.rate)
        own = weigh(own, sums.s_x * fade, fade, sums.m_x - top, e, step)
    return Sums(found.m_x, found.s_x, found.m_t, found.s_t, found.dot, one, own)


@triton.jit
def merge_one(sums, top_x, formula):
    """Return the log-sum at T = 1 of each row from its lanes."""
    return log(tl.sum(sums.one * exp2((sums.m_x - top_x[:, None]) * formula.unsoftened), -1))


@triton.jit
def merge_own(sums, top_x, formula):
    """Return Σ exp((x - m) / T) (x - m) of each row from its lanes."""
    step = sums.m_x - top_x[:, None]
    fade = exp2(step * formula.rate)
    return tl.sum(tl.where(sums.s_x == 0.0, 0.0, sums.own * fade + sums.s_x * fade * step), -1)


@triton.jit
def add_slopes(sums, tile, of, config):
    """Add a tile's f and h to the lanes' sums."""
    x, t = both(tile, of.formula, config)
    f, h, _ = of_tile(x, t, of.soft, of.formula, config.SWAP)
    return sums[0] + tl.sum(by_lane(f, config), 2), sums[1] + tl.sum(by_lane(h, config), 2)


@triton.jit
def row_stats(span, to, soft, h_sum, share, keep, hard, blend):
    """Return RowStats, of soft and share in columns."""
    mass, of_mean, of_sum = blend.mass[:, None], blend.of_mean[:, None], blend.of_sum[:, None]
    return RowStats(span, to, soft, h_sum[:, None], share, keep, hard.label, hard.ls, hard.share, mass, of_mean, of_sum)


@triton.jit
def add_blended(sums, tile, of, config):
    """Do the same for a formula with `blend`."""
    x, t = both(tile, of.formula, config)
    f, h, _, _ = blended_tile(x, t, of.soft, of.mass.of_rows, of.formula)
    return sums[0] + tl.sum(by_lane(f, config), 2), sums[1] + tl.sum(by_lane(h, config), 2)


@triton.jit
def write_slope(state, tile, of, config):
    """Write the gradient of a tile."""
    x, t = capped_both(tile.stored[0], tile.stored[1], tile.column, tile.here, None, of.formula)
    if config.COSINE:
        g = (of.rows.soft.top_t * x + of.rows.soft.ls_t * t) * of.rows.share
    elif of.formula.blend is not None:
        _, h, p, q = blended_tile(x, t, of.rows.soft, of.rows.mass, of.formula)
        g = blended_at_logits(h, p, q, of.rows.h_sum, of.rows.of_mean, of.rows.of_sum, of.rows.share, of.formula)
    else:
        g = divergence_gradient(x, t, of.rows.soft, of.rows.h_sum, of.rows.share, of.formula, config.SWAP)
    if of.formula.hard is not None:
        g = with_hard(g, x, tile.column, of.rows.soft.top_x, HardColumns(of.rows.label, of.rows.ls_1, of.rows.hard), of.formula)
    write_tile(at_stored(g, x, of.formula), tile, of, config)
    return state

"""Device functions of the row-wise template: a row's target, the online softmax as operation of a sweep, the gradient of a tile.

For a row with hard targets, whose shares are c at their classes t, and dense targets dⱼ:

    m = max xⱼ,  ls = ln Σ exp(xⱼ - m),  lse = m + ls
    loss = Σ c φ(m - x_t + ls) + Σ dⱼ (m - xⱼ + ls)
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.classes.rowwise.additions import focused, focused_sums, margin_logit, moved, with_margin
from lossforge.kernels.classes.rowwise.sweep import (
    class_offset,
    element_address,
    mask_out_of_range,
    row_address,
    sweep,
    write_rows,
    write_tile,
)
from lossforge.kernels.engine.layout import END, Strided, longer
from lossforge.kernels.math import LOG2E, exp2, tanh

NONE = tl.constexpr(2**31 - 1)  # in place of a class, where none is known
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32, because differences to -inf would not be finite


class Logits(NamedTuple):
    """x as (outer, rows, classes) with strides s0, s1, s2. As it is read, it is scaled, soft-capped and shifted by a bias for each class:

    x ← cap · tanh(scale · x / cap), or x ← scale · x + tau · bias. A cap excludes a bias. A row's factor multiplies it after the cap.
    """

    ptr: Tensor | None
    s0: int | None
    s1: int | None
    s2: int | None
    classes: int
    scale: float | None = None
    softcap: float | None = None
    bias_ptr: Tensor | None = None
    tau: float | None = None
    factor_ptr: Tensor | None = None
    factor_s0: int | None = None
    factor_s1: int | None = None


class Labels(NamedTuple):
    """What all rows' targets share: class weights, the ignored index and label smoothing.

    Attributes:
        weight_ptr: (classes,), or None.
        ignore: the ignored index.
        smoothing: of labels, or None.
        spread, focus: every class adds spread · p^focus (-ln p) to a row, times the weights of the row's hard targets. Without spread,
            focus is RowLoss's power.
        margin_ptr: (classes,), or None: the margin of each class, beside the one of all.
        first: class of the first logit, where the logits are those of some classes only; None: of all.
        classes: number of all classes, which have the weights, where the logits are those of some.
        cos_m, sin_m, mm: cos m, sin m and m sin m of the angle m that is added to the target's, as in ArcFace's code; None without.
        margin: what is subtracted from the target's cosine; None without.
    """

    weight_ptr: Tensor | None
    ignore: int
    smoothing: float | None
    spread: float | None
    focus: float | None
    margin_ptr: Tensor | None = None
    first: int | None = None
    classes: int | None = None
    cos_m: float | None = None
    sin_m: float | None = None
    mm: float | None = None
    margin: float | None = None


class Target(NamedTuple):
    """Class indices, those of a mixup pair with their λ, or probabilities. Of one class index, lam is the row's weight."""

    a: Strided
    b: Strided
    lam: Strided
    dense: Strided
    labels: Labels
    end: Any = END


class RowLoss(NamedTuple):
    """A row's loss: φ with its hyper-parameters, z-loss, and the scale and divisor of values; the divisor is in device memory.

    entropy_weight: of what φ gives, see RowwiseCall; None without.
    parameter_ptr: (classes,), or None: φ's last hyper-parameter, one a class.
    power: k of the sum Σ p^k that φ takes beside z; then φ gives its derivative by that sum, too. None without.
    """

    phi: Callable[..., Any]
    hyper: Sequence[float]
    z_loss: float | None
    scale: float
    divisor_ptr: Tensor | None
    entropy_weight: float | None = None
    parameter_ptr: Tensor | None = None
    power: float | None = None


Terms = namedtuple("Terms", "a c_a logit_a b c_b logit_b keep valid")
"""Hard targets of rows: class (-1 if absent), share c of the loss, and logit, of both in a pair; whether a row counts and is valid."""

Softmax = namedtuple("Softmax", "m s u d_sum d_dot ahead best squares above")
"""Sums over each lane's classes, or over rows when joined, relative to their maximum m: s = Σ exp(x - m), u = Σ exp(x - m)(x - m),
d_sum = Σ d, d_dot = Σ d (x - m); with EVEN d_dot = Σ (x - zero); with a focus d = exp(x - m)^γ.

ahead: whether a class comes before the target in the order of the logits. best: the first class of the largest logit, NONE where no logit
is above LOWEST. squares = Σ exp(2 (x - m)), above = Σ (x - zero)."""

RowInputs = namedtuple("RowInputs", "span terms zero factor")
"""What is known of rows before their sweep. zero: the result of `origin`. factor: of `row_factor`."""

SoftmaxOp = namedtuple("SoftmaxOp", "x target rows")
"""The operation that computes a Softmax."""

Shares = namedtuple("Shares", "top p q a b h shift even margin_slope")
"""Factors of a row's gradient: see `slope_tile`. top: the row's maximum. margin_slope: the derivative of the target's logit by the
stored one, but for scale, cap and bias."""

RowStats = namedtuple("RowStats", "span to terms shares keep factor")
"""What is known of rows after their sweep. to: where their gradient begins. keep: which rows may have one. factor: of `row_factor`."""

GradientOp = namedtuple("GradientOp", "x target gradient rows")
"""The operation that writes the gradient."""


@triton.jit
def row_factor(x, outer, row, inside):
    """Return what the logits of rows are multiplied by, where they are."""
    factor = row * 0
    if x.factor_ptr is not None:
        factor = tl.load(x.factor_ptr + outer * x.factor_s0 + row.to(tl.int64) * x.factor_s1, mask=inside, other=1.0).to(tl.float32)
    return factor


@triton.jit
def transform(seen, x, column, mask, factor=None):
    """Scale, cap and shift the logits of classes `column`. Those outside `mask` get no bias; None: all are inside.

    factor: of `row_factor`, in a shape that broadcasts; for logits whose rows have one.
    """
    if x.scale is not None:
        seen = seen * x.scale
    if x.softcap is not None:
        seen = x.softcap * tanh(seen / x.softcap)
    if x.factor_ptr is not None:
        seen = seen * factor
    if x.bias_ptr is not None:
        if mask is None:
            bias = tl.load(x.bias_ptr + column)
        else:
            bias = tl.load(x.bias_ptr + column, mask=mask, other=0.0)
        seen += x.tau * bias.to(tl.float32)
    return seen


@triton.jit
def logits(stored, x, column, mask, other, factor):
    """Return a stored tile in float32, scaled, capped and shifted; `other` where the mask is false."""
    tile = stored.to(tl.float32)
    if mask is None:
        tile = transform(tile, x, column, None, factor[:, None])
    else:
        tile = transform(tile, x, column, (column >= 0) & (column < x.classes), factor[:, None])
        if x.scale is not None or x.softcap is not None or x.factor_ptr is not None or x.bias_ptr is not None:
            tile = tl.where(mask, tile, other)
    return tile


@triton.jit
def all_classes(target, classes):
    """Return the number of all classes of a row."""
    return classes if target.labels.classes is None else target.labels.classes


@triton.jit
def hard_term(index, target, outer, row, inside, x):
    """Return, for a class index of each row: (column, class weight, counts, valid, the class's logit).

    For a class that is not among these logits, the column is -1 and the logit has no meaning.
    """
    t = tl.load(row_address(index, outer, row), mask=inside, other=target.labels.ignore)
    counts = inside & (t != target.labels.ignore)
    valid = (t >= 0) & (t < all_classes(target, x.classes))
    safe = counts & valid
    w = tl.where(counts, 1.0, 0.0)
    if target.labels.weight_ptr is not None:
        w = tl.load(target.labels.weight_ptr + t, mask=safe, other=0.0).to(tl.float32)
    column, here = t, safe
    if target.labels.first is not None:
        column = t - target.labels.first
        here = safe & (column >= 0) & (column < x.classes)
    stored = tl.load(element_address(x, outer, row, column), mask=here, other=0.0).to(tl.float32)
    if target.labels.cos_m is not None:
        stored, _ = margin_logit(stored, target.labels)
    if target.labels.margin_ptr is not None:
        stored -= tl.load(target.labels.margin_ptr + t, mask=here, other=0.0).to(tl.float32)
    logit = transform(stored, x, column, here, row_factor(x, outer, row, inside))
    return tl.where(here, column, -1).to(tl.int32), w, counts, valid | (t == target.labels.ignore), logit


@triton.jit
def row_terms(target, outer, row, inside, x):
    """Read the hard targets of the rows."""
    keep, valid = inside, inside
    a = row * 0 - 1
    b = a
    c_a = (row * 0).to(tl.float32)
    c_b, logit_a, logit_b = c_a, c_a, c_a
    if target.a.ptr is not None:
        a, c_a, keep, valid, logit_a = hard_term(target.a, target, outer, row, inside, x)
        if target.b.ptr is not None:
            b, c_b, keep_b, valid_b, logit_b = hard_term(target.b, target, outer, row, inside, x)
            share = tl.load(row_address(target.lam, outer, row), mask=inside, other=1.0).to(tl.float32)
            c_a, c_b = share * c_a, (1.0 - share) * c_b
            keep, valid = keep | keep_b, valid & valid_b
        elif target.lam.ptr is not None:
            share = tl.load(row_address(target.lam, outer, row), mask=inside, other=0.0).to(tl.float32)
            c_a *= share
            keep = keep & (share != 0.0)
            a = tl.where(keep, a, -1)
        if target.labels.smoothing is not None:
            c_a, c_b = (1.0 - target.labels.smoothing) * c_a, (1.0 - target.labels.smoothing) * c_b
    return Terms(a, c_a, logit_a, b, c_b, logit_b, keep, valid)


@triton.jit
def margin_slope(x, target, span, terms):
    """Return the derivative of the rows' target logits by the stored ones, where these have a margin."""
    slope = tl.full([span.row.shape[0]], 1.0, tl.float32)
    if target.labels.cos_m is not None:
        at = element_address(x, span.outer, span.row, terms.a)
        _, slope = margin_logit(tl.load(at, mask=span.inside & (terms.a >= 0), other=0.0).to(tl.float32), target.labels)
    return slope


@triton.jit
def hard_loss(c, a, logit, top, ls, powers, target, loss):
    """Return c φ, c φ′ and c ∂φ/∂Σ p^k of a hard target of class `a`, with z = lse - x_t; 0 where its share c is 0.

    powers: Σ p^k of the rows, which φ takes where the loss has a power.
    """
    z = tl.where(c == 0.0, 0.0, top - logit + ls)
    hyper = loss.hyper
    if loss.parameter_ptr is not None:
        t = tl.maximum(a, 0)  # a row whose class is not here takes any number, because no column of it is its class's
        if target.labels.first is not None:
            t += target.labels.first
        hyper = longer(hyper, tl.load(loss.parameter_ptr + t).to(tl.float32))
    if loss.power is None:
        value, slope = loss.phi(z, *hyper)
        by_powers = 0.0
    else:
        value, slope, by_powers = loss.phi(z, powers, *hyper)
    return c * value, c * slope, c * by_powers


@triton.jit
def held_weight(entropy, loss):
    """Return the weight of rows by their entropies."""
    return tl.minimum(loss.entropy_weight * entropy, 1.0)


@triton.jit
def dense_tile(target, span, exists, column, x, config):
    """Return the dense targets dⱼ (BR, BC) at classes `column` (BR or 1, BC): probabilities and smoothing, times the class weights.

    exists: for which rows; others have 0.
    """
    inside = (column >= 0) & (column < x.classes)
    mask = exists[:, None] & inside
    d = tl.zeros([span.row.shape[0], column.shape[1]], tl.float32)
    if config.DENSE:
        if target.dense.ptr is not None:
            start = span.outer * target.dense.s0 + span.row.to(tl.int64) * target.dense.s1
            at = target.dense.ptr + start[:, None] + class_offset(column, target.dense.s2, config.WIDE)
            d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if target.labels.smoothing is not None:
                d = d * (1.0 - target.labels.smoothing)
        if target.labels.smoothing is not None:
            d = d + tl.where(mask, target.labels.smoothing / all_classes(target, x.classes), 0.0)
        if target.labels.weight_ptr is not None:
            weight_ptr = target.labels.weight_ptr
            if target.labels.first is not None:
                weight_ptr += target.labels.first
            d = tl.where(mask, d * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32), 0.0)
    return d


@triton.jit
def weighed(d, step, target):
    """Return d · step, 0 where d is 0, even if the logit is -inf; with class weights, which may be infinite, also where step is 0."""
    nothing = d == 0.0
    if target.labels.weight_ptr is not None:
        nothing = nothing | (step == 0.0)
    return tl.where(nothing, 0.0, d * step)


@triton.jit
def shrunk(before, top):
    """Return e^(m - top) for running maxima m ≤ top."""
    return exp2((before - top) * LOG2E)


@triton.jit
def relative(x, top):
    """Return e^(x - top) for x ≤ top, 1 where both are infinite."""
    return tl.where(x == top, 1.0, shrunk(x, top))


@triton.jit
def add_exponential(top, total, x):
    """Add an element to each log-sum-exp that is kept as the maximum so far and the sum relative to it."""
    above = tl.maximum(top, x)
    return above, total * relative(top, above) + relative(x, above)


@triton.jit
def origin(x, span):
    """Return the logit that a row is summed relative to, so that a common offset costs no digits: the first if finite, else 0."""
    first = tl.load(row_address(x, span.outer, span.row), mask=span.inside, other=0.0).to(tl.float32)
    first = transform(first, x, span.row * 0, span.inside, row_factor(x, span.outer, span.row, span.inside))
    return tl.where(tl.abs(first) < float("inf"), first, 0.0)


@triton.jit
def before_target(tile, column, here, terms):
    """Return which classes come before the target in the order of the logits; among equal logits the lower class comes first."""
    logit, a = terms.logit_a[:, None], terms.a[:, None]
    return ((tile > logit) | ((tile == logit) & (column < a))) & (column != a) & here


@triton.jit
def softmax_tile(tile, d, here, column, of, config):
    """Compute the Softmax of rows that one tile holds."""
    top = tl.maximum(tl.max(tile, 1), LOWEST)  # a row of -inf has lse -inf, as in a sweep
    step = tile - top[:, None]
    e = exp2(step * LOG2E)
    u = tl.full([config.BR], 0.0, tl.float32)
    d_sum, d_dot, ahead, best, squares, above = u, u, u, u, u, u
    if config.ENTROPY:
        u = tl.sum(tl.where(e > 0, e * step, 0.0), 1)
    if config.DENSE:
        d_sum = tl.sum(d, 1)
        d_dot = tl.sum(weighed(d, step, of.target), 1)
    if config.EVEN:
        d_dot = tl.sum(tl.where(here, step, 0.0), 1)
    if of.target.labels.focus is not None:
        d_sum, d_dot = focused_sums(step, here, of.target.labels.focus, 1)
    if config.CORRECT:
        ahead = tl.max(before_target(tile, column, here, of.rows.terms).to(tl.int32), 1)
    if config.ARGMAX:
        best = tl.min(tl.where((tile == top[:, None]) & here, column, NONE), 1)
    if config.SQUARES:
        squares = tl.sum(e * e, 1)
    if config.MEAN:
        above = tl.sum(tl.where(here, tile, 0.0), 1)
    return Softmax(top, tl.sum(e, 1), u, d_sum, d_dot, ahead, best, squares, above)


@triton.jit
def no_softmax(config):
    m = tl.full([config.BR, config.BC // config.VEC], LOWEST, tl.float32)
    s = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
    return Softmax(m, s, s, s, s, s, s.to(tl.int32) + NONE, s, s)


@triton.jit
def add_softmax(so_far, tile, of, config):
    """Add a tile to the sums that each lane keeps of its VEC neighbouring classes.

    It takes one exponential an element, because the maximum of a lane's classes is computed before them.
    """
    BR: tl.constexpr = config.BR
    L: tl.constexpr = config.BC // config.VEC
    V: tl.constexpr = config.VEC
    m, s, u, d_sum, d_dot, ahead, best, squares, mean = so_far
    if config.DENSE:  # before the logits are summed: after that bfloat16 takes 85 registers instead of 64, and half as many programs run
        dense = dense_tile(of.target, of.rows.span, of.rows.span.inside, tile.column, of.x, config)
    x = mask_out_of_range(logits(tile.stored[0], of.x, tile.column, tile.mask, float("-inf"), of.rows.factor), tile, config)
    x = with_margin(x, tile.column, of.target, of.rows.terms)
    if config.EVEN or config.MEAN:
        above = x - of.rows.zero[:, None]
        if tile.here is not None:
            above = tl.where(tile.here, above, 0.0)
        above = tl.sum(tl.reshape(above, [BR, L, V]), 2)
        if config.EVEN:
            d_dot += above
        if config.MEAN:
            mean += above
    grouped = tl.reshape(x, [BR, L, V])
    top = tl.maximum(m, tl.max(grouped, 2))
    fade = shrunk(m, top)
    step = grouped - top[:, :, None]
    e = exp2(step * LOG2E)
    if config.ENTROPY:
        before = tl.where(s == 0, 0.0, fade * (u + (m - top) * s))
        u = before + tl.sum(tl.where(e > 0, e * step, 0.0), 2)
    s = s * fade + tl.sum(e, 2)
    if config.SQUARES:
        squares = squares * (fade * fade) + tl.sum(e * e, 2)
    if config.ARGMAX:
        column = tl.reshape(tl.broadcast_to(tile.column, [BR, L * V]), [BR, L, V])
        first = tl.min(tl.where(grouped == top[:, :, None], column, NONE), 2)
        best = tl.where(top > m, first, tl.minimum(best, first))  # the last tile is read before those between
    if config.DENSE:
        d = tl.reshape(dense, [BR, L, V])
        d_dot += weighed(d_sum, m - top, of.target) + tl.sum(weighed(d, step, of.target), 2)
        d_sum += tl.sum(d, 2)
    if of.target.labels.focus is not None:
        d_sum, d_dot = moved(d_sum, d_dot, m - top, of.target.labels.focus)
        if tile.here is None:
            d_more, dot_more = focused_sums(step, None, of.target.labels.focus, 2)
        else:
            here = tl.reshape(tl.broadcast_to(tile.here, [BR, L * V]), [BR, L, V])
            d_more, dot_more = focused_sums(step, here, of.target.labels.focus, 2)
        d_sum += d_more
        d_dot += dot_more
    if config.CORRECT:
        marks = before_target(x, tile.column, True if tile.here is None else tile.here, of.rows.terms)
        ahead = tl.maximum(ahead, tl.max(tl.reshape(marks.to(tl.float32), [BR, L, V]), 2))
    return Softmax(top, s, u, d_sum, d_dot, ahead, best, squares, mean)


@triton.jit
def join_softmax(lanes, of, config):
    """Join the lanes of each row."""
    m, s, u, d_sum, d_dot, ahead, best, squares, above = lanes
    top = tl.max(m, 1)
    step = m - top[:, None]
    e = exp2(step * LOG2E)
    if config.ENTROPY:
        u = tl.where(s == 0, 0.0, e * (u + step * s))
    if config.DENSE:
        d_dot += weighed(d_sum, step, of.target)
    if of.target.labels.focus is not None:
        d_sum, d_dot = moved(d_sum, d_dot, step, of.target.labels.focus)
    d_dot = tl.sum(d_dot, 1)
    if config.EVEN:
        d_dot += of.rows.span.classes * (of.rows.zero - top)
    if config.ARGMAX:
        best = tl.where(m == top[:, None], best, NONE)
    return Softmax(
        top,
        tl.sum(s * e, 1),
        tl.sum(u, 1),
        tl.sum(d_sum, 1),
        d_dot,
        tl.max(ahead, 1).to(tl.int32),
        tl.min(best, 1),
        tl.sum(squares * e * e, 1),
        tl.sum(above, 1),
    )


@triton.jit
def softmax_of(of, reading, config):
    """Compute the Softmax of rows in a sweep."""
    return join_softmax(sweep(no_softmax(config), (of.x,), of.rows.span, reading, add_softmax, of, config), of, config)


@triton.jit
def slope_tile(x, column, d, of, OWN: tl.constexpr, config):
    """Return the gradient at the stored logits. With e = exp(x - m), the row's shares p, h and shift, and the targets' part t:

    e p - e (h (x - m) + shift) - t, times dx/draw; with a focus γ the middle term is e^γ (h (x - m) + shift).

    Without OWN, t leaves out the hard targets.
    """
    shares = of.rows.shares
    if OWN:
        x = with_margin(x, column, of.target, of.rows.terms)
    share = shares.even
    if config.DENSE:
        share += shares.q[:, None] * d
    if OWN and of.target.a.ptr is not None:
        share += tl.where(column == of.rows.terms.a[:, None], shares.a[:, None], 0.0)
    if OWN and of.target.b.ptr is not None:
        share += tl.where(column == of.rows.terms.b[:, None], shares.b[:, None], 0.0)
    step = x - shares.top[:, None]
    e = exp2(step * LOG2E)
    g = e * shares.p[:, None] - share
    if config.BACKWARD and config.ENTROPY:
        g -= tl.where(e > 0, e * (shares.h[:, None] * step + shares.shift[:, None]), 0.0)
    if of.target.labels.focus is not None:
        tl.static_assert(not (config.BACKWARD and config.ENTROPY), "a loss with a focus has no entropy to differentiate")
        step, power = focused(step, of.target.labels.focus)
        g -= power * (shares.h[:, None] * step + shares.shift[:, None])
    if of.x.factor_ptr is not None:
        g *= of.rows.factor[:, None]
    if of.x.softcap is not None:
        t = x / of.x.softcap
        if of.x.factor_ptr is not None:
            t = t / of.rows.factor[:, None]
        g *= 1.0 - t * t
    if of.x.scale is not None:
        g *= of.x.scale
    if OWN and of.target.labels.cos_m is not None:
        g = tl.where(column == of.rows.terms.a[:, None], g * shares.margin_slope[:, None], g)
    return g


@triton.jit
def write_slope(state, tile, of, config):
    """Write the gradient of a tile."""
    d = dense_tile(of.target, of.rows.span, of.rows.terms.keep, tile.column, of.x, config)
    x = logits(tile.stored[0], of.x, tile.column, tile.mask, 0.0, of.rows.factor)
    g = slope_tile(x, tile.column, d, of, config.BACKWARD, config)
    if config.BACKWARD and config.ALL_ROWS:  # the logits of a row that does not count may be nan
        shares = of.rows.shares
        g = tl.where(((shares.p == 0.0) & (shares.q == 0.0) & (shares.h == 0.0))[:, None], 0.0, g)
    write_tile(g, tile, of, config)
    return state


@triton.jit
def write_own(of, t, logit, config):
    """Overwrite the gradient at the targets' classes `t`, stored without hard targets, because comparing every element would cost more."""
    column = t[:, None]
    d = dense_tile(of.target, of.rows.span, of.rows.terms.keep, column, of.x, config)
    g = slope_tile(logit[:, None], column, d, of, True, config)
    at = element_address(of.gradient, of.rows.span.outer, of.rows.span.row, t)
    tl.store(at[:, None], g, mask=(of.rows.keep & (t >= 0))[:, None])


@triton.jit
def write_slopes(of, config):
    """Write the gradient of whole rows in another sweep."""
    write_rows((of.x,), of, write_slope, True, config)
    if of.target.a.ptr is not None:
        tl.debug_barrier()
        write_own(of, of.rows.terms.a, of.rows.terms.logit_a, config)
    if of.target.b.ptr is not None:
        write_own(of, of.rows.terms.b, of.rows.terms.logit_b, config)

"""Device functions of the row-wise template: a row's target, the online softmax as operation of a sweep, the gradient of a tile.

For a row whose targets are hard terms c[j = t] and dense terms dⱼ:

    m = max xⱼ,  ls = ln Σ exp(xⱼ - m),  lse = m + ls
    loss = Σ c φ(m - x_t + ls) + Σ dⱼ (m - xⱼ + ls)
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.layout import END, Strided
from lossforge.kernels.math import LOG2E, exp2, tanh
from lossforge.kernels.row.focus import focused, focused_sums, moved
from lossforge.kernels.row.sweep import class_offset, element_address, existing, row_address, sweep, write_rows, write_tile

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32: differences to it stay finite, as those to -inf do not


class Logits(NamedTuple):
    """x as (outer, rows, classes) with strides s0, s1, s2, scaled, soft-capped and shifted by a bias a class as it is read:

    x ← cap · tanh(scale · x / cap), or x ← scale · x + tau · bias. There is no bias with a cap.
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


class Labels(NamedTuple):
    """What the rows' targets share: class weights, the index that is ignored, label smoothing.

    spread, focus: every class adds spread · p^focus (-ln p) to a row, times the weights of the row's hard targets.
    first, classes: the logits are those of the classes from `first` on, of so many in all, which have the weights; None: of all.
    """

    weight_ptr: Tensor | None
    ignore: int
    smoothing: float | None
    spread: float | None
    focus: float | None
    first: int | None = None
    classes: int | None = None


class Target(NamedTuple):
    """Class indices, those of a mixup pair with their λ, or probabilities."""

    a: Strided
    b: Strided
    lam: Strided
    dense: Strided
    labels: Labels
    end: Any = END


class RowLoss(NamedTuple):
    """A row's loss: φ and its hyper-parameters, z-loss, what values are multiplied by and the divisor on the device."""

    phi: Callable[..., Any]
    hyper: Sequence[float]
    z_loss: float | None
    scale: float
    divisor_ptr: Tensor | None


Terms = namedtuple("Terms", "a c_a logit_a b c_b logit_b keep valid")
"""Hard targets of rows: class, -1 where absent, its share c of the loss, its logit; of a pair both. Whether a row counts, is valid."""

Softmax = namedtuple("Softmax", "m s u d_sum d_dot ahead")
"""Sums of each lane's classes, and of rows when joined, relative to their maximum m: s = Σ exp(x - m), u = Σ exp(x - m)(x - m),
d_sum = Σ d, d_dot = Σ d (x - m); with EVEN d_dot = Σ (x - zero); with a focus d = exp(x - m)^γ.

ahead: whether a class comes before the target in the order of the logits."""

Known = namedtuple("Known", "span terms zero")
"""What is known of rows before their sweep. zero: as `origin` finds it."""

Sums = namedtuple("Sums", "x target rows")
"""The operation that finds a Softmax."""

Shares = namedtuple("Shares", "top p q a b h shift even")
"""What the gradient of a row is made of: see `slope_tile`. top: the row's maximum."""

Summed = namedtuple("Summed", "span to terms shares keep")
"""What is known of rows after it. keep: which may have a gradient. to: where it begins."""

Slope = namedtuple("Slope", "x target gradient rows")
"""The operation that writes the gradient."""


@triton.jit
def transform(seen, x, column, mask):
    """Logits of classes `column` as the loss sees them; those outside `mask` get no bias, without a mask all exist."""
    if x.scale is not None:
        seen = seen * x.scale
    if x.softcap is not None:
        seen = x.softcap * tanh(seen / x.softcap)
    if x.bias_ptr is not None:
        if mask is None:
            bias = tl.load(x.bias_ptr + column)
        else:
            bias = tl.load(x.bias_ptr + column, mask=mask, other=0.0)
        seen += x.tau * bias.to(tl.float32)
    return seen


@triton.jit
def logits(stored, x, column, mask, other):
    """A stored tile as the loss sees it, in float32; `other` where the mask is false."""
    tile = stored.to(tl.float32)
    if mask is None:
        tile = transform(tile, x, column, None)
    else:
        tile = transform(tile, x, column, (column >= 0) & (column < x.classes))
        if x.scale is not None or x.softcap is not None or x.bias_ptr is not None:
            tile = tl.where(mask, tile, other)
    return tile


@triton.jit
def all_classes(target, classes):
    """How many classes a row has in all."""
    return classes if target.labels.classes is None else target.labels.classes


@triton.jit
def hard_term(index, target, outer, row, inside, x):
    """A class index per row: (column, class weight, counts, valid, the class's logit). Of a class that is not here column and logit say
    nothing."""
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
    logit = transform(tl.load(element_address(x, outer, row, column), mask=here, other=0.0).to(tl.float32), x, column, here)
    return tl.where(here, column, -1).to(tl.int32), w, counts, valid | (t == target.labels.ignore), logit


@triton.jit
def row_terms(target, outer, row, inside, x):
    """What the targets of the rows say."""
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
        if target.labels.smoothing is not None:
            c_a, c_b = (1.0 - target.labels.smoothing) * c_a, (1.0 - target.labels.smoothing) * c_b
    return Terms(a, c_a, logit_a, b, c_b, logit_b, keep, valid)


@triton.jit
def hard_loss(c, logit, top, ls, loss):
    """c φ(z) and c φ′(z) of a hard target, z = lse - x_t, or 0 where its share c is."""
    value, slope = loss.phi(tl.where(c == 0.0, 0.0, top - logit + ls), *loss.hyper)
    return c * value, c * slope


@triton.jit
def dense_tile(target, span, exists, column, x, config):
    """Dense part dⱼ (BR, BC) of the targets at classes `column` (BR or 1, BC): probabilities and smoothing, times the class weights."""
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
            d = d * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return d


@triton.jit
def shrunk(before, top):
    """e^(m - top) for running maxima m ≤ top."""
    return exp2((before - top) * LOG2E)


@triton.jit
def origin(x, span):
    """A logit relative to which a row's are summed, so that a common offset costs no digits: its first, if finite."""
    first = tl.load(row_address(x, span.outer, span.row), mask=span.inside, other=0.0).to(tl.float32)
    first = transform(first, x, span.row * 0, span.inside)
    return tl.where(tl.abs(first) < float("inf"), first, 0.0)


@triton.jit
def before_target(tile, column, here, terms):
    """Which classes come before the target in the order of the logits; of equal logits the first comes first."""
    logit, a = terms.logit_a[:, None], terms.a[:, None]
    return ((tile > logit) | ((tile == logit) & (column < a))) & (column != a) & here


@triton.jit
def softmax_tile(tile, d, here, column, of, config):
    """The joined Softmax of rows that one tile holds."""
    top = tl.max(tile, 1)
    step = tile - top[:, None]
    e = exp2(step * LOG2E)
    u = tl.full([config.BR], 0.0, tl.float32)
    d_sum, d_dot, ahead = u, u, u
    if config.ENTROPY:
        u = tl.sum(tl.where(e > 0, e * step, 0.0), 1)
    if config.DENSE:
        d_sum = tl.sum(d, 1)
        d_dot = tl.sum(tl.where(d == 0, 0.0, d * step), 1)
    if config.EVEN:
        d_dot = tl.sum(tl.where(here, step, 0.0), 1)
    if of.target.labels.focus is not None:
        d_sum, d_dot = focused_sums(step, here, of.target.labels.focus, 1)
    if config.CORRECT:
        ahead = tl.max(before_target(tile, column, here, of.rows.terms).to(tl.int32), 1)
    return Softmax(top, tl.sum(e, 1), u, d_sum, d_dot, ahead)


@triton.jit
def no_softmax(config):
    m = tl.full([config.BR, config.BC // config.VEC], LOWEST, tl.float32)
    s = tl.full([config.BR, config.BC // config.VEC], 0.0, tl.float32)
    return Softmax(m, s, s, s, s, s)


@triton.jit
def add_softmax(so_far, tile, of, config):
    """Take a tile into the sums that each lane keeps of its VEC neighbouring classes.

    One exponential an element: the maximum of the classes that a lane takes at once comes first.
    """
    BR: tl.constexpr = config.BR
    L: tl.constexpr = config.BC // config.VEC
    V: tl.constexpr = config.VEC
    m, s, u, d_sum, d_dot, ahead = so_far
    if config.DENSE:  # before the logits are summed: after it bfloat16 takes 85 registers for 64, so that half as many programs run
        dense = dense_tile(of.target, of.rows.span, of.rows.span.inside, tile.column, of.x, config)
    x = existing(logits(tile.stored[0], of.x, tile.column, tile.mask, float("-inf")), tile, config)
    if config.EVEN:
        above = x - of.rows.zero[:, None]
        if tile.here is not None:
            above = tl.where(tile.here, above, 0.0)
        d_dot += tl.sum(tl.reshape(above, [BR, L, V]), 2)
    grouped = tl.reshape(x, [BR, L, V])
    top = tl.maximum(m, tl.max(grouped, 2))
    fade = shrunk(m, top)
    step = grouped - top[:, :, None]
    e = exp2(step * LOG2E)
    if config.ENTROPY:
        before = tl.where(s == 0, 0.0, fade * (u + (m - top) * s))
        u = before + tl.sum(tl.where(e > 0, e * step, 0.0), 2)
    s = s * fade + tl.sum(e, 2)
    if config.DENSE:
        d = tl.reshape(dense, [BR, L, V])
        d_dot += tl.where(d_sum == 0, 0.0, d_sum * (m - top)) + tl.sum(tl.where(d == 0, 0.0, d * step), 2)
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
    return Softmax(top, s, u, d_sum, d_dot, ahead)


@triton.jit
def join_softmax(lanes, of, config):
    """Join the lanes of each row."""
    m, s, u, d_sum, d_dot, ahead = lanes
    top = tl.max(m, 1)
    step = m - top[:, None]
    e = exp2(step * LOG2E)
    if config.ENTROPY:
        u = tl.where(s == 0, 0.0, e * (u + step * s))
    if config.DENSE:
        d_dot = tl.where(d_sum == 0, 0.0, d_dot + d_sum * step)
    if of.target.labels.focus is not None:
        d_sum, d_dot = moved(d_sum, d_dot, step, of.target.labels.focus)
    d_dot = tl.sum(d_dot, 1)
    if config.EVEN:
        d_dot += of.rows.span.classes * (of.rows.zero - top)
    return Softmax(top, tl.sum(s * e, 1), tl.sum(u, 1), tl.sum(d_sum, 1), d_dot, tl.max(ahead, 1).to(tl.int32))


@triton.jit
def softmax_of(of, reading, config):
    """The Softmax of rows in a sweep."""
    return join_softmax(sweep(no_softmax(config), (of.x,), of.rows.span, reading, add_softmax, of, config), of, config)


@triton.jit
def slope_tile(x, column, d, of, OWN: tl.constexpr, config):
    """Gradient at the logits as they lie in memory; e = exp(x - m), which is p up to the row's sum, t the targets' part, with OWN whole:

    e p - e (h (x - m) + shift) - t, times dx/draw; with a focus γ in the middle e^γ (h (x - m) + shift).
    """
    shares = of.rows.shares
    share = shares.q[:, None] * d if config.DENSE else shares.q[:, None] * 0.0
    if OWN and of.target.a.ptr is not None:
        share += tl.where(column == of.rows.terms.a[:, None], shares.a[:, None], 0.0)
    if OWN and of.target.b.ptr is not None:
        share += tl.where(column == of.rows.terms.b[:, None], shares.b[:, None], 0.0)
    share = shares.even + share
    step = x - shares.top[:, None]
    e = exp2(step * LOG2E)
    g = e * shares.p[:, None] - share
    if config.BACKWARD and config.ENTROPY:
        g -= tl.where(e > 0, e * (shares.h[:, None] * step + shares.shift[:, None]), 0.0)
    if of.target.labels.focus is not None:
        tl.static_assert(not (config.BACKWARD and config.ENTROPY), "a loss with a focus has no entropy to differentiate")
        step, power = focused(step, of.target.labels.focus)
        g -= power * (shares.h[:, None] * step + shares.shift[:, None])
    if of.x.softcap is not None:
        t = x / of.x.softcap
        g *= 1.0 - t * t
    if of.x.scale is not None:
        g *= of.x.scale
    return g


@triton.jit
def write_slope(state, tile, of, config):
    """Write the gradient of a tile."""
    d = dense_tile(of.target, of.rows.span, of.rows.span.inside, tile.column, of.x, config)
    x = logits(tile.stored[0], of.x, tile.column, tile.mask, 0.0)
    g = slope_tile(x, tile.column, d, of, config.BACKWARD, config)
    write_tile(g, tile, of, config)
    return state


@triton.jit
def write_own(of, t, logit, config):
    """Write the gradient at the targets' own classes `t`, over what was stored there without them: a comparison an element costs more."""
    column = t[:, None]
    d = dense_tile(of.target, of.rows.span, of.rows.keep, column, of.x, config)
    g = slope_tile(logit[:, None], column, d, of, True, config)
    at = element_address(of.gradient, of.rows.span.outer, of.rows.span.row, t)
    tl.store(at[:, None], g, mask=(of.rows.keep & (t >= 0))[:, None])


@triton.jit
def write_slopes(of, config):
    """Write the gradient of whole rows in a sweep of their own."""
    write_rows((of.x,), of, write_slope, True, config)
    if of.target.a.ptr is not None:
        tl.debug_barrier()
        write_own(of, of.rows.terms.a, of.rows.terms.logit_a, config)
    if of.target.b.ptr is not None:
        write_own(of, of.rows.terms.b, of.rows.terms.logit_b, config)

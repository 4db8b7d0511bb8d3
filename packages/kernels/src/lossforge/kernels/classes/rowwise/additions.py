"""Device functions of the row-wise template for what may be added to its softmax.

A margin on the target's logit, before any other step: for cosines x = cos θ,

    ψ(x) = cos(θ + angle) - margin,  ψ′(x) = sin(θ + angle) / sin θ

Beyond θ = π - angle, where the cosine of the larger angle would rise again, ψ(x) = x - angle sin(angle) - margin and ψ′(x) = 1. The square
of sin θ is at least NARROW, so that the slope is finite at x = 1.

Sums of powers of every class's probability: a loss's contribution of every class, spread · p^γ (-ln p), times the weights c of the row's
targets; and S = Σ p^γ, which a formula φ(z, S) takes.

With steps x - m from the row's maximum, ls = ln Σ exp(x - m), A = Σ e^(γ step) and B = Σ e^(γ step) step, which one sweep computes,

    value = c spread e^(-γ ls) (ls A - B),    slope = c spread e^(-γ ls) (A + γ (B - ls A))
    gradient = p slope - c spread e^(-γ ls) e^(γ step) (γ step + 1 - γ ls)

Classes of probability 0 add nothing, except at γ = 0, where every class has the factor 1 and they make the value infinite. And

    S = e^(-γ ls) A,    with the slope s = Σ c ∂φ/∂S the gradient is γ s (e^(-γ ls) e^(γ step) - p S)
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp, exp2

NARROW = tl.constexpr(1e-7)  # below 1 - x² of the float32 before 1
FAR = tl.constexpr(-1e30)  # step of a class of probability 0: finite, so that its product with 0 is 0


@triton.jit
def focused(step, focus):
    """Return the step, at least FAR, and e^(γ step): 1 at γ = 0; 0 at other γ where the step is FAR."""
    step = tl.maximum(step, FAR, tl.PropagateNan.ALL)
    return step, exp2(focus * (step * LOG2E))


@triton.jit
def focused_sums(step, inside, focus, axis: tl.constexpr):
    """Return A and B along `axis`, over the classes `inside`; None: all."""
    step, power = focused(step, focus)
    if inside is not None:
        power = tl.where(inside, power, 0.0)
    return tl.sum(power, axis), tl.sum(power * step, axis)


@triton.jit
def moved(a, b, step, focus):
    """Return A and B relative to another maximum; `step`: the old one less the new one."""
    step, fade = focused(step, focus)
    return fade * a, fade * (b + step * a)


@triton.jit
def spread_of(c, ls, labels):
    """Return c spread e^(-γ ls)."""
    return c * labels.spread * exp(-labels.focus * ls)


@triton.jit
def spread_row(a, b, ls, h, focus):
    """Return value and slope of a row; h: the result of spread_of."""
    whole = tl.where(b < 0.5 * FAR, float("-inf"), b)  # γ = 0 and a class of probability 0: infinite
    return h * (ls * a - whole), h * (a + focus * (b - ls * a))


@triton.jit
def slope_factors(h, ls, labels):
    """Return the factors h and shift of `slope_tile`: γ h and h (1 - γ ls). An infinite h becomes nan: its terms have both signs.

    Without a spread h is the result of `powers_slope`: the factors are 0 and -h.
    """
    h += 0.0 * h
    if labels.spread is None:
        h_share, shift = 0.0 * h, -h
    else:
        h_share, shift = labels.focus * h, h * (1.0 - labels.focus * ls)
    return h_share, shift


@triton.jit
def powers_of(a, ls, power):
    """Return S of rows."""
    return a * exp(-power * ls)


@triton.jit
def powers_slope(slope, ls, power):
    """Return γ s e^(-γ ls)."""
    return power * slope * exp(-power * ls)


@triton.jit
def margin_logit(x, labels):
    """Return ψ(x) and ψ′(x)."""
    near = tl.clamp(x, -1.0, 1.0)
    square = (1.0 - near) * (1.0 + near)
    sine = tl.sqrt(tl.maximum(square, NARROW))
    before = x > -labels.cos_m
    value = tl.where(before, x * labels.cos_m - sine * labels.sin_m, x - labels.mm) - labels.margin
    slope = labels.cos_m + tl.where(square >= NARROW, near * labels.sin_m / sine, 0.0)
    return value, tl.where(before, slope, 1.0)


@triton.jit
def with_margin(x, column, target, terms):
    """Return a tile of logits with those of the rows' targets in their places."""
    if target.labels.cos_m is not None:
        x = tl.where(column == terms.a[:, None], terms.logit_a[:, None], x)
    return x

"""Device functions of the row-wise template for what every class adds to a row: spread · p^γ (-ln p), times the weights c of its targets.

With steps x - m from the row's maximum, ls = ln Σ exp(x - m), A = Σ e^(γ step) and B = Σ e^(γ step) step, which one sweep finds,

    value = c spread e^(-γ ls) (ls A - B),    slope = c spread e^(-γ ls) (A + γ (B - ls A))
    gradient = p slope - c spread e^(-γ ls) e^(γ step) (γ step + 1 - γ ls)

Classes of probability 0 add nothing; at γ = 0, which counts all alike, they make the value infinite.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LOG2E, exp, exp2


@triton.jit
def focused(step, focus):
    """e^(γ step) and γ step; 1 and 0 at γ = 0, also where a step is -inf."""
    t = tl.where(focus == 0.0, 0.0, focus * step)
    return exp2(t * LOG2E), t


@triton.jit
def focused_sums(step, inside, focus, axis: tl.constexpr):
    """A and B along `axis`, of the classes `inside`; None: all."""
    power, _ = focused(step, focus)
    if inside is not None:
        power = tl.where(inside, power, 0.0)
    return tl.sum(power, axis), tl.sum(tl.where(power == 0.0, 0.0, power * step), axis)


@triton.jit
def moved(a, b, step, focus):
    """A and B relative to another maximum, `step` from the one before."""
    fade, _ = focused(step, focus)
    return fade * a, tl.where(a == 0.0, 0.0, fade * (b + step * a))


@triton.jit
def spread_row(a, b, ls, h_share, focus):
    """Value and slope of a row."""
    return h_share * (ls * a - b), h_share * (a + tl.where(focus == 0.0, 0.0, focus * (b - ls * a)))


@triton.jit
def spread_shares(c, ls, labels):
    """What `slope_tile` multiplies by and adds, h and shift: c spread e^(-γ ls) and 1 - γ ls."""
    return c * labels.spread * exp(-labels.focus * ls), 1.0 - labels.focus * ls

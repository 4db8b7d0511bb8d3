"""Losses of a number x beside its target y.

Absolute and squared error, Huber loss and smooth L1 loss of d = x - y, with c = min(max(d, -δ), δ):

absolute     L = |d|                                                       dL/dx = sign(d), 0 at d = 0
squared      L = d²                                                        dL/dx = 2 d
Huber        L = ½ d² if |d| ≤ δ else δ (|d| - ½ δ) = c (d - ½ c)          dL/dx = c
smooth L1    Huber's divided by δ = β                                      dL/dx = c / β

Of two boxes absolute error and smooth L1 loss are summed over their four coordinates.

Negative log-likelihoods of a target y under a model of its noise.

Normal, of mean x and variance v, which is at least eps:

    L = ½ (ln v + d²/v), d = x - y      dL/dx = d/v      dL/dy = -d/v      dL/dv = ½ (1 - d²/v) / v

and with `full` ½ ln 2π more. v = eps passes the gradient on, as torch's clamp without gradient does.

Poisson, of rate r = eˣ, or r = x with l = ln(x + eps):

    L = r - y l + s(y)                  dL/dx = r - y, or 1 - y / (x + eps)        dL/dy = s'(y) - l

with Stirling's s(y) = y ln y - y + ½ ln 2πy where y > 1 under `full`, else 0. A count of 0 adds r alone, at a rate of 0 or infinity too.
"""

import triton
import triton.language as tl

from lossforge.kernels.math import LN2, LOG2E, exp2, log


@triton.jit
def l1(x, y):
    d = x - y
    return tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))


@triton.jit
def mse(x, y):
    d = x - y
    return d * d, 2.0 * d


@triton.jit
def clamp(d, bound):
    """Limit d to ±bound; nan stays nan."""
    return tl.minimum(tl.maximum(d, -bound, propagate_nan=tl.PropagateNan.ALL), bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def huber(x, y, delta):
    d = x - y
    c = clamp(d, delta)
    return c * (d - 0.5 * c), c


@triton.jit
def smooth_l1(x, y, beta):
    """Compute the smooth L1 loss for β > 0. If 1 / β overflows, β counts as 2⁻¹²⁷."""
    d = x - y
    s = clamp(d * tl.minimum(1.0 / beta, 1.7014118346046923e38), 1.0)
    return s * (d - (0.5 * beta) * s), s


@triton.jit
def box_l1(a1, b1, c1, d1, a2, b2, c2, d2):
    a, da = l1(a1, a2)
    b, db = l1(b1, b2)
    c, dc = l1(c1, c2)
    d, dd = l1(d1, d2)
    return (a + b) + (c + d), da, db, dc, dd, -da, -db, -dc, -dd


@triton.jit
def box_smooth_l1(a1, b1, c1, d1, a2, b2, c2, d2, beta):
    a, da = smooth_l1(a1, a2, beta)
    b, db = smooth_l1(b1, b2, beta)
    c, dc = smooth_l1(c1, c2, beta)
    d, dd = smooth_l1(d1, d2, beta)
    return (a + b) + (c + d), da, db, dc, dd, -da, -db, -dc, -dd


@triton.jit
def gaussian_nll(x, y, var, full, eps):
    v = tl.where(var < 0.0, float("nan"), tl.maximum(var, eps, propagate_nan=tl.PropagateNan.ALL))
    d = x - y
    slope = d / v
    square = d * slope
    return 0.5 * (log(v) + square) + 0.9189385332046727 * full, slope, -slope, (0.5 - 0.5 * square) / v


@triton.jit
def exponential(x):
    """Return eˣ with a relative error of 3e-7 for any x. `exp` rounds x log₂ e, which costs a rate of e³⁰ its last four bits."""
    t = x * LOG2E
    lost = tl.fma(x, LOG2E, -t) + x * 1.925963033500e-8  # what t lacks of x log₂ e, and LOG2E of log₂ e
    return exp2(t) * tl.where(lost == lost, 1.0 + LN2 * lost, 1.0)


@triton.jit
def times_log(y, log_rate):
    return tl.where((y == 0.0) & (tl.abs(log_rate) == float("inf")), 0.0, y * log_rate)


@triton.jit
def poisson_nll(x, y, log_input, full, eps):
    of_log = log_input != 0.0
    rate = tl.where(of_log, exponential(x), x)
    log_rate = tl.where(of_log, x, log(x + eps))
    slope = tl.where(of_log, rate - y, 1.0 - y / (x + eps))
    s = tl.maximum(y, 1.0)
    log_s = log(s)
    stirling = (full != 0.0) & (y > 1.0)
    value = rate - times_log(y, log_rate) + tl.where(stirling, s * log_s - s + 0.5 * log_s + 0.9189385332046727, 0.0)
    return value, slope, tl.where(stirling, log_s + 0.5 / s, 0.0) - log_rate


@triton.jit
def poisson_nll_log(x, y, log_input, full, eps):
    rate = exponential(x)
    return rate - times_log(y, x), rate - y, -x


@triton.jit
def is_plain(log_input, full, eps):
    return (log_input != 0.0) & (full == 0.0)

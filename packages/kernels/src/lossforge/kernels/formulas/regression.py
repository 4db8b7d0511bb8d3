"""Absolute and squared error, Huber loss and smooth L1 loss of d = x - y, with c = min(max(d, -δ), δ):

absolute     L = |d|                                                       dL/dx = sign(d), 0 at d = 0
squared      L = d²                                                        dL/dx = 2 d
Huber        L = ½ d² if |d| ≤ δ else δ (|d| - ½ δ) = c (d - ½ c)          dL/dx = c
smooth L1    Huber's divided by δ = β                                      dL/dx = c / β

Of two boxes absolute error and smooth L1 loss are summed over their four coordinates.
"""

import triton
import triton.language as tl


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

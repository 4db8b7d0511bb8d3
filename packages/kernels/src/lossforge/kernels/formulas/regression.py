"""Squared error, Huber loss and smooth L1 loss of d = x - y, with c = min(max(d, -δ), δ):

squared      L = d²                                                        dL/dx = 2 d
Huber        L = ½ d² if |d| ≤ δ else δ (|d| - ½ δ) = c (d - ½ c)          dL/dx = c
smooth L1    Huber's divided by δ = β                                      dL/dx = c / β
"""

import triton
import triton.language as tl


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

"""Absolute error: L = |x - y|, dL/dx = sign(x - y), 0 at x = y."""

import triton
import triton.language as tl


@triton.jit
def l1(x, y):
    d = x - y
    return tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))

"""Absolute and smooth absolute error of two boxes, summed over their four coordinates: `l1.py` and `regression.py`, four times."""

import triton
import triton.language as tl  # noqa: F401

from lossforge.kernels.formulas.l1 import l1
from lossforge.kernels.formulas.regression import smooth_l1


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

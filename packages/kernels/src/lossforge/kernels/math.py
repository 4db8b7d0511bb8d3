"""Device functions that formulas share. Plain `tl` arithmetic: no libdevice, so the interpreter runs them too."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def exp(x):
    """eˣ through the hardware's base-2 exponential; 0 below about -87."""
    return tl.exp2(x * LOG2E)


@triton.jit
def log(x):
    """ln x for x ≥ 0."""
    return tl.log2(x) * LN2


@triton.jit
def log1p_unit(e):
    """ln(1 + e) for e in [0, 1]: e times a minimax polynomial; relative error 2e-7, where ln(1 + e) taken literally loses every digit."""
    p = e * 5.232690833508968e-3 - 2.9505228623747826e-2
    p = e * p + 7.822594046592712e-2
    p = e * p - 1.3663245737552643e-1
    p = e * p + 1.9106008112430573e-1
    p = e * p - 2.484298199415207e-1
    p = e * p + 3.331909775733948e-1
    p = e * p - 4.999949336051941e-1
    return e * (e * p + 1.0)


@triton.jit
def logistic(x):
    """σ(x), σ(-x) and ln(1 + e^-|x|), which share one exponential; neither σ loses digits by 1 - σ."""
    e = exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    positive = x >= 0
    return tl.where(positive, r, e * r), tl.where(positive, e * r, r), log1p_unit(e)


@triton.jit
def tanh(x):
    """tanh x; near 0 the series, where (1 - e) / (1 + e) would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.05396825397 + square * 0.02186948854))))
    e = exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def powers(q, gamma):
    """q^γ and q^(γ-1) for q in [0, 1], γ ≥ 0. γ is uniform, so the branch costs nothing; 0 takes its limit, never inf."""
    if gamma == 2.0:
        power, lower = q * q, q
    elif gamma == 1.0:
        power, lower = q, q * 0.0 + 1.0
    elif gamma == 0.0:
        power, lower = q * 0.0 + 1.0, q * 0.0
    else:
        q = tl.maximum(q, TINY, propagate_nan=tl.PropagateNan.ALL)
        lower = tl.exp2((gamma - 1.0) * tl.log2(q))
        power = lower * q
    return power, lower

"""Device functions that formulas share. They use no libdevice, so that the interpreter runs them too.

Compiled, exp2 and reciprocal are the GPU's approximate instructions, without the code around them for subnormal numbers. `tl.exp2` and a
division would cost three to eight more instructions an element, and instructions limit the speed in half precision. The relative errors
are 2⁻²² and 2⁻²³. Results below the smallest normal float32 are 0.
"""

from lossforge.kernels.availability import TRITON, missing_triton

if not TRITON:
    raise missing_triton()

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HALF_PI = tl.constexpr(1.5707963267948966)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def hold(x):
    """Return x, which a derived gradient takes for a constant: its slope is 0, as that of torch's `x.detach()`."""
    return x


@triton.jit
def widened(x):
    """Return x in float32. Two neighbours in bfloat16 share a register; each takes one instruction here, and 1.5 by Triton's conversion."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        wide = x.to(tl.float32)
    else:
        halves: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        wide = tl.inline_asm_elementwise(halves, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return wide


@triton.jit
def exp2(x):
    """Return 2ˣ for float32."""
    if INTERPRETED:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return power


@triton.jit
def log2(x):
    """Return log₂ x for float32 from the smallest normal number up."""
    if INTERPRETED:
        exponent = tl.log2(x)
    else:
        exponent = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return exponent


@triton.jit
def log2_nearest(x):
    """Return log₂ x, rounded to nearest, for finite float32 from the smallest normal number up; nan stays nan. It takes seven instructions
    more than log2.

    The GPU's instruction truncates: from 2⁻¹⁶ to 2⁻⁸ its mean error is 8e-7, always of one sign, so that a sum over classes keeps it.
    Here the instruction takes only m, between √½ and √2, where x = 2ᵏ m. Adding k to the bits of 3 · 2²² gives the float32 3 · 2²² + k.
    """
    if INTERPRETED:
        exponent = tl.log2(x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        k = (bits - 0x3F3504F3) >> 23  # the bits of √½
        m = (bits - (k << 23)).to(tl.float32, bitcast=True)
        exponent = log2(m) + ((k + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0 + x * 0.0)
    return exponent


@triton.jit
def log2_subnormal(x):
    """Return log₂ x for float32, including subnormal numbers. It takes three instructions more than log2."""
    if INTERPRETED:
        exponent = tl.log2(x)
    else:
        exponent = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return exponent


@triton.jit
def reciprocal(x):
    """Return 1 / x for float32."""
    if INTERPRETED:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return inverse


@triton.jit
def product(x, y):
    """Return x · y for float32, rounded before anything is added. So products of equal factors are equal, and their difference is 0."""
    if INTERPRETED:
        z = x * y
    else:
        z = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)
    return z


@triton.jit
def exp(x):
    """Return eˣ; 0 below about -87."""
    return exp2(x * LOG2E)


@triton.jit
def decay(x):
    """Return e^-|x|. As an operand |x| is free; LLVM would spend an instruction on it."""
    if INTERPRETED:
        power = tl.exp2(tl.abs(x) * -1.4426950408889634)
    else:
        power = tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $1; mul.f32 t, t, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return power


@triton.jit
def log(x):
    """Return ln x for x ≥ 0."""
    return tl.log2(x) * LN2


@triton.jit
def log1p_unit(e):
    """Return ln(1 + e) for e in [0, 1]: e times a minimax polynomial, with relative error 2e-7. The formula as written would lose every
    digit of a small e."""
    p = e * 5.232690833508968e-3 - 2.9505228623747826e-2
    p = e * p + 7.822594046592712e-2
    p = e * p - 1.3663245737552643e-1
    p = e * p + 1.9106008112430573e-1
    p = e * p - 2.484298199415207e-1
    p = e * p + 3.331909775733948e-1
    p = e * p - 4.999949336051941e-1
    return e * (e * p + 1.0)


@triton.jit
def log1p_ratio(e, v):
    """Return ln(1 + e) for e in [0, 1], from e and v = e / (1 + e), with relative error 2.4e-7.

    Replacing 1 + e by 1 / (1 + e) turns e into -v and v into -e. The logarithm and e + v then only change their signs. So their quotient
    depends on e v alone, and its polynomial has half the terms of the polynomial in e for ln(1 + e) / e.
    """
    w = e * v
    p = w * 6.0489533933876644e-4 - 3.4937162196146023e-3
    p = w * p + 1.6653186916134018e-2
    p = w * p - 8.3332503902326896e-2
    return (e + v) * (w * p + 0.49999999177017168)


@triton.jit
def half_logistic(x):
    """Return σ(|x|), σ(-|x|) and ln(1 + e^-|x|), which share one exponential."""
    e = decay(x)
    r = reciprocal(1.0 + e)
    v = e * r
    return r, v, log1p_ratio(e, v)


@triton.jit
def logistic(x):
    """Return σ(x), σ(-x) and ln(1 + e^-|x|). Neither σ is computed as 1 - σ, which would lose digits."""
    larger, smaller, log1p = half_logistic(x)
    positive = x >= 0
    return tl.where(positive, larger, smaller), tl.where(positive, smaller, larger), log1p


@triton.jit
def logistic_hard(x, positive):
    """Return σ(u), σ(-u) and softplus(u) for u = -x where `positive`, else x."""
    larger, smaller, log1p = half_logistic(x)
    above = (x >= 0) != positive
    return tl.where(above, larger, smaller), tl.where(above, smaller, larger), tl.where(above, tl.abs(x), 0.0) + log1p


@triton.jit
def tanh(x):
    """Return tanh x: by its series near 0, where (1 - e) / (1 + e) would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.05396825397 + square * 0.02186948854))))
    e = exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def complement(t):
    """Return 1 - e^-t and e^-t for t ≥ 0. For small t the difference is computed by its series, which keeps its digits."""
    e = exp(-t)
    series = 1.0 - t * (1 / 6) * (1.0 - t * (1 / 7) * (1.0 - t * (1 / 8)))
    series = 1.0 - t * (1 / 2) * (1.0 - t * (1 / 3) * (1.0 - t * (1 / 4) * (1.0 - t * (1 / 5) * series)))
    return tl.where(t < 0.5, t * series, 1.0 - e), e


@triton.jit
def atan_ratio(y, x):
    """Return atan(y / x), also where x is 0; 0 where both are 0. Relative error 4e-7."""
    u, v = tl.abs(y), tl.abs(x)
    larger = tl.maximum(u, v, propagate_nan=tl.PropagateNan.ALL)
    a = tl.minimum(u, v) * reciprocal(tl.maximum(larger, TINY, propagate_nan=tl.PropagateNan.ALL))
    z = a * a
    p = z * 2.849889931276706e-3 - 1.606863187083046e-2
    p = z * p + 4.269152717905027e-2
    p = z * p - 7.50429553782718e-2
    p = z * p + 1.0640934695579185e-1
    p = z * p - 1.4203644710946237e-1
    p = z * p + 1.999261943759347e-1
    p = z * p - 3.3333073348850284e-1
    p = product(a, z * p + 1.0)
    angle = tl.where(u > v, HALF_PI - p, p)
    return tl.where((y < 0) != (x < 0), -angle, angle)


@triton.jit
def power(q, gamma):
    """Return q^γ for q in [0, 1], γ ≥ 0; at q = 0 its limit."""
    return exp2(gamma * log2(tl.maximum(q, TINY, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def powers(q, gamma):
    """Return q^γ and q^(γ-1) for q in [0, 1], γ ≥ 0; at q = 0 their limits, but never inf."""
    base = tl.maximum(q, TINY, propagate_nan=tl.PropagateNan.ALL)
    lower = exp2((gamma - 1.0) * log2(base))
    return tl.where(gamma == 0.0, 1.0, base * lower), lower  # 1 at γ = 0, where base · lower would carry the error of log2's last bit

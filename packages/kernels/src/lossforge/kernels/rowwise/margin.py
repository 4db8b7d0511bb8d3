"""Device functions of the row-wise template for a margin on the target's logit, before any other step: for cosines x = cos θ,

    ψ(x) = cos(θ + angle) - margin,  ψ′(x) = sin(θ + angle) / sin θ

Beyond θ = π - angle, where the cosine of the larger angle would rise again, ψ(x) = x - angle sin(angle) - margin and ψ′(x) = 1. The square
of sin θ is at least NARROW, so that the slope is finite at x = 1.
"""

import triton
import triton.language as tl

NARROW = tl.constexpr(1e-7)  # below 1 - x² of the float32 before 1


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

"""How well two boxes match, as torchvision.ops.box_iou and its variants say it: 1 minus the loss of formulas/box.py, without derivatives.

I/U is divided directly, because 1 - (1 - I/U) would lose the digits of boxes that overlap little.
"""

import triton
import triton.language as tl

from lossforge.kernels.formulas.box import V_SCALE, axis, distance_loss, larger, overlap_loss
from lossforge.kernels.formulas.rotated import bhattacharyya, root
from lossforge.kernels.math import atan_ratio, complement, product


@triton.jit
def ratio(across, down, union, eps):
    """Return I/U, rounded to nearest, so that it is 1 for equal boxes whose area is at least eps."""
    _, _, wi, _, _, _, _, _, _ = across
    _, _, hi, _, _, _, _, _, _ = down
    return tl.div_rn(tl.where((wi > 0) & (hi > 0), product(wi, hi), 0.0), larger(union, eps))


@triton.jit
def iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    _, union, _, _ = overlap_loss(across, down, eps)
    return ratio(across, down, union, eps)


@triton.jit
def giou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    _, _, _, wc, _, _, _, _, _ = across
    _, _, _, hc, _, _, _, _, _ = down
    _, union, _, _ = overlap_loss(across, down, eps)
    hull = product(wc, hc)
    return ratio(across, down, union, eps) - (hull - union) / larger(hull, eps)


@triton.jit
def diou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    _, union, _, _ = overlap_loss(across, down, eps)
    distance, _, _, _, _ = distance_loss(across, down, eps)
    return ratio(across, down, union, eps) - distance


@triton.jit
def ciou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    across = axis(x1, x2, u1, u2)
    down = axis(y1, y2, v1, v2)
    w1, w2, _, _, _, _, _, _, _ = across
    h1, h2, _, _, _, _, _, _, _ = down
    loss, union, _, _ = overlap_loss(across, down, eps)
    distance, _, _, _, _ = distance_loss(across, down, eps)
    angle = atan_ratio(w2, h2) - atan_ratio(w1, h1)
    v = V_SCALE * angle * angle
    return ratio(across, down, union, eps) - distance - v * v / larger(loss + v, eps)


@triton.jit
def probiou(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps):
    """Return 1 - √(1 - e^-D) of rotated boxes."""
    square, _ = complement(bhattacharyya(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps))
    return 1.0 - root(square, eps)

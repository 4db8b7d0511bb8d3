"""Custom losses, from a formula each. Check and train them:

uv run python -m lossforge.losses.check examples/my_loss.py:margin_bce
uv run experiments/train.py loss=custom loss.target=examples/my_loss.py:margin_bce loss.hyper.margin=0.5
"""

import triton
import triton.language as tl

from lossforge.kernels.math import logistic
from lossforge.losses import elementwise


@elementwise(hyper={"margin": 1.0})
@triton.jit
def margin_bce(x, y, margin):
    """Binary cross entropy that asks for a margin: L = softplus(margin - (2y - 1) x). Its gradient is derived."""
    u = margin - (2.0 * y - 1.0) * x
    _, _, log1p = logistic(u)  # ln(1 + exp(-|u|)), exact at any u
    return tl.maximum(u, 0.0) + log1p


@elementwise(hyper={"margin": 1.0})
@triton.jit
def squared_hinge(x, y, margin):
    """L = max(margin - (2y - 1) x, 0)², with its gradient written out."""
    sign = 2.0 * y - 1.0
    short = tl.maximum(margin - sign * x, 0.0)
    return short * short, -2.0 * sign * short

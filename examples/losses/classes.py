"""Classes of unequal size, and scores of all probabilities: formulas of z = -ln p of the row's class, and of sums s = Σ p^k over a row."""

import triton
import triton.language as tl
from torch import Tensor

from lossforge.losses import rowwise


@rowwise
@triton.jit
def nll(z):
    """L = z."""
    return z


def ldam_loss(input: Tensor, target: Tensor, class_counts: Tensor, scale: float = 30.0) -> Tensor:
    """Return LDAM's loss of cosines, whose margins m = 0.5 (min n / n)^(1/4) are larger for rarer classes (arXiv 1906.07413)."""
    return nll(input, target, class_margin=0.5 * (class_counts.min() / class_counts) ** 0.25, scale=scale)


def balanced_softmax_loss(input: Tensor, target: Tensor, class_counts: Tensor) -> Tensor:
    """Return balanced softmax, cross entropy of x + ln n (arXiv 2007.10740). Predict with x alone."""
    return nll(input, target, class_bias=class_counts.log())


@rowwise(hyper={"gamma": 2.0})
@triton.jit
def class_focal(z, gamma):
    """L = (1 - p)^γ z, where γ may be a tensor of one number a class: larger for classes that are easy (arXiv 1708.02002)."""
    wrong = tl.maximum(1.0 - tl.exp(-z), 1e-7)
    return tl.exp2(gamma * tl.log2(wrong)) * z


@rowwise(hyper={"k": 2.0}, power="k")
@triton.jit
def power_score(z, s, k):
    """L = (1 - p^(k-1)) / (k - 1) - (1 - s) / k, the proper score of Tsallis entropy: cross entropy at k = 1, half the Brier score at 2.

    It is bounded for k > 1, and the bi-tempered loss (arXiv 1906.03361) of t1 = 2 - k and t2 = 1.
    """
    q = k - 1.0
    own = tl.where(q == 0.0, z, (1.0 - tl.exp(-q * z)) / tl.where(q == 0.0, 1.0, q))
    return own - (1.0 - s) / k

"""Varifocal loss with the weight held, as RT-DETR and D-FINE have it: no gradient goes through α p^γ. It needs Triton."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.math import hold, logistic, power
from lossforge.losses import elementwise


def _reference(x: Tensor, y: Tensor, alpha: float, gamma: float) -> Tensor:
    weight = torch.where(y > 0, y, alpha * x.detach().sigmoid() ** gamma)
    return weight * F.binary_cross_entropy_with_logits(x, y, reduction="none")


@elementwise(hyper={"alpha": 0.75, "gamma": 2.0}, reference=_reference)
@triton.jit
def held_varifocal(x, y, alpha, gamma):
    """L = w (softplus(x) - y x), w = y of a positive and α p^γ, held, of a negative. Its gradient is derived."""
    p, _, log1p = logistic(x)
    w = tl.where(y > 0.0, y, alpha * power(hold(p), gamma))
    return w * (tl.maximum(x, 0.0) + log1p - y * x)

"""Each formula twice: as the kernels inline it, and as its plain-torch twin, which autograd differentiates.

The twins of element-wise formulas take (x, y, *hyper) and return the value per element; those of row-wise ones take (z, *hyper), z per row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.formulas import bce, focal, l1, softmax


class Formula(NamedTuple):
    kernel: Any
    twin: Callable[..., Tensor]


def l1_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


def bce_with_logits_twin(x: Tensor, y: Tensor, pos_weight: Tensor | float) -> Tensor:
    return -pos_weight * y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)


def _bounded_log(p: Tensor, floor: float) -> Tensor:
    """max(ln p, -100) with derivative 1 / max(p, floor)."""
    slope = torch.where(p < floor, p / floor, p.clamp(min=floor).log())
    return slope + (p.log().clamp(min=-100) - slope).detach()


def bce_twin(p: Tensor, y: Tensor, floor: float) -> Tensor:
    return -y * _bounded_log(p, floor) - (1 - y) * _bounded_log(1 - p, floor)


def focal_twin(x: Tensor, y: Tensor, gamma: float, alpha: Tensor | float) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    q = p * (1 - y) + p_not * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    alpha = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
    a = torch.where(alpha < 0, torch.ones_like(alpha), alpha * y + (1 - alpha) * (1 - y))
    return a * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * entropy


FORMULAS = {
    "l1": Formula(l1.l1, l1_twin),
    "bce_with_logits": Formula(bce.bce_with_logits, bce_with_logits_twin),
    "bce": Formula(bce.bce, bce_twin),
    "focal": Formula(focal.focal, focal_twin),
    "cross_entropy": Formula(softmax.cross_entropy, lambda z: z),
}

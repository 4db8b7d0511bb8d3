"""Losses of independent yes-or-no decisions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.formulas import asymmetric, bce, focal, poly
from lossforge.losses.formulas.common import Formula


def bce_with_logits_twin(x: Tensor, y: Tensor, pos_weight: Tensor | float) -> Tensor:
    return -pos_weight * y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)


def _bounded_log(p: Tensor, floor: float) -> Tensor:
    """max(ln p, -100) with derivative 1 / max(p, floor)."""
    slope = torch.where(p < floor, p / floor, p.clamp(min=floor).log())
    return slope + (p.log().clamp(min=-100) - slope).detach()


def bce_twin(p: Tensor, y: Tensor, floor: float) -> Tensor:
    return -y * _bounded_log(p, floor) - (1 - y) * _bounded_log(1 - p, floor)


def _balance(y: Tensor, alpha: Tensor | float) -> Tensor:
    """α y + (1 - α)(1 - y), 1 where α is negative."""
    alpha = torch.as_tensor(alpha, dtype=y.dtype, device=y.device)
    return torch.where(alpha < 0, torch.ones_like(alpha), alpha * y + (1 - alpha) * (1 - y))


def focal_twin(x: Tensor, y: Tensor, gamma: float, alpha: Tensor | float) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    q = p * (1 - y) + p_not * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    return _balance(y, alpha) * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * entropy


def asymmetric_twin(x: Tensor, y: Tensor, gamma_neg: float, gamma_pos: float, clip: float, pos_weight: Tensor | float) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    shifted = (p - clip).clamp(min=0)
    negative = -torch.log1p(-shifted) if clip > 0 else -F.logsigmoid(-x)
    entropy = -pos_weight * y * F.logsigmoid(x) + (1 - y) * negative
    base = (y * p_not + (1 - y) * shifted).clamp(min=torch.finfo(x.dtype).tiny)
    return base ** (gamma_pos * y + gamma_neg * (1 - y)) * entropy


def poly_bce_twin(x: Tensor, y: Tensor, epsilon: float, gamma: float, alpha: Tensor | float) -> Tensor:
    q = x.sigmoid() * (1 - y) + (-x).sigmoid() * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    return _balance(y, alpha) * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * (entropy + epsilon * q)


FORMULAS = {
    "bce_with_logits": Formula(bce.bce_with_logits, bce_with_logits_twin),
    "bce": Formula(bce.bce, bce_twin),
    "focal": Formula(focal.focal, focal_twin, focal.focal_2, focal.is_2, (focal.focal_hard, focal.focal_2_hard)),
    "asymmetric": Formula(asymmetric.asymmetric, asymmetric_twin),
    "poly_bce": Formula(poly.poly_bce, poly_bce_twin, poly.poly_bce_0, poly.is_0),
}

"""Losses of independent yes-or-no decisions."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family


def bce_with_logits_twin(x: Tensor, y: Tensor, pos_weight: Tensor | float) -> Tensor:
    return -pos_weight * y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)


def softened_bce_twin(x: Tensor, y: Tensor, slope: float, offset: float, threshold: float, pos_weight: Tensor | float) -> Tensor:
    y = y * slope + offset
    if isinstance(threshold, Tensor) or threshold > -torch.inf:
        y = (y > threshold).to(y.dtype)
    return bce_with_logits_twin(x, y, pos_weight)


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


def asymmetric_twin(
    x: Tensor, y: Tensor, gamma_neg: float, gamma_pos: float, clip: float, pos_weight: Tensor | float, constant_powers: bool = False
) -> Tensor:
    p, p_not = x.sigmoid(), (-x).sigmoid()
    shifted = (p - clip).clamp(min=0)
    negative = -F.logsigmoid(-x)
    if isinstance(clip, Tensor) or clip > 0:
        negative = torch.where(torch.as_tensor(clip > 0), -torch.log1p(-shifted.clamp(max=1 - 2.0**-24)), negative)
    entropy = -pos_weight * y * F.logsigmoid(x) + (1 - y) * negative
    base = (y * p_not + (1 - y) * shifted).clamp(min=torch.finfo(x.dtype).tiny)
    power = base ** (gamma_pos * y + gamma_neg * (1 - y))
    return (power.detach() if constant_powers else power) * entropy


def poly_bce_twin(x: Tensor, y: Tensor, epsilon: float, gamma: float, alpha: Tensor | float) -> Tensor:
    q = x.sigmoid() * (1 - y) + (-x).sigmoid() * y
    entropy = -y * F.logsigmoid(x) - (1 - y) * F.logsigmoid(-x)
    return _balance(y, alpha) * q.clamp(min=torch.finfo(x.dtype).tiny) ** gamma * (entropy + epsilon * q)


def quality_twin(x: Tensor, y: Tensor, beta: float) -> Tensor:
    distance = (x.sigmoid() * (1 - y) - (-x).sigmoid() * y).abs().clamp(min=torch.finfo(x.dtype).tiny)
    return distance**beta * bce_with_logits_twin(x, y, 1.0)


def varifocal_twin(x: Tensor, y: Tensor, alpha: float, gamma: float, iou_weighted: float) -> Tensor:
    negative = alpha * x.sigmoid().clamp(min=torch.finfo(x.dtype).tiny) ** gamma
    w = torch.where(y > 0, y if iou_weighted else torch.ones_like(y), negative)
    return w * bce_with_logits_twin(x, y, 1.0)


TWINS = {
    "bce_with_logits": bce_with_logits_twin,
    "bce_softened": softened_bce_twin,
    "bce": bce_twin,
    "focal": focal_twin,
    "asymmetric": asymmetric_twin,
    "asymmetric_constant_powers": functools.partial(asymmetric_twin, constant_powers=True),
    "poly_bce": poly_bce_twin,
    "quality_focal": quality_twin,
    "varifocal": varifocal_twin,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import asymmetric, bce, focal, poly, quality, varifocal

    return {
        "bce_with_logits": Formulas(bce.bce_with_logits, binary=Formulas(bce.bce_with_logits_hard)),
        "bce_softened": Formulas(bce.bce_with_logits_softened, binary=Formulas(bce.bce_with_logits_softened_hard)),
        "bce": Formulas(bce.bce, heavy=True),
        "focal": Formulas(focal.focal, focal.focal_2, focal.is_2, Formulas(focal.focal_hard, focal.focal_2_hard, focal.is_2)),
        "asymmetric": Formulas(asymmetric.asymmetric_unclipped, asymmetric.asymmetric_clipped, asymmetric.clips, heavy=True),
        "asymmetric_constant_powers": Formulas(
            asymmetric.asymmetric_unclipped_constant, asymmetric.asymmetric_clipped_constant, asymmetric.clips, heavy=True
        ),
        "poly_bce": Formulas(poly.poly_bce, poly.poly_bce_0, poly.is_0),
        "quality_focal": Formulas(
            quality.quality, quality.quality_2, quality.is_2, Formulas(quality.quality_hard, quality.quality_2_hard, quality.is_2)
        ),
        "varifocal": Formulas(
            varifocal.varifocal,
            varifocal.varifocal_2,
            varifocal.is_2,
            Formulas(varifocal.varifocal_hard, varifocal.varifocal_2_hard, varifocal.is_2),
        ),
    }


FORMULAS = family(TWINS, _kernels)

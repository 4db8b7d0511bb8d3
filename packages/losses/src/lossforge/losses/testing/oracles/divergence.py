"""Divergences in dense torch, from their definitions, because no library has them with our arguments."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.testing.oracles import reduced


def kl_div(
    x: Tensor, teacher: Tensor, temperature: float = 1.0, reduction: str = "mean", reverse: bool = False, temperature_squared: bool = True
) -> Tensor:
    a, b = (x / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    if reverse:
        a, b = b, a
    per_row = F.kl_div(a, b, reduction="none", log_target=True).sum(1)
    return reduced(per_row, reduction) * (temperature**2 if temperature_squared else 1)


def js_div(
    x: Tensor, teacher: Tensor, beta: float = 0.5, temperature: float = 1.0, reduction: str = "mean", temperature_squared: bool = False
) -> Tensor:
    """Compute the mixture in logarithms, as TRL's generalized_jsd_loss does."""
    lp, lq = (x / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    if beta in (0, 1):
        per_row = F.kl_div(*((lp, lq) if beta == 0 else (lq, lp)), reduction="none", log_target=True)
    else:
        b = torch.tensor(beta, dtype=x.dtype, device=x.device)
        lm = torch.logsumexp(torch.stack([lp + torch.log1p(-b), lq + b.log()]), dim=0)
        per_row = b * F.kl_div(lm, lq, reduction="none", log_target=True) + (1 - b) * F.kl_div(lm, lp, reduction="none", log_target=True)
    return reduced(per_row.sum(1), reduction) * (temperature**2 if temperature_squared else 1)


def total_variation(
    x: Tensor, teacher: Tensor, temperature: float = 1.0, reduction: str = "mean", temperature_squared: bool = False
) -> Tensor:
    """Compute Σ max(p - q, 0), the probability by which p exceeds q."""
    p, q = (x / temperature).softmax(1), (teacher / temperature).softmax(1)
    return reduced((p - q).clamp(min=0).sum(1), reduction) * (temperature**2 if temperature_squared else 1)


def cosine_distance(x: Tensor, teacher: Tensor, reduction: str = "mean") -> Tensor:
    """Compute half of the squared distance of the rows of length 1."""
    return reduced((F.normalize(x, dim=1, eps=1e-8) - F.normalize(teacher, dim=1, eps=1e-8)).square().sum(1) / 2, reduction)


def total_variation_probability(p: Tensor, q: Tensor, reduction: str = "batchmean") -> Tensor:
    """Compute half of the larger of both less the smaller."""
    each = (torch.maximum(p, q) - torch.minimum(p, q)) / 2
    return each.sum() / len(p) if reduction == "batchmean" else reduced(each, reduction)


def topk_kl_div(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    temperature: float = 1.0,
    reduction: str = "mean",
    renormalize: bool = False,
    tail: bool = False,
    temperature_squared: bool = True,
    reverse: float = 0.0,
) -> Tensor:
    """Compute with a dense teacher; the tail is the sum of the student's other probabilities."""
    q = (values / temperature).softmax(1) if renormalize else values.exp()
    teacher = torch.zeros_like(x).scatter(1, indices, q)
    p = (x / temperature).softmax(1)
    forward, own = F.kl_div(p.log(), teacher, reduction="none").sum(1), p.gather(1, indices)
    backward = F.kl_div(q.log(), own, reduction="none").sum(1)
    if tail:
        left = torch.ones_like(x).scatter(1, indices, 0.0)
        p_left, q_left = (p * left).sum(1), 1 - q.sum(1)
        forward = forward + F.kl_div(p_left.log(), q_left, reduction="none")
        backward = backward + F.kl_div(q_left.log(), p_left, reduction="none")
    per_row = (1 - reverse) * forward + reverse * backward
    return reduced(per_row, reduction) * (temperature**2 if temperature_squared else 1)


def dino(
    x: Tensor, teacher: Tensor, student_temperature: float = 0.1, teacher_temperature: float = 0.04, reduction: str = "mean"
) -> Tensor:
    """Compute as facebookresearch/dino's DINOLoss does for one pair of views."""
    q = F.softmax(teacher / teacher_temperature, dim=1)
    return reduced(torch.sum(-q * F.log_softmax(x / student_temperature, dim=1), dim=1), reduction)


def draft(
    x: Tensor,
    teacher: Tensor,
    kind: str = "lk",
    eta: float = 3.0,
    kl_scale: float = 1.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    temperature_squared: bool = False,
) -> Tensor:
    """Compute the acceptance as Σ min(p, q), as speculators' and SpecForge's losses of draft models do."""
    log_p, log_q = (x / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    acceptance = torch.minimum(log_p.exp(), log_q.exp()).sum(1)
    cross_entropy = -(log_q.exp() * log_p).sum(1)
    kl = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)
    share = kl_scale * torch.exp(-eta * acceptance.detach())
    per_row = {
        "lk": share * kl + (1 - share) * (1 - acceptance),
        "log_tv": -acceptance.log(),
        "tv": 1 - acceptance,
        "kl": kl,
        "ce": cross_entropy,
    }[kind]
    return reduced(per_row, reduction) * (temperature**2 if temperature_squared else 1)

"""Each loss in a few lines of plain torch, as someone without a kernel writes it: the baseline for speed and the reference for results.

The functions take the logits or boxes, the target, other tensors and options by the names that the loss gives them, in any floating dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[..., Tensor]


def eager(loss: str) -> Call:
    """Return the loss in plain torch, which is also the float64 reference."""
    return _EAGER[loss]


def one_hot(x: Tensor, target: Tensor) -> Tensor:
    """Encode class indices as one-hot rows; background rows are all zeros."""
    return target if target.is_floating_point() else (target.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)).to(x.dtype)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.mean()


def _cross_entropy(
    x: Tensor, target: Tensor, *, target_b: Tensor | None = None, lam: float = 1.0, weight: Tensor | None = None, **options: Any
) -> Tensor:
    value = F.cross_entropy(x, target, weight, **options)
    return value if target_b is None else lam * value + (1 - lam) * F.cross_entropy(x, target_b, weight, **options)


def _focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as torchvision.ops.sigmoid_focal_loss does, so that measuring needs no torchvision."""
    y = one_hot(x, target)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return _reduced((alpha * y + (1 - alpha) * (1 - y)) * entropy * (1 - p_t) ** gamma, reduction)


def _preference_bce(x: Tensor, target: Tensor, *, preference: Tensor, reduction: str = "mean") -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target, preference, reduction=reduction)


def _bce_smoothed(x: Tensor, target: Tensor, *, smoothing: float, reduction: str) -> Tensor:
    y = one_hot(x, target) * (1 - smoothing) + smoothing / x.shape[-1]
    return F.binary_cross_entropy_with_logits(x, y, reduction=reduction)


def _asymmetric(x: Tensor, target: Tensor, *, gamma_neg: float, gamma_pos: float, clip: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    s = (p - clip).clamp(min=0)
    entropy = target * F.logsigmoid(x) + (1 - target) * torch.log1p(-s)
    base = target * (1 - p) + (1 - target) * s
    return _reduced(-(base ** (gamma_pos * target + gamma_neg * (1 - target))) * entropy, reduction)


def _poly_bce(x: Tensor, target: Tensor, *, epsilon: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    values = F.binary_cross_entropy_with_logits(x, target, reduction="none") + epsilon * (1 - p * target - (1 - p) * (1 - target))
    return _reduced(values, reduction)


def _scored(x: Tensor, target: Tensor, score: Tensor) -> Tensor:
    return one_hot(x, target) * score.unsqueeze(-1)


def _quality_focal(x: Tensor, target: Tensor, *, score: Tensor, beta: float, reduction: str) -> Tensor:
    y = _scored(x, target, score)
    values = (y - x.sigmoid()).abs() ** beta * F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return _reduced(values, reduction)


def _varifocal(x: Tensor, target: Tensor, *, score: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
    y = _scored(x, target, score)
    factor = torch.where(y > 0, y, alpha * x.sigmoid() ** gamma)
    return _reduced(factor * F.binary_cross_entropy_with_logits(x, y, reduction="none"), reduction)


def _mal(x: Tensor, target: Tensor, *, score: Tensor, gamma: float, reduction: str) -> Tensor:
    """Compute as DEIM does: no gradient goes through the weight."""
    one = one_hot(x, target)
    weight = x.detach().sigmoid() ** gamma * (1 - one) + one
    y = (one * score.unsqueeze(-1)) ** gamma
    return F.binary_cross_entropy_with_logits(x, y, weight=weight, reduction=reduction)


def _ia_bce(x: Tensor, target: Tensor, *, score: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as LW-DETR does, from logits: no gradient goes through a positive's target."""
    p, q, positive = x.sigmoid(), score.unsqueeze(-1), one_hot(x, target) > 0
    y = torch.where(positive, (p**alpha * q ** (1 - alpha)).clamp(min=0.01), 0.0).detach()
    factor = torch.where(positive, 1.0, p**gamma)
    return _reduced(factor * F.binary_cross_entropy_with_logits(x, y, reduction="none"), reduction)


def _gaussian_focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as mmdetection does, from logits and without its 1e-12."""
    positive = (1 - x.sigmoid()) ** alpha * -F.logsigmoid(x)
    negative = (1 - target) ** gamma * x.sigmoid() ** alpha * -F.logsigmoid(-x)
    return _reduced(torch.where(target == 1, positive, negative), reduction)


def _distribution_focal(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmdetection and YOLOv8 do: two cross entropies, of the bins on the left and on the right."""
    left = target.long().flatten()
    of_left, of_right = (F.cross_entropy(x.flatten(0, -2), bin, reduction="none").view_as(target) for bin in (left, left + 1))
    share = target - target.floor()
    return _reduced(of_left * (1 - share) + of_right * share, reduction)


def _multi_margin(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Call torch's function, which on CPU takes no bfloat16."""
    return F.multi_margin_loss(x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x, target, **options)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_cosh(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    d = x - target
    return _reduced(d + F.softplus(-2 * d) - math.log(2), reduction)


def _quantile(x: Tensor, target: Tensor, *, quantile: float, reduction: str) -> Tensor:
    d = target - x
    return _reduced(torch.maximum(quantile * d, (quantile - 1) * d), reduction)


def _general_robust(x: Tensor, target: Tensor, *, alpha: float, scale: float, reduction: str) -> Tensor:
    """Compute arXiv 1701.03077 where alpha is none of its limits."""
    b = abs(alpha - 2)
    return _reduced(b / alpha * (((x - target) / scale).square() / b + 1).pow(alpha / 2).sub(1), reduction)


def _total_variation_probability(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    return _reduced((x - target).abs() / 2, reduction)


def _margin_ranking(x: Tensor, other: Tensor, *, label: Tensor, **options: Any) -> Tensor:
    return F.margin_ranking_loss(x, other, label, **options)


def _cosine_embedding(x: Tensor, other: Tensor, *, label: Tensor, **options: Any) -> Tensor:
    return F.cosine_embedding_loss(x, other, label, **options)


def _multilabel_margin(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Call torch's function, which on CPU takes no bfloat16; compute in float64 by the formula.

    On an H100 the gradients of torch's kernel for float32 and of ours were each 11 % off that of its kernel for float64.
    """
    if x.dtype != torch.float64:
        return F.multilabel_margin_loss(x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x, target, reduction=reduction)
    listed = (target >= 0).cumprod(1).bool()
    index = target[:, : int(listed.sum(1).max())]
    listed = listed[:, : index.shape[1]]
    # what is not listed goes to a class beyond the last
    others = torch.ones(len(x), x.shape[1] + 1, dtype=torch.bool, device=x.device)
    others = others.scatter(1, index.where(listed, x.shape[1]), False)[:, :-1]
    margins = F.relu(1 - x.gather(1, index.clamp(min=0))[:, :, None] + x[:, None])
    return _reduced((margins * (listed[:, :, None] & others[:, None])).sum((1, 2)) / x.shape[1], reduction)


def _distribution_balanced(
    x: Tensor, target: Tensor, *, class_counts: Tensor, num_samples: int, focal_gamma: float = 2.0, reduction: str
) -> Tensor:
    """Compute as timm does, with its defaults."""
    x, y = _wide(x), _wide(target)
    frequency, z = 1 / class_counts, x - 0.05 / 2 * torch.log(num_samples / class_counts - 1)
    share = frequency / (y * frequency).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weight = 0.1 + torch.sigmoid(10 * (share - 0.2))
    positive = F.softplus(-z) * torch.sigmoid(-z) ** focal_gamma
    negative = F.softplus(2 * z) / 2 * torch.sigmoid(2 * z) ** focal_gamma
    return _reduced(weight * 2 * (y * positive + (1 - y) * negative), reduction)


def _zlpr(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as timm does."""
    x, positive = _wide(x), target > 0.5
    zero = x.new_zeros(len(x), 1)
    negatives = torch.cat([x.masked_fill(positive, -math.inf), zero], 1).logsumexp(1)
    return _reduced(negatives + torch.cat([(-x).masked_fill(~positive, -math.inf), zero], 1).logsumexp(1), reduction)


def _two_way(x: Tensor, target: Tensor, *, tp: float, tn: float) -> Tensor:
    """Compute as timm does, of samples and of classes, and wait for no count of these."""
    x, positive = _wide(x), target > 0.5
    wanted, others = (-x / tp).masked_fill(~positive, -1e4), (x / tn).masked_fill(positive, -1e4)
    found = []
    for dim in (0, 1):
        exists = positive.any(dim)
        values = F.softplus(tn * others.logsumexp(dim) + tp * wanted.logsumexp(dim))
        found.append(torch.where(exists, values, 0.0).sum() / exists.sum().clamp(min=1))
    return found[0] + found[1]


def _jsd(x: Tensor, target: Tensor, *, num_splits: int, alpha: float, smoothing: float) -> Tensor:
    """Compute as timm does."""
    views = _wide(x).chunk(num_splits)
    p = [view.softmax(1) for view in views]
    mixture = torch.stack(p).mean(0).clamp(1e-7, 1).log()
    divergence = sum((F.kl_div(mixture, each, reduction="batchmean") for each in p), start=x.new_zeros(())) / num_splits
    return F.cross_entropy(views[0], target, label_smoothing=smoothing) + alpha * divergence


def _seesaw(x: Tensor, target: Tensor, *, class_counts: Tensor, p: float, q: float, reduction: str) -> Tensor:
    """Compute as mmdetection's seesaw_ce_loss does."""
    x, index = _wide(x), target.unsqueeze(1)
    rarer = (class_counts / class_counts[index]).clamp(max=1) ** p
    scores = x.detach().softmax(1)
    surer = (scores / scores.gather(1, index).clamp(min=1e-2)).clamp(min=1) ** q
    return F.cross_entropy(x + (rarer * surer).log().scatter(1, index, 0.0), target, reduction=reduction)


def _load_balancing(x: Tensor, *, top_k: int, z_loss: float) -> Tensor:
    """Compute as transformers' load_balancing_loss_func does, and add the router z-loss."""
    x = _wide(x)
    p = x.softmax(1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(top_k, 1).indices, 1.0)
    return x.shape[1] * (chosen.mean(0) * p.mean(0)).sum() + z_loss * x.logsumexp(1).square().mean()


def _siglip(x: Tensor, *, reduction: str = "mean") -> Tensor:
    labels = 2 * torch.eye(len(x), x.shape[1], dtype=x.dtype, device=x.device) - 1
    return -F.logsigmoid(labels * x).sum() / (len(x) if reduction == "mean" else 1)


def _preference_bce_probability(x: Tensor, target: Tensor, *, preference: Tensor, reduction: str) -> Tensor:
    return F.binary_cross_entropy(x, target, preference, reduction=reduction)


def _clip(x: Tensor, *, reduction: str) -> Tensor:
    """Compute as open_clip.ClipLoss does: the first columns belong to the rows, the others are negatives of all rows."""
    pairs = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(x, pairs, reduction=reduction) + F.cross_entropy(x[:, : len(x)].T, pairs, reduction=reduction)) / 2


def _arcface(x: Tensor, target: Tensor, *, margin: float, scale: float, reduction: str) -> Tensor:
    """Compute as the authors' code does, with one cosine a row in a copy of all."""
    own = x.gather(1, target.unsqueeze(1))
    moved = own * math.cos(margin) - (1 - own.square()).clamp(0, 1).sqrt() * math.sin(margin)
    moved = torch.where(own > -math.cos(margin), moved, own - margin * math.sin(margin))
    return F.cross_entropy(scale * x.scatter(1, target.unsqueeze(1), moved), target, reduction=reduction)


def _cosface(x: Tensor, target: Tensor, *, margin: float, scale: float, reduction: str) -> Tensor:
    """Compute as the authors' code does."""
    index = target.unsqueeze(1)
    return F.cross_entropy(scale * x.scatter(1, index, x.gather(1, index) - margin), target, reduction=reduction)


def _log_p(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)


def _softmax_focal(x: Tensor, target: Tensor, *, gamma: float, reduction: str) -> Tensor:
    """Compute arXiv 1708.02002 with a softmax's p_t."""
    log_p = _log_p(x, target)
    return _reduced(-((1 - log_p.exp()) ** gamma) * log_p, reduction)


def _asymmetric_single_label(x: Tensor, target: Tensor, *, gamma_pos: float, gamma_neg: float, eps: float, reduction: str) -> Tensor:
    ln_p = x.log_softmax(1)
    p, hit = ln_p.exp(), torch.zeros_like(ln_p, dtype=torch.bool).scatter_(1, target.unsqueeze(1), True)
    weight = torch.where(hit, (1 - p) ** gamma_pos, p**gamma_neg)
    return _reduced(-((hit * (1 - eps) + eps / x.shape[1]) * weight * ln_p).sum(1), reduction)


def _poly_ce(x: Tensor, target: Tensor, *, epsilon: float, reduction: str) -> Tensor:
    """arXiv 2204.12511."""
    log_p = _log_p(x, target)
    return _reduced(-log_p + epsilon * (1 - log_p.exp()), reduction)


def _generalized_ce(x: Tensor, target: Tensor, *, q: float, reduction: str) -> Tensor:
    """arXiv 1805.07836."""
    return _reduced((1 - _log_p(x, target).exp() ** q) / q, reduction)


def _taylor_ce(x: Tensor, target: Tensor, *, order: int, reduction: str) -> Tensor:
    miss = 1 - _log_p(x, target).exp()
    return _reduced(sum((miss**k / k for k in range(2, order + 1)), start=miss), reduction)


def _symmetric_ce(x: Tensor, target: Tensor, *, alpha: float, beta: float, log_zero: float, reduction: str) -> Tensor:
    """arXiv 1908.06112."""
    log_p = _log_p(x, target)
    return _reduced(-alpha * log_p - beta * log_zero * (1 - log_p.exp()), reduction)


def _ohem_ce(x: Tensor, target: Tensor, *, threshold: float, min_kept: int) -> Tensor:
    """Keep the pixels below the threshold, and at least so many, as segmentation libraries do, without waiting for their number."""
    values = F.cross_entropy(x, target, reduction="none")
    each = values.detach().flatten()
    least = each.topk(min(min_kept, len(each))).values[-1].clamp(max=-math.log(threshold))
    keep = values.detach() >= least
    return torch.where(keep, values, 0.0).sum() / keep.sum()


def _logit_adjusted_ce(x: Tensor, target: Tensor, *, log_prior: Tensor, tau: float, reduction: str) -> Tensor:
    """arXiv 2007.07314."""
    return F.cross_entropy(x + tau * log_prior, target, reduction=reduction)


def _selective_log_softmax(
    x: Tensor, target: Tensor, *, temperature: float = 1.0, outputs: Sequence[str] = (), reduction: str = "none"
) -> Tensor:
    """Compute as TRL's selective_log_softmax does, and with outputs ("entropy",) subtract its entropy_from_logits."""
    log_p = (x / temperature).log_softmax(1)
    values = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    return _reduced(values + (log_p.exp() * log_p).sum(1) if outputs else values, reduction)


def log_probabilities(x: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of student and teacher, in float32 at least. In bfloat16 those of 32000 classes are off by 3e-2, and
    gradients by 5e-2."""
    student, teacher = ((t / temperature).log_softmax(1, torch.promote_types(t.dtype, torch.float32)) for t in (x, target))
    return student, teacher


def _kl(x: Tensor, target: Tensor, *, temperature: float, reduction: str, reverse: bool = False) -> Tensor:
    """Compute arXiv 1503.02531, times T²."""
    log_p, log_q = log_probabilities(x, target, temperature)
    to, of = (log_q, log_p) if reverse else (log_p, log_q)
    return F.kl_div(to, of, reduction=reduction, log_target=True) * temperature**2


def _js(x: Tensor, target: Tensor, *, beta: float, reduction: str, temperature: float = 1.0) -> Tensor:
    """Compute arXiv 2306.13649, as TRL's GKD does."""
    log_p, log_q = log_probabilities(x, target, temperature)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    of_teacher, of_student = (F.kl_div(log_m, of, reduction=reduction, log_target=True) for of in (log_q, log_p))
    return beta * of_teacher + (1 - beta) * of_student


def _total_variation(x: Tensor, target: Tensor, *, reduction: str, temperature: float = 1.0) -> Tensor:
    p, q = (log_p.exp() for log_p in log_probabilities(x, target, temperature))
    return (p - q).abs().sum() / 2 / (len(x) if reduction == "batchmean" else 1)


def _topk_kl(x: Tensor, target: Tensor, *, indices: Tensor, temperature: float, reduction: str) -> Tensor:
    """Compute KL over the classes `indices`, which the teacher kept. target: their log-probabilities."""
    log_p = (x / temperature).log_softmax(1).gather(1, indices)
    return F.kl_div(log_p, target, reduction=reduction, log_target=True) * temperature**2


def _dino(x: Tensor, target: Tensor, *, center: Tensor, student_temperature: float, teacher_temperature: float, reduction: str) -> Tensor:
    """Compute as the authors' DINOLoss does for one pair of crops (arXiv 2104.14294)."""
    q = ((_wide(target) - center) / teacher_temperature).softmax(1)
    return _reduced(-(q * (_wide(x) / student_temperature).log_softmax(1)).sum(1), reduction)


def _dkd(x: Tensor, target: Tensor, *, label: Tensor, alpha: float, beta: float, temperature: float, reduction: str) -> Tensor:
    """Compute as the authors' code does (arXiv 2203.08679), which takes 1000 from the own class's logit."""
    own = F.one_hot(label, x.shape[1])
    pairs, others = [], []
    for logits in (_wide(x) / temperature, _wide(target) / temperature):
        p = (logits.softmax(1) * own).sum(1)
        pairs.append(torch.stack([p, 1 - p], 1).log())
        others.append((logits - 1000 * own).log_softmax(1))
    of_own, of_others = (F.kl_div(p, q, reduction="none", log_target=True).sum(1) for p, q in (pairs, others))
    return _reduced(temperature**2 * (alpha * of_own + beta * of_others), reduction)


def _channel_wise_kl_div(x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Tensor:
    """arXiv 2011.13256."""
    log_p, log_q = ((_wide(t).flatten(2) / temperature).log_softmax(2) for t in (x, target))
    return _reduced(temperature**2 * F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(2), reduction)


def _dist(x: Tensor, target: Tensor, *, beta: float, gamma: float, temperature: float) -> Tensor:
    """Compute as the authors' code does (arXiv 2205.10536). F.cosine_similarity has no + 1e-8, which 1,000 classes show."""
    p, q = ((_wide(t) / temperature).softmax(1) for t in (x, target))

    def correlation(a: Tensor, b: Tensor) -> Tensor:
        a, b = (t - t.mean(1, keepdim=True) for t in (a, b))
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-8)).mean()

    return temperature**2 * (beta * (1 - correlation(p, q)) + gamma * (1 - correlation(p.T, q.T)))


def _boundary(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1812.07032, of maps that a data loader computed."""
    return _reduced((_wide(x).softmax(1) * target).mean((2, 3)), reduction)


def _silog(x: Tensor, target: Tensor, *, lambd: float) -> Tensor:
    """Compute arXiv 1406.2283 over the pixels whose depth is known, and take the root."""
    known = target > 0
    d = torch.where(known, _wide(x).log() - torch.where(known, target, 1.0).log(), 0.0)
    n = known.sum()
    return (d.square().sum() / n - lambd * (d.sum() / n).square()).sqrt()


def _koleo(x: Tensor) -> Tensor:
    """Compute as DINOv2's KoLeoLoss does."""
    x = F.normalize(_wide(x), dim=1, eps=1e-8)
    nearest = (x @ x.T).fill_diagonal_(-1).argmax(1)
    return -(F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()


def _off_diagonal(c: Tensor) -> Tensor:
    return c.square().sum() - c.diagonal().square().sum()


def _vicreg(x: Tensor) -> Tensor:
    """Compute as lightly's VICRegLoss does, with its defaults, of two views in one tensor."""
    a, b = _wide(x).chunk(2)
    total = 25 * F.mse_loss(a, b)
    for z in (a - a.mean(0), b - b.mean(0)):
        total = total + 12.5 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + _off_diagonal(z.T @ z / (len(z) - 1)) / z.shape[1]
    return total


def _barlow_twins(x: Tensor) -> Tensor:
    """Compute as lightly's BarlowTwinsLoss does, with its defaults, of two views in one tensor."""
    a, b = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() for z in _wide(x).chunk(2))
    c = a.T @ b / len(a)
    return (1 - c.diagonal()).square().sum() + 5e-3 * _off_diagonal(c)


def _area(low: Tensor, high: Tensor) -> Tensor:
    w, h = (high - low).unbind(1)
    return w * h


def _iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the intersection over union of boxes (x1, y1, x2, y2), their union, and the sides of the smallest box around both."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    intersection = torch.where((high > low).all(1), _area(low, high), 0.0)
    union = _area(a[:, :2], a[:, 2:]) + _area(b[:, :2], b[:, 2:]) - intersection
    return intersection / union, union, torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])


def _box_iou(x: Tensor, target: Tensor, *, log: bool = False, reduction: str) -> Tensor:
    iou, _, _ = _iou(x, target)
    return _reduced(-iou.clamp(min=1e-7).log() if log else 1 - iou, reduction)


def _giou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1902.09630."""
    iou, union, around = _iou(x, target)
    hull = around[:, 0] * around[:, 1]
    return _reduced(1 - iou + (hull - union) / hull, reduction)


def _distance(a: Tensor, b: Tensor, around: Tensor) -> Tensor:
    """Return ρ²/d²: the squared distance of the centres over the squared diagonal of the smallest box around both."""
    return ((a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2).square().sum(1) / around.square().sum(1)


def _diou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 1911.08287."""
    iou, _, around = _iou(x, target)
    return _reduced(1 - iou + _distance(x, target, around), reduction)


def _ciou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute arXiv 1911.08287. No gradient goes through α, as in the authors' code."""
    iou, _, around = _iou(x, target)
    angle, wanted = (torch.atan((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])) for b in (x, target))
    v = 4 / math.pi**2 * (wanted - angle).square()
    alpha = (v / (1 - iou + v)).detach()
    return _reduced(1 - iou + _distance(x, target, around) + alpha * v, reduction)


def _eiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 2101.08158."""
    iou, _, around = _iou(x, target)
    differences = (x[:, 2:] - x[:, :2]) - (target[:, 2:] - target[:, :2])
    return _reduced(1 - iou + _distance(x, target, around) + (differences / around).square().sum(1), reduction)


def _siou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """arXiv 2205.12740."""
    iou, _, around = _iou(x, target)
    offset = (x[:, :2] + x[:, 2:] - target[:, :2] - target[:, 2:]) / 2
    angle = 2 * offset.prod(1, keepdim=True).abs() / offset.square().sum(1, keepdim=True)
    distance = 1 - torch.exp((angle - 2) * (offset / around).square())
    own, wanted = x[:, 2:] - x[:, :2], target[:, 2:] - target[:, :2]
    shape = 1 - torch.exp(-(own - wanted).abs() / torch.maximum(own, wanted))
    return _reduced(1 - iou + (distance + shape**4).sum(1) / 2, reduction)


def _gaussian(boxes: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the covariance [[a, c], [c, b]] of rotated boxes (cx, cy, w, h, angle) as a, b, c, and its determinant."""
    w, h = (boxes[:, 2:4].square() * share).unbind(1)
    cosine, sine = boxes[:, 4].cos(), boxes[:, 4].sin()
    return w * cosine**2 + h * sine**2, w * sine**2 + h * cosine**2, (w - h) * cosine * sine, w * h


def _probiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as ultralytics does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = _gaussian(x, 1 / 12), _gaussian(target, 1 / 12)
    (dx, dy), a, b, c = (x[:, :2] - target[:, :2]).unbind(1), a1 + a2, b1 + b2, c1 + c2
    det = a * b - c**2
    distance = (a * dy**2 + b * dx**2 - 2 * c * dx * dy) / det / 4 + (det / (4 * (det1 * det2).sqrt())).log() / 2
    return _reduced((1 - (-distance).exp()).sqrt(), reduction)


def _gwd(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = _gaussian(x, 1 / 4), _gaussian(target, 1 / 4)
    root = (det1 * det2).sqrt()
    shapes = a1 + b1 + a2 + b2 - 2 * (a1 * a2 + b1 * b2 + 2 * c1 * c2 + 2 * root).sqrt()
    distance = ((x[:, :2] - target[:, :2]).square().sum(1) + shapes).sqrt() / (2 * root.sqrt().sqrt())
    return _reduced(1 - 1 / (1 + distance.log1p()), reduction)


def _kld(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = _gaussian(x, 1 / 4), _gaussian(target, 1 / 4)
    dx, dy = (x[:, :2] - target[:, :2]).unbind(1)
    offset = (b1 * dx**2 + a1 * dy**2 - 2 * c1 * dx * dy) / det1
    distance = (offset + (b1 * a2 + a1 * b2 - 2 * c1 * c2) / det1 + (det1 / det2).log()) / 2 - 1
    return _reduced(1 - 1 / (1 + distance.sqrt().log1p()), reduction)


def _kfiou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmrotate does, by the determinant of the product."""
    (a1, b1, c1, det1), (a2, b2, c2, det2) = _gaussian(x, 1 / 4), _gaussian(target, 1 / 4)
    shared = 4 * (det1 * det2 / ((a1 + a2) * (b1 + b2) - (c1 + c2) ** 2)).sqrt()
    return _reduced(1 - shared / (4 * det1.sqrt() + 4 * det2.sqrt() - shared), reduction)


def _polygon(boxes: Tensor) -> Tensor:
    """Return the corners (N, 4, 2)."""
    cosine, sine = boxes[:, 4].cos(), boxes[:, 4].sin()
    along, across = torch.stack([cosine, sine], 1) * boxes[:, 2:3] / 2, torch.stack([-sine, cosine], 1) * boxes[:, 3:4] / 2
    return boxes[:, None, :2] + torch.stack([-along - across, along - across, along + across, across - along], 1)


def _inside(points: Tensor, boxes: Tensor) -> Tensor:
    (dx, dy), cosine, sine = (points - boxes[:, None, :2]).unbind(2), boxes[:, 4:].cos(), boxes[:, 4:].sin()
    return ((dx * cosine + dy * sine).abs() <= boxes[:, 2:3] / 2) & ((dy * cosine - dx * sine).abs() <= boxes[:, 3:4] / 2)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _rotated_iou(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Sort the corners within the other box and the crossings of the edges by their angle, as differentiable IoU in mmcv does."""
    first, second = _polygon(x), _polygon(target)
    p, q = first.unsqueeze(2), second.unsqueeze(1)
    d, e = first.roll(-1, 1).unsqueeze(2) - p, second.roll(-1, 1).unsqueeze(1) - q
    turn = _cross(d, e)
    t, u = _cross(q - p, e) / turn, _cross(q - p, d) / turn
    crosses = (t > 0) & (t < 1) & (u > 0) & (u < 1)
    crossings = p + torch.where(crosses, t, 0.0).unsqueeze(3) * d
    points = torch.cat([first, second, crossings.flatten(1, 2)], 1)
    counts = torch.cat([_inside(first, target), _inside(second, x), crosses.flatten(1)], 1)
    number = counts.sum(1, keepdim=True)
    middle = torch.where(counts.unsqueeze(2), points, 0.0).sum(1, keepdim=True) / number.unsqueeze(2).clamp(min=1)
    dx, dy = (points - middle).detach().unbind(2)
    order = torch.where(counts, torch.atan2(dy, dx), torch.inf).argsort(1)[:, :8]
    around = points.gather(1, order.unsqueeze(2).expand(-1, -1, 2)) - middle
    kept = torch.arange(8, device=x.device) < number
    around = torch.where(kept.unsqueeze(2), around, around[:, :1])
    shared = torch.where(number.squeeze(1) > 2, _cross(around, around.roll(-1, 1)).sum(1) / 2, 0.0)
    return _reduced(1 - shared / (x[:, 2:4].prod(1) + target[:, 2:4].prod(1) - shared), reduction)


def _regions(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ p y, Σ p and Σ y over the pixels of each class of each image."""
    p = x.softmax(1)
    y = torch.zeros_like(p).scatter_(1, target.unsqueeze(1), 1.0)
    return (p * y).sum((2, 3)), p.sum((2, 3)), y.sum((2, 3))


SMOOTH = 1e-5
"""Added to numerator and denominator, as in MONAI."""


def _dice(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.DiceLoss does (arXiv 1606.04797)."""
    i, p, y = _regions(x, target)
    return _reduced(1 - (2 * i + SMOOTH) / (p + y + SMOOTH), reduction)


def _jaccard(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    i, p, y = _regions(x, target)
    return _reduced(1 - (i + SMOOTH) / (p + y - i + SMOOTH), reduction)


def _tversky_index(x: Tensor, target: Tensor, alpha: float, beta: float) -> Tensor:
    i, p, y = _regions(x, target)
    return (i + SMOOTH) / (i + alpha * (p - i) + beta * (y - i) + SMOOTH)


def _tversky(x: Tensor, target: Tensor, *, alpha: float, beta: float, reduction: str) -> Tensor:
    """Compute as monai.losses.TverskyLoss does (arXiv 1706.05721)."""
    return _reduced(1 - _tversky_index(x, target, alpha, beta), reduction)


def _focal_tversky(x: Tensor, target: Tensor, *, alpha: float, beta: float, gamma: float, reduction: str) -> Tensor:
    """Compute as the authors' code does (arXiv 1810.07842)."""
    return _reduced((1 - _tversky_index(x, target, alpha, beta)) ** gamma, reduction)


def _dice_ce(x: Tensor, target: Tensor, *, lambda_dice: float, lambda_ce: float, reduction: str) -> Tensor:
    """Compute as monai.losses.DiceCELoss does."""
    return lambda_dice * _dice(x, target, reduction=reduction) + lambda_ce * F.cross_entropy(x, target, reduction=reduction)


def _generalized_dice(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.GeneralizedDiceLoss does (arXiv 1707.03237)."""
    i, p, y = _regions(x, target)
    w = 1 / y.square()
    w = torch.where(w.isinf(), torch.where(w.isinf(), 0.0, w).amax(1, keepdim=True), w)
    return _reduced(1 - (2 * (w * i).sum(1) + SMOOTH) / ((w * (p + y)).sum(1) + SMOOTH), reduction)


def _mcc(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as monai.losses.MCCLoss does (arXiv 2010.13454), in shares of the pixels, whose products do not overflow."""
    m = target[0].numel()
    i, p, y = (sums / m for sums in _regions(x, target))
    return _reduced(1 - (i - p * y) / (p * y * (1 - p) * (1 - y) + SMOOTH / m**4).sqrt(), reduction)


def _lovasz(errors: Tensor, own: Tensor) -> Tensor:
    """Compute the authors' loss of regions (…, pixels), with their weights as fractions: as differences in float32 they are a tenth off."""
    errors, order = errors.sort(descending=True, stable=True)
    own = own.gather(-1, order)
    total = own.sum(-1, keepdim=True)
    rest = total - own.cumsum(-1)
    union = (rest + torch.arange(1, own.shape[-1] + 1, device=own.device)).to(errors.dtype)
    return (errors.relu() * torch.where(own, 1 / union, rest / (union * (union - 1).clamp(min=1)))).sum(-1)


def _lovasz_softmax(x: Tensor, target: Tensor) -> Tensor:
    classes = torch.arange(x.shape[1], device=x.device).view(1, -1, *(1,) * (x.ndim - 2))
    own = target.unsqueeze(1) == classes
    errors, own = (t.transpose(0, 1).flatten(1) for t in ((_wide(x).softmax(1) - own.to(x.dtype)).abs(), own))
    present = own.any(1)
    return torch.where(present, _lovasz(errors, own), 0.0).sum() / present.sum().clamp(min=1)


def _lovasz_hinge(x: Tensor, target: Tensor, *, per_image: bool) -> Tensor:
    assert per_image
    return _lovasz((1 - _wide(x) * (2 * target - 1)).flatten(1), (target == 1).flatten(1)).mean()


_EAGER: dict[str, Call] = {
    "ce": _cross_entropy,
    "focal": _focal,
    "mae": F.l1_loss,
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "preference_bce": _preference_bce,
    "preference_bce_probability": _preference_bce_probability,
    "bce_probability": F.binary_cross_entropy,
    "kl_div": F.kl_div,
    "nll": F.nll_loss,
    "gaussian_nll": F.gaussian_nll_loss,
    "poisson_nll": F.poisson_nll_loss,
    "soft_margin": F.soft_margin_loss,
    "hinge_embedding": F.hinge_embedding_loss,
    "multi_margin": _multi_margin,
    "multilabel_soft_margin": F.multilabel_soft_margin_loss,
    "triplet_margin": F.triplet_margin_loss,
    "log_cosh": _log_cosh,
    "quantile": _quantile,
    "general_robust": _general_robust,
    "total_variation_probability": _total_variation_probability,
    "margin_ranking": _margin_ranking,
    "cosine_embedding": _cosine_embedding,
    "multilabel_margin": _multilabel_margin,
    "distribution_balanced": _distribution_balanced,
    "zlpr": _zlpr,
    "two_way": _two_way,
    "jsd": _jsd,
    "seesaw": _seesaw,
    "load_balancing": _load_balancing,
    "taylor_ce": _taylor_ce,
    "symmetric_ce": _symmetric_ce,
    "ohem_ce": _ohem_ce,
    "siou": _siou,
    "lovasz_softmax": _lovasz_softmax,
    "lovasz_hinge": _lovasz_hinge,
    "bce_smoothed": _bce_smoothed,
    "asymmetric": _asymmetric,
    "poly_bce": _poly_bce,
    "quality_focal": _quality_focal,
    "varifocal": _varifocal,
    "mal": _mal,
    "ia_bce": _ia_bce,
    "gaussian_focal": _gaussian_focal,
    "distribution_focal": _distribution_focal,
    "siglip": _siglip,
    "clip": _clip,
    "softmax_focal": _softmax_focal,
    "arcface": _arcface,
    "cosface": _cosface,
    "poly_ce": _poly_ce,
    "asymmetric_single_label": _asymmetric_single_label,
    "generalized_ce": _generalized_ce,
    "logit_adjusted_ce": _logit_adjusted_ce,
    "selective_log_softmax": _selective_log_softmax,
    "kl": _kl,
    "js": _js,
    "total_variation": _total_variation,
    "topk_kl": _topk_kl,
    "iou": _box_iou,
    "giou": _giou,
    "diou": _diou,
    "ciou": _ciou,
    "eiou": _eiou,
    "probiou": _probiou,
    "gwd": _gwd,
    "kld": _kld,
    "kfiou": _kfiou,
    "rotated_iou": _rotated_iou,
    "box_l1": F.l1_loss,
    "box_smooth_l1": F.smooth_l1_loss,
    "dice": _dice,
    "jaccard": _jaccard,
    "tversky": _tversky,
    "focal_tversky": _focal_tversky,
    "dice_ce": _dice_ce,
    "generalized_dice": _generalized_dice,
    "mcc": _mcc,
    "dino": _dino,
    "dkd": _dkd,
    "channel_wise_kl_div": _channel_wise_kl_div,
    "dist": _dist,
    "boundary": _boundary,
    "silog": _silog,
    "koleo": _koleo,
    "vicreg": _vicreg,
    "barlow_twins": _barlow_twins,
}

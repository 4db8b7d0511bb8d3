"""Losses of classes that are each a question of yes or no."""

from __future__ import annotations

import math
from typing import Any

from lossforge.bench.record import (
    ELEMENTS,
    FOCAL,
    HIDDEN,
    IMAGENET,
    LARGE,
    F,
    Fused,
    Others,
    Target,
    Tensor,
    cases,
    enter,
    layers,
    loss,
    mean_of_rows,
    of_layer,
    of_module,
    of_timm,
    one_hot,
    reduced,
    summed,
    summed_row,
    torch,
    whole,
    wide,
)

LABELS, MANY = (4096, 9605), (4096, 21841)
RETINANET, ANCHORS = "retinanet-800x1344", (16, 120087, 80)


def _torchvision(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    return of_module("torchvision.ops", "sigmoid_focal_loss")(x, one_hot(x, target), **options)


def _focal_of_rows(x: Tensor, others: Others) -> Tensor:
    return summed_row(focal(x, others["target"], **FOCAL | {"reduction": "none"}))


@loss(
    "focal",
    "focal",
    cases("table", RETINANET, ANCHORS, "anchors", "class index", FOCAL),
    cases("table", RETINANET, ANCHORS, "dense", "dense", FOCAL),
    cases("small", "detr", (8, 900, 256), "dense", options=FOCAL, other={"gamma": 1.5, "alpha": 0.4}, dtypes=["fp32"]),
    *(
        cases("scaling", "over-n", (anchors, 80), "anchors", "over-n", FOCAL, dtypes=["fp32"])
        for anchors in (1000, 8000, 64000, 512000, 2000000)
    ),
    layers("linear", IMAGENET, HIDDEN, "classes", "class index", FOCAL),
    template=ELEMENTS,
    peers={"torchvision": lambda case: _torchvision},
    targets=(
        Target("class index 16x120087x80 fp32", "ms", 0.33),
        Target("class index 16x120087x80 bf16", "ms", 0.23),
        Target("dense 16x120087x80 fp32", "ms", 0.46),
        Target("dense 16x120087x80 bf16", "ms", 0.29),
        Target("8x900x256 fp32", "host_us", 110.0),
        Target("linear class index", "ms", 1.1, "products", "its products"),
    ),
    fused=Fused(
        rows=_focal_of_rows,
        total=lambda rows, others: rows.sum(),
        ours=of_layer("focal", **FOCAL),
    ),
)
def focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as torchvision.ops.sigmoid_focal_loss does, so that measuring needs no torchvision."""
    y = one_hot(x, target)
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return reduced((alpha * y + (1 - alpha) * (1 - y)) * entropy * (1 - p_t) ** gamma, reduction)


enter(
    "bce",
    "binary cross entropy",
    cases("table", "large", LARGE, "dense"),
    layers("linear", IMAGENET, HIDDEN, "dense", "dense"),
    template=ELEMENTS,
    peers={"timm": of_timm("BinaryCrossEntropy", smoothing=0.0)},
    targets=(Target("linear dense", "ms", 1.1, "products", "its products"),),
    fused=Fused(
        rows=lambda x, others: summed_row(F.binary_cross_entropy_with_logits(x, others["target"], reduction="none")) / x.shape[1],
        total=mean_of_rows,
        ours=of_layer("bce", reduction="mean"),
    ),
)
enter("bce_probability", "BCE of probabilities", summed("large", LARGE, "dense of probabilities"), template=ELEMENTS)
enter(
    "preference_bce",
    "preference-weighted BCE",
    cases("table", "large", LARGE, "preference"),
    eager=lambda x, target, *, preference, **options: F.binary_cross_entropy_with_logits(x, target, preference, **options),
    template=ELEMENTS,
    targets=(Target("268435456 fp32", "ms", 1.07), Target("268435456 bf16", "ms", 0.56)),
)
enter(
    "preference_bce_probability",
    "preference-weighted BCE of probabilities",
    summed("large", LARGE, "preference of probabilities"),
    eager=lambda x, target, *, preference, **options: F.binary_cross_entropy(x, target, preference, **options),
    template=ELEMENTS,
)
enter("multilabel_soft_margin", "multi-label soft margin", summed("open-images", LABELS, "multi-label"), template=ELEMENTS)


@loss(
    "bce_smoothed",
    "smoothed BCE",
    summed(IMAGENET, MANY, "classes", {"smoothing": 0.1}, {"smoothing": 0.2}),
    template=ELEMENTS,
    peers={"timm": of_timm("BinaryCrossEntropy")},
)
def bce_smoothed(x: Tensor, target: Tensor, *, smoothing: float, reduction: str) -> Tensor:
    y = one_hot(x, target) * (1 - smoothing) + smoothing / x.shape[-1]
    return F.binary_cross_entropy_with_logits(x, y, reduction=reduction)


@loss(
    "asymmetric",
    "asymmetric",
    summed("open-images", LABELS, "multi-label", {"gamma_neg": 4.0, "gamma_pos": 1.0, "clip": 0.05}, {"gamma_neg": 3.0}),
    template=ELEMENTS,
    peers={"timm": of_timm("AsymmetricLossMultiLabel")},
)
def asymmetric(x: Tensor, target: Tensor, *, gamma_neg: float, gamma_pos: float, clip: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    s = (p - clip).clamp(min=0)
    entropy = target * F.logsigmoid(x) + (1 - target) * torch.log1p(-s)
    base = target * (1 - p) + (1 - target) * s
    return reduced(-(base ** (gamma_pos * target + gamma_neg * (1 - target))) * entropy, reduction)


@loss(
    "poly_bce",
    "Poly-1 BCE",
    summed("open-images", LABELS, "multi-label", {"epsilon": 2.0}, {"epsilon": 1.0}),
    template=ELEMENTS,
    peers={"timm": of_timm("PolyBinaryCrossEntropy")},
)
def poly_bce(x: Tensor, target: Tensor, *, epsilon: float, reduction: str) -> Tensor:
    p = x.sigmoid()
    values = F.binary_cross_entropy_with_logits(x, target, reduction="none") + epsilon * (1 - p * target - (1 - p) * (1 - target))
    return reduced(values, reduction)


@loss(
    "distribution_balanced",
    "distribution-balanced",
    summed("open-images", LABELS, "counted multi-label", {"num_samples": 2**20}, {"focal_gamma": 1.0}),
    peers={"timm": of_timm("DistributionBalancedLoss")},
)
def distribution_balanced(
    x: Tensor, target: Tensor, *, class_counts: Tensor, num_samples: int, focal_gamma: float = 2.0, reduction: str
) -> Tensor:
    """Compute as timm does, with its defaults."""
    x, y = wide(x), wide(target)
    frequency, z = 1 / class_counts, x - 0.05 / 2 * torch.log(num_samples / class_counts - 1)
    share = frequency / (y * frequency).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weight = 0.1 + torch.sigmoid(10 * (share - 0.2))
    positive = F.softplus(-z) * torch.sigmoid(-z) ** focal_gamma
    negative = F.softplus(2 * z) / 2 * torch.sigmoid(2 * z) ** focal_gamma
    return reduced(weight * 2 * (y * positive + (1 - y) * negative), reduction)


def _zlpr_of_timm(case: Any) -> Any:
    """Return timm's, which has the mean alone, as a sum."""
    made = of_timm("ZlprLoss")(case)
    return lambda x, target, *, reduction: len(x) * made(x, target)


@loss("zlpr", "ZLPR", summed("open-images", LABELS, "multi-label"), function="zlpr_loss", peers={"timm": _zlpr_of_timm})
def zlpr(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as timm does."""
    x, positive = wide(x), target > 0.5
    zero = x.new_zeros(len(x), 1)
    negatives = torch.cat([x.masked_fill(positive, -math.inf), zero], 1).logsumexp(1)
    return reduced(negatives + torch.cat([(-x).masked_fill(~positive, -math.inf), zero], 1).logsumexp(1), reduction)


@loss(
    "two_way",
    "two-way",
    whole("open-images", LABELS, "multi-label", {"tp": 4.0, "tn": 1.0}, {"tp": 2.0}),
    function="two_way_loss",
    late=True,
    peers={"timm": of_timm("TwoWayLoss")},
)
def two_way(x: Tensor, target: Tensor, *, tp: float, tn: float) -> Tensor:
    """Compute as timm does, of samples and of classes, and wait for no count of these."""
    x, positive = wide(x), target > 0.5
    wanted, others = (-x / tp).masked_fill(~positive, -1e4), (x / tn).masked_fill(positive, -1e4)
    found = []
    for dim in (0, 1):
        exists = positive.any(dim)
        values = F.softplus(tn * others.logsumexp(dim) + tp * wanted.logsumexp(dim))
        found.append(torch.where(exists, values, 0.0).sum() / exists.sum().clamp(min=1))
    return found[0] + found[1]


def scored(x: Tensor, target: Tensor, score: Tensor) -> Tensor:
    return one_hot(x, target) * score.unsqueeze(-1)


@loss("quality_focal", "quality focal", summed(RETINANET, ANCHORS, "scored", {"beta": 2.0}, {"beta": 1.5}), template=ELEMENTS)
def quality_focal(x: Tensor, target: Tensor, *, score: Tensor, beta: float, reduction: str) -> Tensor:
    y = scored(x, target, score)
    values = (y - x.sigmoid()).abs() ** beta * F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return reduced(values, reduction)


@loss("varifocal", "varifocal", summed(RETINANET, ANCHORS, "scored", {"alpha": 0.75, "gamma": 2.0}, {"gamma": 1.5}), template=ELEMENTS)
def varifocal(x: Tensor, target: Tensor, *, score: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
    y = scored(x, target, score)
    factor = torch.where(y > 0, y, alpha * x.sigmoid() ** gamma)
    return reduced(factor * F.binary_cross_entropy_with_logits(x, y, reduction="none"), reduction)


@loss("mal", "matchability-aware", summed(RETINANET, ANCHORS, "scored", {"gamma": 1.5}, {"gamma": 2.0}), template=ELEMENTS)
def mal(x: Tensor, target: Tensor, *, score: Tensor, gamma: float, reduction: str) -> Tensor:
    """Compute as DEIM does: no gradient goes through the weight."""
    one = one_hot(x, target)
    weight = x.detach().sigmoid() ** gamma * (1 - one) + one
    y = (one * score.unsqueeze(-1)) ** gamma
    return F.binary_cross_entropy_with_logits(x, y, weight=weight, reduction=reduction)


@loss("ia_bce", "IoU-aware BCE", summed(RETINANET, ANCHORS, "scored", {"alpha": 0.25, "gamma": 2.0}, {"gamma": 1.5}), template=ELEMENTS)
def ia_bce(x: Tensor, target: Tensor, *, score: Tensor, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as LW-DETR does, from logits: no gradient goes through a positive's target."""
    p, q, positive = x.sigmoid(), score.unsqueeze(-1), one_hot(x, target) > 0
    y = torch.where(positive, (p**alpha * q ** (1 - alpha)).clamp(min=0.01), 0.0).detach()
    factor = torch.where(positive, 1.0, p**gamma)
    return reduced(factor * F.binary_cross_entropy_with_logits(x, y, reduction="none"), reduction)


@loss(
    "gaussian_focal", "Gaussian focal", summed("large", LARGE, "heatmap", {"alpha": 2.0, "gamma": 4.0}, {"alpha": 1.5}), template=ELEMENTS
)
def gaussian_focal(x: Tensor, target: Tensor, *, alpha: float, gamma: float, reduction: str) -> Tensor:
    """Compute as mmdetection does, from logits and without its 1e-12."""
    positive = (1 - x.sigmoid()) ** alpha * -F.logsigmoid(x)
    negative = (1 - target) ** gamma * x.sigmoid() ** alpha * -F.logsigmoid(-x)
    return reduced(torch.where(target == 1, positive, negative), reduction)


@loss(
    "distribution_focal",
    "distribution focal",
    summed("gfl-800x1344", (16, 89600, 17), "positions"),
    summed("yolo-640", (8, 33600, 16), "positions"),
)
def distribution_focal(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Compute as mmdetection and YOLOv8 do: two cross entropies, of the bins on the left and on the right."""
    left = target.long().flatten()
    of_left, of_right = (F.cross_entropy(x.flatten(0, -2), bin, reduction="none").view_as(target) for bin in (left, left + 1))
    share = target - target.floor()
    return reduced(of_left * (1 - share) + of_right * share, reduction)

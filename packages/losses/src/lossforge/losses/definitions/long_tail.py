"""The distribution-balanced loss of long-tailed samples with several labels."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import ElementwiseCall, Formulas
from lossforge.losses import checks
from lossforge.losses.definitions.binary import lost, smoothed
from lossforge.losses.device_names import logistic, power, tl
from lossforge.losses.formulas import formula
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.elementwise import ELEMENTWISE, dense, elementwise_loss, of_dim, per_sample
from lossforge.losses.templates.options import ElementwiseOptions
from lossforge.losses.types import BatchReduction, NonNegative, Positive, Real


def focused_softplus(t, gamma):
    """Return σ(t)^γ softplus(t), and its slope by t."""
    hit, missed, rest = logistic(t)
    entropy = tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    modulation = power(hit, gamma)
    return modulation * entropy, modulation * (hit + gamma * (missed * tl.where(gamma == 0.0, 0.0, entropy)))


def distribution_balanced(x, y, neg_scale, gamma, balance, bias):
    z = x + bias
    positive, falls = focused_softplus(-z, gamma)
    negative, rises = focused_softplus(neg_scale * z, gamma)
    return balance * (y * positive + (1.0 - y) * (negative / neg_scale)), balance * ((1.0 - y) * rises - y * falls)


@formula("distribution_balanced", lambda of: Formulas(of(distribution_balanced), heavy=True))
def distribution_balanced_reference(x: Tensor, y: Tensor, neg_scale: float, gamma: float, balance: float, bias: float | Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    z = x + bias
    positive = -F.logsigmoid(z) * torch.sigmoid(-z).clamp(min=tiny) ** gamma
    negative = -F.logsigmoid(-neg_scale * z) / neg_scale * torch.sigmoid(neg_scale * z).clamp(min=tiny) ** gamma
    return lost(balance * (y * positive + (1 - y) * negative), x, gamma != 0)


@loss(
    "distribution_balanced",
    ELEMENTWISE,
    Module("DistributionBalancedLoss", "Distribution-balanced loss as timm.loss.DistributionBalancedLoss"),
    options=({"neg_scale": 5.0, "focal_gamma": 0.0}, {"neg_scale": 1.0, "focal_gamma": 1.5, "focal_balance": 0.7}, {"focal_gamma": 0.5}),
    like="lossforge.losses.oracles.multilabel:distribution_balanced",
    paper="arXiv 2007.09654",
)
def distribution_balanced_loss(
    input: Tensor,  # any shape
    target: Tensor,  # as input, or class indices: as input without dim
    class_counts: Tensor | None = None,  # (C,)
    num_samples: int | None = None,
    map_alpha: Real = 0.1,
    map_beta: Real = 10.0,
    map_mu: Real = 0.2,
    neg_scale: Positive = 2.0,
    init_bias: Real = 0.05,
    focal_gamma: NonNegative = 2.0,
    focal_balance: Real = 2.0,
    smoothing: float = 0.0,
    reduction: BatchReduction = "mean",
    *,
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Distribution-balanced loss, as timm.loss.DistributionBalancedLoss (Wu et al. 2020, arXiv 2007.09654).

    L = w v b [y σ(-z)^γ softplus(-z) + (1 - y) σ(λz)^γ softplus(λz) / λ], z = x - κ / λ ln(S / n - 1). Class j has n = class_counts[j] of
    S = num_samples, λ = neg_scale, κ = init_bias, γ = focal_gamma, b = focal_balance, or 1 where γ is 0.

    v = map_alpha + σ(map_beta (r - map_mu)) with r = (1 / n) / Σⱼ yⱼ / nⱼ, how often class j alone would draw its sample, as a share of how
    often all of the sample's classes draw it. A sample without positives has r = ∞. Without class_counts v is 1 and z is x. The weights v
    are computed from the targets, as a tensor in the shape of input; the logits are read once. The mean divides by the number of elements.

    When to use it: Take it for samples with several labels under a long tail. It balances the classes without oversampling, and gives the
    many negatives of rare classes a smaller gradient.

    When not: Leave it on balanced classes (`bce`, `asymmetric`). It needs the classes' counts, and has six numbers that could be tuned.

    Args:
        target: in [0, 1], dense; or class indices, one against all, -1 background and -2 ignored.
        class_counts: (C,), the positive samples of each class in the training set; those outside [1, S - 1] count as its ends.
        num_samples: S of at least 2, the samples of the training set; needed with class_counts.
        map_alpha: the least weight of an element.
        map_beta: how steeply the weight rises with the share r.
        map_mu: the share r at which the weight is halfway between least and largest.
        neg_scale: λ above 0, a factor of the logits of negatives; 1 for none. The larger it is, the sooner their gradient fades.
        init_bias: κ, how far the classes' shares of the training set shift the logits; 0 for none.
        focal_gamma: γ of at least 0, the focusing exponent.
        focal_balance: b, a factor of the loss where γ is not 0.
        smoothing: s in [0, 1], of dense targets, which become y (1 - s) + s / 2.
        reduction: "mean", "sum", "none", or "batchmean": the sum divided by the number of samples, input.shape[0].
    """
    gamma = checks.number("focal_gamma", focal_gamma, 0.0)
    scale = checks.number("neg_scale", neg_scale, 0.0, exclusive=True)
    balance = checks.number("focal_balance", focal_balance)
    rising = [checks.number(name, value) for name, value in (("map_alpha", map_alpha), ("map_beta", map_beta), ("map_mu", map_mu))]
    shift = checks.number("init_bias", init_bias) / scale
    hyper = [scale, gamma, balance if checks.nonzero(gamma) else 1.0]
    call = ElementwiseCall("distribution_balanced", input, smoothed(target, input, smoothing), weight=weight, hyper=[*hyper, 0.0])
    call = call._replace(reduction=per_sample(reduction, input, options))
    if class_counts is None:
        return elementwise_loss(call, options)
    if num_samples is None:
        raise ValueError("num_samples must be given where class_counts is, got None")
    counts = _counts(class_counts, num_samples, input, checks.whole_number("dim", options.get("dim", -1)))
    prepared = elementwise_loss(call._replace(hyper=hyper, parameter=-shift * torch.log(num_samples / counts - 1)), options)
    share = _rebalanced(1 / counts, prepared.call._replace(target=dense(target, input)), rising)
    return prepared._replace(call=prepared.call._replace(weight=share if weight is None else share * weight))


def _counts(counts: Tensor, samples: float, x: Tensor, dim: int) -> Tensor:
    """Return the counts in [1, S - 1], in a shape that broadcasts to x."""
    checks.whole("input", x)
    of_dim(dim, x)
    checks.beside("class_counts", counts, x)
    if counts.shape != (x.shape[dim],):
        raise ValueError(f"class_counts must hold one count a class, shape ({x.shape[dim]},), got {tuple(counts.shape)}")
    samples = checks.number("num_samples", samples, 2.0)
    counts = counts.to(torch.float64 if x.dtype == torch.float64 else torch.float32).clamp(1, samples - 1)
    return counts.view(-1, *(1,) * (x.ndim - 1 - dim % x.ndim))


def _rebalanced(frequency: Tensor, call: ElementwiseCall, rising: list[float]) -> Tensor:
    """Return the weight of each element. frequency: 1 / n of each class."""
    least, slope, middle = rising
    target = call.target
    assert target is not None

    def of_index(index: Tensor) -> Tensor:
        found = frequency.flatten()[index.long().clamp(0, frequency.numel() - 1)]
        return torch.where(index < 0, 0.0, found).unsqueeze(call.dim)

    if target.is_floating_point():
        rate = (target * frequency).sum(call.dim, keepdim=True)
    else:
        share = None if call.lam is None else call.lam.unsqueeze(call.dim)
        rate = of_index(target) if share is None else share * of_index(target)
        if call.target_b is not None and share is not None:
            rate = rate + (1 - share) * of_index(call.target_b)
    ratio = frequency / rate.clamp(min=torch.finfo(frequency.dtype).tiny)
    return least + torch.sigmoid(slope * (ratio - middle))

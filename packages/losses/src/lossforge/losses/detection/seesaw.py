"""Seesaw loss for long-tailed classes: cross entropy of logits that are shifted for each row."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lossforge.kernels.torch_internals import register_autograd
from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import Reduction
from lossforge.losses.base.options import weights_of_classes
from lossforge.losses.base.state import kernels_apply
from lossforge.losses.engine.operators import LIBRARY, define, launched
from lossforge.losses.functional import cross_entropy
from lossforge.losses.templates.plain_forms import accurate, relative

__all__ = ["SeesawLoss", "seesaw_loss"]


@checks.named
def seesaw_loss(
    input: Tensor,
    target: Tensor,
    class_counts: Tensor,
    p: float = 0.8,
    q: float = 2.0,
    eps: float = 1e-2,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Seesaw loss for long-tailed classes, as mmdetection's seesaw_ce_loss (Wang et al. 2021, arXiv 2008.10032).

    L = cross_entropy(x + ln S_t, t) with S_tj = min(1, Nⱼ / N_t)^p · max(1, σⱼ / max(σ_t, eps))^q beside the target and S_tt = 1, where
    σ = softmax(x) and N are the class counts. Rare classes get a smaller gradient as negatives of frequent ones, unless the row scores them
    above its own class. No gradient goes through S.

    One launch writes the shifted logits, then cross entropy's reads them: a tensor of the logits' size in float32 beside the gradient.

    When to use it: Take it for detectors and classifiers of hundreds of classes with a long tail, as LVIS. `SeesawLoss` counts the samples.

    When not: Leave it on balanced classes, where S is the second factor alone. For a classifier whose class shares are known,
    `logit_adjusted_cross_entropy` is simpler and has one number to tune.

    Args:
        input: logits (N, C), of any floating dtype and strides. mmdetection's objectness is a cross entropy of its own, beside this.
        target: class indices (N,), of any integer dtype.
        class_counts: (C,), the samples of each class so far, N; those below 1 count as 1.
        p: of at least 0, how much smaller the gradient of rarer classes is; at 0 it is not smaller.
        q: of at least 0, how much larger the gradient of classes is that score above the target's; at 0 it is not larger.
        eps: in (0, 1], the least score of the target.
        reduction: "mean" over the rows that count, "sum" or "none".
        weight: (C,), a factor of each class, which the mean divides by.
        ignore_index: rows with this index have loss and gradient 0.
        normalizer: number or 0-d tensor that takes the place of the mean's divisor: mmdetection's avg_factor.

    Returns:
        a scalar; with reduction "none" one value a row. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class does not exist.

    Examples:
        >>> import torch
        >>> from lossforge.losses import seesaw_loss
        >>> logits = torch.randn(8, 5, requires_grad=True)
        >>> seesaw_loss(logits, torch.randint(5, (8,)), torch.tensor([900, 400, 30, 5, 1])).backward()
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim == 2 and input.shape[1] > 0, "have shape (N, C) with at least one class")
    rows, classes = input.shape
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    target = checks.indices("target", target, input, checks.Allowed(0, classes, ignore_index, None), (rows,))
    checks.real("class_counts", class_counts)
    checks.without_gradient("class_counts", class_counts)
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    counts = weights_of_classes("class_counts", class_counts.to(wide), input, classes)
    assert counts is not None
    p, q = checks.number("p", p, 0.0), checks.number("q", q, 0.0)
    least = math.log(checks.number("eps", eps, 0.0, 1.0, exclusive=True))
    log_counts = counts.detach().clamp(min=1).log()
    if kernels_apply(input) and not any(isinstance(n, Tensor) for n in (p, q)):
        x = OPERATORS.seesaw(input.resolve_neg(), target.contiguous(), log_counts, p, q, least)
    else:
        x = seesaw_reference(input, target, log_counts, p, q, least)
    return cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction, normalizer=normalizer)


def seesaw_reference(x: Tensor, target: Tensor, log_counts: Tensor, p: float, q: float, least: float) -> Tensor:
    """Return the shifted logits, relative to each row's largest, in plain torch."""
    x = accurate(x)
    classes = x.shape[1]
    exists = ((target >= 0) & (target < classes)).unsqueeze(1)
    index = target.long().clamp(0, classes - 1).unsqueeze(1)
    log_p = x.detach().log_softmax(1)
    rarer = (log_counts - log_counts[index]).clamp(max=0)
    surer = (log_p - log_p.gather(1, index).clamp(min=least)).clamp(min=0)
    others = exists & (torch.arange(classes, device=x.device) != index)
    return relative(x, 1) + torch.where(others, p * rarer + q * surer, 0.0)


class SeesawLoss(nn.Module):
    """Seesaw loss that counts the samples of each class as it trains: `seesaw_loss`, as mmdetection's SeesawLoss.

    The counts are the buffer `class_counts`, int64, which is saved with the model. A call in training mode adds its targets first; a call
    in evaluation mode leaves them. Each process counts its own samples, as in mmdetection.

    Args:
        num_classes: C, the number of classes.
        p: of at least 0, how much smaller the gradient of rarer classes is; at 0 it is not smaller.
        q: of at least 0, how much larger the gradient of classes is that score above the target's; at 0 it is not larger.
        eps: in (0, 1], the least score of the target.
        reduction: "mean" over the rows that count, "sum" or "none".
        weight: (C,), a factor of each class, which the mean divides by.
        ignore_index: rows with this index have loss and gradient 0, and are not counted.

    Examples:
        >>> import torch
        >>> from lossforge.losses import SeesawLoss
        >>> criterion = SeesawLoss(5)
        >>> criterion(torch.randn(8, 5, requires_grad=True), torch.randint(5, (8,))).backward()
        >>> criterion.class_counts.sum()
        tensor(8)
    """

    class_counts: Tensor
    weight: Tensor | None

    def __init__(
        self,
        num_classes: int,
        p: float = 0.8,
        q: float = 2.0,
        eps: float = 1e-2,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        num_classes = checks.whole_number("num_classes", num_classes)
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        checks.one_of("reduction", reduction, checks.REDUCTIONS)
        checks.whole_number("ignore_index", ignore_index)
        self.p, self.q, self.eps, self.reduction, self.ignore_index = p, q, eps, reduction, ignore_index
        self.register_buffer("class_counts", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor, *, normalizer: float | Tensor | None = None) -> Tensor:
        """Return the loss of logits (N, C) and class indices (N,), after counting these in training mode."""
        checks.integer("target", target)
        counts = self.counted(target) if self.training else self.class_counts
        shape = (self.p, self.q, self.eps, self.reduction)
        found = seesaw_loss(input, target, counts, *shape, weight=self.weight, ignore_index=self.ignore_index, normalizer=normalizer)
        if self.training:
            self.class_counts.copy_(counts)  # not before the call has been checked
        return found

    @torch.no_grad()
    def counted(self, target: Tensor) -> Tensor:
        """Return the counts with the classes of a batch, by sums of integers, whose order changes nothing."""
        index = target.flatten().long()
        counts = (index != self.ignore_index) & (index >= 0) & (index < len(self.class_counts))
        return self.class_counts.index_put((torch.where(counts, index, 0),), counts.long(), accumulate=True)

    def extra_repr(self) -> str:
        return f"num_classes={len(self.class_counts)}, p={self.p}, q={self.q}, eps={self.eps}, reduction={self.reduction!r}"


def _shifted(x: Tensor, target: Tensor, log_counts: Tensor, p: float, q: float, least: float) -> Tensor:
    found: tuple[Tensor] = launched("classes.seesaw", "shifted", (x, target, log_counts), p, q, least)
    return found[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient as it is, because none goes through the shift."""
    return grad.to(ctx.dtype), None, None, None, None, None


define("seesaw(Tensor x, Tensor target, Tensor log_counts, float p, float q, float least) -> Tensor", _shifted, _fake)
register_autograd(LIBRARY, "seesaw", _setup, _differentiate)

"""Losses that compare the positive classes of a sample with its negative ones."""

import functools
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack, cast

from torch import Tensor

from lossforge.kernels.call import MultilabelCall
from lossforge.losses import checks
from lossforge.losses.templates.declare import Module, public
from lossforge.losses.templates.multilabel import MULTILABEL
from lossforge.losses.templates.options import CallOptions, check_options, with_options
from lossforge.losses.templates.record import first, prepared
from lossforge.losses.types import Empty, Gradient, Positive, Reduction, ScalarReduction


class PairedOptions(TypedDict, total=False):
    """As every loss has them."""

    empty: Empty
    gradient: Gradient | None


class MultilabelOptions(PairedOptions, total=False):
    inplace: bool
    normalizer: float | Tensor | None


def _check(input: Tensor, target: Tensor) -> None:
    """Check the logits and targets of samples with several labels."""
    checks.whole("input", input)
    if input.ndim == 0 or input.shape[-1] == 0:
        raise ValueError(f"input must have at least one class in its last dimension, got shape {tuple(input.shape)}")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    if target.is_complex():
        raise TypeError(f"target must be of a real dtype or bool, got {target.dtype}")
    checks.without_gradient("target", target)
    checks.beside("target", target, input)
    if target.shape != input.shape:
        raise ValueError(
            f"target must have the shape of input, {tuple(input.shape)}, 1 for each class that holds, got shape {tuple(target.shape)}"
        )


@public(
    MULTILABEL.docs,
    Module("ZlprLoss", "ZLPR loss as timm.loss.ZlprLoss"),
    repeats=True,
)
def zlpr_loss(
    input: Tensor,  # (…, C)
    target: Tensor,  # as input
    reduction: Reduction = "mean",
    **options: Unpack[MultilabelOptions],
) -> Tensor:
    """ZLPR loss, softmax cross entropy of samples with several labels, as timm.loss.ZlprLoss (Su et al. 2022, arXiv 2208.02955).

    L = ln(1 + Σⱼ exp xⱼ) + ln(1 + Σₖ exp(-xₖ)) with j over the negative classes of a sample and k over its positive ones, those with a
    target above ½. Every positive logit is pushed above every negative one, and 0 is the threshold between them.

    One pass over the logits gives the value, another the gradient; no masked copy is made. "mean" divides by the number of samples.

    When to use it: Take it for samples with few of many labels. Its size does not grow with the number of negatives, it has nothing to
    tune, and 0 is the threshold.

    When not: Leave it where each label's probability must be calibrated alone; `bce` and `asymmetric` give these.

    Args:
        input: logits (…, C), of any floating dtype, the classes last.
        target: in the shape of input, of any real dtype or bool; above ½ where a class holds.

    Examples:
        >>> logits = torch.randn(8, 80, requires_grad=True)
        >>> zlpr_loss(logits, torch.rand(8, 80) > 0.9).backward()
    """
    _check(input, target)
    given = cast(CallOptions, options)
    divisor = check_options(input, reduction, given, MultilabelOptions)
    lead = input.shape[:-1]
    x, y = (t if t.ndim == 2 else t.reshape(-1, t.shape[-1]) for t in (input, target))
    call = MultilabelCall("zlpr", x, y, reduction=reduction)
    shaped = len(lead) != 1 and reduction == "none"
    return prepared(with_options(call, given, divisor), options, functools.partial(_of_shape, lead) if shaped else first)


def _of_shape(lead: Sequence[int], results: Sequence[Tensor | None]) -> Tensor:
    return first(results).view(lead)


@public(
    MULTILABEL.docs,
    Module("TwoWayLoss", "Two-way multi-label loss as timm.loss.TwoWayLoss"),
    repeats=True,
)
def two_way_loss(
    input: Tensor,  # (N, C)
    target: Tensor,  # as input
    tp: Positive = 4.0,
    tn: Positive = 1.0,
    reduction: ScalarReduction = "mean",
    **options: Unpack[PairedOptions],
) -> Tensor:
    """Two-way multi-label loss, as timm.loss.TwoWayLoss (Kobayashi 2023, CVPR, "Two-way Multi-Label Loss").

    L = softplus(tn ln Σⱼ exp(xⱼ / tn) + tp ln Σₖ exp(-xₖ / tp)) with j over negatives and k over positives, those with a target above ½:
    the mean over the samples that have a positive, plus that over the classes of the batch that have one.

    Each direction is one pass over the logits, and one more writes the gradient of both. Logits are scores for a ranking, not calibrated
    probabilities.

    When to use it: Take it where labels are ranked within a sample, and samples within a label, as retrieval is judged.

    When not: Leave it where logits must become probabilities (`bce`), and where batches are so small that most labels have no positive.

    Args:
        input: logits (N, C), of any floating dtype.
        target: in the shape of input, of any real dtype or bool; above ½ where a class holds.
        tp: temperature above 0 of the positives' soft minimum.
        tn: temperature above 0 of the negatives' soft maximum.
        reduction: "mean", of each direction; or "sum".
        empty: without effect; the mean of no sample is 0, as timm's.

    Examples:
        >>> logits = torch.randn(8, 80, requires_grad=True)
        >>> two_way_loss(logits, torch.rand(8, 80) > 0.9).backward()
    """
    _check(input, target)
    if input.ndim != 2:
        raise ValueError(f"input must have shape (N, C), got {tuple(input.shape)}")
    checks.one_of("reduction", reduction, ("mean", "sum"))
    check_options(input, reduction, cast(CallOptions, options), PairedOptions)
    numbers: dict[str, Any] = {
        "tp": checks.number("tp", tp, 0.0, exclusive=True),
        "tn": checks.number("tn", tn, 0.0, exclusive=True),
        "paired": True,
        "reduction": reduction,
    }
    return prepared(MultilabelCall("two_way", input, target, **numbers), options)

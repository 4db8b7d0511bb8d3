"""Divergences of softmax distributions, for distillation.

Both sides are logits, softened by the same temperature. The gradient goes to `input`; to a teacher that requires grad as well, through the
plain-torch reference. A class of probability 0 on both sides (logits of -inf) adds nothing; one that only the student excludes makes
KL(teacher ‖ student) infinite, as the mathematics say, with a finite gradient. One that only the teacher excludes makes the reverse
infinite, whose gradient then is not finite.

Options that each of them has, beside those of every function:

reduction: "batchmean", as in torch.nn.functional.kl_div: Σ / N for N samples; "mean": the mean over rows, where F.kl_div divides by the
    number of elements; "sum"; "none": one value a row, in the shape (N, d…). For (N, C) "batchmean" and "mean" are the same. Rows that are
    left out do not count in either.
temperature_squared: multiply by temperature², so that gradients keep their size (Hinton et al. 2015, arXiv 1503.02531).
weight: (N, d…), floating or bool, a factor a row; the means divide by its sum. Rows of weight 0 are left out: they are not read,
    unless weight requires grad.
labels, ignore_index: integers (N, d…); rows whose label is ignore_index are left out. Other labels mean nothing here.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import DivergenceCall, TopKCall
from lossforge.losses import checks
from lossforge.losses.dispatch import value
from lossforge.losses.functional.common import CallOptions, check_options, factor
from lossforge.losses.repeat import repeated
from lossforge.losses.types import BatchReduction

REDUCTIONS = ("none", "batchmean", "mean", "sum")


@repeated
def kl_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    temperature: float = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    reverse: bool = False,
    temperature_squared: bool = True,
    weight: Tensor | None = None,  # (), (N,), (N, d…)
    labels: Tensor | None = None,  # as weight
    ignore_index: int = -100,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Kullback-Leibler divergence of the student's softmax from the teacher's.

    L = T² Σⱼ qⱼ (ln qⱼ - ln pⱼ), p = softmax(input / T), q = softmax(target_logits / T); with `reverse` T² Σⱼ pⱼ (ln pⱼ - ln qⱼ).

    Args: target_logits: the teacher's, of any floating dtype; temperature: T > 0; reverse: KL(student ‖ teacher) in place of
    KL(teacher ‖ student). Others: see lossforge.losses.functional.divergence and lossforge.losses.functional.
    Returns: a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    Raises: TypeError, ValueError naming the argument.
    Source: Hinton et al. 2015, arXiv 1503.02531; torch.nn.functional.kl_div on log_softmax; reverse: MiniLLM, arXiv 2306.08543.
    """
    return _loss(
        "kl",
        input,
        target_logits,
        [],
        reverse,
        temperature,
        reduction,
        temperature_squared,
        weight,
        labels,
        ignore_index,
        options,
    )


@repeated
def js_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    temperature_squared: bool = False,
    weight: Tensor | None = None,  # (), (N,), (N, d…)
    labels: Tensor | None = None,  # as weight
    ignore_index: int = -100,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the student's softmax and the teacher's.

    L = β KL(q ‖ m) + (1 - β) KL(p ‖ m), m = (1 - β) p + β q, p = softmax(input / T), q = softmax(target_logits / T).

    At β = 0 it is KL(q ‖ p) and at β = 1 KL(p ‖ q), the limits of L / (β (1 - β)), as in TRL; 0 where torch.compile traces β as a
    tensor.

    Args: target_logits: the teacher's, of any floating dtype; beta: in [0, 1]; temperature: T > 0; temperature_squared: off by default, as
    in TRL. Others: see lossforge.losses.functional.divergence and lossforge.losses.functional.
    Returns: a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    Raises: TypeError, ValueError naming the argument.
    Source: GKD, Agarwal et al. 2024, arXiv 2306.13649; TRL's generalized_jsd_loss.
    """
    beta = checks.number("beta", beta, 0.0, 1.0)
    limit = not isinstance(beta, Tensor) and beta in (0.0, 1.0)
    return _loss(
        "kl" if limit else "js",
        input,
        target_logits,
        [] if limit else [beta],
        limit and beta == 1.0,
        temperature,
        reduction,
        temperature_squared,
        weight,
        labels,
        ignore_index,
        options,
    )


@repeated
def total_variation_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    temperature: float = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    temperature_squared: bool = False,
    weight: Tensor | None = None,  # (), (N,), (N, d…)
    labels: Tensor | None = None,  # as weight
    ignore_index: int = -100,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Total variation distance of the student's softmax and the teacher's.

    L = ½ Σⱼ |pⱼ - qⱼ|, p = softmax(input / T), q = softmax(target_logits / T). Where p = q the gradient takes sign 0.

    Args: target_logits: the teacher's, of any floating dtype; temperature: T > 0. Others: see lossforge.losses.functional.divergence and
    lossforge.losses.functional.
    Returns: a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    Raises: TypeError, ValueError naming the argument.
    Source: f-distill, Wen et al. 2023, arXiv 2307.15190.
    """
    return _loss(
        "total_variation",
        input,
        target_logits,
        [],
        False,
        temperature,
        reduction,
        temperature_squared,
        weight,
        labels,
        ignore_index,
        options,
    )


@repeated
def topk_kl_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    values: Tensor,  # (K,), (N, K), (N, K, d…)
    indices: Tensor,  # as values
    temperature: float = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    renormalize: bool = False,
    tail: bool = False,
    temperature_squared: bool = True,
    weight: Tensor | None = None,  # (), (N,), (N, d…)
    labels: Tensor | None = None,  # as weight
    ignore_index: int = -100,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Kullback-Leibler divergence from a teacher of which the K likeliest classes of each row are known; no dense teacher is built.

    L = T² Σₖ qₖ (ln qₖ - ln p[iₖ]), p = softmax(input / T), q = exp(values); with tail also (1 - Σ q) ln((1 - Σ q) / (1 - Σ p[i])).

    Args: values, indices: in the order of torch.topk, so that *log_q.topk(k, dim) gives both. values: natural logarithms of the teacher's
    probabilities at temperature T, or with `renormalize` its logits (or log-probabilities at temperature 1), of which
    q = softmax(values / T) over the K. indices: their classes, of any integer dtype, different from each other within a row; -1 for no
    entry. tail: the classes that are not among the K count as one more, as in TRL; needs values that are not
    renormalised. 1 - Σ p[i] is at least 2⁻²⁴. Others: see lossforge.losses.functional.divergence and lossforge.losses.functional.
    Returns: a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    Raises: TypeError, ValueError naming the argument; IndexError for an index out of range.
    Source: Hinton et al. 2015, arXiv 1503.02531, over the classes that are kept.
    """
    checks.floating("input", input)
    if isinstance(values, Tensor) and isinstance(indices, Tensor) and not values.is_floating_point() and indices.is_floating_point():
        raise TypeError(
            "values come before indices, as topk gives them: topk_kl_div_with_logits(input, *teacher.topk(k)), "
            f"got {values.dtype} as values"
        )
    checks.floating_beside("values", values, input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    if renormalize and tail:
        raise ValueError("tail needs probabilities that leave some to the other classes, got renormalize=True")
    class_dim = 0 if input.ndim == 1 else 1
    indices = checks.indices("indices", indices, None, input, 0, input.shape[class_dim], -1, options.get("validate"))
    k = indices.shape[class_dim] if indices.ndim == input.ndim else 0
    entries = tuple(k if d == class_dim else n for d, n in enumerate(input.shape))
    if k == 0 or indices.shape != entries:
        raise ValueError(f"indices must have K classes for each row of input, {tuple(input.shape)}, got shape {tuple(indices.shape)}")
    if values.shape != indices.shape:
        raise ValueError(f"values must have the shape of indices, {tuple(indices.shape)}, got {tuple(values.shape)}")
    return _loss(
        "topk_kl",
        input,
        indices,
        [1.0 * renormalize, 1.0 * tail],
        False,
        temperature,
        reduction,
        temperature_squared,
        weight,
        labels,
        ignore_index,
        options,
        values,
    )


def _loss(
    loss: str,
    x: Tensor,
    teacher: Tensor,
    hyper: list[float],
    swap: bool,
    temperature: float,
    reduction: str,
    temperature_squared: bool,
    weight: Tensor | None,
    labels: Tensor | None,
    ignore_index: int,
    options: CallOptions,
    values: Tensor | None = None,
) -> Tensor:
    """Check arguments and compute. teacher: logits, or with `values` indices, both checked."""
    if values is None:
        checks.floating("input", x)
        if x.ndim == 0:
            raise ValueError("input must have a dimension of classes, got a 0-d tensor")
        checks.floating_beside("target_logits", teacher, x)
        if teacher.shape != x.shape:
            raise ValueError(f"target_logits must have the shape of input, {tuple(x.shape)}, got {tuple(teacher.shape)}")
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    checks.one_of("reduction", reduction, REDUCTIONS)
    batchmean = reduction == "batchmean"
    reduction = "mean" if batchmean else reduction
    divisor = check_options(x, reduction, options, CallOptions)
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    per_row = torch.Size([]) if x.ndim == 1 else torch.Size([x.shape[0], *x.shape[2:]])
    for name, t in (("weight", weight), ("labels", labels)):
        if t is None:
            continue
        if name == "labels" or not isinstance(t, Tensor):
            checks.integer(name, t) if name == "labels" else checks.floating(name, t)
        elif not (t.is_floating_point() or t.dtype == torch.bool):
            raise TypeError(f"weight must be of a floating dtype or bool, got {t.dtype}")
        checks.beside(name, t, x)
        if t.shape != per_row:
            raise ValueError(f"{name} must have one entry a row, shape {tuple(per_row)}, got {tuple(t.shape)}")
    if labels is not None and labels.dtype not in (torch.int32, torch.int64):
        labels = labels.long()
    one = x.ndim == 1
    if one:
        x, teacher = x.unsqueeze(0), teacher.unsqueeze(0)
        values, weight, labels = (None if t is None else t.unsqueeze(0) for t in (values, weight, labels))
    scale = factor(options)
    if batchmean and options.get("normalizer") is None:
        for n in x.shape[2:]:
            scale = scale * n
    if temperature_squared:
        scale = scale * temperature * temperature
    shared: dict[str, Any] = {
        "loss": loss,
        "x": x,
        "labels": labels,
        "weight": weight,
        "normalizer": divisor,
        "temperature": 1.0 * temperature,
        "ignore_index": ignore_index,
        "loss_scale": scale,
        "reduction": reduction if options.get("normalizer") is None else "sum",
        "empty_is_zero": options.get("empty") == "zero",
    }
    call: DivergenceCall | TopKCall
    if values is None:
        call = DivergenceCall(target=teacher, hyper=hyper, swap=swap, **shared)
    else:
        renormalize, tail = hyper
        call = TopKCall(target=values, indices=teacher, renormalize=bool(renormalize), tail=bool(tail), **shared)
    result = value(call, options.get("gradient"), options.get("inplace", False))
    return result.squeeze(0) if one and result.ndim else result

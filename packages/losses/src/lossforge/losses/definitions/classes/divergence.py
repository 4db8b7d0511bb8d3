"""Divergences of softmax distributions, for distillation.

Both sides are logits, softened by the same temperature. The gradient goes to `input`; to a teacher that requires grad as well, through the
plain-torch reference, in `dkd_loss` by the kernel. A class of probability 0 on both sides (logits of -inf) adds nothing; one that only the
student excludes makes KL(teacher ‖ student) infinite, as the mathematics say, with a finite gradient. One that only the teacher excludes
makes the reverse infinite, whose gradient then is not finite.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import DivergenceCall, TopKCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss, public
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import BatchReduction, DivergenceOutputs, NonNegative, Positive, Reduction, UnitInterval
from lossforge.losses.base.options import (
    CappedDivergenceOptions,
    CheckedMeanOptions,
    SharedOptions,
    TopKOptions,
    WeightedElementwiseOptions,
    of_classes,
    rows_of,
)
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall, TemplateDocs
from lossforge.losses.base.state import KERNEL_DTYPES, kernels_apply
from lossforge.losses.engine.operators import define_differentiable, launched
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import tl
from lossforge.losses.templates.divergence import DIVERGENCE, TOPK, C, divergence_loss
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss, per_sample
from lossforge.losses.templates.plain_forms import counted, or_nan, relative

__all__ = ["DivergenceOutput"]

ORACLES = "lossforge.losses.testing.oracles.divergence"


class DivergenceOutput(Outputs):
    """What a divergence returns with outputs.

    Attributes:
        loss: a scalar, or one value a row with reduction "none".
        entropy: (N, d…), of the student's softmax(input / T), in nats, without gradient; 0 in rows that are left out.
    """

    loss: Tensor
    entropy: Tensor


def _with_entropy(
    call: C, options: CappedDivergenceOptions | TopKOptions, temperature_squared: bool, outputs: Sequence[DivergenceOutputs]
) -> CheckedCall[C, Tensor | DivergenceOutput]:
    """Check arguments of a divergence, whose entropy may be wanted too."""
    asked: list[bool] = DivergenceOutput.asked(outputs)
    wanted = [*asked, *call.outputs[len(asked) :]]
    checked: CheckedCall[C, Any] = divergence_loss(call._replace(outputs=wanted), options, temperature_squared)
    return checked.returning(_loss_and_entropy) if any(asked) else checked


def _loss_and_entropy(results: Sequence[Tensor | None]) -> DivergenceOutput:
    return DivergenceOutput.of(results[:2])


def _weighted(p: Tensor, lp: Tensor, lq: Tensor) -> Tensor:
    """p ln (p / q), 0 where p is."""
    return p * torch.where(p == 0, 0.0, lp - lq)


@formula("kl", DeviceFormula("softmax.kl", averaged="softmax.kl_averaged"))
def kl_reference(lp: Tensor, lq: Tensor) -> Tensor:
    return _weighted(lq.exp(), lq, lp)


@loss(
    "kl",
    DIVERGENCE,
    Module("KLDivWithLogitsLoss", "Kullback-Leibler divergence from a teacher's logits"),
    switches=("reverse", "temperature_squared"),
    options=({"reverse": True}, {"temperature": 3.0}, {"temperature": 0.7, "reverse": True, "temperature_squared": False}),
    like=f"{ORACLES}:kl_div",
    paper="arXiv 1503.02531",
)
def kl_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    reverse: bool = False,
    temperature_squared: bool = True,
    ignore_index: int = -100,
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[CappedDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DivergenceOutput]:
    """Kullback-Leibler divergence of the student's softmax from the teacher's.

    L = T² Σⱼ qⱼ (ln qⱼ - ln pⱼ), p = softmax(input / T), q = softmax(target_logits / T); with `reverse` T² Σⱼ pⱼ (ln pⱼ - ln qⱼ).

    Source: Hinton et al. 2015, arXiv 1503.02531; torch.nn.functional.kl_div on log_softmax; reverse: MiniLLM, arXiv 2306.08543.

    When to use it: Take it for distillation from a teacher's logits. A temperature above 1 shows more of the teacher's small probabilities.

    When not: Leave it where the teacher's logits do not fit in memory (`topk_kl`, `linear_kl_div`). Under it a student much smaller than
    its teacher gives too many classes some probability; try `reverse=True` or `js`.

    Args:
        reverse: KL(student ‖ teacher) in place of KL(teacher ‖ student).

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is); with outputs DivergenceOutput.
    """
    call = DivergenceCall("kl", input, target_logits, ignore_index=ignore_index, reduction=reduction)
    return _with_entropy(call._replace(swap=reverse, temperature=temperature), options, temperature_squared, outputs)


@formula("js", DeviceFormula("softmax.js"))
def js_reference(lp: Tensor, lq: Tensor, beta: float) -> Tensor:
    p, q = lp.exp(), lq.exp()
    m = (1 - beta) * p + beta * q
    lm = torch.where(m == 0, 1.0, m).log()
    return beta * _weighted(q, lq, lm) + (1 - beta) * _weighted(p, lp, lm)


@loss(
    "js",
    DIVERGENCE,
    Module("JSDivWithLogitsLoss", "Generalised Jensen-Shannon divergence from a teacher's logits"),
    switches=("temperature_squared",),
    options=({"beta": 0.0}, {"beta": 1.0}, {"beta": 0.1, "temperature": 2.0}, {"beta": 0.9, "temperature_squared": True}),
    like=f"{ORACLES}:js_div",
    paper="arXiv 2306.13649",
)
def js_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    beta: UnitInterval = 0.5,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    temperature_squared: bool = False,
    ignore_index: int = -100,
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[CappedDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DivergenceOutput]:
    """Generalised Jensen-Shannon divergence of the student's softmax and the teacher's.

    L = β KL(q ‖ m) + (1 - β) KL(p ‖ m), m = (1 - β) p + β q, p = softmax(input / T), q = softmax(target_logits / T).

    At β = 0 it is KL(q ‖ p) and at β = 1 KL(p ‖ q), the limits of L / (β (1 - β)), as in TRL; 0 where torch.compile traces β as a
    tensor. So it jumps at both ends: near them L is about β (1 - β) times that KL, and goes to 0.

    Source: GKD, Agarwal et al. 2024, arXiv 2306.13649; TRL's generalized_jsd_loss.

    When to use it: Take it for distillation on the student's own text, as GKD does. With β inside (0, 1) it is at most ln 2. There β weighs
    teacher against student in the mixture m; to blend the two directions of KL, add two calls with β = 0 and β = 1.

    When not: Leave it where plain KL works, because its gradient fades where student and teacher differ much.

    Args:
        beta: β in [0, 1], the teacher's share of the mixture. 0 and 1 themselves are the two directions of KL.
        temperature_squared: multiply by T², so that gradients keep their size. Off by default, as in TRL; on by default in the
            Kullback-Leibler losses.

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is); with outputs DivergenceOutput.
    """
    beta = checks.number("beta", beta, 0.0, 1.0)
    call = DivergenceCall("js", input, target_logits, ignore_index=ignore_index, reduction=reduction)
    call = call._replace(hyper=[beta], temperature=temperature)
    if not isinstance(beta, Tensor) and beta in (0.0, 1.0):
        call = call._replace(loss="kl", hyper=[], swap=beta == 1.0)
    return _with_entropy(call, options, temperature_squared, outputs)


@formula("total_variation", DeviceFormula("softmax.total_variation"))
def total_variation_reference(lp: Tensor, lq: Tensor) -> Tensor:
    d = lp.exp() - lq.exp()
    half = torch.where(d.detach().sum(1, keepdim=True).isnan(), torch.nan, 0.5).to(d.dtype)  # a teacher of nan gives a gradient of nan
    return half * d.abs()


@loss(
    "total_variation",
    DIVERGENCE,
    Module("TotalVariationWithLogitsLoss", "Total variation distance from a teacher's logits"),
    switches=("temperature_squared",),
    options=({"temperature": 2.0}, {"temperature": 0.5, "temperature_squared": True}),
    like=f"{ORACLES}:total_variation",
    paper="arXiv 2307.15190",
)
def total_variation_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    temperature_squared: bool = False,
    ignore_index: int = -100,
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[CappedDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DivergenceOutput]:
    """Total variation distance of the student's softmax and the teacher's.

    L = ½ Σⱼ |pⱼ - qⱼ|, p = softmax(input / T), q = softmax(target_logits / T). Where p = q the gradient takes sign 0.

    Source: f-distill, Wen et al. 2023, arXiv 2307.15190.

    When to use it: Take it for distillation that should not chase the teacher's rare errors. It is bounded by 1.

    When not: Leave it at the start of training, because its gradient vanishes where the student gives almost no probability.

    Args:
        temperature_squared: multiply by T², so that gradients keep their size. Off by default: the value is then a distance in [0, 1]; on
            by default in the Kullback-Leibler losses.

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is); with outputs DivergenceOutput.
    """
    call = DivergenceCall("total_variation", input, target_logits, ignore_index=ignore_index, reduction=reduction)
    return _with_entropy(call._replace(temperature=temperature), options, temperature_squared, outputs)


@formula("cosine", DeviceFormula(None))
def cosine_reference(x: Tensor, teacher: Tensor) -> Tensor:
    """Of logits, not of log-probabilities."""
    cos = (x * teacher).sum(1, keepdim=True)
    for t in (x, teacher):
        cos = cos / or_nan(torch.linalg.vector_norm(t, dim=1, keepdim=True).clamp(min=1e-8))
    return 1 - cos


@loss(
    "cosine_distance",
    DIVERGENCE,
    Module("CosineDistanceWithLogitsLoss", "Cosine distance from a teacher's logits"),
    formula="cosine",
    without=("temperature", "one class"),  # of one class the gradient is 0 but for rounding
    options=({"scale": 0.7, "softcap": 3.0, "target_scale": 1.4},),
    like=f"{ORACLES}:cosine_distance",
)
def cosine_distance_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    reduction: BatchReduction = "batchmean",
    *,
    ignore_index: int = -100,
    **options: Unpack[CappedDivergenceOptions],
) -> CheckedCall[DivergenceCall]:
    """Cosine distance of the student's logits and the teacher's, as rows of C numbers.

    L = 1 - x · t / (|x| |t|), x = input, t = target_logits; a length is at least 1e-8, as in torch.nn.functional.cosine_similarity.
    A row whose squares overflow float32, of a length from 1.8e19, has a loss of nan.

    Source: Liger-Kernel's LigerFusedLinearCosineSimilarityLoss: its β is 1 - hard_weight, and its weight of the labels hard_weight.

    When to use it: Take it for distillation that should teach directions of logits, not their size: a temperature changes nothing.

    When not: Leave it where the student's probabilities matter. A common offset of the logits, which no softmax sees, changes the distance,
    and the student is free in the size of its logits. With `hard_weight` the labels' cross entropy sets it.

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    """
    call = DivergenceCall("cosine", input, target_logits, ignore_index=ignore_index, reduction=reduction)
    return divergence_loss(call, options, False)


def half_distance(x, y):
    return 0.5 * tl.abs(x - y)


@formula("total_variation_probability", DeviceFormula(half_distance))
def half_distance_reference(x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (x - y).abs()


@loss(
    "total_variation_probability",
    ELEMENTWISE,
    Module("TotalVariationLoss", "Total variation distance of probabilities"),
    domain="probabilities",
    like=f"{ORACLES}:total_variation_probability",
    paper="arXiv 2307.15190",
    given="softmax",
)
def total_variation(
    input: Tensor,  # probabilities, any shape
    target: Tensor,  # as input, or class indices: as input without dim
    reduction: BatchReduction = "batchmean",
    **options: Unpack[WeightedElementwiseOptions],
) -> CheckedCall[ElementwiseCall]:
    """Total variation distance of probabilities that are given, element by element.

    L = ½ w |x - y|, whose sum over the classes of a row is the distance. Where x = y the gradient takes sign 0.

    Source: f-distill, Wen et al. 2023, arXiv 2307.15190.

    When to use it: Take it for distributions that exist as probabilities anyway, such as those of a mixture. With `reduction="none"` it
    shows which classes two models differ in.

    When not: Leave it where both are logits; `total_variation_with_logits` reads each once, and keeps no probabilities.

    Args:
        input: probabilities of any shape and floating dtype.
        target: probabilities in the shape of input; or class indices, -1 background and -2 ignored.
        reduction: "batchmean" divides by the number of samples, input.shape[0], and is the mean distance of rows (N, C); "mean" divides
            by the number of elements; "sum"; "none".
        weight: broadcasts to input, such as (N, 1) for one weight a row; no mean divides by it.
    """
    kept = per_sample(reduction, input, options)
    return elementwise_loss(ElementwiseCall("total_variation_probability", input, target, reduction=kept), options)


@formula("topk_kl", DeviceFormula(None))
def topk_kl_reference(lp: Tensor, lq: Tensor, tail: bool, reverse: float) -> Tensor:
    """Of the K classes in dimension 1 and, with `tail`, of all others as one more, whose probabilities are 1 less the sum of these.

    reverse: the share of KL(student ‖ teacher). Of an entry that is absent both are -inf.
    """
    terms = _weighted(lq.exp(), lq, lp)
    if checks.nonzero(reverse):
        terms = (1 - reverse) * terms + reverse * _weighted(lp.exp(), lp, lq)
    if not tail:
        return terms
    least = 2.0**-24 if lp.dtype == torch.float32 else 2.0**-53  # below it the difference is rounding
    left_p = (1 - lp.exp().sum(1, keepdim=True)).clamp(min=least)
    left_q = (1 - lq.exp().sum(1, keepdim=True)).clamp(min=0.0)
    of_tail = _weighted(left_q, torch.where(left_q == 0, 1.0, left_q).log(), left_p.log())
    if checks.nonzero(reverse):
        of_tail = (1 - reverse) * of_tail + reverse * left_p * (left_p.log() - left_q.clamp(min=least).log())
    return torch.cat([terms, of_tail], dim=1)


@loss(
    "topk_kl",
    TOPK,
    Module(
        "TopKKLDivWithLogitsLoss",
        "Kullback-Leibler divergence from a teacher's top-K log-probabilities",
        " A call takes input, values and indices.",
    ),
    switches=("renormalize", "tail", "temperature_squared"),
    options=(
        {"tail": True},
        {"renormalize": True, "temperature": 2.0, "scale": 0.7},
        {"tail": True, "temperature": 3.0, "temperature_squared": False, "softcap": 3.0, "scale": 1.3},
        {"reverse": 1.0},
        {"reverse": 0.3, "tail": True, "temperature": 2.0, "scale": 1.2},
        {"reverse": 0.6, "renormalize": True, "softcap": 4.0},
    ),
    like=f"{ORACLES}:topk_kl_div",
    paper="arXiv 1503.02531",
)
def topk_kl_div_with_logits(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    values: Tensor,  # (K,), (N, K), (N, K, d…)
    indices: Tensor,  # as values
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    *,
    renormalize: bool = False,
    tail: bool = False,
    reverse: UnitInterval = 0.0,
    temperature_squared: bool = True,
    ignore_index: int = -100,
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[TopKOptions],
) -> CheckedCall[TopKCall, Tensor | DivergenceOutput]:
    """Kullback-Leibler divergence from a teacher's top-K log-probabilities; no dense teacher is built.

    L = T² Σₖ qₖ (ln qₖ - ln p[iₖ]), p = softmax(input / T), q = exp(values); with tail also (1 - Σ q) ln((1 - Σ q) / (1 - Σ p[i])).

    With reverse=λ it is (1 - λ) of this and λ of the reverse, T² Σₖ p[iₖ] (ln p[iₖ] - ln qₖ), with a tail likewise.

    Source: Hinton et al. 2015, arXiv 1503.02531, over the classes that are kept; NeMo RL's kl_type "forward", "reverse" and "mixed", whose
    mixed_kl_weight is 1 - λ.

    When to use it: Take it if only the teacher's K largest logits of each row were stored.

    When not: Leave it where those K hold little of the probability, unless with `tail=True`; the student otherwise learns a distribution
    that is too sharp.

    Args:
        values: (N, K) or (N, K, d…), natural logarithms of the teacher's probabilities at temperature T; with renormalize its logits, or
            log-probabilities at temperature 1. *log_q.topk(k, dim) gives values and indices. Where their exponentials add up to more than
            1.05, they are no probabilities: a ValueError, on CUDA with validate alone, without it nan in the row.
        indices: their classes, of any integer dtype, different from each other within a row; -1 for no entry. An entry whose value is -inf
            is none either, whatever its index in range: rows of fewer than K, as a serving engine pads them.
        renormalize: q = softmax(values / T) over the K.
        tail: the classes that are not among the K count as one more, as in TRL; needs values that are not renormalised. 1 - Σ p[i] is at
            least 2⁻²⁴, and in the reverse 1 - Σ q too.
        reverse: λ in [0, 1], the share of KL(student ‖ teacher).

    Returns:
        a scalar, or (N, d…) with reduction "none", in float32 (float64 where an input is).
    """
    checks.whole("input", input)
    if isinstance(values, Tensor) and isinstance(indices, Tensor) and not values.is_floating_point() and indices.is_floating_point():
        raise TypeError(
            "values come before indices, as topk gives them: topk_kl_div_with_logits(input, *teacher.topk(k)), "
            f"got {values.dtype} as values"
        )
    checks.floating_beside("values", values, input)
    class_dim = of_classes(input)
    if renormalize and tail:
        raise ValueError("tail needs probabilities that leave some to the other classes, got renormalize=True")
    indices = checks.indices("indices", indices, input, checks.Allowed(0, input.shape[class_dim], -1, options.get("validate")))
    k = indices.shape[class_dim] if indices.ndim == input.ndim else 0
    entries = tuple(k if d == class_dim else n for d, n in enumerate(input.shape))
    if k == 0 or indices.shape != entries:
        raise ValueError(f"indices must have K classes for each row of input, {tuple(input.shape)}, got shape {tuple(indices.shape)}")
    checks.fits("values", values, values.shape == indices.shape, "have the shape of indices, {}", indices.shape)
    call = TopKCall("topk_kl", input, values, indices, ignore_index=ignore_index, reduction=reduction)
    reverse = checks.number("reverse", reverse, 0.0, 1.0)
    call = call._replace(renormalize=renormalize, tail=tail, reverse=reverse, temperature=temperature)
    return _with_entropy(call, options, temperature_squared, outputs)


@public(
    DIVERGENCE.docs,
    Module(
        "ChannelWiseKLDivLoss",
        "Kullback-Leibler divergence of each channel's softmax over the pixels",
        forward="input: Tensor, target_logits: Tensor",
    ),
)
def channel_wise_kl_div(
    input: Tensor,  # (N, C, d…)
    target_logits: Tensor,  # as input
    temperature: Positive = 1.0,
    reduction: BatchReduction = "mean",
    **options: Unpack[SharedOptions],
) -> CheckedCall[DivergenceCall]:
    """Kullback-Leibler divergence of each channel's softmax over the pixels, channel-wise distillation (CWD; Shu et al. 2021, arXiv
    2011.13256).

    L = T² Σᵢ qᵢ (ln qᵢ - ln pᵢ), of each channel the sum over its pixels i, p = softmax(input / T) and q = softmax(target_logits / T).

    It is kl_div_with_logits with pixels in place of classes, in one launch over the features as they lie in memory.

    When to use it: Take it to distil dense prediction: logits of segmentation, or features of a detector's levels. It asks where a channel
    is active, not how strongly.

    When not: Leave it for classifiers, whose logits have no pixels (`kl`). Student and teacher must have the same channels; a 1×1
    convolution makes them so.

    Args:
        input: the student's logits or features (N, C, d…), with at least one dimension of pixels, of any floating dtype.
        target_logits: the teacher's, in the shape of input, of any floating dtype. Where it requires grad, it gets a gradient as well.
        reduction: "mean" over samples and channels, as the paper has it; "batchmean": Σ / N; "sum"; "none", (N, C).

    Examples:
        >>> student, teacher = torch.randn(2, 19, 8, 8, requires_grad=True), torch.randn(2, 19, 8, 8)
        >>> channel_wise_kl_div(student, teacher, temperature=4.0).backward()
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim > 2, "have shape (N, C, d…) with at least one dimension of pixels")
    pixels = 0 not in input.shape[2:] or 0 in input.shape[:2]
    checks.fits("input", input, pixels, "have at least one pixel, shape (N, C, d…)")
    checks.floating_beside("target_logits", target_logits, input)
    checks.fits("target_logits", target_logits, target_logits.shape == input.shape, "have the shape of input, {}", input.shape)
    student, teacher = (t.flatten(2).transpose(1, 2) for t in (input, target_logits))
    call = DivergenceCall("kl", student, teacher, temperature=temperature, reduction=reduction)
    return divergence_loss(call, {**options}, True)


@public(
    DIVERGENCE.docs,
    Module("DKDLoss", "Decoupled knowledge distillation", forward="input: Tensor, target_logits: Tensor, target: Tensor"),
)
def dkd_loss(
    input: Tensor,  # (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    target: Tensor,  # class indices (N,), (N, d…)
    alpha: NonNegative = 1.0,
    beta: NonNegative = 8.0,
    temperature: Positive = 4.0,
    reduction: Reduction = "mean",
    **options: Unpack[CheckedMeanOptions],
) -> Tensor:
    """Decoupled knowledge distillation (DKD; Zhao et al. 2022, arXiv 2203.08679).

    L = T² (α KL(v ‖ u) + β KL(q ‖ p)), p and q the softmaxes of input / T and target_logits / T over all classes but the target's; u and v
    the probabilities of the target's class and of the others together, (u_t, 1 - u_t). A term whose coefficient is 0 is left out; the
    second also in a row where student or teacher has -inf for all classes but the target's, because these then have no softmax.

    KL(teacher ‖ student) itself is α = 1 and β = 1 - v_t, so that a teacher that is sure silences what it knows of the other classes. Here
    β is the same for all rows. The target's class is left out of the sums before they are computed, so that 1 - u_t keeps its digits.
    One launch reads both logits and computes all rows; backward reads them once more. Logits (N, C, d…) are copied first.

    When to use it: Take it for distillation with labels, from a teacher that is sure of most samples. Tune β: the paper has 1 to 8.

    When not: Leave it without labels (`kl`), or where labels are often wrong.

    Args:
        input: the student's logits (N, C) or (N, C, d…), of any floating dtype.
        target_logits: the teacher's, in the shape of input, of any floating dtype. Where it requires grad, it gets a gradient as well.
        target: class indices of any integer dtype, in the shape of input without the classes.
        alpha: α of at least 0, the weight of the target's class against the others.
        beta: β of at least 0, the weight of the other classes among each other.
        temperature: T above 0.
        reduction: "mean" over the rows, "sum", or "none" for one value a row.

    Examples:
        >>> student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10)
        >>> dkd_loss(student, teacher, torch.randint(10, (8,))).backward()
    """
    checks.whole("input", input)
    whole = input.ndim > 1 and input.shape[1] > 1
    checks.fits("input", input, whole, "have shape (N, C) or (N, C, d…) with at least two classes")
    checks.floating_beside("target_logits", target_logits, input)
    checks.fits("target_logits", target_logits, target_logits.shape == input.shape, "have the shape of input, {}", input.shape)
    classes = input.shape[1]
    index = checks.indices("target", target, input, checks.Allowed(0, classes, None, options.get("validate")), rows_of(input, 1)).long()
    alpha, beta = checks.number("alpha", alpha, 0.0), checks.number("beta", beta, 0.0)
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    checks.factor("temperature²", temperature * temperature)
    checks.only(CheckedMeanOptions.__annotations__, options, "the loss")
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("empty", options.get("empty", "nan"), checks.EMPTY)
    x, teacher = (t.movedim(1, -1).flatten(0, -2) for t in (input, target_logits))
    numbers, rows = (alpha, beta, temperature), index.flatten().contiguous()
    if kernels_apply(input) and kernels_apply(target_logits) and not any(isinstance(n, Tensor) for n in numbers):
        x, teacher = (t.resolve_neg().contiguous() for t in (x, teacher))
        each = OPERATORS.decoupled_divergence(x, teacher, rows, *numbers)[0].view(index.shape)
    else:
        each = decoupled_reference(x, teacher, rows, *numbers).view(index.shape)
    if reduction == "none":
        return each.clone()  # backward keeps the operator's result, which a change in place would spoil
    empty = options.get("empty") == "zero" and each.numel() == 0
    return each.mean() if reduction == "mean" and not empty else each.sum()


def decoupled_reference(x: Tensor, teacher: Tensor, target: Tensor, alpha: float, beta: float, temperature: float) -> Tensor:
    """Compute the loss of each row of logits (N, C) in plain torch."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, teacher.dtype), torch.float32)
    own = target.clamp(0, x.shape[1] - 1).unsqueeze(1)
    right = torch.where(target.unsqueeze(1) == own, 1.0, torch.nan).to(dtype)  # a factor of nan makes the gradient nan as well
    (odds_p, p, alone_p), (odds_q, q, alone_q) = (_log_odds(right * t.to(dtype), own, temperature) for t in (x, teacher))
    parts: list[Tensor] = []
    if checks.nonzero(beta):
        parts.append(beta * counted(_kl_of_rows, ~(alone_p | alone_q), (p, q), 1))
    if checks.nonzero(alpha) or not parts:
        log_p, log_q = (F.logsigmoid(torch.stack([odds, -odds], 1)) for odds in (odds_p, odds_q))
        parts.append(alpha * kl_reference(log_p, log_q).sum(1))
    return temperature * temperature * torch.stack(parts).sum(0)


def _log_odds(logits: Tensor, own: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln(p / (1 - p)) of each row's own class, the others' logits / T less the largest, and where only these are all -inf.

    own: (N, 1), whose logit is -inf among the others'.
    """
    others = logits.scatter(1, own, -torch.inf)
    top = others.detach().amax(1, keepdim=True)
    nothing = top == -torch.inf
    top = torch.where(nothing, 0.0, top)
    logit, others = (logits.gather(1, own) - top) / temperature, (others - top) / temperature
    lse = torch.where(nothing, -torch.inf, torch.where(nothing, 0.0, others).logsumexp(1, keepdim=True))
    return (logit - lse).squeeze(1), others, (nothing & (logit > -torch.inf)).squeeze(1)


def _kl_of_rows(p: Tensor, q: Tensor) -> Tensor:
    return kl_reference(p.log_softmax(1), q.log_softmax(1)).sum(1)


def _decoupled(x: Tensor, teacher: Tensor, target: Tensor, *numbers: float) -> Tensor:
    found: tuple[Tensor] = launched("classes.decoupled", "forward", (x, teacher, target), *numbers)
    return found[0]


def _fake_decoupled(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((9, x.shape[0]), dtype=torch.float32)


def _decoupled_backward(grad: Tensor, results: Tensor, x: Tensor, teacher: Tensor, target: Tensor, *rest: Any) -> None:
    _, _, temperature, *gradients = rest
    launched("classes.decoupled", "backward", (x, teacher, target, results, grad[0], *gradients), temperature)


def _decoupled_again(*given: Any) -> Tensor:
    """Compute what the operator returns in plain torch, with zeros in place of what backward takes."""
    return F.pad(decoupled_reference(*given).unsqueeze(0), (0, 0, 0, 8))


define_differentiable(
    "decoupled_divergence",
    "Tensor x, Tensor teacher, Tensor target, float alpha, float beta, float temperature",
    _decoupled,
    _fake_decoupled,
    _decoupled_backward,
    _decoupled_again,
    inputs=2,
)


PLAIN = TemplateDocs(
    arguments={"target_logits": DIVERGENCE.docs.arguments["target_logits"]},
    targets=DIVERGENCE.docs.targets,
)
"""Of a loss that no template's kernels compute."""
RELATED_CLASSES = 4096
"""Classes of dist_loss that a program holds, at most."""


@public(PLAIN, Module("DISTLoss", "Distillation of relations", forward="input: Tensor, target_logits: Tensor"))
def dist_loss(
    input: Tensor,  # (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    beta: NonNegative = 1.0,
    gamma: NonNegative = 1.0,
    temperature: Positive = 1.0,
) -> Tensor:
    """Distillation of relations from a stronger teacher (DIST; Huang et al. 2022, arXiv 2205.10536).

    L = T² (β (1 - mean ρ(pᵢ, qᵢ)) + γ (1 - mean ρ(p·ⱼ, q·ⱼ))), ρ Pearson's correlation, p = softmax(input / T), rows i and classes j.

    As in the authors' code, ρ divides by the lengths' product + 1e-8. Rows of up to 4,096 classes take three launches, one of them for the
    gradient; more classes are computed in plain PyTorch.

    When to use it: Take it for a student much smaller than its teacher. It asks for the teacher's order of classes in a sample, and of
    samples in a class, not for its probabilities.

    When not: Leave it on small batches: the correlation of a class over few samples says little. It gives no calibrated probabilities.

    Args:
        input: the student's logits (N, C) or (N, C, d…), of any floating dtype.
        target_logits: the teacher's, in the shape of input, of any floating dtype. Where it requires grad, it gets a gradient as well.
        beta: β of at least 0, the weight of relations among the classes of a row.
        gamma: γ of at least 0, the weight of relations among the rows of a class.
        temperature: T above 0.

    Returns:
        a scalar, in float32 (float64 where an input is).

    Examples:
        >>> student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10)
        >>> dist_loss(student, teacher).backward()
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim > 1 and input.shape[1] > 0, "have shape (N, C) or (N, C, d…) with at least one class")
    checks.floating_beside("target_logits", target_logits, input)
    checks.fits("target_logits", target_logits, target_logits.shape == input.shape, "have the shape of input, {}", input.shape)
    beta, gamma = checks.number("beta", beta, 0.0), checks.number("gamma", gamma, 0.0)
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    checks.factor("temperature²", temperature * temperature)
    x, teacher = (t.movedim(1, -1).flatten(0, -2) for t in (input, target_logits))
    traced = any(isinstance(v, Tensor) for v in (beta, gamma, temperature))
    served = target_logits.dtype in KERNEL_DTYPES and input.shape[1] <= RELATED_CLASSES and not traced
    if served and kernels_apply(input, target_logits):
        found: Tensor = OPERATORS.relations(x.resolve_neg().contiguous(), teacher.resolve_neg().contiguous(), beta, gamma, temperature)
        return found[0].clone()  # backward takes `found`, which the caller must not change in place
    return relations_reference(x, teacher, beta, gamma, temperature)


def relations_reference(x: Tensor, target: Tensor, beta: float, gamma: float, temperature: float) -> Tensor:
    """Compute the loss of logits (N, C) in plain torch."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, target.dtype), torch.float32)
    p, q = (relative(t.to(dtype), 1).div(temperature).softmax(1) for t in (x, target))
    total = 0.0 * p.sum()
    for factor, a, b in ((beta, p, q), (gamma, p.T, q.T)):
        if checks.nonzero(factor):
            total = total + factor * (1 - _correlation(a, b))
    return temperature**2 * total


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean of Pearson's correlation of the rows of x and y."""
    x, y = (t - t.mean(1, keepdim=True) for t in (x, y))
    squares = x.square().sum(1) * y.square().sum(1)
    lengths = squares.clamp(min=torch.finfo(x.dtype).tiny).sqrt()  # at 0 the root has no derivative
    return ((x * y).sum(1) / (lengths + 1e-8)).mean()


def _relations(x: Tensor, target: Tensor, *numbers: float) -> Tensor:
    found: tuple[Tensor] = launched("classes.relations", "forward", (x, target), *numbers)
    return found[0]


def _fake_relations(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((1 + 4 * x.shape[1],), dtype=torch.float32)


def _relations_backward(grad: Tensor, result: Tensor, x: Tensor, target: Tensor, *rest: Any) -> None:
    beta, _, temperature, gradient = rest
    launched("classes.relations", "backward", (x, target, result, grad, gradient), beta, temperature)


def _padded_reference(x: Tensor, *rest: Any) -> Tensor:
    """Return the loss before zeros in place of the classes' numbers, which have no gradient."""
    return F.pad(relations_reference(x, *rest).unsqueeze(0), (0, 4 * x.shape[1]))


define_differentiable(
    "relations",
    "Tensor x, Tensor target, float beta, float gamma, float temperature",
    _relations,
    _fake_relations,
    _relations_backward,
    _padded_reference,
)

"""Losses of rows of classes under a softmax."""

from typing import NamedTuple, Unpack

from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.dispatch import rowwise
from lossforge.losses.functional.common import Options, check_options, factor, share
from lossforge.losses.operators.rowwise import Arguments as Rowwise
from lossforge.losses.repeat import repeated


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns when further outputs are asked for; None for the others."""

    loss: Tensor
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None


@repeated
def cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[Options],
) -> Tensor | CrossEntropyOutput:
    """Cross entropy, as torch.nn.functional.cross_entropy.

    L = Σⱼ wⱼ qⱼ (lse(x) - xⱼ) + z_loss · lse(x)², lse(x) = ln Σ exp xⱼ, qⱼ = (1 - ε) yⱼ + ε / C with ε = label_smoothing. The mean divides
    by the weights of the classes of the rows not ignored, with probabilities by the number of rows.

    Args: target: indices of any integer dtype, or probabilities; target_b and lam: a mixup pair of indices, y = λ [j = target] +
    (1 - λ) [j = target_b], λ a number, one a sample or one a row; scale, softcap: the logits become cap · tanh(scale · x / cap);
    z_loss: its coefficient (PaLM, arXiv 2204.02311). Others: see lossforge.losses.functional.
    Returns: the loss, a scalar or (N, d…); with any return_…, CrossEntropyOutput: z_loss (reduced as the loss, which holds it),
    lse and entropy of softmax(x) per row, all three differentiable, and correct: whether the first of the largest logits is the target.
    Raises: TypeError, ValueError naming the argument; IndexError for a class index out of range.
    """
    reduction = checks.legacy_reduction(size_average, reduce, reduction)
    checks.floating("input", input)
    if input.ndim == 0:
        raise ValueError("input must have a dimension of classes, got a 0-d tensor")
    divisor = check_options(input, reduction, options, Options)
    normalizer, target_b = options.get("normalizer"), options.get("target_b")
    checks.whole_number("ignore_index", ignore_index)
    checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    checks.number("scale", scale)
    checks.number("z_loss", z_loss, 0.0)
    if softcap is not None:
        checks.number("softcap", softcap, 0.0, exclusive=True)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}")
    class_dim = 0 if input.ndim == 1 else 1
    classes = input.shape[class_dim]
    per_row = [n for d, n in enumerate(input.shape) if d != class_dim]
    if target.is_floating_point():
        if target.shape != input.shape:
            raise ValueError(
                f"target must have the shape of input, {tuple(input.shape)}, where it holds probabilities, got {tuple(target.shape)}"
            )
        checks.beside("target", target, input)
        if return_correct:
            raise ValueError("return_correct needs class indices as target, got probabilities")
    else:
        target = checks.indices("target", target, per_row, input, 0, classes, ignore_index, options.get("validate"))
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, per_row, input, 0, classes, ignore_index, options.get("validate"))
    if weight is not None:
        checks.floating_beside("weight", weight, input)
        if weight.shape != (classes,):
            raise ValueError(f"weight must hold one weight a class, shape ({classes},), got {tuple(weight.shape)}")
        weight = weight.contiguous()
    one = input.ndim == 1
    a = Rowwise(
        "cross_entropy",
        input.unsqueeze(0) if one else input,
        target.unsqueeze(0) if one else target,
        target_b.unsqueeze(0) if one and target_b is not None else target_b,
        share(options.get("lam"), target, target_b, input),
        weight,
        divisor,
        [],
        ignore_index,
        1.0 * label_smoothing,
        1.0 * scale,
        softcap,
        1.0 * z_loss,
        factor(options),
        reduction if normalizer is None else "sum",
        options.get("empty") == "zero",
        [return_z_loss, return_lse, return_entropy, return_correct],
    )
    results = rowwise(a, options.get("gradient"), options.get("inplace", False))
    if one:
        results = [t if t is None or t.ndim == 0 else t.squeeze(0) for t in results]
    loss, *others = results
    assert loss is not None
    return CrossEntropyOutput(loss, *others) if any(a.outputs) else loss

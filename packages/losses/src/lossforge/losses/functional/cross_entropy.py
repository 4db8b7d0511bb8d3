"""Cross entropy of rows of classes."""

from typing import Literal, NamedTuple, Unpack, overload

from torch import Tensor

from lossforge.kernels.call import Formulas, RowCall
from lossforge.losses import checks
from lossforge.losses.formulas import formula
from lossforge.losses.registry import loss
from lossforge.losses.templates.module import Module
from lossforge.losses.templates.options import Options
from lossforge.losses.templates.row import RowOptions, rowwise_results
from lossforge.losses.types import NonNegative, Positive, Real, Reduction, UnitInterval

__all__ = ["CrossEntropyOutput", "cross_entropy"]


@formula("cross_entropy", lambda of: Formulas(of.softmax.cross_entropy))
def cross_entropy_reference(z: Tensor) -> Tensor:
    return z


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns when further outputs are asked for; None for the others.

    Attributes:
        loss: a scalar, or one value a row with reduction "none".
        z_loss: the part of the loss that z_loss adds, reduced as the loss, which holds it.
        lse: (N, d…), log-sum-exp of each row's logits, in nats; differentiable.
        entropy: (N, d…), of each row's softmax, in nats; differentiable.
        correct: (N, d…), bool: the largest logit is the target's.
    """

    loss: Tensor
    z_loss: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None


class CrossEntropyOptions(RowOptions, total=False):
    """Those of cross_entropy after the weight, by keyword."""

    size_average: bool | None
    ignore_index: int
    reduce: bool | None
    reduction: Reduction
    label_smoothing: float


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    **options: Unpack[RowOptions],
) -> Tensor: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: Literal[True],
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_z_loss: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_entropy: Literal[True],
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_correct: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_correct: Literal[True],
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[CrossEntropyOptions],
) -> Tensor | CrossEntropyOutput: ...
@loss(
    "ce",
    "rowwise",
    Module(
        "CrossEntropyLoss",
        "Cross entropy as torch.nn.CrossEntropyLoss, with more options",
        " For type checkers a call gives a Tensor, or with a return_… CrossEntropyOutput.",
    ),
    formula="cross_entropy",
    without=(),
    options=({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 5.0, "scale": 0.7}),
    judge="torch.nn.functional:cross_entropy",
)
def cross_entropy(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…), or probabilities as input
    weight: Tensor | None = None,  # (C,)
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: UnitInterval = 0.0,
    *,
    scale: Real = 1.0,
    softcap: Positive | None = None,
    z_loss: NonNegative = 0.0,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[Options],
) -> Tensor | CrossEntropyOutput:
    """Cross entropy, as torch.nn.functional.cross_entropy.

    L = Σⱼ wⱼ qⱼ (lse(x) - xⱼ) + z_loss · lse(x)², lse(x) = ln Σ exp xⱼ, qⱼ = (1 - ε) yⱼ + ε / C with ε = label_smoothing. The mean divides
    by the weights of the classes of the rows not ignored, with probabilities by the number of rows.

    Args:
        target: class indices (), (N,) or (N, d…) of any integer dtype; or probabilities in the shape of input.
        label_smoothing: ε in [0, 1].
        scale: the logits become scale · x.
        softcap: the logits become softcap · tanh(scale · x / softcap); None for none.
        z_loss: coefficient of lse², averaged over the rows not ignored, whatever the class weights (PaLM, arXiv 2204.02311).

    Returns:
        the loss, a scalar or (N, d…); with any return_…, CrossEntropyOutput: z_loss (reduced as the loss, which holds it), lse and entropy
        of softmax(x) per row, all three differentiable, and correct: whether the first of the largest logits is the target.
    """
    call = RowCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    call = call._replace(
        reduction=checks.legacy_reduction(size_average, reduce, reduction),
        outputs=[return_z_loss, return_lse, return_entropy, return_correct],
    )
    row_options: RowOptions = {**options, "scale": scale, "softcap": softcap, "z_loss": z_loss}
    value, *others = rowwise_results(call, row_options, probabilities=True)
    assert value is not None
    return CrossEntropyOutput(value, *others) if any(call.outputs) else value

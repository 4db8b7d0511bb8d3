"""Cross entropy of rows of classes."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import (
    DeviceMesh,
    NonNegative,
    Positive,
    ProcessGroup,
    Real,
    Reduction,
    RowOutput,
    TokenWeight,
    UnitInterval,
)
from lossforge.losses.base.options import Options, of_classes
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.engine.parallel.cross_entropy import over_processes
from lossforge.losses.engine.parallel.shards import without_group
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.rowwise import (
    BY_PROBABILITY,
    LARGEST,
    ROWWISE,
    RowOptions,
    entropy_weight,
    rowwise_results,
    with_several_classes,
)

__all__ = ["CrossEntropyOutput"]

WEIGHTS = ("probability", "entropy")


@formula("cross_entropy", DeviceFormula("softmax.cross_entropy"))
def cross_entropy_reference(z: Tensor) -> Tensor:
    return z


@formula(BY_PROBABILITY, DeviceFormula("softmax.by_probability"))
def by_probability_reference(z: Tensor) -> Tensor:
    return (-z).exp().detach() * z.clamp(max=1e30)


class CrossEntropyOutput(Outputs):
    """What `cross_entropy` returns when further outputs are asked for: the loss and these alone, in this order.

    Attributes:
        loss: a scalar, or one value a row with reduction "none".
        z_loss: the part of the loss that z_loss adds, reduced as the loss, which holds it.
        lse: (N, d…), log-sum-exp of each row's logits, in nats; differentiable.
        entropy: (N, d…), of each row's softmax, in nats; differentiable.
        correct: (N, d…), bool: the largest logit is the target's.
        argmax: (N, d…), int64: the class of the largest logit that is not nan, the first of equal ones.
        log_p2: (N, d…), ln Σ p² of each row's softmax, without gradient: minus the Rényi entropy of order 2.
        mean_logit: (N, d…), mean of each row's logits, without gradient.
    """

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    entropy: Tensor
    correct: Tensor
    argmax: Tensor
    log_p2: Tensor
    mean_logit: Tensor


@loss(
    "ce",
    ROWWISE,
    Module(
        "CrossEntropyLoss",
        "Cross entropy as torch.nn.CrossEntropyLoss, with more options",
        " For type checkers a call gives a Tensor, or with outputs CrossEntropyOutput.",
    ),
    formula="cross_entropy",
    without=(),
    options=({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 5.0, "scale": 0.7}),
    like="torch.nn.functional:cross_entropy",
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
    token_weight: Tensor | TokenWeight | None = None,  # (), (N,), (N, d…)
    scale: Real = 1.0,
    softcap: Positive | None = None,
    z_loss: NonNegative = 0.0,
    outputs: Sequence[RowOutput] = (),
    group: ProcessGroup | DeviceMesh | None = None,
    classes: int | None = None,
    **options: Unpack[Options],
) -> CheckedCall[RowwiseCall, Tensor | CrossEntropyOutput]:
    """Cross entropy, as torch.nn.functional.cross_entropy.

    L = Σⱼ wⱼ qⱼ (lse(x) - xⱼ) + z_loss · lse(x)², lse(x) = ln Σ exp xⱼ, qⱼ = (1 - ε) yⱼ + ε / C with ε = label_smoothing. The mean divides
    by the weights of the classes of the rows not ignored, with probabilities by the number of rows.

    When to use it: Take it first for classes that exclude each other, such as labels of images, tokens of language and classes of pixels.

    When not: Leave it where a sample has several labels (`bce`), where many labels are wrong (`generalized_ce`), or where rare classes
    matter as much as frequent ones (`logit_adjusted_ce`).

    Args:
        target: class indices (), (N,) or (N, d…) of any integer dtype; or probabilities in the shape of input.
        label_smoothing: ε in [0, 1], the share of the target that is spread over all classes.
        token_weight: a factor of each row's loss but for its z_loss, in the shape of target or broadcast to it; any number, negative too.
            It needs class indices, and excludes label_smoothing and target_b. The mean does not divide by it: a weighted mean has
            normalizer=token_weight.sum(). A row of weight 0 is left out as an ignored one, but the mean divides by it.
            "probability" is p_t of the row itself, as in dynamic fine-tuning (DFT, arXiv 2508.05629); "entropy" is min(1, H / ln K) of the
            row's entropy H, K = min(20, C), as in entropy-adaptive fine-tuning (EAFT, arXiv 2601.02151), which takes H of the 20 largest
            logits. Neither has a gradient.
        scale: the logits become scale · x.
        softcap: the logits become softcap · tanh(scale · x / softcap); None for none.
        z_loss: coefficient of lse², averaged over the rows not ignored. That is so whatever the class weights (PaLM, arXiv 2204.02311).
        group: processes over which the classes are spread, a ProcessGroup or a DeviceMesh of one dimension: each has the logits, class
            weights and target probabilities of its own classes, and the indices of all. Every process gets the whole loss.
        classes: with group, how many there are in all processes. Parts may be padded, and the last be smaller. A DTensor needs none.

    Returns:
        the loss, a scalar or (N, d…); with outputs CrossEntropyOutput: z_loss (reduced as the loss, which holds it), lse and entropy
        of softmax(x) per row, all three differentiable; correct: whether the first of the largest logits is the target; argmax: its class;
        log_p2, ln Σ p², and mean_logit, for logs. These four are of the logits as scaled and capped, and have no gradient.
    """
    call = RowwiseCall("cross_entropy", input, target, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
    call = call._replace(
        reduction=checks.legacy_reduction(size_average, reduce, reduction),
        outputs=CrossEntropyOutput.asked(outputs),
    )
    row_options: RowOptions = {**options, "scale": scale, "softcap": softcap, "z_loss": z_loss}
    further = any(call.outputs)
    finish: Callable[..., Any] = CrossEntropyOutput.of if further else first
    call = _weighed_by_itself(call, token_weight, group is not None) if isinstance(token_weight, str) else call._replace(lam=token_weight)
    if further and call.entropy_weight and "entropy" not in outputs:
        finish = _without_entropy
    if group is not None:
        return finish(over_processes(call, row_options, group, classes))
    without_group(classes)
    return with_several_classes(rowwise_results(call, row_options, probabilities=True).returning(finish))


def cross_entropy_of_index(
    input: Tensor,
    target: Tensor,
    *,
    outputs: list[bool],
    ignore_index: int,
    reduction: Reduction,
    row_scale: Tensor | None = None,
    token_weight: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    each_row: bool = False,
    **options: Unpack[RowOptions],
) -> CheckedCall[RowwiseCall, tuple[Tensor | None, ...]]:
    """Check a call of `cross_entropy` whose class indices are the argument `index` of a public function, as messages then say.

    Its results are the template's. outputs: which further ones are asked for, in the order of a row-wise call's. each_row: with group, the
    last result is the cross entropy of each row, without its weight and without gradient.
    """
    call = RowwiseCall("cross_entropy", input, target, ignore_index=ignore_index, reduction=reduction, outputs=outputs)
    call = call._replace(row_scale=row_scale, lam=token_weight)
    if group is not None:
        return over_processes(call, options, group, None, "index", each_row)
    return rowwise_results(call, options, target_name="index").returning(tuple)


def _without_entropy(results: Sequence[Tensor | None]) -> CrossEntropyOutput:
    return CrossEntropyOutput.of([*results[:3], None, *results[4:]])


def _weighed_by_itself(call: RowwiseCall, weight: str, shared: bool) -> RowwiseCall:
    """Return a call whose rows have a weight that follows from their own logits. shared: over processes, which know the classes later."""
    checks.one_of("token_weight", weight, WEIGHTS)
    if weight == "probability":
        return call._replace(loss=BY_PROBABILITY)
    dim = -1 if shared else of_classes(call.x)
    z_loss, lse, _, *others = call.outputs
    return call._replace(entropy_weight=entropy_weight(LARGEST if shared else call.x.shape[dim]), outputs=[z_loss, lse, True, *others])

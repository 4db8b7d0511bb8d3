"""Asymmetric loss of one class against the others under a softmax."""

from typing import Unpack

from torch import Tensor

from lossforge.kernels.call import Formulas, RowwiseCall
from lossforge.losses import checks
from lossforge.losses.definitions.classification import softmax_focal_reference
from lossforge.losses.formulas import formula
from lossforge.losses.reference import focused
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.options import of_classes
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_loss
from lossforge.losses.types import NonNegative, Reduction, UnitInterval


@formula("asymmetric_single_label", lambda of: Formulas(of.softmax.asymmetric))
def asymmetric_reference(z: Tensor, gamma_pos: float, gamma_neg: float, own: float, spread: float) -> Tensor:
    return own * softmax_focal_reference(z, gamma_pos) - spread * focused(z.clamp(max=1e30), gamma_neg)


@loss(
    "asymmetric_single_label",
    ROWWISE,
    Module("AsymmetricLossSingleLabel", "Asymmetric loss as timm.loss.AsymmetricLossSingleLabel"),
    options=(
        {"eps": 0.0},
        {"gamma_pos": 0.0, "gamma_neg": 0.0, "eps": 0.3},
        {"gamma_pos": 0.5, "gamma_neg": 1.5, "eps": 0.2},
        {"gamma_pos": 2.0, "gamma_neg": 0.3, "eps": 1.0},
    ),
    like="lossforge.losses.oracles.asymmetric:asymmetric_single_label",
    paper="arXiv 2009.14119",
)
def asymmetric_loss_single_label(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target: Tensor,  # class indices (), (N,), (N, d…)
    gamma_pos: NonNegative = 1.0,
    gamma_neg: NonNegative = 4.0,
    eps: UnitInterval = 0.1,
    reduction: Reduction = "mean",
    *,
    weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    **options: Unpack[RowOptions],
) -> Tensor:
    """Asymmetric loss under a softmax, as timm.loss.AsymmetricLossSingleLabel (Ben-Baruch et al. 2020, arXiv 2009.14119).

    L = -w_t Σⱼ qⱼ aⱼ ln pⱼ with p = softmax(x), qⱼ = (1 - eps) [j = t] + eps / C, a_t = (1 - p_t)^γ₊, and aⱼ = pⱼ^γ₋ elsewhere.

    The powers are differentiated too. A class of logit -inf that is not the target adds nothing (timm: nan), except at γ₋ = 0, where it
    makes the loss infinite as label smoothing does. Where a power's derivative is infinite (γ₊ < 1 and p_t = 1) the gradient takes its
    limit, 0. The mean divides as that of cross_entropy, by the weights of the classes of the rows not ignored.

    When to use it: Take it in recipes that train with timm's loss of the same name. It moves weight away from easy samples.

    When not: Leave it as a first choice; cross entropy with label smoothing is easier to tune.

    Args:
        target: class indices of any integer dtype. A mixup pair's loss is λ L(target) + (1 - λ) L(target_b).
        gamma_pos: γ₊ of at least 0, the focusing exponent of the target's class.
        gamma_neg: γ₋ of at least 0, the focusing exponent of the other classes.
        eps: in [0, 1], the share of label smoothing.
        weight: (C,), one factor a class.
    """
    gamma_pos = checks.number("gamma_pos", gamma_pos, 0.0)
    gamma_neg = checks.number("gamma_neg", gamma_neg, 0.0)
    eps = checks.number("eps", eps, 0.0, 1.0)
    dim = of_classes(input)
    spread = eps / max(input.shape[dim], 1)
    call = RowwiseCall("asymmetric_single_label", input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
    hyper = [gamma_pos, gamma_neg, 1.0 - eps + spread, spread]
    return rowwise_loss(call._replace(hyper=hyper, spread=spread, focus=gamma_neg), options)

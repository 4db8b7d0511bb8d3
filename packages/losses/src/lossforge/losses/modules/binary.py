"""Losses of independent yes-or-no decisions: one logit or probability each."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.functional.elementwise import BATCH_REDUCTIONS
from lossforge.losses.modules.common import ElementwiseModule, LogitsModule, WeightedSettings
from lossforge.losses.types import BatchReduction, Reduction


class BCEWithLogitsLoss(ElementwiseModule):
    """Binary cross entropy on logits as torch.nn.BCEWithLogitsLoss: see functional.binary_cross_entropy_with_logits."""

    function = staticmethod(functional.binary_cross_entropy_with_logits)
    pos_weight: Tensor | None
    label_smoothing: float
    target_threshold: float | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        pos_weight: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        target_threshold: float | None = None,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(
            options,
            weight=weight,
            reduction=checks.legacy_reduction(size_average, reduce, reduction),
            pos_weight=pos_weight,
            label_smoothing=label_smoothing,
            target_threshold=target_threshold,
        )


class BCELoss(ElementwiseModule):
    """Binary cross entropy on probabilities as torch.nn.BCELoss: see functional.binary_cross_entropy."""

    function = staticmethod(functional.binary_cross_entropy)

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(options, weight=weight, reduction=checks.legacy_reduction(size_average, reduce, reduction))


class BinaryCrossEntropy(ElementwiseModule):
    """Binary cross entropy of smoothed labels as timm.loss.BinaryCrossEntropy: see functional.smoothed_binary_cross_entropy."""

    function = staticmethod(functional.smoothed_binary_cross_entropy)
    smoothing: float
    target_threshold: float | None
    sum_classes: bool
    pos_weight: float | Tensor | None
    smooth_dense: bool

    def __init__(
        self,
        smoothing: float = 0.1,
        target_threshold: float | None = None,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        sum_classes: bool = False,
        pos_weight: float | Tensor | None = None,
        smooth_dense: bool = False,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(
            options,
            smoothing=smoothing,
            target_threshold=target_threshold,
            weight=weight,
            reduction=reduction,
            sum_classes=sum_classes,
            pos_weight=pos_weight,
            smooth_dense=smooth_dense,
        )


class PreferenceBCEWithLogitsLoss(LogitsModule):
    """Preference-weighted binary cross entropy on logits, with a weight per group: see functional.preference_bce_with_logits."""

    function = staticmethod(functional.preference_bce_with_logits)
    shared: Mapping[str, Any] = {**LogitsModule.shared, "dim": -1}
    group_weight: Tensor | None
    dim: int

    def __init__(
        self, group_weight: Tensor | None = None, *, reduction: Reduction = "mean", **options: Unpack[ElementwiseSettings]
    ) -> None:
        super().__init__(options, group_weight=group_weight, reduction=reduction)


class PreferenceBCELoss(PreferenceBCEWithLogitsLoss):
    """Preference-weighted binary cross entropy on probabilities, with a weight per group: see functional.preference_bce."""

    function = staticmethod(functional.preference_bce)


class SigmoidFocalLoss(ElementwiseModule):
    """Sigmoid focal loss: see functional.sigmoid_focal_loss. As there, the default reduction is torchvision's "none"."""

    function = staticmethod(functional.sigmoid_focal_loss)
    alpha: float | Tensor
    gamma: float

    def __init__(
        self, alpha: float | Tensor = 0.25, gamma: float = 2.0, reduction: Reduction = "none", **options: Unpack[WeightedSettings]
    ) -> None:
        super().__init__(options, alpha=alpha, gamma=gamma, reduction=reduction)


class AsymmetricLossMultiLabel(ElementwiseModule):
    """Asymmetric loss as timm.loss.AsymmetricLossMultiLabel: see functional.asymmetric_loss_multi_label."""

    function = staticmethod(functional.asymmetric_loss_multi_label)
    reductions = BATCH_REDUCTIONS
    gamma_neg: float
    gamma_pos: float
    clip: float | None
    eps: float
    disable_torch_grad_focal_loss: bool
    smoothing: float
    pos_weight: float | Tensor | None

    def __init__(
        self,
        gamma_neg: float = 4.0,
        gamma_pos: float = 1.0,
        clip: float | None = 0.05,
        eps: float = 1e-8,
        disable_torch_grad_focal_loss: bool = False,
        smoothing: float = 0.0,
        reduction: BatchReduction = "batchmean",
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(
            options,
            gamma_neg=gamma_neg,
            gamma_pos=gamma_pos,
            clip=clip,
            eps=eps,
            disable_torch_grad_focal_loss=disable_torch_grad_focal_loss,
            smoothing=smoothing,
            reduction=reduction,
            weight=weight,
            pos_weight=pos_weight,
        )


class PolyBinaryCrossEntropy(ElementwiseModule):
    """Poly-1 binary cross entropy as timm.loss.PolyBinaryCrossEntropy: see functional.poly_binary_cross_entropy."""

    function = staticmethod(functional.poly_binary_cross_entropy)
    reductions = BATCH_REDUCTIONS
    epsilon: float
    gamma: float
    alpha: float | Tensor | None
    smoothing: float

    def __init__(
        self,
        epsilon: float = 2.0,
        gamma: float = 0.0,
        alpha: float | Tensor | None = None,
        smoothing: float = 0.0,
        reduction: BatchReduction = "mean",
        **options: Unpack[WeightedSettings],
    ) -> None:
        super().__init__(options, epsilon=epsilon, gamma=gamma, alpha=alpha, smoothing=smoothing, reduction=reduction)

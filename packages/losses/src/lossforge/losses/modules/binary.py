"""Losses of independent yes-or-no decisions: one logit or probability each."""

from typing import Any, Unpack

from torch import Tensor

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.modules.common import LossModule


class BCEWithLogitsLoss(LossModule):
    """Binary cross entropy on logits as torch.nn.BCEWithLogitsLoss: see functional.binary_cross_entropy_with_logits."""

    function = staticmethod(functional.binary_cross_entropy_with_logits)

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        buffers = {"weight": weight, "pos_weight": pos_weight}
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), buffers, {}, options)


class BinaryCrossEntropy(LossModule):
    """Binary cross entropy of smoothed labels as timm.loss.BinaryCrossEntropy: see functional.smoothed_binary_cross_entropy."""

    function = staticmethod(functional.smoothed_binary_cross_entropy)

    def __init__(
        self,
        smoothing: float = 0.1,
        target_threshold: float | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        sum_classes: bool = False,
        pos_weight: float | Tensor | None = None,
        smooth_dense: bool = False,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        settings: dict[str, Any] = {
            "smoothing": smoothing,
            "target_threshold": target_threshold,
            "sum_classes": sum_classes,
            "smooth_dense": smooth_dense,
        }
        buffers = {"weight": weight}
        if isinstance(pos_weight, Tensor):
            buffers["pos_weight"] = pos_weight
        else:
            settings["pos_weight"] = pos_weight
        super().__init__(reduction, buffers, settings, options)


class PreferenceBCEWithLogitsLoss(LossModule):
    """Preference-weighted binary cross entropy on logits, with a weight per group: see functional.preference_bce_with_logits."""

    function = staticmethod(functional.preference_bce_with_logits)

    def __init__(self, group_weight: Tensor | None = None, *, reduction: str = "mean", **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {"group_weight": group_weight}, {}, options)


class PreferenceBCELoss(PreferenceBCEWithLogitsLoss):
    """Preference-weighted binary cross entropy on probabilities, with a weight per group: see functional.preference_bce."""

    function = staticmethod(functional.preference_bce)


class SigmoidFocalLoss(LossModule):
    """Sigmoid focal loss: see functional.sigmoid_focal_loss. As there, the default reduction is torchvision's "none"."""

    function = staticmethod(functional.sigmoid_focal_loss)

    def __init__(
        self, alpha: float | Tensor = 0.25, gamma: float = 2.0, reduction: str = "none", **options: Unpack[ElementwiseSettings]
    ) -> None:
        per_class = alpha if isinstance(alpha, Tensor) else None
        settings = {"gamma": gamma} if per_class is not None else {"alpha": alpha, "gamma": gamma}
        super().__init__(reduction, {} if per_class is None else {"alpha": per_class}, settings, options)


class AsymmetricLossMultiLabel(LossModule):
    """Asymmetric loss as timm.loss.AsymmetricLossMultiLabel: see functional.asymmetric_loss_multi_label."""

    function = staticmethod(functional.asymmetric_loss_multi_label)
    reductions = (*checks.REDUCTIONS, "batchmean")

    def __init__(
        self,
        gamma_neg: float = 4.0,
        gamma_pos: float = 1.0,
        clip: float | None = 0.05,
        eps: float = 1e-8,
        disable_torch_grad_focal_loss: bool = False,
        smoothing: float = 0.0,
        reduction: str = "batchmean",
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        settings = {
            "gamma_neg": gamma_neg,
            "gamma_pos": gamma_pos,
            "clip": clip,
            "eps": eps,
            "disable_torch_grad_focal_loss": disable_torch_grad_focal_loss,
            "smoothing": smoothing,
        }
        buffers = {"weight": weight}
        if isinstance(pos_weight, Tensor):
            buffers["pos_weight"] = pos_weight
        else:
            settings["pos_weight"] = pos_weight
        super().__init__(reduction, buffers, settings, options)


class PolyBinaryCrossEntropy(LossModule):
    """Poly-1 binary cross entropy as timm.loss.PolyBinaryCrossEntropy: see functional.poly_binary_cross_entropy."""

    function = staticmethod(functional.poly_binary_cross_entropy)
    reductions = (*checks.REDUCTIONS, "batchmean")

    def __init__(
        self,
        epsilon: float = 2.0,
        gamma: float = 0.0,
        alpha: float | Tensor | None = None,
        smoothing: float = 0.0,
        reduction: str = "mean",
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        settings: dict[str, Any] = {"epsilon": epsilon, "gamma": gamma, "smoothing": smoothing}
        buffers: dict[str, Tensor | None] = {}
        if isinstance(alpha, Tensor):
            buffers["alpha"] = alpha
        else:
            settings["alpha"] = alpha
        super().__init__(reduction, buffers, settings, options)

"""The losses as modules: the functions of lossforge.losses.functional with their options kept, class-wise tensors as buffers.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, weight, preference, group, normalizer).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import ElementwiseSettings, Settings


class _Loss(nn.Module):
    """A function, its options, and its tensors as buffers."""

    function: ClassVar[Callable[..., Any]]
    accepted: ClassVar[type] = ElementwiseSettings
    reductions: ClassVar[tuple[str, ...]] = checks.REDUCTIONS

    def __init__(self, reduction: str, buffers: dict[str, Tensor | None], settings: dict[str, Any], options: Any) -> None:
        super().__init__()
        checks.one_of("reduction", reduction, self.reductions)
        for name in options:
            if name not in self.accepted.__annotations__:
                raise TypeError(f"{type(self).__name__} takes no option {name!r}; it takes {', '.join(self.accepted.__annotations__)}")
        for name, t in buffers.items():
            self.register_buffer(name, t)
        self.reduction = reduction
        self.buffers_given = tuple(buffers)
        self.settings = {**settings, **options}

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Any:
        tensors = {name: t for name in self.buffers_given if (t := getattr(self, name)) is not None}
        return type(self).function(input, target, reduction=self.reduction, **{**self.settings, **tensors, **per_call})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in {"reduction": self.reduction, **self.settings}.items())


class L1Loss(_Loss):
    """Mean absolute error as torch.nn.L1Loss: see functional.l1_loss."""

    function = staticmethod(functional.l1_loss)

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean", **options: Unpack[ElementwiseSettings]
    ) -> None:
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {}, {}, options)


class MSELoss(L1Loss):
    """Mean squared error as torch.nn.MSELoss: see functional.mse_loss."""

    function = staticmethod(functional.mse_loss)


class HuberLoss(_Loss):
    """Huber loss as torch.nn.HuberLoss: see functional.huber_loss."""

    function = staticmethod(functional.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0, **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {}, {"delta": delta}, options)


class SmoothL1Loss(_Loss):
    """Smooth L1 loss as torch.nn.SmoothL1Loss: see functional.smooth_l1_loss."""

    function = staticmethod(functional.smooth_l1_loss)

    def __init__(
        self,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        beta: float = 1.0,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {}, {"beta": beta}, options)


class BCEWithLogitsLoss(_Loss):
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


class PreferenceBCEWithLogitsLoss(_Loss):
    """Preference-weighted binary cross entropy on logits, with a weight per group: see functional.preference_bce_with_logits."""

    function = staticmethod(functional.preference_bce_with_logits)

    def __init__(self, group_weight: Tensor | None = None, *, reduction: str = "mean", **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {"group_weight": group_weight}, {}, options)


class PreferenceBCELoss(PreferenceBCEWithLogitsLoss):
    """Preference-weighted binary cross entropy on probabilities, with a weight per group: see functional.preference_bce."""

    function = staticmethod(functional.preference_bce)


class SigmoidFocalLoss(_Loss):
    """Sigmoid focal loss: see functional.sigmoid_focal_loss. As there, the default reduction is torchvision's "none"."""

    function = staticmethod(functional.sigmoid_focal_loss)

    def __init__(
        self, alpha: float | Tensor = 0.25, gamma: float = 2.0, reduction: str = "none", **options: Unpack[ElementwiseSettings]
    ) -> None:
        per_class = alpha if isinstance(alpha, Tensor) else None
        settings = {"gamma": gamma} if per_class is not None else {"alpha": alpha, "gamma": gamma}
        super().__init__(reduction, {} if per_class is None else {"alpha": per_class}, settings, options)


class AsymmetricLossMultiLabel(_Loss):
    """Asymmetric loss as timm.loss.AsymmetricLossMultiLabel: see functional.asymmetric_loss_multi_label."""

    function = staticmethod(functional.asymmetric_loss_multi_label)
    reductions = (*checks.REDUCTIONS, "batchmean")

    def __init__(
        self,
        gamma_neg: float = 4.0,
        gamma_pos: float = 1.0,
        clip: float | None = 0.05,
        *,
        reduction: str = "batchmean",
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        settings = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "clip": clip}
        buffers = {"weight": weight}
        if isinstance(pos_weight, Tensor):
            buffers["pos_weight"] = pos_weight
        else:
            settings["pos_weight"] = pos_weight
        super().__init__(reduction, buffers, settings, options)


class PolyBinaryCrossEntropy(_Loss):
    """Poly-1 binary cross entropy as timm.loss.PolyBinaryCrossEntropy: see functional.poly_binary_cross_entropy."""

    function = staticmethod(functional.poly_binary_cross_entropy)
    reductions = (*checks.REDUCTIONS, "batchmean")

    def __init__(
        self,
        epsilon: float = 2.0,
        gamma: float = 0.0,
        alpha: float | Tensor | None = None,
        *,
        reduction: str = "mean",
        **options: Unpack[ElementwiseSettings],
    ) -> None:
        settings: dict[str, Any] = {"epsilon": epsilon, "gamma": gamma}
        buffers: dict[str, Tensor | None] = {}
        if isinstance(alpha, Tensor):
            buffers["alpha"] = alpha
        else:
            settings["alpha"] = alpha
        super().__init__(reduction, buffers, settings, options)


class CrossEntropyLoss(_Loss):
    """Cross entropy as torch.nn.CrossEntropyLoss, with more options: see functional.cross_entropy."""

    function = staticmethod(functional.cross_entropy)
    accepted = Settings

    def __init__(
        self,
        weight: Tensor | None = None,
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
        **options: Unpack[Settings],
    ) -> None:
        settings = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "scale": scale,
            "softcap": softcap,
            "z_loss": z_loss,
            "return_z_loss": return_z_loss,
            "return_lse": return_lse,
            "return_entropy": return_entropy,
            "return_correct": return_correct,
        }
        super().__init__(checks.legacy_reduction(size_average, reduce, reduction), {"weight": weight}, settings, options)

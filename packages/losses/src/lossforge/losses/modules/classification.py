"""Losses of rows of classes under a softmax for imbalanced, hard or noisily labelled data."""

from typing import Unpack

import torch
from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.rowwise import RowSettings
from lossforge.losses.modules.common import RowModule
from lossforge.losses.types import Reduction


class SoftmaxFocalLoss(RowModule):
    """Focal loss under a softmax: see functional.softmax_focal_loss. As there, the default reduction is kornia's "none"."""

    function = staticmethod(functional.softmax_focal_loss)
    alpha: float | Tensor | None
    gamma: float

    def __init__(
        self,
        alpha: float | Tensor | None = None,
        gamma: float = 2.0,
        reduction: Reduction = "none",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(options, alpha=alpha, gamma=gamma, reduction=reduction, weight=weight, ignore_index=ignore_index)


class PolyCrossEntropyLoss(RowModule):
    """Poly-1 cross entropy as timm.loss.PolyCrossEntropy: see functional.poly_cross_entropy."""

    function = staticmethod(functional.poly_cross_entropy)
    epsilon: float
    label_smoothing: float

    def __init__(
        self,
        epsilon: float = 2.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        smoothing: float | None = None,
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(
            options,
            epsilon=epsilon,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            smoothing=smoothing,
        )


class GeneralizedCrossEntropyLoss(RowModule):
    """Generalised cross entropy for noisy labels: see functional.generalized_cross_entropy."""

    function = staticmethod(functional.generalized_cross_entropy)
    q: float

    def __init__(
        self,
        q: float = 0.7,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(options, q=q, weight=weight, ignore_index=ignore_index, reduction=reduction)


class LogitAdjustedCrossEntropyLoss(RowModule):
    """Logit-adjusted cross entropy for long-tailed classes: see functional.logit_adjusted_cross_entropy.

    Args: class_counts: samples of each class in the training set, or their shares, (C,), all above 0. Kept as the buffer log_prior; None:
    given as log_prior at each call.
    """

    function = staticmethod(functional.logit_adjusted_cross_entropy)
    log_prior: Tensor | None
    tau: float
    label_smoothing: float

    def __init__(
        self,
        class_counts: Tensor | None = None,
        tau: float = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(
            options,
            log_prior=None if class_counts is None else _log_shares(class_counts),
            tau=tau,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


def _log_shares(class_counts: Tensor) -> Tensor:
    if not isinstance(class_counts, Tensor):
        raise TypeError(f"class_counts must be a tensor, got {type(class_counts).__name__}")
    if class_counts.ndim != 1 or not len(class_counts):
        raise ValueError(f"class_counts must hold one count a class, shape (C,), got {tuple(class_counts.shape)}")
    if not (class_counts > 0).all():
        raise ValueError(f"class_counts must be above 0, got {class_counts.min().item():g}")
    counts = class_counts.double()
    return (counts / counts.sum()).log().to(torch.float64 if class_counts.dtype == torch.float64 else torch.float32)

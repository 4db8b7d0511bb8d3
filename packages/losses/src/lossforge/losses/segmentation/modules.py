"""The losses of masks as modules, whose options are attributes that each call reads."""

from collections.abc import Sequence
from typing import Literal

from lossforge.losses.base.module import TargetModule, constructor
from lossforge.losses.base.option_types import Activation, Reduction
from lossforge.losses.segmentation.depth import silog_loss
from lossforge.losses.segmentation.distance import boundary_loss, hausdorff_loss
from lossforge.losses.segmentation.regions import generalized_dice_loss, mcc_loss

__all__ = ["BoundaryLoss", "GeneralizedDiceLoss", "HausdorffLoss", "MCCLoss", "SILogLoss"]


class GeneralizedDiceLoss(TargetModule):
    """Generalised Dice loss as monai.losses.GeneralizedDiceLoss: see generalized_dice_loss.

    Args:
        weighting: "square" for w = 1/Y², "simple" for 1/Y, "uniform" for 1.
        reduction: "mean" over images, "sum", or "none": (N,).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        batch: the sums are over all images, so that there is one value.
        ignore_index: pixels with this class index belong to no region and get gradient 0.
        smooth_nr: n of at least 0.
        smooth_dr: d of at least 0.
    """

    function = staticmethod(generalized_dice_loss)
    weighting: Literal["square", "simple", "uniform"]
    reduction: Reduction
    activation: Activation | None
    include_background: bool
    batch: bool
    ignore_index: int
    smooth_nr: float
    smooth_dr: float

    @constructor
    def __init__(
        self,
        weighting: Literal["square", "simple", "uniform"] = "square",
        reduction: Reduction = "mean",
        *,
        activation: Activation | None = "softmax",
        include_background: bool = True,
        batch: bool = False,
        ignore_index: int = -100,
        smooth_nr: float = 1e-5,
        smooth_dr: float = 1e-5,
    ) -> None:
        super().__init__(
            weighting=weighting,
            reduction=reduction,
            activation=activation,
            include_background=include_background,
            batch=batch,
            ignore_index=ignore_index,
            smooth_nr=smooth_nr,
            smooth_dr=smooth_dr,
        )


class MCCLoss(TargetModule):
    """Loss of Matthews' correlation coefficient as monai.losses.MCCLoss: see mcc_loss.

    Args:
        reduction: "mean" over images and classes, "sum", or "none": (N, C), with batch (1, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        batch: a region is a class over all images.
        ignore_index: pixels with this class index count nowhere and get gradient 0.
        smooth_nr: n of at least 0.
        smooth_dr: d of at least 0.
    """

    function = staticmethod(mcc_loss)
    reduction: Reduction
    activation: Activation | None
    include_background: bool
    batch: bool
    ignore_index: int
    smooth_nr: float
    smooth_dr: float

    @constructor
    def __init__(
        self,
        reduction: Reduction = "mean",
        *,
        activation: Activation | None = "softmax",
        include_background: bool = True,
        batch: bool = False,
        ignore_index: int = -100,
        smooth_nr: float = 0.0,
        smooth_dr: float = 1e-5,
    ) -> None:
        super().__init__(
            reduction=reduction,
            activation=activation,
            include_background=include_background,
            batch=batch,
            ignore_index=ignore_index,
            smooth_nr=smooth_nr,
            smooth_dr=smooth_dr,
        )


class BoundaryLoss(TargetModule):
    """Boundary loss as monai.losses.BoundaryLoss: see boundary_loss.

    Args:
        reduction: "mean" over images and classes, "sum", or "none": (N, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        spacing: the distance of neighbours along each spatial dimension, above 0; None for 1, and where targets are the maps themselves.
    """

    function = staticmethod(boundary_loss)
    reduction: Reduction
    activation: Activation | None
    include_background: bool
    spacing: Sequence[float] | None

    @constructor
    def __init__(
        self,
        reduction: Reduction = "mean",
        *,
        activation: Activation | None = "softmax",
        include_background: bool = True,
        spacing: Sequence[float] | None = None,
    ) -> None:
        super().__init__(reduction=reduction, activation=activation, include_background=include_background, spacing=spacing)


class HausdorffLoss(TargetModule):
    """Hausdorff distance loss as monai.losses.HausdorffDTLoss: see hausdorff_loss.

    Args:
        alpha: α of at least 0, how much far errors count more.
        reduction: "mean" over images and classes, "sum", or "none": (N, C).
        activation: "softmax" over two or more classes, "sigmoid" of each, or None.
        include_background: class 0 counts.
        spacing: the distance of neighbours along each spatial dimension, above 0; None for 1.
    """

    function = staticmethod(hausdorff_loss)
    alpha: float
    reduction: Reduction
    activation: Activation | None
    include_background: bool
    spacing: Sequence[float] | None

    @constructor
    def __init__(
        self,
        alpha: float = 2.0,
        reduction: Reduction = "mean",
        *,
        activation: Activation | None = "softmax",
        include_background: bool = True,
        spacing: Sequence[float] | None = None,
    ) -> None:
        super().__init__(alpha=alpha, reduction=reduction, activation=activation, include_background=include_background, spacing=spacing)


class SILogLoss(TargetModule):
    """Scale-invariant logarithmic loss of depths as transformers' SiLogLoss of GLPN: see silog_loss.

    Args:
        lambd: λ in [0, 1].
        root: take the root.
        per_image: a mean of one value an image; else one value over all pixels.
        eps: of at least 0, added below the root, whose gradient at 0 is infinite.
    """

    function = staticmethod(silog_loss)
    lambd: float
    root: bool
    per_image: bool
    eps: float

    @constructor
    def __init__(self, lambd: float = 0.5, *, root: bool = True, per_image: bool = False, eps: float = 0.0) -> None:
        super().__init__(lambd=lambd, root=root, per_image=per_image, eps=eps)

"""Losses that extend the Jaccard index of a region from sets of wrong pixels to errors of any size: segmentation.

The extension, Lovász's, sorts a region's errors and weighs each by how much the Jaccard loss grows with that pixel among the wrong ones.
It is convex in the errors, and at errors of 0 and 1 it is the Jaccard loss itself.
"""

from typing import Unpack

from torch import Tensor

from lossforge.kernels.call import Formulas, LovaszCall
from lossforge.losses import checks
from lossforge.losses.device_names import tl
from lossforge.losses.formulas import formula
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.lovasz import LOVASZ, LOVASZ_MASKS, LovaszOptions, lovasz_loss
from lossforge.losses.types import Averaged, Reduction


def missing_probability(p, y):
    return tl.abs(y - p)


@formula("lovasz_softmax", lambda of: Formulas(of(missing_probability)))
def missing_probability_reference(p: Tensor, y: Tensor) -> Tensor:
    return (y - p).abs()


@loss(
    "lovasz_softmax",
    LOVASZ,
    Module("LovaszSoftmaxLoss", "Lovász-softmax loss, as segmentation_models_pytorch's LovaszLoss of several classes"),
    options=({"per_image": True}, {"classes": "all"}, {"classes": [2, 0], "per_image": True}),
    like="lossforge.losses.oracles.segmentation:lovasz_softmax",
    paper="arXiv 1705.08790",
)
def lovasz_softmax_loss(
    input: Tensor,  # (N, C, d…)
    target: Tensor,  # (N, d…)
    classes: Averaged | list[int] | tuple[int, ...] = "present",
    per_image: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[LovaszOptions],
) -> Tensor:
    """Lovász-softmax loss (Berman et al. 2018, arXiv 1705.08790), as segmentation_models_pytorch's LovaszLoss in its multiclass mode.

    L = Σ gₖ eₖ over the pixels k of a region, the largest error first, e = |y - p|, p = softmax(x), gₖ = J({1…k}) - J({1…k - 1}), where
    J(M) = 1 - |Y - M| / |Y ∪ M| is the Jaccard loss of a mask of the class's pixels Y that is wrong at the pixels M.

    The mean is that of the classes, with per_image of each image, and then that of the images. Torch sorts the errors of each region;
    equal errors keep the order of their pixels. Kernels compute all else.

    When to use it: Take it to finish a segmentation that is judged by mean IoU, after or beside cross entropy. It optimises that measure
    itself, of the batch or of each image.

    When not: Leave it at the start of training, and on small batches of many classes, whose mean IoU says little of the data set's.
    `jaccard` needs no sort, which takes most of the time here.

    Args:
        classes: "present" averages the classes that have pixels, "all" every class. With a list of class indices absent classes count too,
            and a class that is listed twice counts twice.
    """
    checks.whole("input", input)
    if input.ndim < 2 or input.shape[1] < 2:
        raise ValueError(
            f"input must have shape (N, C, d…) with at least two classes, got {tuple(input.shape)}: of one class take lovasz_hinge_loss"
        )
    call = LovaszCall("lovasz_softmax", input, target, per_image=per_image, ignore_index=ignore_index, reduction=reduction)
    return lovasz_loss(call, classes, options)


def hinge(x, y):
    return 1.0 - x * (2.0 * y - 1.0)


@formula("lovasz_hinge", lambda of: Formulas(of(hinge)))
def hinge_reference(x: Tensor, y: Tensor) -> Tensor:
    return 1 - x * (2 * y - 1)


@loss(
    "lovasz_hinge",
    LOVASZ_MASKS,
    Module("LovaszHingeLoss", "Lovász hinge loss, as segmentation_models_pytorch's LovaszLoss of one class"),
    options=({"per_image": True},),
    like="lossforge.losses.oracles.segmentation:lovasz_hinge",
    paper="arXiv 1705.08790",
)
def lovasz_hinge_loss(
    input: Tensor,  # (N, d…), (N, 1, d…)
    target: Tensor,  # as input
    per_image: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    **options: Unpack[LovaszOptions],
) -> Tensor:
    """Lovász hinge loss of a mask (Berman et al. 2018, arXiv 1705.08790), as segmentation_models_pytorch's LovaszLoss in its binary mode.

    L = Σ gₖ max(0, eₖ) over the pixels k, the largest error first, e = 1 - x (2 y - 1), with gₖ as in `lovasz_softmax_loss`.

    When to use it: Take it for one class against background that is judged by its IoU, after or beside `bce`.

    When not: Leave it where logits must become probabilities, because it asks only that they pass a margin of 1.
    """
    checks.whole("input", input)
    if input.ndim < 2:
        raise ValueError(f"input must have shape (N, d…) or (N, 1, d…), got {tuple(input.shape)}")
    one = isinstance(target, Tensor) and target.ndim == input.ndim - 1 and input.shape[1] == 1
    x = input if one else input.unsqueeze(1)
    call = LovaszCall("lovasz_hinge", x, target, softmax=False, per_image=per_image, ignore_index=ignore_index, reduction=reduction)
    return lovasz_loss(call, "all", options)

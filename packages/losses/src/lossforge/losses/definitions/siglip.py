"""The pairwise sigmoid loss of image and text embeddings."""

from typing import Unpack

from torch import Tensor

from lossforge.kernels.call import ElementwiseCall
from lossforge.kernels.torch_internals import transformed
from lossforge.losses import checks
from lossforge.losses.templates.declare import Module, loss
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss
from lossforge.losses.templates.options import ElementwiseOptions
from lossforge.losses.types import Reduction

NOWHERE = 2**62
"""The offset of a diagonal that meets no matrix."""


@loss(
    "siglip",
    ELEMENTWISE,
    Module(
        "SigLIPLoss",
        "Pairwise sigmoid loss of similarities",
        " `forward` takes offset and negative_only as well.",
        forward="input: Tensor, target: Tensor | None = None",
    ),
    formula="bce_with_logits",
    paper="arXiv 2303.15343",
    targets="the diagonal, class index, dense",
    given="",
)
def siglip_loss(
    input: Tensor,  # (N, M)
    target: Tensor | None = None,  # as input, or (N,) class indices; None: the diagonal
    *,
    offset: int = 0,
    negative_only: bool = False,
    reduction: Reduction = "mean",
    weight: Tensor | None = None,  # broadcasts to input
    **options: Unpack[ElementwiseOptions],
) -> Tensor:
    """Pairwise sigmoid loss of similarities, as open_clip's SigLipLoss (Zhai et al. 2023, arXiv 2303.15343).

    L = w softplus(-z x), z = 1 where image i and text j belong together, -1 elsewhere; "mean" divides their sum by the number of rows N.

    The logits are x = scale · (images @ texts.T) + bias, computed outside, so that autograd gives scale and bias their gradients.
    `torch.addmm(bias, scale * images, texts.T)`, bias of shape (1,), adds the bias within the matrix product.

    It takes no embeddings. siglip_loss(images, texts) is refused where the texts are seen not to be a dense target: their shape is not that
    of the images, they hold values outside [0, 1] (checked on CPU; on CUDA with validate), or a network gave them.

    When to use it: Take it for pairs of images and texts. Each pair is a decision of its own, so a batch can be split over devices without
    a softmax over all of it.

    When not: Leave it without a learned scale and a bias of about -10, because nearly all pairs are negatives at the start. For very small
    batches the negatives are too few.

    Args:
        input: similarities (N, M), any floating dtype: row i is an image, column j a text.
        target: None: the pairs are j = i + offset, and no matrix of labels is built. Class indices (N,): the text of each image, -1 none,
            -2 an image that is ignored. Dense (N, M): y = (z + 1) / 2, for images with several texts.
        offset: the column of the first row's pair: on device r with N images, r N where the texts of all devices are gathered, -r N where
            all images are.
        negative_only: there are no pairs, as with the texts of another device.
        reduction: "mean" averages over the rows not ignored, "sum" or "none".

    Examples:
        >>> similarities = torch.randn(8, 8, requires_grad=True)  # scale * images @ texts.T + bias
        >>> siglip_loss(similarities).backward()
    """
    offset = checks.whole_number("offset", offset)
    if not -NOWHERE < offset < NOWHERE:
        raise ValueError(f"offset must be above {-NOWHERE} and below {NOWHERE}, got {offset}")
    if target is not None and (offset or negative_only):
        raise ValueError(f"target must be None where {'offset' if offset else 'negative_only'} is given, got a tensor")
    if isinstance(target, Tensor) and target.is_floating_point():
        _refuse_embeddings(input, target, options.get("validate"))
    where = NOWHERE if negative_only else offset
    call = ElementwiseCall("bce_with_logits", input, target, weight=weight, hyper=[1.0], offset=where, reduction=reduction)
    return elementwise_loss(call, options, mean="rows", diagonal=True)


def _refuse_embeddings(input: Tensor, target: Tensor, validate: bool | None) -> None:
    checks.whole("input", input)
    found = ""
    if target.shape != input.shape:
        found = f"{tuple(target.shape)}"
    elif not checks.known(target) or transformed(input, target):
        return
    elif target.grad_fn is not None and target.ndim == 2 and target.shape[0] != target.shape[1]:
        found = f"the output of a network, {tuple(target.shape)}"
    elif target.numel() and (target.device.type == "cpu" or (checks.VALIDATE if validate is None else validate)):
        once = target.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())]  # of what is expanded
        low, high = (t.item() for t in once.aminmax())
        found = f"values from {low:g} to {high:g}" if low < 0 or high > 1 else ""
    if found:
        raise ValueError(
            f"target must have the shape of input, {tuple(input.shape)}, and hold y in [0, 1], 1 where a pair belongs together, "
            f"got {found}; embeddings make one matrix of logits first: siglip_loss(logit_scale * images @ texts.T + logit_bias)"
        )

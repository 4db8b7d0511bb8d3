"""Losses over similarities of two views, of which pairs belong together."""

from typing import TypedDict, Unpack, cast

from torch import Tensor

from lossforge.kernels.call import ContrastiveCall
from lossforge.losses import checks
from lossforge.losses.templates.contrastive import CONTRASTIVE
from lossforge.losses.templates.declare import Module, public
from lossforge.losses.templates.options import CallOptions, check_options, with_options
from lossforge.losses.templates.record import prepared
from lossforge.losses.types import Empty, Gradient, Reduction


class ContrastiveOptions(TypedDict, total=False):
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    normalizer: float | Tensor | None
    scale: float


@public(
    CONTRASTIVE.docs,
    Module(
        "ClipLoss",
        "Symmetric InfoNCE over one similarity matrix",
        " Its input is the matrix, open_clip's are the features.",
    ),
    repeats=True,
)
def clip_loss(
    similarity: Tensor,  # (N, M), M ≥ N
    offset: int = 0,
    reduction: Reduction = "mean",
    **options: Unpack[ContrastiveOptions],
) -> Tensor:
    """Symmetric InfoNCE over one similarity matrix, the loss of CLIP, as open_clip.ClipLoss (Radford et al. 2021, arXiv 2103.00020).

    L = ½ (ln Σⱼ exp xᵢⱼ - xᵢ,ᵢ₊ₒ) + ½ (ln Σₖ exp xₖ,ᵢ₊ₒ - xᵢ,ᵢ₊ₒ) with o = offset: the mean of the cross entropies over rows (image to
    text) and over columns (text to image). Both directions come from one reading of the matrix, the gradient from another; no transposed
    copy and no tensor of targets is made. The mean divides by the number of pairs N.

    When to use it: Take it where you have the matrix of similarities already, or change it before the loss.

    When not: Leave it where you have the features; `clip_loss_from_features` never makes the matrix.

    In one direction (InfoNCE of a query against a positive and negatives; open_clip's local_loss, once for images and once for texts) the
    loss is cross_entropy(similarity, torch.arange(N) + offset).

    Args:
        similarity: logits (N, M), such as logit_scale · image_features @ text_features.T: row i and column i + offset belong together. With
            M > N the other columns are negatives of the rows only, as with texts gathered from other devices or a queue.
        offset: the column of the first row's pair.
        scale: a number that multiplies the similarities.

    Examples:
        >>> similarities = torch.randn(8, 8, requires_grad=True)  # scale * images @ texts.T
        >>> clip_loss(similarities).backward()
    """
    checks.whole("similarity", similarity)
    if isinstance(offset, Tensor) and offset.ndim:
        raise TypeError(
            f"offset must be a whole number, got a tensor of shape {tuple(offset.shape)}; embeddings make one matrix of "
            "similarities first: clip_loss(logit_scale * images @ texts.T)"
        )
    offset = checks.whole_number("offset", offset)
    given = cast(CallOptions, options)
    divisor = check_options(similarity, reduction, given, ContrastiveOptions)
    if similarity.ndim != 2 or not 0 <= offset <= similarity.shape[1] - similarity.shape[0]:
        raise ValueError(f"similarity must have shape (N, M) with 0 ≤ offset ≤ M - N, got {tuple(similarity.shape)} with offset {offset}")
    scale = checks.number("scale", options.get("scale", 1.0))
    call = ContrastiveCall("clip", similarity, offset=offset, logit_scale=1.0 * scale, reduction=reduction)
    return prepared(with_options(call, given, divisor), options)

"""Contrastive losses: of a matrix of similarities, or of the features whose similarities are then in no memory."""

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.contrastive.call import ContrastiveCall
from lossforge.kernels.elementwise.call import ElementwiseCall
from lossforge.kernels.similarity.call import SimilarityCall
from lossforge.kernels.torch_internals import transformed
from lossforge.losses import checks
from lossforge.losses.base.declare import Module, loss, public
from lossforge.losses.base.options import ElementwiseOptions, InplaceOptions, SharedOptions, check_options, checked_call
from lossforge.losses.base.record import CheckedCall, Finish, first
from lossforge.losses.option_types import Reduction
from lossforge.losses.state import autocast_dtype
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss
from lossforge.losses.templates.similarity import CONTRASTIVE, OTHERS, OWN, SIMILARITY

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
) -> CheckedCall[ElementwiseCall]:
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


class ContrastiveOptions(InplaceOptions, total=False):
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
) -> CheckedCall[ContrastiveCall]:
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
    divisor = check_options(similarity, reduction, options, ContrastiveOptions)
    if similarity.ndim != 2 or not 0 <= offset <= similarity.shape[1] - similarity.shape[0]:
        raise ValueError(f"similarity must have shape (N, M) with 0 ≤ offset ≤ M - N, got {tuple(similarity.shape)} with offset {offset}")
    scale = checks.number("scale", options.get("scale", 1.0))
    call = ContrastiveCall("clip", similarity, offset=offset, logit_scale=scale, reduction=reduction)
    return checked_call(call, options, divisor)


Number = float | Tensor


def _features(normalize: bool, **given: Tensor) -> list[Tensor]:
    """Return features that are checked, in the dtype that a product of them would be computed in."""
    found: list[Tensor] = []
    for name, t in given.items():
        checks.whole(name, t)
        checks.fits(name, t, t.ndim == 2, "have shape (N, D), one row of features a sample")
        if found:
            of, like = next(iter(given.items()))
            checks.beside(name, t, like, of)
            if t.shape[1] != like.shape[1]:
                raise ValueError(f"{name} must have the {like.shape[1]} features of {of}, got shape {tuple(t.shape)}")
        if normalize:
            t = F.normalize(t, dim=1)
        dtype = autocast_dtype(t.device.type)
        if dtype and t.dtype != torch.float64:
            t = t.to(dtype)
        if found and t.dtype != found[0].dtype:
            raise TypeError(f"{name} must have the dtype of {of}, {found[0].dtype}, got {t.dtype}")
        found.append(t)
    return found


def _number(name: str, value: Number, a: Tensor, low: float | None = None) -> tuple[float, Tensor | None]:
    """Return a number, above `low` where that is given, and what it is multiplied with on the device."""
    if not checks.is_parameter(value, a):
        return (checks.number(name, value) if low is None else checks.number(name, value, low, exclusive=True)), None
    checks.floating_beside(name, value, a)
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
    return 1.0, value.reshape(())


def _softened(call: SimilarityCall, number: float, t: Tensor | None) -> SimilarityCall:
    """Return a call with similarities over a temperature, as _number returns it."""
    return call._replace(logit_scale=1.0 / number, scale=None if t is None else 1.0 / t)


def _checked(call: SimilarityCall, options: SharedOptions, of: str, finish: Finish = first) -> CheckedCall[SimilarityCall]:
    divisor = check_options(call.a, call.reduction, options, SharedOptions, of)
    return checked_call(call, options, divisor, finish)


def _whole_offset(offset: int, rows: int, columns: int, of: str) -> int:
    offset = checks.whole_number("offset", offset)
    if not 0 <= offset <= columns - rows:
        raise ValueError(f"{of} must have a pair for each of {rows} rows from offset on, got {columns} rows with offset {offset}")
    return offset


@public(
    SIMILARITY.docs,
    Module(
        "InfoNCELoss",
        "InfoNCE of queries, positives and negatives",
        forward="query: Tensor, positive: Tensor, negatives: Tensor | None = None",
    ),
)
def info_nce_loss(
    query: Tensor,  # (N, D)
    positive: Tensor,  # (M, D), M ≥ N
    negatives: Tensor | None = None,  # (K, D)
    temperature: Number = 0.1,
    reduction: Reduction = "mean",
    *,
    in_batch: bool = True,
    symmetric: bool = False,
    offset: int = 0,
    normalize: bool = True,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """InfoNCE of features, as info_nce.info_nce and sentence-transformers' MultipleNegativesRankingLoss (arXiv 1807.03748).

    L = ln Σⱼ exp xᵢⱼ - xᵢₚ, xᵢⱼ = qᵢ · kⱼ / T, the sum over the positives of the batch and over the negatives, which all queries share.

    - MultipleNegativesRankingLoss is temperature=1/20, with the hard negatives of all anchors, (N, K, D), as negatives.flatten(0, 1).
    - A queue, as MoCo's (arXiv 1911.05722), is negatives with in_batch=False: a query is then compared with its own positive and the queue.
    - On several devices gather the positives of all, and give the row of this device's first positive as offset.

    No matrix of similarities is in memory, neither in forward nor in backward.

    When to use it: Take it to learn features from pairs: retrieval, sentence embeddings, self-supervised images.

    When not: Leave it where several positives share a label; `supervised_contrastive_loss` takes them as positives.

    Args:
        query: (N, D), the features of N queries.
        positive: (M, D). Row i + offset belongs to query i; the other rows are its negatives. M > N where those of other devices
            are among them.
        negatives: (K, D), further negatives of every query.
        temperature: T above 0, a number or a tensor of one element, which gets a gradient.
        in_batch: compare a query with the positives of the others; without, negatives must be given.
        symmetric: mean of this loss and that of the positives against the queries, as CLIP's; negatives are those of queries alone.
        offset: the row of positive that belongs to the first query.

    Examples:
        >>> query, positive = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
        >>> info_nce_loss(query, positive, torch.randn(100, 32)).backward()
    """
    given = {"query": query, "positive": positive} | ({} if negatives is None else {"negatives": negatives})
    a, *others = _features(normalize, **given)
    rows, columns = len(a), len(others[0])
    offset = _whole_offset(offset, rows, columns, "positive")
    call = SimilarityCall("both_sides" if symmetric else "softmax", a, others[0] if negatives is None else torch.cat(others))
    call = call._replace(offset=offset, reduction=reduction)
    if not in_batch:
        if negatives is None or symmetric or columns != rows:
            raise ValueError("in_batch=False needs negatives, as many positives as queries, and symmetric=False")
        call = call._replace(skip=OTHERS, pairs=columns)
    return _checked(_softened(call, *_number("temperature", temperature, a, 0.0)), options, "query")


@public(
    SIMILARITY.docs,
    Module("NTXentLoss", "Normalised temperature-scaled cross entropy of two views", forward="input1: Tensor, input2: Tensor"),
)
def nt_xent_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    temperature: Number = 0.5,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """Normalised temperature-scaled cross entropy of two views, the loss of SimCLR (Chen et al. 2020, arXiv 2002.05709).

    L = ln Σⱼ exp xᵢⱼ - xᵢₚ, j ≠ i, x = z · z / T over all 2 N views z: each view is compared with its sample's other view and with
    the 2 N - 2 views of other samples.

    When to use it: Take it for self-supervised features of images in two augmentations.

    When not: Leave it where batches are small; `info_nce_loss` with a queue has more negatives.

    Args:
        input1: (N, D), the features of one view.
        input2: (N, D), the features of the other view, in the same order.
        temperature: T above 0, a number or a tensor of one element, which gets a gradient.
        reduction: "mean" over the 2 N views, "sum", or "none", (2 N,).

    Examples:
        >>> nt_xent_loss(torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)).backward()
    """
    a, b = _features(normalize, input1=input1, input2=input2)
    checks.fits("input2", b, len(a) == len(b), "have the shape of input1, {}", a.shape)
    z, labels = torch.cat([a, b]), torch.arange(len(a), device=a.device).repeat(2)
    call = SimilarityCall("softmax", z, z, row_labels=labels, column_labels=labels, skip=OWN, reduction=reduction)
    return _checked(_softened(call, *_number("temperature", temperature, a, 0.0)), options, "input1")


@public(
    SIMILARITY.docs,
    Module("SupConLoss", "Supervised contrastive loss", forward="features: Tensor, labels: Tensor | None = None"),
)
def supervised_contrastive_loss(
    features: Tensor,  # (N, D), (N, V, D)
    labels: Tensor | None = None,  # (N,)
    temperature: Number = 0.07,
    base_temperature: float | None = 0.07,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """Supervised contrastive loss, as SupContrast's SupConLoss (Khosla et al. 2020, arXiv 2004.11362).

    L = T / T₀ (ln Σⱼ exp xᵢⱼ - Σₚ xᵢₚ / |P|), j ≠ i, x = z · z / T, P the others of the same label, T₀ = base_temperature.

    The sum over the positives is outside of the logarithm. A row without a positive adds 0; the mean divides by all rows.

    When to use it: Take it to learn features from labels, before a classifier is trained on them, with several samples of a class a batch.

    When not: Leave it where a batch has few samples of each class; then most rows have no positive.

    Args:
        features: (N, D), or V views of each sample, (N, V, D).
        labels: integers (N,); None: only the views of a sample belong together.
        temperature: T above 0, a number or a tensor of one element, which gets a gradient.
        base_temperature: T₀; None for T, which leaves the factor out.
        reduction: "mean" over all rows, "sum", or "none", (N,) or (N, V).

    Examples:
        >>> supervised_contrastive_loss(torch.randn(8, 32, requires_grad=True), torch.arange(8) % 3).backward()
    """
    checks.whole("features", features)
    shape = tuple(features.shape)
    checks.fits("features", features, features.ndim in (2, 3), "have shape (N, D) or (N, V, D)")
    (z,) = _features(normalize, features=features.flatten(0, -2))
    if labels is None:
        labels = torch.arange(shape[0], device=z.device)
    else:
        checks.integer("labels", labels)
        checks.beside("labels", labels, z, "features")
    checks.fits("labels", labels, labels.shape == shape[:1], "have shape {}", shape[:1])
    labels = labels if len(shape) == 2 else labels.repeat_interleave(shape[1])
    call = SimilarityCall("softmax", z, z, row_labels=labels, column_labels=labels, skip=OWN, reduction=reduction)
    base = None if base_temperature is None else checks.number("base_temperature", base_temperature, 0.0, exclusive=True)

    def finish(results: Sequence[Tensor | None]) -> Tensor:
        loss = first(results)
        loss = loss.unflatten(0, shape[:2]) if loss.ndim and len(shape) == 3 else loss
        return loss if base is None else loss * (number / base if t is None else t.to(loss.dtype) / base)

    number, t = _number("temperature", temperature, z, 0.0)
    return _checked(_softened(call, number, t), options, "features", finish)


@public(
    SIMILARITY.docs,
    Module(
        "ClipFeaturesLoss",
        "Symmetric InfoNCE of image and text features, as open_clip.ClipLoss",
        forward="image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor = 1.0",
    ),
)
def clip_loss_from_features(
    image_features: Tensor,  # (N, D)
    text_features: Tensor,  # (M, D), M ≥ N
    logit_scale: Number = 1.0,
    reduction: Reduction = "mean",
    *,
    offset: int = 0,
    normalize: bool = False,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """Symmetric InfoNCE of image and text features, as open_clip.ClipLoss (Radford et al. 2021, arXiv 2103.00020).

    L = ½ (ln Σⱼ exp xᵢⱼ - xᵢₚ) + ½ (ln Σₖ exp xₖₚ - xᵢₚ), x = logit_scale · images · textsᵀ, p = i + offset: clip_loss of x, a matrix that
    is never in memory.

    On several devices, as open_clip's local_loss: gather the features of all, and take the mean of
    info_nce_loss(images, every_text, temperature=1 / logit_scale, offset=offset, normalize=False) and the same of texts and every image.

    When to use it: Take it to align images and texts, or any two kinds of data that come in pairs.

    When not: Leave it where it costs too much to gather the features of all devices; `siglip_loss_from_features` needs no sum over devices.

    Args:
        image_features: (N, D), unit vectors as a CLIP model gives them.
        text_features: (M, D). Row i + offset belongs to image i; with M > N the others are negatives of the images alone.
        logit_scale: a number or a tensor of one element, which gets a gradient.
        offset: the row of text_features that belongs to the first image.

    Examples:
        >>> images, texts = (torch.nn.functional.normalize(torch.randn(8, 32)) for _ in range(2))
        >>> clip_loss_from_features(images.requires_grad_(), texts, logit_scale=100.0).backward()
    """
    a, b = _features(normalize, image_features=image_features, text_features=text_features)
    offset = _whole_offset(offset, len(a), len(b), "text_features")
    number, scale = _number("logit_scale", logit_scale, a)
    call = SimilarityCall("both_sides", a, b, scale=scale, logit_scale=number, offset=offset, reduction=reduction)
    return _checked(call, options, "image_features")


@public(
    SIMILARITY.docs,
    Module(
        "SigLIPFeaturesLoss",
        "Pairwise sigmoid loss of image and text features, as open_clip.SigLipLoss",
        " `forward` takes offset and negative_only as well.",
        forward="image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor = 1.0, logit_bias: float | Tensor = 0.0",
    ),
)
def siglip_loss_from_features(
    image_features: Tensor,  # (N, D)
    text_features: Tensor,  # (M, D)
    logit_scale: Number = 1.0,
    logit_bias: Number = 0.0,
    reduction: Reduction = "mean",
    *,
    offset: int = 0,
    negative_only: bool = False,
    normalize: bool = False,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """Pairwise sigmoid loss of image and text features, as open_clip's SigLipLoss (Zhai et al. 2023, arXiv 2303.15343).

    L = Σⱼ softplus(-z xᵢⱼ), x = logit_scale · images · textsᵀ + logit_bias, z = 1 where j = i + offset, else -1: siglip_loss of x, whose
    matrix is never in memory. "mean" is the sum over the number of images.

    When to use it: Take it for pairs of images and texts on several devices: add the loss of each device's texts, with negative_only for
    those of others.

    When not: Leave it without a learned scale and a bias of about -10, because nearly all pairs are negatives at the start.

    Args:
        image_features: (N, D), unit vectors as a SigLIP model gives them.
        text_features: (M, D).
        logit_scale: a number or a tensor of one element, which gets a gradient.
        logit_bias: a number or a tensor of one element, which gets a gradient.
        offset: the row of text_features that belongs to the first image.
        negative_only: there are no pairs, as with the texts of another device.

    Examples:
        >>> images, texts = (torch.nn.functional.normalize(torch.randn(8, 32)) for _ in range(2))
        >>> siglip_loss_from_features(images.requires_grad_(), texts, 10.0, -10.0).backward()
    """
    a, b = _features(normalize, image_features=image_features, text_features=text_features)
    (number, scale), (shift, bias) = _number("logit_scale", logit_scale, a), _number("logit_bias", logit_bias, a)
    offset = NOWHERE if negative_only else checks.whole_number("offset", offset)
    call = SimilarityCall("sigmoid", a, b, scale=scale, bias=bias, logit_scale=number, logit_bias=shift if bias is None else 0.0)
    return _checked(call._replace(offset=offset, reduction=reduction), options, "image_features")

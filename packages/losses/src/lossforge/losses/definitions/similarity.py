"""Contrastive losses of features: of all similarities of two sets of them, without a matrix of these in memory."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import SimilarityCall
from lossforge.losses import checks
from lossforge.losses.definitions.siglip import NOWHERE
from lossforge.losses.templates.declare import Module, public
from lossforge.losses.templates.options import check_options, with_options
from lossforge.losses.templates.record import Deferred, first, prepared
from lossforge.losses.templates.similarity import OTHERS, OWN, SIMILARITY
from lossforge.losses.types import Empty, Gradient, Reduction

Number = float | Tensor


class SimilarityOptions(TypedDict, total=False):
    empty: Empty
    gradient: Gradient | None
    normalizer: float | Tensor | None


def _features(normalize: bool, **given: Tensor) -> list[Tensor]:
    """Return features that are checked, in the dtype that a product of them would be computed in."""
    found: list[Tensor] = []
    for name, t in given.items():
        checks.whole(name, t)
        if t.ndim != 2:
            raise ValueError(f"{name} must have shape (N, D), one row of features a sample, got {tuple(t.shape)}")
        if found:
            of, like = next(iter(given.items()))
            checks.beside(name, t, like, of)
            if t.shape[1] != like.shape[1]:
                raise ValueError(f"{name} must have the {like.shape[1]} features of {of}, got shape {tuple(t.shape)}")
        if checks.flag("normalize", normalize):
            t = F.normalize(t, dim=1)
        kind = t.device.type
        if torch.is_autocast_enabled(kind) and t.dtype != torch.float64:
            t = t.to(torch.get_autocast_dtype(kind))
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


def _prepared(call: SimilarityCall, options: SimilarityOptions, of: str, finish: Any = first) -> Deferred:
    divisor = check_options(call.a, call.reduction, options, SimilarityOptions, of)
    return prepared(with_options(call, options, divisor), options, finish)


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
    **options: Unpack[SimilarityOptions],
) -> Tensor:
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
        positive: (M, D), of which row i + offset belongs to query i; the other rows are its negatives. M > N where those of other devices
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
    symmetric = checks.flag("symmetric", symmetric)
    call = SimilarityCall("both_sides" if symmetric else "softmax", a, others[0] if negatives is None else torch.cat(others))
    call = call._replace(offset=offset, reduction=reduction)
    if not checks.flag("in_batch", in_batch):
        if negatives is None or symmetric or columns != rows:
            raise ValueError("in_batch=False needs negatives, as many positives as queries, and symmetric=False")
        call = call._replace(skip=OTHERS, pairs=columns)
    return _prepared(_softened(call, *_number("temperature", temperature, a, 0.0)), options, "query")


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
    **options: Unpack[SimilarityOptions],
) -> Tensor:
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
    if len(a) != len(b):
        raise ValueError(f"input2 must have the shape of input1, {tuple(a.shape)}, got {tuple(b.shape)}")
    z, labels = torch.cat([a, b]), torch.arange(len(a), device=a.device).repeat(2)
    call = SimilarityCall("softmax", z, z, row_labels=labels, column_labels=labels, skip=OWN, reduction=reduction)
    return _prepared(_softened(call, *_number("temperature", temperature, a, 0.0)), options, "input1")


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
    **options: Unpack[SimilarityOptions],
) -> Tensor:
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
    if features.ndim not in (2, 3):
        raise ValueError(f"features must have shape (N, D) or (N, V, D), got {shape}")
    (z,) = _features(normalize, features=features.flatten(0, -2))
    if labels is None:
        labels = torch.arange(shape[0], device=z.device)
    else:
        checks.integer("labels", labels)
        checks.beside("labels", labels, z, "features")
    if labels.shape != shape[:1]:
        raise ValueError(f"labels must have shape {shape[:1]}, got {tuple(labels.shape)}")
    labels = labels if len(shape) == 2 else labels.repeat_interleave(shape[1])
    call = SimilarityCall("softmax", z, z, row_labels=labels, column_labels=labels, skip=OWN, reduction=reduction)
    base = None if base_temperature is None else checks.number("base_temperature", base_temperature, 0.0, exclusive=True)

    def finish(results: Sequence[Tensor | None]) -> Tensor:
        loss = first(results)
        loss = loss.unflatten(0, shape[:2]) if loss.ndim and len(shape) == 3 else loss
        return loss if base is None else loss * (number / base if t is None else t.to(loss.dtype) / base)

    number, t = _number("temperature", temperature, z, 0.0)
    return _prepared(_softened(call, number, t), options, "features", finish)


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
    **options: Unpack[SimilarityOptions],
) -> Tensor:
    """Symmetric InfoNCE of image and text features, as open_clip.ClipLoss (Radford et al. 2021, arXiv 2103.00020).

    L = ½ (ln Σⱼ exp xᵢⱼ - xᵢₚ) + ½ (ln Σₖ exp xₖₚ - xᵢₚ), x = logit_scale · images · textsᵀ, p = i + offset: clip_loss of x, a matrix that
    is never in memory.

    On several devices, as open_clip's local_loss: gather the features of all, and take the mean of
    info_nce_loss(images, every_text, temperature=1 / logit_scale, offset=offset, normalize=False) and the same of texts and every image.

    When to use it: Take it to align images and texts, or any two kinds of data that come in pairs.

    When not: Leave it where it costs too much to gather the features of all devices; `siglip_loss_from_features` needs no sum over devices.

    Args:
        image_features: (N, D), unit vectors as a CLIP model gives them.
        text_features: (M, D), of which row i + offset belongs to image i; with M > N the others are negatives of the images alone.
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
    return _prepared(call, options, "image_features")


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
    **options: Unpack[SimilarityOptions],
) -> Tensor:
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
    offset = NOWHERE if checks.flag("negative_only", negative_only) else checks.whole_number("offset", offset)
    call = SimilarityCall("sigmoid", a, b, scale=scale, bias=bias, logit_scale=number, logit_bias=shift if bias is None else 0.0)
    return _prepared(call._replace(offset=offset, reduction=reduction), options, "image_features")

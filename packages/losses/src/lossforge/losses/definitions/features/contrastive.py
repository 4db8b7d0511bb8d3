"""Contrastive losses: of a matrix of similarities, or of the features whose similarities are then in no memory."""

from collections.abc import Sequence
from typing import Any, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.features.calls import OTHERS, OWN, SAME, ContrastiveCall, SimilarityCall
from lossforge.kernels.torch_internals import transformed
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss, public
from lossforge.losses.base.option_types import Direction, NonNegative, Positive, Reduction
from lossforge.losses.base.options import ElementwiseOptions, InplaceOptions, SharedOptions, check_options, checked_call
from lossforge.losses.base.record import CheckedCall, Finish, first
from lossforge.losses.base.state import autocast_dtype, without_autocast
from lossforge.losses.engine.calls import compute
from lossforge.losses.engine.parallel import spread
from lossforge.losses.engine.parallel.contrastive import over_processes
from lossforge.losses.templates.elementwise import ELEMENTWISE, elementwise_loss
from lossforge.losses.templates.plain_forms import accurate, reduced_call, unit_rows
from lossforge.losses.templates.rowwise import rowwise_loss
from lossforge.losses.templates.similarity import CONTRASTIVE, NOWHERE, SIMILARITY

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


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
Temperature = Positive | Tensor


def features_of(normalize: bool, **given: Tensor) -> list[Tensor]:
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
        dtype = t.dtype if t.dtype == torch.float64 else autocast_dtype(t.device.type) or t.dtype
        t = (unit_rows(t) if normalize else t).to(dtype)
        if found and t.dtype != found[0].dtype:
            raise TypeError(f"{name} must have the dtype of {of}, {found[0].dtype}, got {t.dtype}")
        found.append(t)
    return found


def number_of(name: str, value: Number, a: Tensor, low: float | None = None) -> tuple[float, Tensor | None]:
    """Return a number, above `low` where that is given, and what it is multiplied with on the device."""
    if not checks.is_parameter(value, a):
        return (checks.number(name, value) if low is None else checks.number(name, value, low, exclusive=True)), None
    checks.floating_beside(name, value, a)
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}")
    return 1.0, value.reshape(())


def softened(call: SimilarityCall, number: float, t: Tensor | None) -> SimilarityCall:
    """Return a call with similarities over a temperature, as number_of returns it."""
    return call._replace(logit_scale=1.0 / number, scale=None if t is None else 1.0 / t)


def checked_features(call: SimilarityCall, options: SharedOptions, of: str) -> CheckedCall[SimilarityCall]:
    return checked_call(call, options, check_options(call.a, call.reduction, options, SharedOptions, of))


def _of_group(checked: CheckedCall[SimilarityCall], group: Any, of: str, distinct: bool = False) -> Any:
    """Return a checked call; with group its loss. distinct: whether equal labels of two processes mean two things."""
    return checked if group is None else over_processes(group, checked, of, distinct)


def whole_offset(offset: int, rows: int, columns: int, of: str) -> int:
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
@spread.over_processes
def info_nce_loss(
    query: Tensor,  # (N, D)
    positive: Tensor,  # (M, D), M ≥ N
    negatives: Tensor | None = None,  # (K, D), (N, K, D)
    temperature: Temperature = 0.1,
    reduction: Reduction = "mean",
    *,
    in_batch: bool = True,
    symmetric: bool = False,
    offset: int = 0,
    normalize: bool = True,
    labels: Tensor | None = None,  # (M,)
    directions: tuple[Direction, ...] = ("query_to_doc",),
    decoupled: bool = False,
    hardness: NonNegative = 0.0,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """InfoNCE of features, as info_nce.info_nce and sentence-transformers' MultipleNegativesRankingLoss (arXiv 1807.03748).

    L = ln Σⱼ exp xᵢⱼ - xᵢₚ, xᵢⱼ = qᵢ · kⱼ / T, the sum over the positives of the batch and over the negatives, which all queries share.

    - MultipleNegativesRankingLoss is temperature=1/20, with the hard negatives of all anchors, (N, K, D), as negatives.flatten(0, 1).
    - A queue, as MoCo's (arXiv 1911.05722), is negatives with in_batch=False: a query is then compared with its own positive and the queue.
    - GTE (arXiv 2308.03281) takes all four directions. Each adds its similarities to the one sum of a query.
    - DCL (arXiv 2110.06848) is decoupled=True.
    - On several devices give the group. Or gather the positives of all, and give the row of this device's first positive as offset.

    No matrix of similarities is in memory, neither in forward nor in backward.

    When to use it: Take it to learn features from pairs: retrieval, sentence embeddings, self-supervised images.

    When not: Leave it where several positives share a label; `supervised_contrastive_loss` takes them as positives.

    Args:
        query: (N, D), the features of N queries.
        positive: (M, D). Row i + offset belongs to query i; the other rows are its negatives. M > N where those of other devices
            are among them.
        negatives: (K, D), further negatives of every query; or (N, K, D), K negatives of each query alone.
        temperature: T above 0, which divides the similarities. A tensor of one element gets a gradient.
        in_batch: compare a query with the positives of the others; without, negatives must be given.
        symmetric: mean of this loss and that of the positives against the queries, as CLIP's; negatives are those of queries alone.
        offset: the row of positive that belongs to the first query.
        labels: integers, one for each positive. A positive whose label is that of a query's own is not its negative, as with equal texts.
        directions: what the sum is over, as sentence-transformers names it: "query_to_doc", which must be among them; "query_to_query",
            qᵢ · qⱼ of the other queries; "doc_to_query", pᵢ · qⱼ of all queries; "doc_to_doc", pᵢ · kⱼ of all but the own positive.
        decoupled: leave the own pair out of the sum.
        hardness: α of at least 0, by which harder negatives weigh more. Their similarity is larger by α qᵢ · kⱼ, which has no gradient.

    Examples:
        >>> query, positive = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
        >>> info_nce_loss(query, positive, torch.randn(100, 32)).backward()
    """
    if isinstance(directions, str) or not isinstance(directions, Sequence):
        raise TypeError(f"directions must be a tuple of names, got {type(directions).__name__}")
    several = negatives.shape[:2] if isinstance(negatives, Tensor) and negatives.ndim == 3 else None
    hardness = checks.number("hardness", hardness, 0.0)
    others_given = {"directions": tuple(directions) != DIRECTIONS[:1], "decoupled": decoupled, "hardness": checks.nonzero(hardness)}
    group = spread.group_of(
        options, {"offset": checks.whole_number("offset", offset) != 0}, others_given | {"negatives (N, K, D)": several is not None}
    )
    given = {"query": query, "positive": positive}
    if negatives is not None:
        given["negatives"] = negatives if several is None else negatives.flatten(0, 1)
    a, b, *others = features_of(normalize, **given)
    rows, columns = len(a), len(b)
    if group is not None:
        checks.fits("positive", b, rows == columns, "have as many rows as query where group is given, {}", rows)
    offset = whole_offset(offset, rows, columns, "positive")
    temperatures = number_of("temperature", temperature, a, 0.0)
    call = SimilarityCall("both_sides" if symmetric else "softmax", a, torch.cat([b, *others]) if others and several is None else b)
    call = call._replace(offset=offset, reduction=reduction, decoupled=decoupled, hardness=hardness)
    if checks.nonzero(hardness) and (temperatures[1] is not None or symmetric or several):
        raise ValueError("hardness needs a temperature that is a number, symmetric=False, and no negatives (N, K, D)")
    if not in_batch:
        if negatives is None or symmetric or columns != rows or labels is not None or (several and decoupled):
            raise ValueError(
                "in_batch=False needs negatives, as many positives as queries, symmetric=False and no labels; with negatives (N, K, D) "
                "decoupled=False too"
            )
        call = call._replace(skip=OTHERS, pairs=columns)
    if labels is not None:
        call = _without_equals(call, labels, columns)
    if tuple(directions) != DIRECTIONS[:1]:
        if not in_batch or symmetric or checks.nonzero(hardness) or columns != rows or labels is not None:
            raise ValueError(
                "directions beside query_to_doc need as many positives as queries, in_batch=True, symmetric=False, hardness=0 and no labels"
            )
        call = _in_directions(call, a, b, directions)
    if several is None:
        return _of_group(checked_features(softened(call, *temperatures), options, "query"), group, "query")
    if symmetric or several[0] != rows:
        raise ValueError(f"negatives (N, K, D) need N = {rows} and symmetric=False, got {tuple(several)} with symmetric={symmetric}")
    number, t = temperatures
    pair, of_own = (
        _each_product(a, b[offset : offset + rows].unsqueeze(1)),
        _each_product(a, others[0].reshape(*several, others[0].shape[-1])),
    )
    over = 1.0 / number if t is None else 1.0 / t
    if not in_batch:
        index = torch.zeros(rows, dtype=torch.int64, device=a.device)
        logits = torch.cat([pair, of_own], 1) * over
        return compute(rowwise_loss(RowwiseCall("cross_entropy", logits, index, reduction=reduction), {**options}))  # type: ignore[typeddict-unknown-key]  # group is taken out
    return _beside_own_negatives(checked_features(softened(call, number, t), options, "query"), (of_own - pair) * over)


def _each_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products (N, K) of each row of a (N, D) with its own K rows of b (N, K, D), not rounded to half precision."""
    with without_autocast(a):
        return torch.einsum("nd,nkd->nk", accurate(a), accurate(b))


def _beside_own_negatives(checked: CheckedCall[SimilarityCall], relative: Tensor) -> Tensor:
    """Return the loss of a call whose sum of each row has further similarities, (N, K), relative to that of its pair.

    It is joined here and not by `finish`, which a kept plan of the call would repeat with these similarities.
    """
    values = compute(CheckedCall(checked.call._replace(reduction="none", normalizer=None, loss_scale=1.0), {}, first))
    return reduced_call(checked.call, torch.logaddexp(values, relative.logsumexp(1).to(values.dtype)))


def _without_equals(call: SimilarityCall, labels: Tensor, columns: int) -> SimilarityCall:
    """Return a call whose rows leave out the columns of their own column's label."""
    checks.integer("labels", labels)
    checks.beside("labels", labels, call.a, "query")
    checks.fits("labels", labels, labels.shape == (columns,), "have shape ({},), one for each positive", columns)
    labels = labels.to(torch.int64)
    further = labels.new_full((len(call.b) - columns,), torch.iinfo(torch.int64).min)
    row_labels = labels[call.offset : call.offset + len(call.a)]
    return call._replace(row_labels=row_labels, column_labels=torch.cat([labels, further]), skip=SAME)


def _in_directions(call: SimilarityCall, query: Tensor, positive: Tensor, directions: tuple[Direction, ...]) -> SimilarityCall:
    """Return a call whose columns are of several directions: rows are (query, positive), columns (document, 0) and (0, document)."""
    for each in directions:
        checks.one_of("directions", each, DIRECTIONS)
    if DIRECTIONS[0] not in directions:
        raise ValueError(f"directions must have {DIRECTIONS[0]}, got {', '.join(directions)}")
    own = torch.arange(len(query), device=query.device)
    further = own.new_full((len(call.b) - len(query),), -1)
    kinds = {  # columns, whether they are compared with the positive, and the label of the row that leaves each out
        "query_to_query": (query, False, own),
        "doc_to_query": (query, True, torch.full_like(own, -1)),
        "doc_to_doc": (call.b, True, torch.cat([own, further])),
    }
    found = [
        (call.b, False, torch.full((len(call.b),), -1, device=own.device)),
        *[kinds[each] for each in DIRECTIONS[1:] if each in directions],
    ]
    a, b, labels = beside_positives(query, positive, found)
    return call._replace(a=a, b=b, row_labels=own, column_labels=labels, skip=SAME)


def beside_positives(query: Tensor, positive: Tensor, found: Sequence[tuple[Tensor, bool, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries beside their positives, and columns beside zeros, so that one product compares them with either; and their labels.

    found: columns, whether the positives are compared with them, and their labels.
    """
    depth = query.shape[1]
    columns = [F.pad(t, (depth, 0) if of_positive else (0, depth)) for t, of_positive, _ in found]
    return torch.cat([query, positive], 1), torch.cat(columns), torch.cat([labels for _, _, labels in found])


@public(
    SIMILARITY.docs,
    Module(
        "NTXentLoss",
        "Normalised temperature-scaled cross entropy of two views",
        " `forward` takes gathered1, gathered2 and offset as well.",
        forward="input1: Tensor, input2: Tensor",
    ),
)
@spread.over_processes
def nt_xent_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    temperature: Temperature = 0.5,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    decoupled: bool = False,
    gathered1: Tensor | None = None,  # (M, D)
    gathered2: Tensor | None = None,  # (M, D)
    offset: int = 0,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Normalised temperature-scaled cross entropy of two views, the loss of SimCLR (Chen et al. 2020, arXiv 2002.05709).

    L = ln Σⱼ exp xᵢⱼ - xᵢₚ, j ≠ i, x = z · z / T over all 2 N views z: each view is compared with its sample's other view and with
    the 2 N - 2 views of other samples. With `decoupled`, DCL (Yeh et al. 2022, arXiv 2110.06848), the sum leaves the other view out, so
    that small batches learn as well.

    On several devices give the group. Or, as lightly's NTXentLoss(gather_distributed=True): gather the views of all, and give them, and the
    row of this device's first sample among them as offset.

    When to use it: Take it for self-supervised features of images in two augmentations.

    When not: Leave it where batches are small; `info_nce_loss` with a queue has more negatives.

    Args:
        input1: (N, D), the features of one view.
        input2: (N, D), the features of the other view, in the same order.
        temperature: T above 0, which divides the similarities. A tensor of one element gets a gradient.
        reduction: "mean" over the 2 N views, "sum", or "none", (2 N,).
        decoupled: leave the other view of a sample out of the sum.
        gathered1: the first views of M samples, input1 among them; a view is compared with these and gathered2 in place of the inputs.
        gathered2: the second views of these samples.
        offset: the row of gathered1 that is the first of input1.

    Examples:
        >>> nt_xent_loss(torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)).backward()
    """
    a, b = features_of(normalize, input1=input1, input2=input2)
    checks.fits("input2", b, len(a) == len(b), "have the shape of input1, {}", a.shape)
    further = {"gathered1": gathered1 is not None, "gathered2": gathered2 is not None, "offset": checks.whole_number("offset", offset) != 0}
    group = spread.group_of(options, further, {"decoupled": decoupled})
    finish: Finish[Tensor] = first
    if gathered1 is None or gathered2 is None:
        if gathered1 is not None or gathered2 is not None or offset:
            raise ValueError("gathered1, gathered2 and offset go together, got offset or one of the views alone")
        z, labels = torch.cat([a, b]), torch.arange(len(a), device=a.device).repeat(2)
        call = SimilarityCall("softmax", z, z, row_labels=labels, column_labels=labels, skip=OWN, reduction=reduction)
    else:
        c, d = features_of(normalize, input1=input1, gathered1=gathered1, gathered2=gathered2)[1:]
        checks.fits("gathered2", d, len(c) == len(d), "have the shape of gathered1, {}", c.shape)
        call, finish = _of_views(torch.stack([a, b], 1), torch.stack([c, d], 1), whole_offset(offset, len(a), len(c), "gathered1"))
        call = call._replace(reduction=reduction)
    call = softened(call._replace(decoupled=decoupled), *number_of("temperature", temperature, a, 0.0))
    return _of_group(checked_features(call, options, "input1").returning(finish), group, "input1", distinct=True)


def _of_views(views: Tensor, others: Tensor, offset: int) -> tuple[SimilarityCall, Finish[Tensor]]:
    """Return a call of the views of samples, (N, V, D), among those of more, (M, V, D), and what orders its values by view."""
    rows, several, _ = views.shape
    column_labels = torch.arange(len(others), device=views.device).repeat_interleave(several)
    first_row = offset * several
    row_labels = column_labels[first_row : first_row + rows * several]
    call = SimilarityCall("softmax", views.flatten(0, 1), others.flatten(0, 1), row_labels=row_labels, column_labels=column_labels)

    def finish(results: Sequence[Tensor | None]) -> Tensor:
        loss = first(results)
        return loss.view(rows, several).t().flatten() if loss.ndim else loss

    return call._replace(skip=OWN, offset=first_row), finish


@public(
    SIMILARITY.docs,
    Module(
        "SupConLoss",
        "Supervised contrastive loss",
        " `forward` takes gathered, gathered_labels and offset as well.",
        forward="features: Tensor, labels: Tensor | None = None",
    ),
)
@spread.over_processes
def supervised_contrastive_loss(
    features: Tensor,  # (N, D), (N, V, D)
    labels: Tensor | None = None,  # (N,)
    temperature: Temperature = 0.07,
    base_temperature: float | None = 0.07,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    gathered: Tensor | None = None,  # (M, D), (M, V, D)
    gathered_labels: Tensor | None = None,  # (M,)
    offset: int = 0,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Supervised contrastive loss, as SupContrast's SupConLoss (Khosla et al. 2020, arXiv 2004.11362).

    L = T / T₀ (ln Σⱼ exp xᵢⱼ - Σₚ xᵢₚ / |P|), j ≠ i, x = z · z / T, P the others of the same label, T₀ = base_temperature.

    The sum over the positives is outside of the logarithm. A row without a positive adds 0; the mean divides by all rows.

    When to use it: Take it to learn features from labels, before a classifier is trained on them, with several samples of a class a batch.

    When not: Leave it where a batch has few samples of each class; then most rows have no positive.

    Args:
        features: (N, D), or V views of each sample, (N, V, D).
        labels: integers (N,); None: only the views of a sample belong together.
        temperature: T above 0, which divides the similarities. A tensor of one element gets a gradient.
        base_temperature: T₀; None for T, which leaves the factor out.
        gathered: the features of M samples, those of this device among them; a row is compared with these in place of `features`.
        gathered_labels: their labels, where labels are given.
        offset: the sample of `gathered` that is the first of features.
        reduction: "mean" over all rows, "sum", or "none", (N,) or (N, V).

    Examples:
        >>> supervised_contrastive_loss(torch.randn(8, 32, requires_grad=True), torch.arange(8) % 3).backward()
    """
    checks.whole("features", features)
    shape = tuple(features.shape)
    checks.fits("features", features, features.ndim in (2, 3), "have shape (N, D) or (N, V, D)")
    group = spread.group_of(
        options,
        {
            "gathered": gathered is not None,
            "gathered_labels": gathered_labels is not None,
            "offset": checks.whole_number("offset", offset) != 0,
        },
    )
    call = of_labels(features, labels, gathered, gathered_labels, offset, normalize)._replace(reduction=reduction)
    base = None if base_temperature is None else checks.number("base_temperature", base_temperature, 0.0, exclusive=True)

    def finish(results: Sequence[Tensor | None]) -> Tensor:
        loss = first(results)
        loss = loss.reshape(shape[:2]) if loss.ndim and len(shape) == 3 else loss
        factor = number if t is None else t
        factor = factor.to(loss.dtype) if isinstance(factor, Tensor) else factor  # torch.compile keeps a number in float64
        return loss if base is None else loss * (factor / base)

    number, t = number_of("temperature", temperature, call.a, 0.0)
    checked = checked_features(softened(call, number, t), options, "features").returning(finish)
    return _of_group(checked, group, "features", distinct=labels is None)


def of_labels(
    features: Tensor, labels: Tensor | None, gathered: Tensor | None, gathered_labels: Tensor | None, offset: int, normalize: bool
) -> SimilarityCall:
    """Return a call of features (N, D) or (N, V, D) against all others, or gathered ones: those of the same label belong together."""
    (z,) = features_of(normalize, features=features.flatten(0, -2))
    row_labels, offset = _labels_of("labels", labels, features), checks.whole_number("offset", offset)
    if gathered is None:
        if gathered_labels is not None or offset:
            raise ValueError(f"{'offset' if offset else 'gathered_labels'} needs gathered, got none")
        return SimilarityCall("softmax", z, z, row_labels=row_labels, column_labels=row_labels, skip=OWN)
    checks.tensor("gathered", gathered)
    shape = features.shape
    fits = gathered.ndim == len(shape) and gathered.shape[1:-1] == shape[1:-1]
    checks.fits("gathered", gathered, fits, "have shape (M, D), or (M, V, D) with the views of features")
    if (labels is None) != (gathered_labels is None):
        raise ValueError("labels and gathered_labels go together, got one of them alone")
    others = features_of(normalize, features=features.flatten(0, -2), gathered=gathered.flatten(0, -2))[1]
    offset = whole_offset(offset, shape[0], len(gathered), "gathered")
    column_labels = _labels_of("gathered_labels", gathered_labels, gathered)
    first_row = offset * (shape[1] if len(shape) == 3 else 1)
    if labels is None:
        row_labels = column_labels[first_row : first_row + len(z)]
    return SimilarityCall("softmax", z, others, row_labels=row_labels, column_labels=column_labels, skip=OWN, offset=first_row)


def _labels_of(name: str, labels: Tensor | None, features: Tensor) -> Tensor:
    """Return the label of each row of features (N, D) or (N, V, D): without labels, which sample it is of."""
    if labels is None:
        labels = torch.arange(len(features), device=features.device)
    else:
        checks.integer(name, labels)
        checks.beside(name, labels, features, "features")
    checks.fits(name, labels, labels.shape == features.shape[:1], "have shape {}", tuple(features.shape[:1]))
    return labels if features.ndim == 2 else labels.repeat_interleave(features.shape[1])


@public(
    SIMILARITY.docs,
    Module(
        "ClipFeaturesLoss",
        "Symmetric InfoNCE of image and text features, as open_clip.ClipLoss",
        forward="image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor = 1.0",
    ),
)
@spread.over_processes
def clip_loss_from_features(
    image_features: Tensor,  # (N, D)
    text_features: Tensor,  # (M, D), M ≥ N
    logit_scale: Number = 1.0,
    reduction: Reduction = "mean",
    *,
    offset: int = 0,
    normalize: bool = False,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Symmetric InfoNCE of image and text features, as open_clip.ClipLoss (Radford et al. 2021, arXiv 2103.00020).

    L = ½ (ln Σⱼ exp xᵢⱼ - xᵢₚ) + ½ (ln Σₖ exp xₖₚ - xᵢₚ), x = logit_scale · images · textsᵀ, p = i + offset: clip_loss of x, a matrix that
    is never in memory.

    On several devices give the group. Or, as open_clip's local_loss: gather the features of all, and take the mean of
    info_nce_loss(images, every_text, temperature=1 / logit_scale, offset=offset, normalize=False) and the same of texts and every image.

    When to use it: Take it to align images and texts, or any two kinds of data that come in pairs.

    When not: Leave it where batches are small; `siglip_loss_from_features` depends less on the number of pairs.

    Args:
        image_features: (N, D), unit vectors as a CLIP model gives them.
        text_features: (M, D). Row i + offset belongs to image i; with M > N the others are negatives of the images alone.
        logit_scale: a number or a tensor of one element, which gets a gradient.
        offset: the row of text_features that belongs to the first image.

    Examples:
        >>> images, texts = (torch.nn.functional.normalize(torch.randn(8, 32)) for _ in range(2))
        >>> clip_loss_from_features(images.requires_grad_(), texts, logit_scale=100.0).backward()
    """
    a, b = features_of(normalize, image_features=image_features, text_features=text_features)
    group = spread.group_of(options, {"offset": checks.whole_number("offset", offset) != 0})
    if group is not None:
        checks.fits("text_features", b, len(a) == len(b), "have as many rows as image_features where group is given, {}", len(a))
    offset = whole_offset(offset, len(a), len(b), "text_features")
    number, scale = number_of("logit_scale", logit_scale, a)
    call = SimilarityCall("both_sides", a, b, scale=scale, logit_scale=number, offset=offset, reduction=reduction)
    return _of_group(checked_features(call, options, "image_features"), group, "image_features")


@public(
    SIMILARITY.docs,
    Module(
        "SigLIPFeaturesLoss",
        "Pairwise sigmoid loss of image and text features, as open_clip.SigLipLoss",
        " `forward` takes offset and negative_only as well.",
        forward="image_features: Tensor, text_features: Tensor, logit_scale: float | Tensor = 1.0, logit_bias: float | Tensor = 0.0",
    ),
)
@spread.over_processes
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
    **options: Unpack[spread.SpreadOptions],
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
    a, b = features_of(normalize, image_features=image_features, text_features=text_features)
    group = spread.group_of(options, {"offset": checks.whole_number("offset", offset) != 0, "negative_only": negative_only})
    (number, scale), (shift, bias) = number_of("logit_scale", logit_scale, a), number_of("logit_bias", logit_bias, a)
    offset = NOWHERE if negative_only else checks.whole_number("offset", offset)
    call = SimilarityCall("sigmoid", a, b, scale=scale, bias=bias, logit_scale=number, logit_bias=shift if bias is None else 0.0)
    return _of_group(
        checked_features(call._replace(offset=offset, reduction=reduction), options, "image_features"), group, "image_features"
    )

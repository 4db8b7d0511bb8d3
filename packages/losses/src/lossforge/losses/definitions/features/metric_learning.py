"""Losses of features by all pairs of a batch, beside those of contrastive.py."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lossforge.kernels.features.calls import SAME, SimilarityCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, public
from lossforge.losses.base.option_types import MarginStrategy, NonNegative, Positive, Real, Reduction
from lossforge.losses.base.options import SharedOptions, check_options, checked_call
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.definitions.features.contrastive import (
    Temperature,
    beside_positives,
    checked_features,
    features_of,
    number_of,
    of_labels,
    softened,
    whole_offset,
)
from lossforge.losses.engine.parallel import spread
from lossforge.losses.engine.parallel.batch import batch_of, loss_of_rows
from lossforge.losses.templates.plain_forms import accurate
from lossforge.losses.templates.similarity import SIMILARITY

ROUNDING = 1e-6
"""By how much a guide's similarity of float32 must exceed another before it is larger."""


@public(
    SIMILARITY.docs,
    Module(
        "GISTEmbedLoss",
        "InfoNCE without the false negatives that a guide finds",
        " `forward` takes offset as well.",
        forward="query: Tensor, positive: Tensor, query_guide: Tensor, positive_guide: Tensor, negatives: Tensor | None = None, "
        "negatives_guide: Tensor | None = None",
        kept=("margin",),
    ),
)
def gist_embed_loss(
    query: Tensor,  # (N, D)
    positive: Tensor,  # (M, D), M ≥ N
    query_guide: Tensor,  # (N, G)
    positive_guide: Tensor,  # (M, G)
    negatives: Tensor | None = None,  # (K, D)
    negatives_guide: Tensor | None = None,  # (K, G)
    temperature: Temperature = 0.01,
    reduction: Reduction = "mean",
    *,
    margin: Real = 0.0,
    margin_strategy: MarginStrategy = "absolute",
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    offset: int = 0,
    normalize: bool = True,
    **options: Unpack[SharedOptions],
) -> CheckedCall[SimilarityCall]:
    """InfoNCE without the false negatives that a guide finds, as sentence-transformers' GISTEmbedLoss (Solatorio 2024, arXiv 2402.16829).

    L = ln Σⱼ exp xᵢⱼ - xᵢₚ, xᵢⱼ = qᵢ · kⱼ / T, the sum over the pair, the other positives, the other queries qⱼ, the products of the own
    with the other positives, and the negatives: over those whose similarity by the guide is at most gᵢ - margin, where gᵢ is the guide's
    similarity of the pair.

    Neither the similarities nor those of the guide are in memory. A guide's similarity must be larger by 1e-6 to be left out, so that equal
    texts are not left out by chance; a query and a positive are never their own negatives.

    When to use it: Take it for pairs from data with many near duplicates, with a good embedding model as guide.

    When not: Leave it where no guide is better than the model; `info_nce_loss(labels=)` leaves out what is known to be equal.

    Args:
        query: (N, D), the features of N queries.
        positive: (M, D). Row i + offset belongs to query i; the other rows are its negatives.
        query_guide: (N, G), the guide's features of the queries. No guide has a gradient. They are rounded to the dtype of query.
        positive_guide: (M, G), those of the positives.
        negatives: (K, D), further negatives of every query.
        negatives_guide: (K, G), the guide's features of the negatives.
        temperature: T above 0, which divides the similarities. A tensor of one element gets a gradient.
        margin: how far below the similarity of the pair a negative must be; a fraction of it with margin_strategy="relative".
        margin_strategy: "absolute": gᵢ - margin, or "relative": gᵢ - margin |gᵢ|.
        contrast_anchors: compare queries with each other.
        contrast_positives: compare positives with each other.
        offset: the row of positive that belongs to the first query.
        normalize: divide each row, of the guide's too, by its length first.

    Examples:
        >>> query, positive, guide = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32), torch.randn(2, 8, 16)
        >>> gist_embed_loss(query, positive, *guide).backward()
    """
    if (negatives is None) != (negatives_guide is None):
        raise ValueError("negatives and negatives_guide go together, got one of them alone")
    further = {} if negatives is None else {"negatives": negatives}
    a, b, *others = features_of(normalize, query=query, positive=positive, **further)
    guides = {"query_guide": query_guide, "positive_guide": positive_guide}
    guides |= {} if negatives_guide is None else {"negatives_guide": negatives_guide}
    for (name, t), like in zip(guides.items(), (a, b, *others), strict=True):
        checks.floating_beside(name, t, query, "query")
        checks.without_gradient(name, t)
        checks.fits(name, t, t.ndim == 2 and len(t) == len(like), "have one row for each of {} rows of features", len(like))
    of_a, of_b, *of_others = [t.to(a.dtype) for t in features_of(normalize, **guides)]
    checks.one_of("margin_strategy", margin_strategy, ("absolute", "relative"))
    offset = whole_offset(offset, len(a), len(b), "positive")
    own = slice(offset, offset + len(a))
    pair = (accurate(of_a) * accurate(of_b[own])).sum(1)
    below = checks.number("margin", margin) * (pair.abs() if margin_strategy == "relative" else 1.0)
    call = SimilarityCall("softmax", a, torch.cat([b, *others]), threshold=pair - below + ROUNDING, offset=offset, reduction=reduction)
    call = call._replace(row_guide=of_a, column_guide=torch.cat([of_b, *of_others]))
    if contrast_anchors or contrast_positives:
        call = _contrasted(call, (b, of_b), contrast_anchors, contrast_positives)
    return checked_features(softened(call, *number_of("temperature", temperature, a, 0.0)), options, "query")


def _contrasted(call: SimilarityCall, positives: tuple[Tensor, Tensor], anchors: bool, among_positives: bool) -> SimilarityCall:
    """Return a call whose rows are compared with the other queries and their positives with the other positives, by the guide too."""
    assert call.row_guide is not None
    assert call.column_guide is not None
    rows = len(call.a)
    own = torch.arange(rows, device=call.a.device)
    sides = []
    for query, columns, positive in zip((call.a, call.row_guide), (call.b, call.column_guide), positives, strict=True):
        found = [(columns, False, own.new_full((len(columns),), -1))]
        if anchors:
            found.append((query, False, own))
        if among_positives:
            found.append((positive, True, torch.arange(len(positive), device=own.device) - call.offset))
        sides.append(beside_positives(query, positive[call.offset : call.offset + rows], found))
    (a, b, labels), (of_a, of_b, _) = sides
    return call._replace(a=a, b=b, row_guide=of_a, column_guide=of_b, row_labels=own, column_labels=labels, skip=SAME)


LABELLED = "`forward` takes gathered, gathered_labels and offset as well."


@public(
    SIMILARITY.docs,
    Module(
        "MultiSimilarityLoss",
        "Multi-similarity loss of labelled features",
        f" {LABELLED}",
        forward="features: Tensor, labels: Tensor",
    ),
)
@spread.over_processes
def multi_similarity_loss(
    features: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    alpha: Positive = 2.0,
    beta: Positive = 50.0,
    base: Real = 0.5,
    reduction: Reduction = "mean",
    *,
    epsilon: NonNegative | None = None,
    normalize: bool = True,
    gathered: Tensor | None = None,  # (M, D)
    gathered_labels: Tensor | None = None,  # (M,)
    offset: int = 0,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Multi-similarity loss, as pytorch-metric-learning's MultiSimilarityLoss (Wang et al. 2019, arXiv 1904.06627).

    L = ln(1 + Σₚ exp(-α (xᵢₚ - λ))) / α + ln(1 + Σₙ exp(β (xᵢₙ - λ))) / β, x = z · z, p the others of the same label, n those of other
    labels, λ = base. With `epsilon`, the sums are over the pairs that the paper mines, as MultiSimilarityMiner(epsilon): positives with
    xᵢₚ - ε < maxₙ xᵢₙ and negatives with xᵢₙ + ε > minₚ xᵢₚ.

    The matrix of similarities is not in memory, nor is a list of pairs. Mining takes one more pass over the similarities.

    When to use it: Take it to learn features for retrieval from labels, with several samples of a class in a batch.

    When not: Leave it where a batch has about one sample of each class; `proxy_anchor_loss` compares with a learned proxy of each class.

    Args:
        features: (N, D).
        labels: integers (N,).
        alpha: α, how much the hardest positives outweigh others.
        beta: β, how much the hardest negatives outweigh others.
        base: λ, the similarity that divides positives from negatives.
        epsilon: ε of mining, 0.1 in the paper; None: all pairs count, as in pytorch-metric-learning without a miner.
        gathered: the features of M samples, those of this device among them; a row is compared with these in place of `features`.
        gathered_labels: their labels.
        offset: the row of `gathered` that is the first of features.
        group: processes over which the rows are spread: each gives its own rows, of any number, and all compare them with the rows of all,
            which are gathered. Else as info_nce_loss's.

    Examples:
        >>> multi_similarity_loss(torch.randn(8, 32, requires_grad=True), torch.arange(8) % 3, epsilon=0.1).backward()
    """
    group = _group_of(options, gathered, gathered_labels, offset)
    call = _of_features(features, labels, gathered, gathered_labels, offset, normalize)
    a, b = checks.number("alpha", alpha, 0.0, exclusive=True), checks.number("beta", beta, 0.0, exclusive=True)
    base = checks.number("base", base)
    last = 0.0 if epsilon is None else checks.number("epsilon", epsilon, 0.0)
    call = call._replace(loss="apart", hyper=[a, b, base, base, 1.0 / a, 1.0 / b, last], mined=epsilon is not None, reduction=reduction)
    return _of_group(checked_features(call, options, "features"), group)


def _of_features(
    features: Tensor, labels: Tensor, gathered: Tensor | None, gathered_labels: Tensor | None, offset: int, normalize: bool
) -> SimilarityCall:
    """Return a call of labelled features (N, D) without views."""
    checks.whole("features", features)
    checks.fits("features", features, features.ndim == 2, "have shape (N, D)")
    checks.integer("labels", labels)
    return of_labels(features, labels, gathered, gathered_labels, offset, normalize)


def _group_of(options: spread.SpreadOptions, gathered: Tensor | None, gathered_labels: Tensor | None, offset: int) -> Any:
    given = {"gathered": gathered is not None, "gathered_labels": gathered_labels is not None}
    return spread.group_of(options, given | {"offset": checks.whole_number("offset", offset) != 0})


def _of_group(checked: CheckedCall[SimilarityCall], group: Any) -> Any:
    """Return a checked call of labelled features; with group its loss, of this process's rows against the rows of all."""
    call = checked.call
    if group is None or call.row_labels is None:
        return checked
    batch = batch_of(group, "features", call.a)
    own = call.row_labels.long()
    call = call._replace(b=batch.gathered(call.b), row_labels=own, column_labels=batch.gathered(own), offset=batch.first)
    return loss_of_rows(batch, checked._replace(call=call), batch.total)


@public(
    SIMILARITY.docs,
    Module(
        "CircleLoss",
        "Circle loss of labelled features",
        f" {LABELLED}",
        forward="features: Tensor, labels: Tensor",
        kept=("margin",),
    ),
)
@spread.over_processes
def circle_loss(
    features: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    margin: Real = 0.4,
    gamma: Positive = 80.0,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    gathered: Tensor | None = None,  # (M, D)
    gathered_labels: Tensor | None = None,  # (M,)
    offset: int = 0,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Circle loss of pairs, as pytorch-metric-learning's CircleLoss (Sun et al. 2020, arXiv 2002.10857).

    L = ln(1 + Σₚ exp(γ wₚ (1 - m - xᵢₚ)) Σₙ exp(γ wₙ (xᵢₙ - m))), x = z · z, wₚ = max(0, 1 + m - xᵢₚ), wₙ = max(0, xᵢₙ + m), which have
    no gradient; p the others of the same label, n those of other labels, m = margin. A row without a positive, or without a negative,
    adds 0.

    The mean divides by all rows, as Keras' does. That of pytorch-metric-learning divides by the rows whose loss is above 0: give their
    number as normalizer.

    When to use it: Take it to learn features for retrieval or identification where each pair must be pulled by how far it is off.

    When not: Leave it where features are not normalised: the margin speaks of cosines. With one sample of a class in a batch no row has
    a positive; `proxy_anchor_loss` needs none.

    Args:
        features: (N, D).
        labels: integers (N,).
        margin: m, by which positives are pulled above 1 - m, and negatives below m; 0.25 for faces.
        gamma: γ above 0, the scale; 256 for faces.
        gathered: the features of M samples, those of this device among them; a row is compared with these in place of `features`.
        gathered_labels: their labels.
        offset: the row of `gathered` that is the first of features.
        group: processes over which the rows are spread: each gives its own rows, of any number, and all compare them with the rows of all,
            which are gathered. Else as info_nce_loss's.

    Examples:
        >>> circle_loss(torch.randn(8, 32, requires_grad=True), torch.arange(8) % 3).backward()
    """
    group = _group_of(options, gathered, gathered_labels, offset)
    call = _of_features(features, labels, gathered, gathered_labels, offset, normalize)
    m, scale = checks.number("margin", margin), checks.number("gamma", gamma, 0.0, exclusive=True)
    call = call._replace(loss="circle", hyper=[scale, scale, 1.0 - m, m, 1.0, 1.0, 2.0 * m], reduction=reduction)
    return _of_group(checked_features(call, options, "features"), group)


@public(
    SIMILARITY.docs,
    Module(
        "ProxyAnchorLoss",
        "Proxy anchor loss of features and the proxies of classes",
        " The proxies are given with each call, so that the optimiser has them where the model has.",
        forward="features: Tensor, proxies: Tensor, labels: Tensor",
        kept=("margin",),
    ),
)
@spread.over_processes
def proxy_anchor_loss(
    features: Tensor,  # (N, D)
    proxies: Tensor,  # (C, D)
    labels: Tensor,  # (N,)
    margin: Real = 0.1,
    alpha: Positive = 32.0,
    reduction: Reduction = "mean",
    *,
    normalize: bool = True,
    **options: Unpack[spread.SpreadOptions],
) -> Tensor:
    """Proxy anchor loss, as pytorch-metric-learning's ProxyAnchorLoss (Kim et al. 2020, arXiv 2003.13911).

    L = 1/|P⁺| Σ_c ln(1 + Σₚ exp(-α (x_cp - δ))) + 1/C Σ_c ln(1 + Σₙ exp(α (x_cn + δ))), x = proxies · featuresᵀ, p the features of
    class c, n all others, |P⁺| the number of classes that the batch has, δ = margin.

    The matrix of similarities is in memory neither in forward nor in backward. The proxies get a gradient; give them a learning rate of
    their own, 100 times that of the model in the paper.

    When to use it: Take it to learn features for retrieval from labels, with batches of any mixture of classes: it converges fast, because
    each proxy sees all samples of the batch.

    When not: Leave it with more classes than a matrix of proxies can be learned for; `multi_similarity_loss` has no parameters.

    Args:
        features: (N, D).
        proxies: (C, D), one row a class, learned with the features.
        labels: class indices (N,), from 0 to C - 1. On CUDA any other label makes the loss nan.
        margin: δ, which positives must exceed and the negated similarity of negatives too.
        alpha: α above 0, the scale.
        reduction: "mean" as in the formula; "none", (C,), a proxy's own: its term of positives times C / |P⁺|, and its term of negatives;
            "sum" adds these up, and a normalizer divides their sum.
        group: processes over which the features are spread, which are gathered: each gives its own, of any number, and has all proxies, of
            which it computes a part. Their gradients are this part's; DDP's average is that of the loss. "none" gives the values of all
            proxies in every process. Else as info_nce_loss's.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: on CPU, a class index is out of range.

    Examples:
        >>> features, proxies = torch.randn(8, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True)
        >>> proxy_anchor_loss(features, proxies, torch.arange(8) % 5).backward()
    """
    group = spread.group_of(options, {})
    b, a = features_of(normalize, features=features, proxies=proxies)
    classes = len(a)
    divisor = check_options(b, reduction, options, SharedOptions, "features")
    labels = checks.indices("labels", labels, features, checks.Allowed(0, classes, None, None), (len(b),), (torch.int64,))
    scale, delta = checks.number("alpha", alpha, 0.0, exclusive=True), checks.number("margin", margin)
    batch = batch_of(group, "features", b, a)
    b, labels = batch.gathered(b), batch.gathered(labels)
    outside = (labels < 0) | (labels >= classes)
    seen = torch.zeros(classes + 1, dtype=torch.promote_types(b.dtype, torch.float32), device=b.device)
    present = seen.index_fill_(0, torch.where(outside, classes, labels), 1.0)[:classes].sum()
    present = torch.where(outside.any(), torch.nan, present)
    rows = torch.arange(classes, device=b.device)
    if group is not None and reduction != "none":  # each process computes a part of the proxies
        own = slice(*[classes * r // len(batch.rows) for r in (batch.rank, batch.rank + 1)])
        a, rows = a[own], rows[own]
    call = SimilarityCall("apart", a, b, row_labels=rows, column_labels=labels, reduction=reduction)
    call = call._replace(hyper=[scale, scale, delta, -delta, 1.0, 1.0, 0.0], negative_weight=present / classes)
    mean = reduction == "mean" and options.get("normalizer") is None
    call = call._replace(loss_scale=1.0 if mean else float(classes))  # over |P⁺|
    checked: Any = checked_call(call, options, present if divisor is None else present * divisor)
    return checked if group is None else loss_of_rows(batch, checked, classes)

"""Losses of vectors: of their similarities, of pairs and triplets, and of features fused with the product of their similarities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lossforge.bench.record import (
    ELEMENTS,
    Call,
    F,
    Fused,
    Others,
    Target,
    Tensor,
    enter,
    layers,
    loss,
    losses,
    mean_of_rows,
    of_module,
    summed,
    summed_row,
    torch,
    whole,
    wide,
)
from lossforge.bench.records.classes import cross_entropy_of_rows

CLIP, SIMILARITIES, VECTORS, PROJECTIONS = "clip-16384", (16384, 16384), (65536, 768), (2 * 2048, 8192)
LOGIT_SCALE, LOGIT_BIAS = 20.0, -10.0
MEMORY = {"targets": (Target("features", "peak_mib", 4096.0, said="4 GiB", use=("clip-65536",)),)}
SCALED: dict[str, Any] = {"temperature": 1 / LOGIT_SCALE, "normalize": False}


@loss("siglip", "SigLIP", summed(CLIP, SIMILARITIES, "nothing", whole=True), template=ELEMENTS)
def siglip(x: Tensor, *, reduction: str = "mean") -> Tensor:
    labels = 2 * torch.eye(len(x), x.shape[1], dtype=x.dtype, device=x.device) - 1
    return -F.logsigmoid(labels * x).sum() / (len(x) if reduction == "mean" else 1)


@loss("clip", "CLIP", summed(CLIP, SIMILARITIES, "nothing", {"reduction": "mean"}, whole=True), function="clip_loss", late=True)
def clip(x: Tensor, *, reduction: str) -> Tensor:
    """Compute as open_clip.ClipLoss does: the first columns belong to the rows, the others are negatives of all rows."""
    pairs = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(x, pairs, reduction=reduction) + F.cross_entropy(x[:, : len(x)].T, pairs, reduction=reduction)) / 2


enter("triplet_margin", "triplet margin", summed("embeddings", VECTORS, "triplets", {"margin": 1.0}, {"margin": 0.5}))
enter("cosine_embedding", "cosine embedding", summed("embeddings", VECTORS, "signed pairs", {"margin": 0.2}, {"margin": 0.1}))


@loss("koleo", "KoLeo", whole("features-8192", (8192, 1024), "near rows"), function="koleo_loss")
def koleo(x: Tensor) -> Tensor:
    """Compute as DINOv2's KoLeoLoss does."""
    x = F.normalize(wide(x), dim=1, eps=1e-8)
    nearest = (x @ x.T).fill_diagonal_(-1).argmax(1)
    return -(F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()


def halves(function: Call) -> Call:
    """Give both halves of one tensor, two views of as many samples, so that both get a gradient."""
    return lambda x, **options: function(*x.chunk(2), **options)


def off_diagonal(c: Tensor) -> Tensor:
    return c.square().sum() - c.diagonal().square().sum()


@loss("vicreg", "VICReg", whole("projections-2048", PROJECTIONS, "two halves"), function="vicreg_loss", adapt=halves)
def vicreg(x: Tensor) -> Tensor:
    """Compute as lightly's VICRegLoss does, with its defaults, of two views in one tensor."""
    a, b = wide(x).chunk(2)
    total = 25 * F.mse_loss(a, b)
    for z in (a - a.mean(0), b - b.mean(0)):
        total = total + 12.5 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off_diagonal(z.T @ z / (len(z) - 1)) / z.shape[1]
    return total


@loss("barlow_twins", "Barlow Twins", whole("projections-2048", PROJECTIONS, "two halves"), function="barlow_twins_loss", adapt=halves)
def barlow_twins(x: Tensor) -> Tensor:
    """Compute as lightly's BarlowTwinsLoss does, with its defaults, of two views in one tensor."""
    a, b = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() for z in wide(x).chunk(2))
    c = a.T @ b / len(a)
    return (1 - c.diagonal()).square().sum() + 5e-3 * off_diagonal(c)


def pairs_of(*sizes: int, inputs: str = "features") -> list[Any]:
    """Return cases of queries and keys; the matrix of 65,536 alone takes 8 GiB."""
    return [case for size in sizes for case in layers("features", f"clip-{size}", (size, 512, size), inputs)]


def batch(inputs: str) -> list[Any]:
    return layers("features", "features-8192", (8192, 512, 8192), inputs)


def views(inputs: str) -> list[Any]:
    """Return cases of two views, of which there are twice as many as the shape says."""
    return [case for size in (8192, 32768) for case in layers("features", f"views-{size}", (size, 512, size), inputs)]


def of_features(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda inputs, **how: getattr(losses, name)(inputs.x, inputs.head, **options, **how)


def of_labelled(name: str, **options: Any) -> Callable[..., Tensor]:
    """Compute a loss of all samples of both matrices, with their labels."""

    def call(inputs: Any, **how: Any) -> Tensor:
        z = torch.cat([inputs.x, inputs.head])
        found: Tensor = getattr(losses, name)(z, inputs.others["labels"], normalize=False, **options, **how)
        return found

    return call


def contrast(x: Tensor, others: Others) -> Tensor:
    return cross_entropy_of_rows(LOGIT_SCALE * x, others)


def labelled_contrast(x: Tensor, others: Others) -> Tensor:
    """Leave rows of the same label out of the negatives."""
    own, labels = others["target"].unsqueeze(1), others["labels"]
    equal = (labels[own] == labels).scatter(1, own, False)
    return contrast(x.masked_fill(equal, -torch.inf), others)


def decoupled(x: Tensor, others: Others) -> Tensor:
    """Leave the positive out of the denominator."""
    x, own = wide(LOGIT_SCALE * x), others["target"].unsqueeze(1)
    return x.scatter(1, own, -torch.inf).logsumexp(1) - x.gather(1, own).squeeze(1)


def pairwise(x: Tensor, others: Others) -> Tensor:
    together = torch.arange(x.shape[1], device=x.device) == others["target"].unsqueeze(1)
    return summed_row(-F.logsigmoid(torch.where(together, 1.0, -1.0).to(x.dtype) * (LOGIT_SCALE * x + LOGIT_BIAS)))


enter(
    "info_nce",
    "InfoNCE of features",
    pairs_of(16384, 65536),
    fused=Fused(contrast, mean_of_rows, of_features("info_nce_loss", **SCALED)),
    **MEMORY,
)
enter(
    "clip_features",
    "CLIP of features",
    pairs_of(16384, 65536),
    fused=Fused(contrast, mean_of_rows, of_features("clip_loss_from_features", logit_scale=LOGIT_SCALE), both=True),
    **MEMORY,
)
enter(
    "siglip_features",
    "SigLIP of features",
    pairs_of(16384, 65536),
    fused=Fused(pairwise, mean_of_rows, of_features("siglip_loss_from_features", logit_scale=LOGIT_SCALE, logit_bias=LOGIT_BIAS)),
    **MEMORY,
)
enter(
    "info_nce_labels",
    "InfoNCE with labels",
    batch("labelled features"),
    fused=Fused(
        labelled_contrast,
        mean_of_rows,
        lambda inputs, **how: losses.info_nce_loss(inputs.x, inputs.head, **SCALED, labels=inputs.others["labels"], **how),
    ),
)
enter(
    "info_nce_decoupled",
    "InfoNCE decoupled",
    batch("features"),
    fused=Fused(decoupled, mean_of_rows, of_features("info_nce_loss", **SCALED, decoupled=True)),
)


def guided(x: Tensor, others: Others) -> Tensor:
    """Return each row's log-sum-exp, and the logit of its pair, without rows that the guide finds nearer than the pair.

    A query is compared with all queries and positives, a positive with positives alone.
    """
    own, pair, guide = others["own"].unsqueeze(1), others["target"].unsqueeze(1), others["guide"]
    x, near = wide(LOGIT_SCALE * x), guide[others["own"]] @ guide.T
    dropped = (near > near.gather(1, pair)).scatter(1, pair, False).scatter(1, own, True)
    queries = torch.arange(len(guide), device=x.device) < len(guide) // 2
    dropped = dropped | (~queries[own] & queries)
    return torch.stack([x.masked_fill(dropped, -torch.inf).logsumexp(1), x.gather(1, pair).squeeze(1)], 1)


def mean_of_guided(rows: Tensor, others: Others) -> Tensor:
    (of_queries, pair), (of_positives, _) = (half.unbind(1) for half in rows.chunk(2))
    return (torch.logaddexp(of_queries, of_positives) - pair).mean()


enter(
    "gist_embed",
    "GISTEmbed",
    batch("guided features"),
    fused=Fused(
        guided,
        mean_of_guided,
        lambda inputs, **how: of_module("lossforge.losses", "gist_embed_loss")(
            inputs.x, inputs.head, *inputs.others["guide"].chunk(2), **SCALED, **how
        ),
        joined=True,
    ),
)


def without_itself(x: Tensor, others: Others) -> Tensor:
    return (LOGIT_SCALE * x).scatter(1, others["own"].unsqueeze(1), float("-inf"))


def labelled_views(x: Tensor, others: Others) -> Tensor:
    own, labels = others["own"].unsqueeze(1), others["labels"]
    log_p = wide(without_itself(x, others)).log_softmax(1)
    positive = (labels[own] == labels).scatter(1, own, False)
    return -torch.where(positive, log_p, 0.0).sum(1) / positive.sum(1)


enter(
    "nt_xent",
    "NT-Xent of features",
    views("views"),
    fused=Fused(
        lambda x, others: cross_entropy_of_rows(without_itself(x, others), others),
        mean_of_rows,
        of_features("nt_xent_loss", **SCALED),
        joined=True,
    ),
)
enter(
    "supcon",
    "supervised contrastive of features",
    views("labelled views"),
    fused=Fused(
        labelled_views,
        mean_of_rows,
        of_labelled("supervised_contrastive_loss", temperature=1 / LOGIT_SCALE, base_temperature=None),
        joined=True,
    ),
)


def parted(x: Tensor, others: Others) -> tuple[Tensor, Tensor]:
    """Return which similarities are of positives, without a row itself, and which of negatives."""
    own, labels = others["own"].unsqueeze(1), others["labels"]
    equal = labels[own] == labels
    return equal.scatter(1, own, False), ~equal


def log_sum(x: Tensor, taken: Tensor) -> Tensor:
    """Return each row's log-sum-exp of what is taken; of nothing a number so far below 0 that its exponential is 0."""
    return x.masked_fill(~taken, -1e30).logsumexp(1)


def multi_similarity(x: Tensor, others: Others) -> Tensor:
    positive, negative = parted(x, others)
    x = wide(x) - 0.5
    return F.softplus(log_sum(-2.0 * x, positive)) / 2.0 + F.softplus(log_sum(50.0 * x, negative)) / 50.0


def circle(x: Tensor, others: Others) -> Tensor:
    (positive, negative), margin, x = parted(x, others), 0.4, wide(x)
    pull, push = (1 + margin - x).relu().detach(), (x + margin).relu().detach()
    near, far = log_sum(80.0 * pull * (1 - margin - x), positive), log_sum(80.0 * push * (x - margin), negative)
    return F.softplus(near + far)


def proxy_anchor(x: Tensor, others: Others) -> Tensor:
    """Return the terms of the positives and of the negatives of each proxy."""
    positive, x = others["own"].unsqueeze(1) == others["labels"], wide(x)
    terms = log_sum(-32.0 * (x - 0.1), positive), log_sum(32.0 * (x + 0.1), ~positive)
    return F.softplus(torch.stack(terms, 1))


def mean_of_proxies(rows: Tensor, others: Others) -> Tensor:
    near, far = rows.unbind(1)
    present = torch.zeros_like(near).index_fill(0, others["labels"], 1.0).sum()
    return near.sum() / present + far.mean()


enter(
    "multi_similarity",
    "multi-similarity",
    views("labelled views"),
    fused=Fused(multi_similarity, mean_of_rows, of_labelled("multi_similarity_loss"), joined=True),
)
enter("circle", "circle", views("labelled views"), fused=Fused(circle, mean_of_rows, of_labelled("circle_loss"), joined=True))
enter(
    "proxy_anchor",
    "proxy anchor",
    layers("features", "online-products", (11318, 512, 8192), "proxies and features"),
    fused=Fused(
        proxy_anchor,
        mean_of_proxies,
        lambda inputs, **how: losses.proxy_anchor_loss(inputs.head, inputs.x, inputs.others["labels"], normalize=False, **how),
    ),
)

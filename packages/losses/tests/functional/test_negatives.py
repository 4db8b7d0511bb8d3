"""Which negatives a contrastive loss has, and with what weight, against the libraries' formulas, in float64, with the matrix."""

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import gist_embed_loss, info_nce_loss, nt_xent_loss, plain_torch, supervised_contrastive_loss
from lossforge.losses.testing import error

generator = torch.Generator().manual_seed(0)
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7}
DECOUPLED = functools.partial(info_nce_loss, decoupled=True)
DECOUPLED_VIEWS = functools.partial(nt_xent_loss, decoupled=True)
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def rows(number, features, device):
    """Unit vectors."""
    return F.normalize(torch.randn(number, features, generator=generator), dim=1).to(device)


def reduced(each, reduction):
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def own_of(x, offset=0):
    row, column = (torch.arange(n, device=x.device) for n in x.shape)
    return row[:, None] + offset == column


def without_equals(query, positive, labels, negatives=None, *, offset=0, temperature=0.1, decoupled=False, symmetric=False):
    """Cross entropy with -inf at the equal positives, and at the pair where it is decoupled."""
    x = query @ torch.cat([positive] if negatives is None else [positive, negatives]).T / temperature
    own = own_of(x, offset)
    equal = torch.zeros_like(own)
    equal[:, : len(positive)] = labels[offset : offset + len(query), None] == labels
    out = equal & (~own | decoupled)
    loss = x.masked_fill(out, -math.inf).logsumexp(1) - x[own]
    if symmetric:
        x, out, own = (t[:, offset : offset + len(query)].T for t in (x, out, own))
        loss = (loss + x.masked_fill(out, -math.inf).logsumexp(1) - x[own]) / 2
    return loss


def decoupled(query, positive, *, offset=0, temperature=0.1):
    """DCL, arXiv 2110.06848, of one direction."""
    x = query @ positive.T / temperature
    own = own_of(x, offset)
    return x.masked_fill(own, -math.inf).logsumexp(1) - x[own]


def lightly_dcl(a, b, temperature=0.1):
    """lightly's DCLLoss: each view's pair against all other views but the pair and itself."""

    def of(a, b):
        same, other = a @ a.T / temperature, b @ a.T / temperature
        own = own_of(same)
        rest = torch.cat([same.masked_fill(own, -math.inf), other.T.masked_fill(own, -math.inf)], 1)
        return rest.logsumexp(1) - other.diagonal()

    return torch.cat([of(a, b), of(b, a)])


def lightly_gathered(a, b, c, d, offset, temperature=0.5):
    """lightly's NTXentLoss(gather_distributed=True) of the process whose first sample is `offset`."""
    here = torch.arange(len(a), device=a.device) + offset
    each = []
    for view, same, other in ((a, c, d), (b, d, c)):
        of_same = (view @ same.T / temperature).masked_fill(own_of(view @ same.T, offset), -math.inf)
        each.append(F.cross_entropy(torch.cat([view @ other.T / temperature, of_same], 1), here, reduction="none"))
    return torch.cat(each)


def sup_contrast_gathered(features, labels, gathered, gathered_labels, offset, temperature=0.07):
    """SupContrast's formula, rows of one process against those of all."""
    x = features @ gathered.T / temperature
    own = own_of(x, offset)
    log_p = x - x.masked_fill(own, -math.inf).logsumexp(1, keepdim=True)
    together = (labels[:, None] == gathered_labels) & ~own
    return -torch.where(together, log_p, 0.0).sum(1) / together.sum(1).clamp(min=1)


def in_directions(query, positive, directions, negatives=None, temperature=0.1):
    """sentence-transformers' MultipleNegativesRankingLoss with partition_mode="joint"."""
    docs = positive if negatives is None else torch.cat([positive, negatives])
    query, positive, queries = query / temperature, positive / temperature, query
    pair = (queries * positive).sum(1)
    every = {
        "query_to_doc": query @ docs.T,
        "query_to_query": (query @ queries.T).masked_fill(own_of(query @ queries.T), -math.inf),
        "doc_to_query": positive @ queries.T,
        "doc_to_doc": (positive @ docs.T).masked_fill(own_of(positive @ docs.T), -math.inf),
    }
    return torch.cat([every[each] for each in directions], 1).logsumexp(1) - pair


def hard(query, positive, hardness, temperature=0.1):
    """sentence-transformers' MultipleNegativesRankingLoss with hardness_mode="all_negatives"."""
    x = query @ positive.T
    own = own_of(x)
    logits = x / temperature + (hardness * x.detach()).masked_fill(own, 0.0)
    return logits.logsumexp(1) - logits[own]


def own_negatives(query, positive, negatives, *, in_batch, temperature=0.1, decoupled=False):
    """info-nce-pytorch's negative_mode="paired", and the same beside the negatives of the batch."""
    x = query @ positive.T / temperature
    pair = x.diagonal()
    first = x if in_batch else pair[:, None]
    if decoupled:
        first = first.masked_fill(own_of(x), -math.inf)
    return torch.cat([first, torch.einsum("nd,nkd->nk", query, negatives) / temperature], 1).logsumexp(1) - pair


def gist(query, positive, of_query, of_positive, negatives=None, of_negatives=None, *, offset=0, temperature=0.01, margin=0.0, **given):
    """sentence-transformers' GISTEmbedLoss."""
    here = slice(offset, offset + len(query))
    own = own_of(query @ positive.T, offset)
    least = (of_query @ of_positive.T)[own][:, None]
    least = least - margin * (least.abs() if given.get("margin_strategy") == "relative" else 1.0)

    def masked(a, b, of_a, of_b, kept=False):
        return (a @ b.T).masked_fill((of_a @ of_b.T > least) & ~torch.as_tensor(kept, device=a.device), -math.inf)

    x = [masked(query, positive, of_query, of_positive, own)]
    if given.get("contrast_anchors", True):
        x.append(masked(query, query, of_query, of_query))
    if given.get("contrast_positives", True):
        x.append(masked(positive[here], positive, of_positive[here], of_positive))
    if negatives is not None:
        x.append(masked(query, negatives, of_query, of_negatives))
    return (torch.cat(x, 1) / temperature).logsumexp(1) - x[0][own] / temperature


def guided(function, guides):
    """Return the function of features, with the guides of queries, of positives, and perhaps of negatives."""

    def of_features(query, positive, *negatives, **options):
        given = [g.to(query.dtype) if function is gist else g for g in guides]
        return function(query, positive, *given[:2], *negatives, *given[2:], **options)

    return of_features


def label(number, of, device):
    return torch.randint(of, (number,), generator=generator).to(device)


def cases(d):
    """Return for each case ours, theirs, and the features: the same in each call."""
    generator.manual_seed(0)
    labels, many, classes = label(9, 4, d), label(150, 60, d), label(40, 5, d)
    part = {"labels": labels, "offset": 2}
    every = [rows(n, 16, d) for n in (9, 9)]
    # of eighths, so that sums of their products are exact, and no rounding says which exceed a threshold
    guides, wide = ([(8 * rows(n, width, d)).round() / 8 for n in of] for width, of in ((6, (9, 9, 7)), (70, (140, 140))))
    views = [rows(n, 16, d) for n in (5, 5, 20, 20)]
    return {
        "equal positives": (info_nce_loss, without_equals, every, {"labels": labels}),
        "equal positives, several devices": (info_nce_loss, without_equals, [rows(4, 8, d), rows(9, 8, d)], part),
        "equal positives, negatives": (
            lambda a, b, c, labels, **more: info_nce_loss(a, b, c, labels=labels, **more),
            lambda a, b, c, labels: without_equals(a, b, labels, c),
            [*every, rows(7, 16, d)],
            {"labels": labels},
        ),
        "equal positives, both sides, several tiles": (
            info_nce_loss,
            without_equals,
            [rows(150, 8, d), rows(150, 8, d)],
            {"labels": many, "symmetric": True},
        ),
        "decoupled": (DECOUPLED, decoupled, every, {}),
        "decoupled, small temperature": (DECOUPLED, decoupled, every, {"temperature": 0.01}),
        "decoupled, several tiles": (DECOUPLED, decoupled, [rows(140, 8, d), rows(150, 8, d)], {"offset": 3}),
        "decoupled, both sides": (info_nce_loss, without_equals, every, {"labels": labels, "decoupled": True, "symmetric": True}),
        "decoupled views": (DECOUPLED_VIEWS, lightly_dcl, every, {"temperature": 0.1}),
        "decoupled views, small temperature": (DECOUPLED_VIEWS, lightly_dcl, every, {"temperature": 0.01}),
        "decoupled views, several tiles": (
            functools.partial(nt_xent_loss, decoupled=True),
            lightly_dcl,
            [rows(80, 8, d), rows(80, 8, d)],
            {"temperature": 0.2},
        ),
        "gathered views": (
            lambda a, b, c, e, offset, **more: nt_xent_loss(a, b, gathered1=c, gathered2=e, offset=offset, **more),
            lightly_gathered,
            views,
            {"offset": 10},
        ),
        "gathered labels": (
            lambda a, b, which, **more: supervised_contrastive_loss(a, which[8:20], gathered=b, gathered_labels=which, offset=8, **more),
            lambda a, b, which: sup_contrast_gathered(a, which[8:20], b, which, 8),
            [rows(12, 16, d), rows(40, 16, d)],
            {"which": classes},
        ),
        "four directions": (info_nce_loss, in_directions, every, {"directions": DIRECTIONS}),
        "three directions": (info_nce_loss, in_directions, every, {"directions": DIRECTIONS[:3]}),
        "four directions, negatives": (
            lambda a, b, c, **more: info_nce_loss(a, b, c, **more),
            lambda a, b, c, directions: in_directions(a, b, directions, c),
            [*every, rows(7, 16, d)],
            {"directions": DIRECTIONS},
        ),
        "hard": (info_nce_loss, hard, every, {"hardness": 5.0}),
        "hard, several tiles": (info_nce_loss, hard, [rows(140, 8, d), rows(140, 8, d)], {"hardness": 9.0, "temperature": 0.05}),
        "guide": (guided(gist_embed_loss, guides[:2]), guided(gist, guides[:2]), every, {}),
        "guide, margin": (guided(gist_embed_loss, guides[:2]), guided(gist, guides[:2]), every, {"margin": 0.1, "temperature": 0.1}),
        "guide, negatives, several devices": (
            guided(gist_embed_loss, [guides[0][:4], *guides[1:]]),
            guided(gist, [guides[0][:4], *guides[1:]]),
            [rows(4, 8, d), rows(9, 8, d), rows(7, 8, d)],
            {"offset": 3, "temperature": 0.1, "margin": 0.05, "margin_strategy": "relative"},
        ),
        "guide, pairs alone, several tiles": (
            guided(gist_embed_loss, wide),
            guided(gist, wide),
            [rows(140, 8, d), rows(140, 8, d)],
            {"temperature": 0.1, "contrast_anchors": False, "contrast_positives": False},
        ),
        "own negatives": (info_nce_loss, own_negatives, [*every, rows(27, 16, d).view(9, 3, 16)], {"in_batch": False}),
        "own and other negatives": (info_nce_loss, own_negatives, [*every, rows(27, 16, d).view(9, 3, 16)], {"in_batch": True}),
        "own and other negatives, decoupled": (
            info_nce_loss,
            own_negatives,
            [*every, rows(27, 16, d).view(9, 3, 16)],
            {"in_batch": True, "decoupled": True},
        ),
    }


NAMES = list(cases("cpu"))


def differentiated(function, leaves, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in leaves]
    value = function(*leaves)
    upstream = torch.linspace(0.5, 1.5, max(1, value.numel()), device=value.device, dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaves, upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, dtype, device):
    ours, theirs, leaves, options = cases(device)[name]
    leaves = [t.to(dtype).float() for t in leaves]
    for reduction in ("mean", "sum", "none"):
        oracle = functools.partial(lambda *t, reduction: reduced(theirs(*t, **options), reduction), reduction=reduction)
        value, gradients = differentiated(oracle, leaves, torch.float64)
        for plain in (False, True):
            call = functools.partial(ours, reduction=reduction, normalize=False, **options)
            with plain_torch() if plain else contextlib.nullcontext():
                found, differentials = differentiated(call, leaves, dtype)
            assert found.dtype == torch.float32
            assert error(found, value) < 5e-6, (reduction, plain)
            for got, exact in zip(differentials, gradients, strict=True):
                assert error(got, exact) < 3 * DTYPES[dtype], (reduction, plain)


def test_temperatures_that_are_learned(device):
    """Of negatives of each query alone, of directions, and of decoupled views."""
    a, b, own = rows(6, 8, device), rows(6, 8, device), rows(12, 8, device).view(6, 2, 8)
    calls = (
        (lambda t, *f: info_nce_loss(*f, t), lambda t, *f: own_negatives(*f, in_batch=True, temperature=t), (a, b, own)),
        (lambda t, *f: info_nce_loss(*f, t, in_batch=False), lambda t, *f: own_negatives(*f, in_batch=False, temperature=t), (a, b, own)),
        (
            lambda t, *f: info_nce_loss(*f, None, t, directions=DIRECTIONS),
            lambda t, *f: in_directions(*f, DIRECTIONS, temperature=t),
            (a, b),
        ),
        (lambda t, *f: nt_xent_loss(*f, t, decoupled=True), lambda t, *f: lightly_dcl(*f, t), (a, b)),
    )
    for ours, theirs, features in calls:
        t = torch.tensor(0.3, device=device, requires_grad=True)
        s = t.detach().double().requires_grad_()
        exact = theirs(s, *[f.double() for f in features]).mean()
        found = ours(t, *features)
        assert error(found, exact.detach()) < 5e-6
        assert error(torch.autograd.grad(found, t)[0], torch.autograd.grad(exact, s)[0]) < 1e-5


def test_an_equal_pair_is_no_negative_of_a_guide(device):
    """Two equal texts have the similarity of the pair by the guide: they stay, as in sentence-transformers; the row itself never counts."""
    a = torch.eye(3, device=device)
    value = gist_embed_loss(a, a, a[[0, 0, 2]], a[[0, 0, 2]], temperature=1.0, contrast_positives=False, reduction="none")
    exact = math.log(math.e + 4) - 1  # the pair, two positives and two queries
    torch.testing.assert_close(value.cpu(), torch.full((3,), exact))


def test_normalizer_of_own_negatives(device):
    a, b, own = rows(6, 8, device), rows(6, 8, device), rows(12, 8, device).view(6, 2, 8)
    exact = own_negatives(a.double(), b.double(), own.double(), in_batch=True).sum() / 4
    assert error(info_nce_loss(a, b, own, normalizer=4.0), exact) < 5e-6
    assert error(info_nce_loss(a, b, own, normalizer=torch.tensor(4.0, device=device)), exact) < 5e-6


def test_own_negatives_are_those_of_the_call(device):
    """Also where queries and positives are the same tensors as before, whose call is kept."""
    a, b = rows(6, 8, device), rows(6, 8, device)
    for _ in range(3):
        own = rows(12, 8, device).view(6, 2, 8)
        exact = own_negatives(a.double(), b.double(), own.double(), in_batch=True).mean()
        assert error(info_nce_loss(a, b, own, normalize=False), exact) < 5e-6


@pytest.mark.parametrize("plain", [False, True])
def test_a_decoupled_pair_without_negatives(plain, device):
    """The sum of nothing is 0, and its logarithm -inf; the similarity of the pair has its gradient."""
    a, b = rows(1, 8, device).requires_grad_(), rows(1, 8, device)
    with plain_torch() if plain else contextlib.nullcontext():
        for loss, times in (DECOUPLED(a, b, normalize=False), 1), (DECOUPLED_VIEWS(a, b, temperature=0.1, normalize=False), 2):
            assert loss == -math.inf
            torch.testing.assert_close(torch.autograd.grad(loss * times, a)[0], -10 * times * b)


A = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("labels must have shape", lambda: info_nce_loss(A, A, labels=torch.zeros(3, dtype=torch.int64))),
        ("directions must have query_to_doc", lambda: info_nce_loss(A, A, directions=("doc_to_doc",))),
        ("directions beside query_to_doc need", lambda: info_nce_loss(A, A, directions=DIRECTIONS, symmetric=True)),
        ("directions must be one of", lambda: info_nce_loss(A, A, directions=("query_to_doc", "all"))),
        ("hardness needs a temperature that is a number", lambda: info_nce_loss(A, A, hardness=1.0, symmetric=True)),
        (r"negatives \(N, K, D\) need N = 4", lambda: info_nce_loss(A, A, torch.zeros(3, 2, 3))),
        ("gathered1, gathered2 and offset go together", lambda: nt_xent_loss(A, A, offset=1)),
        ("gathered2 must have the shape of gathered1", lambda: nt_xent_loss(A, A, gathered1=A, gathered2=A[:3])),
        ("gathered must have shape", lambda: supervised_contrastive_loss(A, gathered=A.view(2, 2, 3))),
        ("offset needs gathered", lambda: supervised_contrastive_loss(A, offset=1)),
        ("labels and gathered_labels go together", lambda: supervised_contrastive_loss(A, torch.arange(4), gathered=A)),
        ("positive_guide must have one row", lambda: gist_embed_loss(A, A, A, A[:3])),
        ("query_guide has no gradient", lambda: gist_embed_loss(A, A, A.clone().requires_grad_(), A)),
        ("negatives and negatives_guide go together", lambda: gist_embed_loss(A, A, A, A, A)),
        ("margin_strategy must be one of", lambda: gist_embed_loss(A, A, A, A, margin_strategy="none")),
    ],
)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()

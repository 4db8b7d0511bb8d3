"""The losses of labelled features with two sums a row, against the formulas of the papers in float64, with the whole matrix."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import circle_loss, multi_similarity_loss, plain_torch, proxy_anchor_loss
from lossforge.losses.testing import error

generator = torch.Generator().manual_seed(0)
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])


def features(number, width, device):
    return F.normalize(torch.randn(number, width, generator=generator), dim=1).to(device)


def classes(number, of, device):
    return torch.randint(of, (number,), generator=generator).to(device)


def eighths(number, width, device):
    """Features whose products have no rounding, so that none decides which pairs are mined."""
    return ((8 * torch.randn(number, width, generator=generator) / width**0.5).round() / 8).to(device)


def reduced(each, reduction):
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def sides(z, labels, others=None, other_labels=None, offset=0):
    """Return the similarities, and which are of positives and of negatives."""
    others, other_labels = (z, labels) if others is None else (others, other_labels)
    x = z @ others.T
    row, column = (torch.arange(n, device=x.device) for n in x.shape)
    own, same = row[:, None] + offset == column, labels[:, None] == other_labels
    return x, same & ~own, ~same


def term(exponents, inside):
    """Return ln(1 + Σ exp) over what is inside each row."""
    return torch.stack([torch.cat([row[kept], row.new_zeros(1)]).logsumexp(0) for row, kept in zip(exponents, inside, strict=True)])


def multi_similarity(z, labels, *given, alpha=2.0, beta=50.0, base=0.5, epsilon=None, reduction="mean"):
    """Equations 13 to 15 of arXiv 1904.06627, row by row."""
    x, positive, negative = sides(z, labels, *given)
    if epsilon is not None:
        hard_positive, hard_negative = torch.zeros_like(positive), torch.zeros_like(negative)
        for i, row in enumerate(x):
            if positive[i].any() and negative[i].any():
                hard_positive[i] = positive[i] & (row < row[negative[i]].max() + epsilon)
                hard_negative[i] = negative[i] & (row > row[positive[i]].min() - epsilon)
        positive, negative = hard_positive, hard_negative
    return reduced(term(-alpha * (x - base), positive) / alpha + term(beta * (x - base), negative) / beta, reduction)


def circle(z, labels, *given, margin=0.4, gamma=80.0, reduction="mean"):
    """Equation 6 of arXiv 2002.10857, row by row, with weights that have no gradient."""
    x, positive, negative = sides(z, labels, *given)
    held = x.detach()
    of_positives = -gamma * (1 + margin - held).clamp(min=0) * (x - (1 - margin))
    of_negatives = gamma * (held + margin).clamp(min=0) * (x - margin)
    each = []
    for i in range(len(x)):
        p, n = of_positives[i][positive[i]], of_negatives[i][negative[i]]
        each.append((p.logsumexp(0) + n.logsumexp(0)).logaddexp(x.new_zeros(())) if len(p) and len(n) else 0.0 * x[i].sum())
    return reduced(torch.stack(each), reduction)


def proxy_anchor(z, proxies, labels, margin=0.1, alpha=32.0, reduction="mean"):
    """Equation 4 of arXiv 2003.13911."""
    x = proxies @ z.T
    positive = torch.arange(len(proxies), device=x.device)[:, None] == labels
    present = positive.any(1).sum()
    each = len(proxies) / present.to(x.dtype) * term(-alpha * (x - margin), positive) + term(alpha * (x + margin), ~positive)
    return reduced(each, reduction)


def cases(d):
    """Return for each case ours, theirs, the features, further arguments and options."""
    generator.manual_seed(0)
    few, many = classes(9, 4, d), classes(150, 12, d)
    gathered = classes(40, 5, d)
    of_part = {"gathered_labels": gathered, "offset": 8}
    mined = {"epsilon": 0.1}
    return {
        "multi-similarity": (multi_similarity_loss, multi_similarity, [features(9, 12, d)], (few,), {}),
        "multi-similarity, several tiles": (multi_similarity_loss, multi_similarity, [features(150, 7, d)], (many,), {"base": 0.3}),
        "mined": (multi_similarity_loss, multi_similarity, [eighths(9, 12, d)], (few,), mined),
        "mined, several tiles": (multi_similarity_loss, multi_similarity, [eighths(150, 7, d)], (many,), {**mined, "beta": 20.0}),
        "mined, gathered": (
            lambda z, c, labels, **more: multi_similarity_loss(z, labels, gathered=c, **of_part, **more),
            lambda z, c, labels, **more: multi_similarity(z, labels, c, gathered, 8, **more),
            [eighths(12, 16, d), eighths(40, 16, d)],
            (gathered[8:20],),
            mined,
        ),
        "circle": (circle_loss, circle, [features(9, 12, d)], (few,), {}),
        "circle, several tiles": (circle_loss, circle, [features(150, 7, d)], (many,), {"margin": 0.25, "gamma": 30.0}),
        "circle, gathered": (
            lambda z, c, labels, **more: circle_loss(z, labels, gathered=c, **of_part, **more),
            lambda z, c, labels, **more: circle(z, labels, c, gathered, 8, **more),
            [features(12, 16, d), features(40, 16, d)],
            (gathered[8:20],),
            {},
        ),
        "proxy anchor": (proxy_anchor_loss, proxy_anchor, [features(9, 12, d), features(6, 12, d)], (few,), {}),
        "proxy anchor, several tiles": (
            proxy_anchor_loss,
            proxy_anchor,
            [features(150, 7, d), features(140, 7, d)],
            (many.int(),),
            {"margin": 0.2, "alpha": 16.0},
        ),
    }


NAMES = list(cases("cpu"))


def differentiated(function, leaves, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in leaves]
    value = function(*leaves)
    upstream = torch.linspace(0.5, 1.5, max(1, value.numel()), device=value.device, dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaves, upstream)


STEEP = {
    "multi-similarity": (14, lambda z, labels, proxies: multi_similarity_loss(z, labels, 20.0, 50.0, normalize=False)),
    "circle": (21, lambda z, labels, proxies: circle_loss(z, labels, gamma=120.0, normalize=False)),
    "proxy anchor": (22, lambda z, labels, proxies: proxy_anchor_loss(z, proxies, labels, alpha=120.0, normalize=False)),
}


@pytest.mark.parametrize("name", STEEP)
def test_large_exponents_cost_no_digits(name, device):
    """Exponents of a thousand: what the gradient subtracts from them has more digits than a float32."""
    seed, ours = STEEP[name]
    draw = torch.Generator().manual_seed(seed)
    z, labels = torch.randn(24, 6, generator=draw), torch.randint(0, 3, (24,), generator=draw).to(device)
    proxies = torch.randn(3, 6, generator=draw).to(device)
    found, exact = (
        differentiated(lambda leaf, to=dtype: ours(leaf, labels, proxies.to(to)), [z.to(device)], dtype)[1][0]
        for dtype in (torch.float32, torch.float64)
    )
    assert error(found, exact) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name, dtype, device):
    """Value and gradients of the features and proxies, in every reduction, by the kernels and in plain torch."""
    ours, theirs, leaves, args, options = cases(device)[name]
    leaves = [t.to(dtype).float() for t in leaves]
    for reduction in ("mean", "sum", "none"):
        value, gradients = differentiated(lambda *t, r=reduction: theirs(*t, *args, **options, reduction=r), leaves, torch.float64)
        for plain, mode in ((False, "forward"), (False, "backward"), (True, "backward")):
            if reduction == "none" and mode == "forward":
                continue
            call = functools.partial(ours, reduction=reduction, normalize=False, gradient=mode, **options)
            with plain_torch() if plain else contextlib.nullcontext():
                found, got = differentiated(lambda *t, call=call: call(*t, *args), leaves, dtype)
            assert found.dtype == torch.float32
            assert error(found, value) < 5e-6, (reduction, plain)
            for mine, exact in zip(got, gradients, strict=True):
                assert mine.dtype == dtype
                assert error(mine, exact) < 3 * DTYPES[dtype], (reduction, plain, mode)


@PLAIN
def test_rows_without_positives_or_negatives(plain, device):
    """Of one class and of classes of one sample: finite, with finite gradients; circle adds 0 in both."""
    z = features(4, 8, device)
    for labels in (torch.zeros(4, dtype=torch.int64, device=device), torch.arange(4, device=device)):
        for call in (circle_loss, multi_similarity_loss, functools.partial(multi_similarity_loss, epsilon=0.1)):
            with plain_torch() if plain else contextlib.nullcontext():
                value, (g,) = differentiated(lambda z, call=call: call(z, labels, reduction="none"), [z], torch.float32)  # noqa: B023
            assert g.isfinite().all()
            if call is not multi_similarity_loss:
                assert not value.any()
                assert not g.any()
            else:
                assert (value > 0).all()


@PLAIN
@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_nan_stays(plain, epsilon, device):
    """It spoils every row, because each is compared with it, also where pairs are mined."""
    z, labels = features(6, 8, device), torch.tensor([0, 0, 1, 1, 2, 2], device=device)
    z[2, 3] = torch.nan
    with plain_torch() if plain else contextlib.nullcontext():
        assert multi_similarity_loss(z, labels, epsilon=epsilon, normalize=False, reduction="none").isnan().all()
        assert circle_loss(z, labels, normalize=False, reduction="none").isnan().all()
        assert proxy_anchor_loss(z, z.nan_to_num(), labels, normalize=False).isnan()


@PLAIN
def test_nothing(plain, device):
    """A batch without rows: the mean of nothing."""
    none, proxies = torch.zeros(0, 8, device=device, requires_grad=True), features(3, 8, device).requires_grad_()
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    for call in (
        functools.partial(multi_similarity_loss, none, labels),
        functools.partial(circle_loss, none, labels),
        functools.partial(proxy_anchor_loss, none, proxies, labels),
    ):
        with plain_torch() if plain else contextlib.nullcontext():
            assert call().isnan()
            assert call(empty="zero") == 0
    with plain_torch() if plain else contextlib.nullcontext():
        assert multi_similarity_loss(none, labels, reduction="none").shape == (0,)


def test_normalizer(device):
    z, labels = features(6, 8, device), classes(6, 3, device)
    for ours, theirs, further in (
        (circle_loss, circle, ()),
        (multi_similarity_loss, multi_similarity, ()),
        (proxy_anchor_loss, proxy_anchor, (z,)),
    ):
        exact = theirs(z.double(), *[t.double() for t in further], labels, reduction="sum") / 4
        assert error(ours(z, *further, labels, normalizer=4), exact) < 5e-6
        assert error(ours(z, *further, labels, normalizer=torch.tensor(4.0, device=device)), exact) < 5e-6


def test_labels_out_of_range(device):
    z, proxies = features(4, 8, device), features(3, 8, device)
    labels = torch.tensor([0, 1, 3, 2], device=device)
    if z.is_cuda:
        assert proxy_anchor_loss(z, proxies, labels).isnan()
    else:
        with pytest.raises(IndexError, match="labels must hold 0 to 2, got 3 at row 2"):
            proxy_anchor_loss(z, proxies, labels)


A = torch.zeros(4, 3)
LABELS = torch.arange(4) % 2


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, r"features must have shape \(N, D\)", lambda: circle_loss(A.view(2, 2, 3), LABELS[:2])),
        (ValueError, r"labels must have shape \(4,\)", lambda: multi_similarity_loss(A, LABELS[:3])),
        (ValueError, r"labels must have shape \(4,\)", lambda: proxy_anchor_loss(A, A, LABELS[:3])),
        (TypeError, "labels must", lambda: multi_similarity_loss(A, None)),
        (TypeError, "labels must", lambda: circle_loss(A, LABELS.float())),
        (ValueError, "gathered_labels needs gathered", lambda: circle_loss(A, LABELS, gathered_labels=LABELS)),
        (ValueError, "proxies must have the 3 features", lambda: proxy_anchor_loss(A, A[:, :2], LABELS)),
    ],
)
def test_refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call()

"""The contrastive losses of features against the formulas of the libraries that have them, in float64, with the whole matrix."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.kernels import TRITON
from lossforge.losses import (
    clip_loss,
    clip_loss_from_features,
    cross_entropy,
    info_nce_loss,
    nt_xent_loss,
    plain_torch,
    siglip_loss,
    siglip_loss_from_features,
    supervised_contrastive_loss,
)
from lossforge.losses.testing import error

NAN = float("nan")
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
generator = torch.Generator().manual_seed(0)


def rows(number, features, device="cpu"):
    """Unit vectors."""
    return F.normalize(torch.randn(number, features, generator=generator), dim=1).to(device)


def labels(number, of, device):
    return torch.randint(of, (number,), generator=generator).to(device)


def number(value, device):
    return torch.tensor(value, device=device)


def reduced(each, reduction):
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


def info_nce(query, positive, negatives=None, temperature=0.1, offset=0, in_batch=True, reduction="mean"):
    """The code of info-nce-pytorch, which with negatives compares a query with its own positive and these."""
    own = torch.arange(len(query), device=query.device)
    if in_batch:
        candidates = positive if negatives is None else torch.cat([positive, negatives])
        return F.cross_entropy(query @ candidates.T / temperature, own + offset, reduction=reduction)
    logits = torch.cat([(query * positive).sum(1, keepdim=True), query @ negatives.T], 1)
    return F.cross_entropy(logits / temperature, torch.zeros_like(own), reduction=reduction)


def open_clip(images, texts, scale, offset=0, reduction="mean"):
    logits, own = scale * images @ texts.T, torch.arange(len(images), device=images.device)
    sides = F.cross_entropy(logits, own + offset, reduction="none"), F.cross_entropy(logits.T[own + offset], own, reduction="none")
    return reduced((sides[0] + sides[1]) / 2, reduction)


def open_siglip(images, texts, scale, bias, offset=0, reduction="mean"):
    logits = scale * images @ texts.T + bias
    row, column = (torch.arange(n, device=logits.device) for n in logits.shape)
    signs = torch.where(row[:, None] + offset == column, 1.0, -1.0)
    return reduced(-F.logsigmoid(signs * logits).sum(1), reduction)


def sup_contrast(features, labels, temperature=0.07, base_temperature=0.07, reduction="mean"):
    """SupContrast's formula, with 0 for rows without a positive."""
    logits = features @ features.T / temperature
    own = torch.eye(len(features), dtype=torch.bool, device=features.device)
    log_p = logits - logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    positives = (labels[:, None] == labels) & ~own
    mean = torch.where(positives, log_p, 0.0).sum(1) / positives.sum(1).clamp(min=1)
    return reduced(-temperature / base_temperature * mean, reduction)


def nt_xent(a, b, temperature=0.5, reduction="mean"):
    views = torch.cat([a, b])
    logits = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(views), device=a.device).roll(len(a)), reduction=reduction)


def with_(function, *args, **options):
    """Return the function of its features, and of scale and bias, without normalising them."""
    given = options if function in ORACLES else {**options, "normalize": False}
    return lambda *leaves, **more: function(*leaves[: 3 if "in_batch" in options else None], *args, **given, **more)


ORACLES = (info_nce, open_clip, open_siglip, sup_contrast, nt_xent)
CASES = {
    "info_nce": lambda d: (info_nce_loss, info_nce, [rows(9, 12, d), rows(9, 12, d)], (), {}),
    "info_nce, one row": lambda d: (info_nce_loss, info_nce, [rows(1, 5, d), rows(3, 5, d)], (), {"offset": 2, "temperature": 1.0}),
    "info_nce, hard negatives": lambda d: (info_nce_loss, info_nce, [rows(70, 32, d), rows(70, 32, d), rows(140, 32, d)], (0.05,), {}),
    "info_nce, a queue": lambda d: (info_nce_loss, info_nce, [rows(6, 64, d), rows(6, 64, d), rows(150, 64, d)], (), {"in_batch": False}),
    "info_nce, several devices": lambda d: (info_nce_loss, info_nce, [rows(20, 16, d), rows(60, 16, d)], (), {"offset": 20}),
    "clip": lambda d: (clip_loss_from_features, open_clip, [rows(33, 40, d), rows(33, 40, d), number(14.0, d)], (), {}),
    "clip, several tiles": lambda d: (
        clip_loss_from_features,
        open_clip,
        [rows(140, 16, d), rows(210, 16, d), number(50.0, d)],
        (),
        {"offset": 65},
    ),
    "siglip": lambda d: (siglip_loss_from_features, open_siglip, [rows(9, 8, d), rows(9, 8, d), number(10.0, d), number(-4.0, d)], (), {}),
    "siglip, several tiles": lambda d: (
        siglip_loss_from_features,
        open_siglip,
        [rows(130, 16, d), rows(150, 16, d), number(10.0, d), number(-10.0, d)],
        (),
        {"offset": -7},
    ),
    "supcon": lambda d: (supervised_contrastive_loss, sup_contrast, [rows(80, 24, d)], (labels(80, 30, d),), {"temperature": 0.1}),
    "supcon, several tiles": lambda d: (supervised_contrastive_loss, sup_contrast, [rows(200, 16, d)], (labels(200, 5, d),), {}),
    "nt_xent": lambda d: (nt_xent_loss, nt_xent, [rows(40, 33, d), rows(40, 33, d)], (), {}),
}
EACH = pytest.mark.parametrize("name", CASES)


def differentiated(function, leaves, dtype, **options):
    leaves = [t.to(dtype if t.ndim else torch.promote_types(dtype, torch.float32)).requires_grad_() for t in leaves]
    value = function(*leaves, **options)
    upstream = torch.linspace(0.5, 1.5, max(1, value.numel()), device=value.device, dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad(value, leaves, upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@EACH
def test_against_float64(name, dtype, device):
    """Value and gradients of both features, of scale and of bias, in every mode and reduction. Those of scale and bias are float32."""
    function, oracle, leaves, args, options = CASES[name](device)
    leaves = [t.to(dtype).float() for t in leaves]
    for reduction in ("mean", "sum", "none"):
        value, gradients = differentiated(with_(oracle, *args, **options), leaves, torch.float64, reduction=reduction)
        for mode in ("backward",) if reduction == "none" else ("forward", "backward"):
            ours, found = differentiated(with_(function, *args, **options), leaves, dtype, reduction=reduction, gradient=mode)
            assert ours.dtype == torch.float32
            assert error(ours, value) < 5e-6, (reduction, mode)
            for got, exact in zip(found, gradients, strict=True):
                assert got.dtype == (dtype if got.ndim else torch.float32)
                limit = DTYPES[dtype if got.ndim else torch.float32]
                assert error(got, exact) < (3 if mode == "forward" else 2) * limit, (reduction, mode)


@pytest.mark.skipif(not TRITON, reason="no kernels")
@pytest.mark.parametrize("name", ["clip, several tiles", "siglip, several tiles", "supcon, several tiles", "info_nce, hard negatives"])
def test_blocks_of_rows(name, device, monkeypatch):
    """Gradients that are summed over blocks of rows are those of one block."""
    from lossforge.kernels.features.similarity import launch

    function, _, leaves, args, options = CASES[name](device)
    for reduction in ("mean", "none"):
        with monkeypatch.context() as patched:
            whole = differentiated(with_(function, *args, **options), leaves, torch.float32, reduction=reduction, gradient="backward")
            patched.setattr(launch, "MEMORY", 1)
            parts = differentiated(with_(function, *args, **options), leaves, torch.float32, reduction=reduction, gradient="backward")
        assert torch.equal(whole[0], parts[0])
        assert all(error(a, b) < 3e-6 for a, b in zip(parts[1], whole[1], strict=True))


def test_features_without_elements(device):
    """All similarities are 0."""
    a = torch.zeros(4, 0, device=device)
    assert info_nce_loss(a, a, normalize=False).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sigmoid_without_texts(reduction, device):
    """A device that has no texts of its own adds 0."""
    a, b = rows(4, 8, device).requires_grad_(), rows(0, 8, device).requires_grad_()
    value = siglip_loss_from_features(a, b, 2.0, -1.0, reduction)
    assert value.shape == ((4,) if reduction == "none" else ())
    assert not value.any()
    assert [(g.shape, g.any().item()) for g in torch.autograd.grad(value.sum(), (a, b))] == [(a.shape, False), (b.shape, False)]


def test_by_hand(device):
    """Similarities of 1 and 0: ln(1 + e^-1) each way; the sigmoid ln(1 + e^-1) + ln 2; two classes of one sample each have no positive."""
    a = torch.eye(2, device=device)
    once = math.log1p(math.exp(-1))
    torch.testing.assert_close(info_nce_loss(a, a, temperature=1.0, reduction="none").cpu(), torch.full((2,), once))
    torch.testing.assert_close(clip_loss_from_features(a, a, reduction="none").cpu(), torch.full((2,), once))
    torch.testing.assert_close(siglip_loss_from_features(a, a, reduction="none").cpu(), torch.full((2,), once + math.log(2)))
    features = torch.randn(4, 3, device=device)
    for function in (supervised_contrastive_loss, plain_torch()(supervised_contrastive_loss)):
        assert function(a, torch.tensor([0, 1], device=device)) == 0
        assert not function(features, torch.arange(4, device=device), reduction="none").any()
    views = torch.cat([a, a])
    value = supervised_contrastive_loss(views, torch.tensor([0, 1, 0, 1], device=device), 1.0, None, "none")
    torch.testing.assert_close(value.cpu(), torch.full((4,), math.log(1 + 2 * math.exp(-1))))


def test_forms_of_one_loss(device):
    """Each is another with other arguments."""
    a, b, hard = rows(6, 16, device), rows(6, 16, device), rows(12, 16, device)
    x = a @ b.T
    own = torch.arange(6, device=device)
    close = torch.testing.assert_close
    close(info_nce_loss(a, b), cross_entropy(x * 10, own))
    close(info_nce_loss(a, b, symmetric=True), clip_loss_from_features(a, b, 10.0))
    close(info_nce_loss(a, b, hard, symmetric=True), clip_loss(10 * a @ torch.cat([b, hard]).T))
    close(clip_loss_from_features(a, b, 10.0), clip_loss(x * 10))
    close(siglip_loss_from_features(a, b, 10.0, -3.0), siglip_loss(x * 10 - 3))
    close(siglip_loss_from_features(a, b, 10.0, -3.0, negative_only=True), siglip_loss(x * 10 - 3, negative_only=True))
    close(nt_xent_loss(a, b), supervised_contrastive_loss(torch.stack([a, b], 1), temperature=0.5, base_temperature=None))
    ranking = cross_entropy(20 * a @ torch.cat([b, hard]).T, own)  # sentence-transformers' MultipleNegativesRankingLoss
    close(info_nce_loss(3 * a, 2 * b, (5 * hard).view(6, 2, 16).flatten(0, 1), 1 / 20), ranking)
    parts = info_nce_loss(a[2:4], b, offset=2, temperature=0.1), info_nce_loss(b[2:4], a, offset=2, temperature=0.1)
    every = clip_loss_from_features(a, b, 10.0, reduction="none")
    close((parts[0] + parts[1]) / 2, every[2:4].mean())


def test_views_of_samples(device):
    """(N, V, D) with labels, as SupContrast takes them: a value a view."""
    features, of = rows(10, 16, device).view(5, 2, 16), torch.tensor([0, 1, 0, 2, 2], device=device)
    flat = sup_contrast(features.flatten(0, 1).double(), of.repeat_interleave(2), reduction="none")
    assert error(supervised_contrastive_loss(features, of, reduction="none"), flat.view(5, 2)) < 3e-6
    assert error(supervised_contrastive_loss(features, of), flat.mean()) < 3e-6


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])
def test_gradient_of_a_temperature_where_rows_leave_themselves_out(device, plain):
    def gradient(function, *inputs, **given):
        t = torch.tensor(0.5, dtype=inputs[0].dtype, device=inputs[0].device, requires_grad=True)
        return torch.autograd.grad(function(*inputs, temperature=t, **given), t)[0]

    a, b, of = rows(9, 6, device), rows(9, 6, device), labels(9, 3, device)
    expected = gradient(nt_xent, *[F.normalize(s.double(), dim=1) for s in (a, b)])
    exact = gradient(sup_contrast, F.normalize(a.double(), dim=1), of)
    with plain_torch() if plain else contextlib.nullcontext():
        found, supervised = gradient(nt_xent_loss, a, b), gradient(supervised_contrastive_loss, a, of)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(supervised.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float64), ((1,), torch.float32), ((1, 1), torch.bfloat16)], ids=str)
def test_a_temperature_changes_neither_shape_nor_dtype(shape, dtype, device):
    """Of the loss, which the temperature also multiplies in the supervised one."""
    z, which = rows(12, 8, device).requires_grad_(), labels(12, 3, device)
    t = torch.full(shape, 0.5, dtype=dtype, device=device, requires_grad=True)
    for call in (
        lambda t: supervised_contrastive_loss(z, which, t),
        lambda t: nt_xent_loss(z[:6], z[6:], t),
        lambda t: info_nce_loss(z, z, None, t),
    ):
        found, expected = call(t), call(0.5)
        assert found.shape == ()
        assert found.dtype == torch.float32
        assert error(found, expected) < 1e-6
        assert torch.autograd.grad(found, t)[0].shape == shape


def test_rows_without_a_positive(device):
    """They have loss and gradient 0, and count in the mean."""
    features, of = rows(5, 16, device), torch.tensor([0, 1, 0, 2, 3], device=device)
    value = supervised_contrastive_loss(features, of, reduction="none")
    assert (value[[1, 3, 4]] == 0).all()
    assert (value[[0, 2]] > 0).all()
    torch.testing.assert_close(supervised_contrastive_loss(features, of), value.sum() / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes(dtype, device):
    """Similarities of ±1e4, where exponentials overflow, and features of 0."""
    a = torch.cat([rows(5, 8, device) * 100, torch.zeros(1, 8, device=device)]).to(dtype)
    for function, oracle in ((clip_loss_from_features, open_clip), (siglip_loss_from_features, open_siglip)):
        scales = (1.0,) if function is clip_loss_from_features else (1.0, 0.0)
        value, (g,) = differentiated(lambda a: oracle(a, a.detach(), *scales), [a.float()], torch.float64)  # noqa: B023
        ours, (found,) = differentiated(lambda a: function(a, a.detach(), *scales), [a], dtype)  # noqa: B023
        assert error(ours, value) < 5e-6
        assert found.isfinite().all()
        assert error(found, g) < 2 * DTYPES[dtype]


def test_nan_spoils_its_row_alone(device):
    a, b = rows(5, 8, device), rows(5, 8, device)
    a[2, 3] = NAN
    value = info_nce_loss(a, b, normalize=False, reduction="none")
    assert value.isnan().tolist() == [False, False, True, False, False]
    value = siglip_loss_from_features(a, b, reduction="none")
    assert value.isnan().tolist() == [False, False, True, False, False]


def test_normalizer_and_empty(device):
    a, b = rows(6, 8, device), rows(6, 8, device)
    exact = info_nce(a.double(), b.double(), reduction="sum")
    for normalizer in (4, torch.tensor(4.0, device=device)):
        value, (g, _) = differentiated(lambda a, b: info_nce_loss(a, b, normalize=False, normalizer=normalizer), [a, b], torch.float32)  # noqa: B023
        assert error(value, exact / 4) < 3e-6
        of_sum = differentiated(lambda a, b: info_nce(a, b, reduction="sum") / 4, [a, b], torch.float64)[1][0]
        assert error(g, of_sum) < 3e-6
    for normalizer in (0, torch.tensor(0.0, device=device)):
        value, (g, _) = differentiated(lambda a, b: info_nce_loss(a, b, normalizer=normalizer, empty="zero"), [a, b], torch.float32)  # noqa: B023
        assert value == 0
        assert (g == 0).all()
    none = torch.zeros(0, 8, device=device, requires_grad=True)
    assert info_nce_loss(none, b).isnan()
    assert info_nce_loss(none, b, reduction="sum") == 0
    assert info_nce_loss(none, b, empty="zero") == 0


def test_only_what_requires_grad_is_differentiated(device):
    a, b, t = rows(6, 8, device), rows(6, 8, device), number(0.2, device)
    exact = torch.autograd.grad(info_nce(*(s.double().requires_grad_() for s in (a, b)), temperature=(w := t.double().requires_grad_())), w)
    t.requires_grad_()
    for mode in ("forward", "backward"):
        info_nce_loss(a, b, temperature=t, normalize=False, gradient=mode).backward()
        assert error(t.grad, exact[0]) < 3e-6
        t.grad = None
    queue = rows(20, 8, device)
    query = a.clone().requires_grad_()
    info_nce_loss(query, b, queue, in_batch=False).backward()
    assert queue.grad is None
    assert query.grad is not None


def test_normalising_is_that_of_torch(device):
    leaves = [rows(6, 8, device) * 3, rows(6, 8, device) * torch.rand(6, 1, generator=generator).to(device)]
    value, gradients = differentiated(lambda a, b: info_nce(F.normalize(a), F.normalize(b)), leaves, torch.float64)
    ours, found = differentiated(info_nce_loss, leaves, torch.float32)
    assert error(ours, value) < 3e-6
    assert all(error(got, exact) < 3e-6 for got, exact in zip(found, gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unit_vectors_of_half_precision_are_rounded_once(dtype, device):
    """Lengths, unit vectors and their gradients are float32; only the unit vectors are rounded, to the dtype that is multiplied."""

    def rounded(t):
        unit = F.normalize(t)
        return unit + (unit.float().to(dtype).double() - unit).detach()

    leaves = [(rows(48, 256, device) * 30).to(dtype).float(), (rows(48, 256, device) * 0.2).to(dtype).float()]
    value, gradients = differentiated(lambda a, b: info_nce(rounded(a), rounded(b), temperature=0.05), leaves, torch.float64)
    ours, found = differentiated(lambda a, b: info_nce_loss(a, b, temperature=0.05), leaves, dtype)
    assert error(ours, value) < 5e-6
    assert all(error(got, exact) < 2 * DTYPES[dtype] for got, exact in zip(found, gradients, strict=True))


def test_autocast(device):
    """Features of float32 are multiplied in the dtype of autocast, as torch's own product of them."""
    a, b = rows(9, 16, device), rows(9, 16, device)
    with torch.autocast(device, torch.bfloat16):
        value, gradients = differentiated(clip_loss_from_features, [a, b], torch.float32)
    exact = open_clip(a.bfloat16().double(), b.bfloat16().double(), 1.0)
    assert error(value, exact) < 1e-6
    assert all(g.dtype == torch.float32 for g in gradients)
    assert clip_loss_from_features(a, b) != value
    with torch.autocast(device, torch.bfloat16), plain_torch():
        plain, plain_gradients = differentiated(clip_loss_from_features, [a, b], torch.float32)
    assert plain.dtype == torch.float32
    assert error(plain, exact) < 1e-6
    for ours, reference in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=2e-2, atol=1e-3)


A = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, r"query must have shape \(N, D\).* got \(3,\)", lambda: info_nce_loss(A[0], A)),
        (ValueError, "positive must have the 3 features of query", lambda: info_nce_loss(A, torch.zeros(2, 4))),
        (TypeError, "positive must have the dtype of query, torch.float32", lambda: info_nce_loss(A, A.double())),
        (
            ValueError,
            "positive must have a pair for each of 2 rows .*, got 2 .* offset 1",
            lambda: info_nce_loss(A, A, offset=1),
        ),
        (ValueError, "in_batch=False needs negatives", lambda: info_nce_loss(A, A, in_batch=False)),
        (ValueError, r"temperature must be a number or .* one element, got shape \(2,\)", lambda: info_nce_loss(A, A, temperature=A[:, 0])),
        (ValueError, "input2 must have the shape of input1", lambda: nt_xent_loss(A, A[:1])),
        (ValueError, r"labels must have shape \(2,\)", lambda: supervised_contrastive_loss(A, torch.zeros(3, dtype=torch.long))),
        (TypeError, "labels must be of an integer dtype", lambda: supervised_contrastive_loss(A, A[:, 0])),
        (ValueError, "base_temperature must be finite and above 0", lambda: supervised_contrastive_loss(A, None, 0.1, 0.0)),
        (TypeError, "offset must be a whole number", lambda: siglip_loss_from_features(A, A, offset=0.5)),
    ],
)
def test_errors(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@GPU
@pytest.mark.gpu
def test_memory_is_that_of_a_block_of_rows():
    """Of 32,768² pairs, whose matrix would have 2 GiB in bfloat16: below 1 GiB, forward and backward."""
    a, b = (rows(32768, 128, "cuda").bfloat16().requires_grad_() for _ in range(2))
    clip_loss_from_features(a, b, 10.0).backward()
    a.grad = b.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    clip_loss_from_features(a, b, 10.0).backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30


@GPU
@pytest.mark.gpu
def test_no_synchronisation():
    a, b, scale = rows(300, 64, "cuda").requires_grad_(), rows(300, 64, "cuda").requires_grad_(), number(10.0, "cuda").requires_grad_()
    of = labels(300, 20, "cuda")
    for _ in range(2):  # the first compiles
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            clip_loss_from_features(a, b, scale).backward()
            siglip_loss_from_features(a, b, scale, scale).backward()
            supervised_contrastive_loss(a, of).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@GPU
@pytest.mark.gpu
def test_cuda_graph():
    """Forward and backward, captured once and replayed on other features."""
    a, b = (rows(300, 64, "cuda").bfloat16().requires_grad_() for _ in range(2))

    def step():
        a.grad = b.grad = None
        value = clip_loss_from_features(a, b, 10.0)
        value.backward()
        return value

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value = step()
    found = a.grad
    with torch.no_grad():
        a.copy_(rows(300, 64, "cuda"))
    graph.replay()
    torch.cuda.synchronize()
    exact, (g, _) = differentiated(lambda a, b: open_clip(a, b, 10.0), [a.detach().float(), b.detach().float()], torch.float64)
    assert error(value, exact) < 5e-6
    assert error(found, 2 * g) < 2 * DTYPES[torch.bfloat16]

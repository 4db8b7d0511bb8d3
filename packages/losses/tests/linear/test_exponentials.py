"""Scalar losses of rows whose product stores exponentials: values, gradients, rows that leave their offset, and which calls go that way."""

import math

import pytest
import torch
import torch.nn.functional as F
from linear_calls import launches_of

from lossforge import kernels
from lossforge import losses as L
from lossforge.kernels.plans import PLANS
from lossforge.kernels.tiles import ProductTiles, trial
from lossforge.losses.testing import error

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "z-loss": {"z_loss": 1e-2},
    "z-loss returned": {"z_loss": 1e-2, "outputs": ("z_loss",)},
    "softcap": {"softcap": 5.0, "scale": 0.7},
    "negative scale": {"scale": -0.5},
    "chunks": {"chunk": 9},
    "chunks, summed in bfloat16": {"chunk": 9, "accumulate": "weight"},
    "further results": {"outputs": ("lse", "entropy", "correct", "argmax", "mean_logit")},
    "further results of capped logits": {"softcap": 5.0, "outputs": ("entropy", "mean_logit")},
    "rounding allowed": {"logits": "weight"},
}


@pytest.fixture(autouse=True)
def finished(device, monkeypatch):
    """Return how many chunks went by exponentials since."""
    monkeypatch.setattr(kernels.load("linear.launch"), "WORK", 0)
    PLANS.clear()
    return launches_of("linear_finish_kernel", device, monkeypatch)


def layer(rows, hidden, classes, device, deviation=4.0, dtype=torch.bfloat16, bias=False):
    """Return input, weight and perhaps bias, and class indices, some of them ignored."""
    leaves = torch.randn(rows, hidden) * deviation / hidden**0.5, torch.randn(classes, hidden), *[4 * torch.randn(classes)] * bias
    target = torch.randint(classes, (rows,))
    target[1::5] = -100
    return [t.to(device, dtype).requires_grad_() for t in leaves], target.to(device)


GRADIENT = 8e-3 if torch.cuda.is_available() else 1e-2
"""The interpreter truncates where hardware rounds."""


def check(leaves, target, value=2e-5, gradient=GRADIENT, function=L.cross_entropy, fused=L.linear_cross_entropy, **options):
    """Compare results and gradients with those of float64."""
    found = fused(*leaves[:2], target, bias=leaves[2] if len(leaves) > 2 else None, **options)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with L.plain_torch():
        expected = function(F.linear(*wide), target, **{k: v for k, v in options.items() if k not in ("chunk", "accumulate", "logits")})
    results = [r if isinstance(r, tuple) else (r,) for r in (found, expected)]
    for got, right in zip(*results, strict=True):
        assert (got is None) == (right is None)
        assert got is None or ((got.double() - right.double()).abs() <= value * (1 + right.double().abs())).all()
    found, expected = (r[0] for r in results)
    for got, right in zip(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * expected, wide), strict=True):
        assert error(got, right) < gradient or (right.norm() < 1e-9 and got.norm() < 1e-5)


@pytest.mark.each("options", "shape")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (7, 64, 2), (130, 72, 127), (200, 136, 257), (9, 200, 1300)], ids=str)
def test_options(shape, bias, options, device, finished):
    """Values to float32's precision, gradients to two roundings."""
    leaves, target = layer(*shape, device, bias=bias)
    check(leaves, target, gradient=1.2e-2, **options)
    assert finished() == -(-shape[0] // options.get("chunk", shape[0]))


@pytest.mark.parametrize("function", [L.softmax_focal_loss, L.generalized_cross_entropy], ids=lambda f: f.__name__)
def test_other_losses_of_rows(function, device, finished):
    leaves, target = layer(40, 64, 700, device)
    check(leaves, target, function=function, fused=L.fuse_linear(function), reduction="mean")
    assert finished() == 1


@pytest.mark.parametrize(("mode", "logits"), [("forward", None), ("backward", None), ("forward", "float32"), ("backward", "float32")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weight_a_token(reduction, mode, logits, device, finished):
    """Negative and 0 too, of a row that holds nan; by exponentials, by the product in backward, and by chunks."""
    (x, w, b), target = layer(40, 64, 300, device, bias=True)
    factor = torch.randn(40, device=device)
    factor[2] = 0.0
    found = L.linear_cross_entropy(x, w, target, b, token_weight=factor, reduction=reduction, gradient=mode, logits=logits, z_loss=1e-3)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    z, counts = F.linear(*wide), (target != -100) & (factor != 0)
    each = factor * F.cross_entropy(z, target, reduction="none") + 1e-3 * z.logsumexp(1).square()
    expected = each[counts].sum() / ((target != -100).sum() if reduction == "mean" else 1)
    assert error(found, expected) < 1e-5
    for got, right in zip(torch.autograd.grad(found, (x, w, b)), torch.autograd.grad(expected, wide), strict=True):
        assert error(got, right) < 1.2e-2
    assert finished() == (mode == "forward" and logits is None)
    with torch.no_grad():
        x[2] = torch.nan
    again = L.linear_cross_entropy(x, w, target, b, token_weight=factor, reduction=reduction, gradient=mode, logits=logits, z_loss=1e-3)
    assert torch.equal(again, found)
    (gradient,) = torch.autograd.grad(again, x)
    assert gradient.isfinite().all()
    assert not gradient[2].any()


@pytest.mark.parametrize("kind", ["probability", "entropy"])
@pytest.mark.parametrize("options", [{}, {"gradient": "backward"}, {"logits": "float32"}, {"chunk": 9, "softcap": 5.0}], ids=str)
def test_a_weight_of_the_token_itself(options, kind, device, finished):
    """In three products, in four, and by chunks of logits."""
    leaves, target = layer(40, 64, 300, device, bias=True)
    found = L.linear_cross_entropy(*leaves[:2], target, leaves[2], token_weight=kind, **options)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    z = F.linear(*wide)
    log_p = (5.0 * torch.tanh(z / 5.0) if "softcap" in options else z).log_softmax(1)
    nll, held = F.nll_loss(log_p, target, reduction="none"), log_p.detach()
    factor = (-nll.detach()).exp() if kind == "probability" else (-(held.exp() * held).sum(1) / math.log(20)).clamp(max=1.0)
    expected = (factor * nll).sum() / (target != -100).sum()
    assert error(found, expected) < 1e-4
    for got, right in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, wide), strict=True):
        assert error(got, right) < 1.2e-2
    assert finished() == {"chunk": 5, "gradient": 0, "logits": 0}.get(next(iter(options), ""), 1)


def test_weights_of_sequences(device, finished):
    """(batch, tokens), one for all, and those of a sequence broadcast."""
    (x, w), target = layer(24, 64, 300, device)
    x, target = x.detach().view(4, 6, 64).requires_grad_(), target.view(4, 6)
    for shape in ((4, 6), (4, 1), ()):
        factor = torch.randn(shape, device=device)
        found = L.linear_cross_entropy(x, w, target, token_weight=factor, reduction="sum")
        each = F.cross_entropy(F.linear(x.double(), w.double()).movedim(-1, 1), target, reduction="none")
        assert error(found, (each * factor).sum()) < 1e-5
    assert finished() == 3


def test_logits_with_a_prior(device, finished):
    """A bias of the loss's own, beside the layer's."""
    prior = torch.rand(700, device=device) + 0.01
    leaves, target = layer(40, 64, 700, device, bias=True)
    fused = L.fuse_linear(L.logit_adjusted_cross_entropy)
    check(leaves, target, function=L.logit_adjusted_cross_entropy, fused=fused, log_prior=prior.log())
    assert finished() == 1


def test_class_weights(device, finished):
    """A class of weight 0 gives its rows neither a value nor a gradient."""
    leaves, target = layer(50, 64, 300, device)
    weight = torch.rand(300, device=device) + 0.5
    weight[target[0]] = 0.0
    found = L.linear_cross_entropy(*leaves, target, loss_weight=weight)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.cross_entropy(F.linear(*wide), target, weight.double())
    assert error(found, expected) < 1e-5
    gradients = torch.autograd.grad(found, leaves)
    assert not gradients[0][0].any()
    for got, right in zip(gradients, torch.autograd.grad(expected, wide), strict=True):
        assert error(got, right) < 8e-3
    assert finished() == 1


@pytest.mark.parametrize("beyond", [70.0, 300.0, 1e4], ids=str)
@pytest.mark.parametrize("several", [False, True])
def test_rows_that_leave_their_offset(beyond, several, device, finished):
    """One row, or every third, has its largest logit at a class that is not in the sample, and further above it than exponents reach."""
    (x, w), target = layer(30, 64, 1000, device)
    with torch.no_grad():
        w[:, 0] = 0.0
        w[1, 0] = 64.0  # every third class from 0 is in the sample
        x[:, 0] = 0.0
        x[: 30 if several else 1 : 3, 0] = beyond / 64
    check((x, w), target, value=1e-4)
    assert finished() == 1


LISTS = {
    "none": ([], [[], []]),
    "one": ([40], [[40], []]),
    "the ends of chunks": ([0, 71, 72, 139], [[0, 71], [0, 67]]),
    "all": (range(140), [list(range(72)), list(range(68))]),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled products have tiles of one size")
@pytest.mark.parametrize(("raised", "listed"), LISTS.values(), ids=LISTS)
def test_only_raised_rows_are_computed_again(raised, listed, device, finished, monkeypatch):
    """Two chunks, of 72 rows and 68, which take a plan each: tiles of 32, 32 and 8, and of 32, 32 and 4."""
    launch, lists = kernels.load("linear.launch"), []

    def new_like(x, new):
        found = computed_new_like(x, new)
        if found.dtype == torch.int32:
            lists.append(found)
        return found

    computed_new_like = launch.new_like
    monkeypatch.setattr(launch, "new_like", new_like)
    (x, w), target = layer(140, 64, 300, device)
    raised = list(raised)
    target[raised] = 7
    with torch.no_grad():
        w[:, 0] = x[:, 0] = 0.0
        w[299, 0] = 64.0  # the sample has the first 256 classes
        x[raised, 0] = 4.0
    with trial(ProductTiles(32, 64, 32, 8, 8, 3, 1)):
        check((x, w), target, value=1e-4, chunk=72)
    assert [sorted(t[1 : 1 + t[0]].tolist()) for t in lists] == listed
    assert finished() == 2


def test_a_common_offset(device):
    """Gradients are no further from float64 than those of the unfused computation in bfloat16, which rounds the offset logits too."""
    (x, w), target = layer(30, 64, 1000, device)
    with torch.no_grad():
        x[:, 0] = w[:, 0] = 100.0
    plain = torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    worst = max(error(got, right) for got, right in zip(plain, exact, strict=True))
    check((x, w), target, value=1e-3, gradient=worst)


@pytest.mark.parametrize("deviation", [0.0, 64.0])
def test_flat_and_steep_rows(deviation, device):
    leaves, target = layer(30, 64, 1000, device, deviation)
    check(leaves, target, value=1e-4, gradient=1.2e-2)  # the interpreter truncates where hardware rounds


def test_a_factor_of_zero(device):
    """z-loss can make the factor of p 0 exactly, where that of the target is not."""
    x = torch.tensor([[1.0] + [0.0] * 7], dtype=torch.bfloat16, device=device, requires_grad=True)
    w = torch.tensor([[-8.0] + [1.0] * 7], dtype=torch.bfloat16, device=device, requires_grad=True)
    check((x, w), torch.zeros(1, dtype=torch.int64, device=device), gradient=1.2e-2, z_loss=1 / 16)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_counts(reduction, device):
    """All rows are ignored; there are none."""
    (x, w), target = layer(20, 64, 300, device)
    found = L.linear_cross_entropy(x, w, torch.full_like(target, -100), reduction=reduction)
    assert found.isnan() if reduction == "mean" else found == 0
    if reduction == "sum":
        assert not any(g.any() for g in torch.autograd.grad(found, (x, w)))
    (x, w), target = layer(0, 64, 300, device)
    assert L.linear_cross_entropy(x, w, target, reduction="sum") == 0


def test_a_row_of_nan_that_is_ignored(device):
    (x, w), target = layer(20, 64, 300, device)
    with torch.no_grad():
        x[1] = float("nan")
    found = L.linear_cross_entropy(x, w, target)
    kept = target != -100
    assert error(found, L.linear_cross_entropy(x[kept], w, target[kept])) < 1e-6
    (of_x,) = torch.autograd.grad(found, x)
    assert of_x.isfinite().all()
    assert not of_x[1].any()


def test_further_results_of_rows_that_are_ignored(device, finished):
    """They have an entropy, which may be nan, and no gradient."""
    (x, w), target = layer(20, 64, 300, device)
    with torch.no_grad():
        x[1] = float("nan")
    found = L.linear_cross_entropy(x, w, target, outputs=("entropy", "correct"))
    log_p = F.linear(x.double(), w.double()).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    assert target[[1, 6]].tolist() == [-100, -100]
    assert torch.equal(found.entropy.isnan(), expected.isnan())
    assert (found.entropy - expected).abs().nan_to_num().max() < 1e-4
    assert torch.autograd.grad(found.loss, x)[0].isfinite().all()
    assert finished() == 1


def test_a_gradient_of_a_further_result(device, finished):
    """Backward takes what forward kept: offsets in place of maxima."""
    (x, w), target = layer(20, 64, 300, device)
    found = L.linear_cross_entropy(x, w, target, outputs=("lse", "entropy"))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    log_p = F.linear(*wide).log_softmax(-1)
    expected = F.nll_loss(log_p, target), -(log_p.exp() * log_p).sum(-1), F.linear(*wide).logsumexp(-1)
    gradients = torch.autograd.grad(found.loss + found.entropy.mean() - found.lse.mean(), (x, w))
    exact = torch.autograd.grad(expected[0] + expected[1].mean() - expected[2].mean(), wide)
    assert all(error(got, right) < 8e-3 for got, right in zip(gradients, exact, strict=True))
    assert finished() == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_a_row_that_is_not_finite(bad, device):
    (x, w), target = layer(20, 64, 300, device)
    with torch.no_grad():
        x[0, 0] = bad
    assert L.linear_cross_entropy(x, w, target).isnan()


@pytest.mark.parametrize(
    ("reason", "change"),
    {
        "float16": lambda x, w: ((x.half(), w.half()), {}),
        "smoothing": lambda x, w: ((x, w), {"label_smoothing": 0.1}),
        "the sum of p²": lambda x, w: ((x, w), {"outputs": ("log_p2",)}),
        "a gradient in backward": lambda x, w: ((x, w), {"gradient": "backward"}),
        "logits in float32": lambda x, w: ((x, w), {"logits": "float32"}),
        "many features, and rounding allowed": lambda x, w: ((x.repeat(1, 64), w.repeat(1, 64)), {"logits": "weight"}),
    }.items(),
)
def test_other_calls_go_other_ways(reason, change, device, finished):
    leaves, target = layer(20, 64, 40, device)
    tensors, options = change(*leaves)
    found = L.linear_cross_entropy(*tensors, target, **options)
    assert (found if isinstance(found, torch.Tensor) else found.loss).isfinite()
    assert finished() == 0, reason


def test_little_work_goes_another_way(device, finished, monkeypatch):
    monkeypatch.setattr(kernels.load("linear.launch"), "WORK", 20 * 64 * 300 + 1)
    PLANS.clear()
    leaves, target = layer(20, 64, 300, device)
    assert L.linear_cross_entropy(*leaves, target).isfinite()
    assert finished() == 0


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("classes", [21_841, 128_257])
def test_many_classes(classes, device, finished):
    leaves, target = layer(300, 256, classes, device, bias=True)
    check(leaves, target, outputs=("entropy", "argmax"))
    assert finished() == 1

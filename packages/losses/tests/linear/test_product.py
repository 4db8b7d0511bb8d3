"""The product in which a loss of rows is computed: its results and gradients, what depends on a row alone, and which calls it takes.

Interpreted, its descriptors are blocks of memory, and two programs share the tiles. What only a GPU shows is marked: the order of its sums,
graphs, compilation, memory.
"""

import pytest
import torch
import torch.nn.functional as F
from linear_calls import launches_of, numpy_multiplies_a_row_alike_at_any_place
from torch import Tensor

from lossforge import kernels
from lossforge import losses as L
from lossforge.losses.testing import error

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
EVERY = ("lse", "entropy", "correct", "argmax", "log_p2", "mean_logit")
OPTIONS = {
    "plain": {},
    "all results": {"z_loss": 1e-2, "outputs": ("z_loss", *EVERY)},
    "smoothing": {"label_smoothing": 0.1, "outputs": ("entropy", "mean_logit")},
    "softcap": {"softcap": 5.0, "scale": 0.7, "outputs": EVERY},
    "negative scale": {"scale": -0.5, "outputs": ("lse", "argmax")},
}


@pytest.fixture(autouse=True)
def product(device, monkeypatch):
    """Return how many products were launched since."""
    return launches_of("linear_product_kernel", device, monkeypatch)


def layer(rows, hidden, classes, device, dtype=torch.bfloat16):
    """Return input, weight and bias whose logits have a standard deviation of 4, and class indices, some of them ignored."""
    x, w, b = torch.randn(rows, hidden) * 4 / hidden**0.5, torch.randn(classes, hidden), torch.randn(classes)
    target = torch.randint(classes, (rows,))
    target[1::5] = -100
    return [t.to(device, dtype).requires_grad_() for t in (x, w, b)], target.to(device)


def exact(leaves, target, bias=None, **options):
    """Return the leaves in float64 and the results of the unfused computation. bias: of the layer, where it is no leaf."""
    wide = [t.detach().double().requires_grad_() for t in leaves]
    logits = F.linear(*wide) if bias is None else F.linear(*wide, bias.double())
    with L.plain_torch():
        return wide, L.cross_entropy(logits, target, reduction="none", **options)


def graded(results, upstream):
    """Return what to differentiate: the sum of all differentiable results, weighted."""
    several = (results,) if isinstance(results, Tensor) else results[:4]
    return sum((r * u.to(r.dtype)).sum() for r, u in zip(several, upstream, strict=False) if r is not None)


def compare(found, expected, bound=2e-5):
    several = ((found,), (expected,)) if isinstance(found, Tensor) else (found, expected)
    for got, right in zip(*several, strict=True):
        assert (got is None) == (right is None)
        if got is None:
            continue
        if got.is_floating_point():
            assert ((got.double() - right).abs() <= bound * (1 + right.abs())).all()
        else:
            assert torch.equal(got, right)


@pytest.mark.each("options", "shape")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(1, 8, 1), (7, 64, 2), (130, 72, 127), (200, 136, 257), (9, 200, 1300)], ids=str)
def test_options(shape, options, dtype, device, product):
    """Values to float32's precision, gradients to one rounding of the logits' gradient."""
    leaves, target = layer(*shape, device, dtype)
    found = L.linear_cross_entropy(*leaves[:2], target, leaves[2], reduction="none", **options)
    wide, expected = exact(leaves, target, **options)
    compare(found, expected)
    upstream = torch.randn(4, shape[0], device=device)
    gradients = torch.autograd.grad(graded(found, upstream), leaves)
    for got, right in zip(gradients, torch.autograd.grad(graded(expected, upstream), wide), strict=True):
        assert error(got, right) < 1.2e-2 or right.norm() < 1e-9
    assert product() >= 2


def test_class_weights(device, product):
    leaves, target = layer(50, 64, 300, device)
    weight = torch.rand(300, device=device) + 0.5
    wide, expected = exact(leaves, target, weight=weight.double())
    found = L.linear_cross_entropy(*leaves[:2], target, leaves[2], loss_weight=weight, reduction="none")
    compare(found, expected)
    for got, right in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), wide), strict=True):
        assert error(got, right) < 8e-3
    with torch.no_grad():  # where the gradient is not written in forward, a mean goes by the product too
        mean = L.linear_cross_entropy(*leaves[:2], target, leaves[2], loss_weight=weight)
    assert error(mean, F.cross_entropy(F.linear(*wide), target, weight.double())) < 1e-5
    assert product() == 3


@pytest.mark.parametrize("function", [L.softmax_focal_loss, L.generalized_cross_entropy], ids=lambda f: f.__name__)
def test_other_losses_of_rows(function, device, product):
    """Losses with a formula of their own, and a backward over several blocks of classes."""
    leaves, target = layer(40, 64, 700, device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found = L.fuse_linear(function)(*leaves[:2], target, bias=leaves[2], reduction="none", chunk=15)
    with L.plain_torch():
        expected = function(F.linear(*wide), target, reduction="none")
    compare(found, expected)
    upstream = torch.rand(40, device=device) + 0.5
    gradients = torch.autograd.grad((found * upstream).sum(), leaves)
    for got, right in zip(gradients, torch.autograd.grad((expected * upstream.double()).sum(), wide), strict=True):
        assert error(got, right) < 8e-3
    assert product() == 1 + -(-700 // 264)  # 15 rows' logits are those of 264 classes


def test_a_cap_and_a_temperature(device, product):
    """The cap comes first, then the division by T: log-probabilities and entropy, and their gradients."""
    leaves, target = layer(50, 64, 300, device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    log_p = (3.0 * torch.tanh(F.linear(*wide) / 3.0) / 0.6).log_softmax(-1)
    at = log_p.gather(1, target.clamp(0)[:, None])[:, 0].masked_fill(target == -100, 0.0)
    entropy = -(log_p.exp() * log_p).sum(1)
    options = {"temperature": 0.6, "softcap": 3.0}
    found = L.linear_selective_log_softmax(*leaves[:2], target, leaves[2], outputs=("entropy",), **options)
    compare(found.logps, at)
    compare(found.entropy, entropy)
    compare(L.linear_entropy(*leaves, **options), entropy)
    upstream = torch.rand(2, 50, device=device) + 0.5
    gradients = torch.autograd.grad((found.logps * upstream[0]).sum() + (found.entropy * upstream[1]).sum(), leaves)
    for got, right in zip(gradients, torch.autograd.grad((at * upstream[0]).sum() + (entropy * upstream[1]).sum(), wide), strict=True):
        assert error(got, right) < 1.2e-2
    assert product() >= 3


def test_several_launches_over_rows(device, product, monkeypatch):
    """Statistics of many rows do not take memory together."""
    monkeypatch.setattr(kernels.load("linear.launch"), "PARTS", 0)
    (x, w, _), target = layer(2050, 8, 300, device)
    with torch.no_grad():
        logps, entropy = L.linear_selective_log_softmax(x, w, target, outputs=("entropy",))
        expected = (x.double() @ w.double().t()).log_softmax(-1)
    assert product() == 3  # of 1024 rows
    at = expected.gather(1, target.clamp(0)[:, None])[:, 0]
    assert error(logps, torch.where(target == -100, 0.0, at)) < 1e-6
    assert error(entropy, -(expected.exp() * expected).sum(1)) < 1e-6


@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw"])
def test_what_is_not_needed_is_not_computed(wanted, device, product):
    leaves, target = layer(20, 64, 300, device)
    leaves = [t.detach().requires_grad_(name in wanted) for t, name in zip(leaves, "xwb", strict=True)]
    L.linear_cross_entropy(*leaves[:2], target, leaves[2], reduction="none").sum().backward()
    wide, expected = exact(leaves, target)
    for t, right in zip(leaves, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert (t.grad is not None) == t.requires_grad
        assert t.grad is None or error(t.grad, right) < 8e-3
    assert product() == 2


def test_edges(device):
    """A row that is ignored and holds nan; nan, an infinity and an index out of range in rows of their own."""
    (x, w, _), target = layer(40, 64, 300, device)
    target.clamp_(0)
    wrong = [7, 9]
    with torch.no_grad():
        target[3] = -100
        x[3], x[7], x[9, 0] = torch.nan, torch.nan, torch.inf
        if device == "cuda":  # a CPU refuses it
            wrong, target[5] = [5, 7, 9], 999
    value = L.linear_cross_entropy(x, w, target, reduction="none", validate=False)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value[3] == 0
    assert (gradient[3] == 0).all()
    assert value[wrong].isnan().all()
    assert gradient[wrong].isnan().any(1).all()
    rest = [i for i in range(40) if i not in wrong]
    assert value[rest].isfinite().all()
    assert gradient[rest].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothing"])
def test_an_ignored_row_of_nan_beside_further_results(options, device, product):
    (x, w, _), target = layer(7, 64, 300, device)
    with torch.no_grad():
        x[1] = torch.nan
    found = L.linear_cross_entropy(x, w, target, reduction="none", outputs=EVERY, **options)
    (of_x,) = torch.autograd.grad(found.loss.sum(), x)
    assert target[1] == -100
    assert not of_x[1].any()
    assert of_x.isfinite().all()
    assert product() == 2


def test_nothing_to_sum(device):
    """No rows; and all of them ignored."""
    (x, w, b), target = layer(20, 64, 300, device)
    assert L.linear_selective_log_softmax(x[:0], w, target[:0], b).shape == (0,)
    ignored = torch.full_like(target, -100)
    value = L.linear_cross_entropy(x, w, ignored, b, reduction="none")
    assert (value == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(value.sum(), (x, w, b)))
    with torch.no_grad():
        assert L.linear_cross_entropy(x, w, ignored, b).isnan()
        assert L.linear_cross_entropy(x, w, ignored, b, empty="zero") == 0


def test_a_common_offset_costs_no_digits(device):
    """A bias of 1e4 on every class: the log-probabilities of float32, where logits rounded to bfloat16 would be off by 32."""
    (x, w, _), target = layer(50, 64, 300, device)
    target.clamp_(0)
    bias = torch.full((300,), 9984.0, device=device, dtype=torch.bfloat16)
    found = L.linear_selective_log_softmax(x, w, target, bias)
    expected = F.linear(x.double(), w.double()).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert (found - expected).abs().max() < 5e-3


def results_of(x, w, target):
    x = x.detach().requires_grad_()
    found = L.linear_cross_entropy(x, w, target, reduction="none", outputs=EVERY)
    return [t.detach() for t in found if t is not None]


def test_a_row_has_the_same_bits_in_any_batch(device):
    """Alone, among others, in another order, with other strides and addresses. On a GPU, at the sizes that once differed."""
    rows, hidden, classes = (200, 72, 300) if device == "cpu" else (8192, 520, 8001)
    (x, w, _), target = layer(rows, hidden, classes, device)
    x, w = x.detach(), w.detach()
    whole = results_of(x, w, target)
    for count in (1, 2, 7, 64, 100, 130) if device == "cpu" else (1, 2, 7, 16, 64, 100, 513, 1000, 4096, 8191):
        for got, expected in zip(results_of(x[:count], w, target[:count]), whole, strict=True):
            assert torch.equal(got, expected[:count]), count
    order = torch.randperm(rows, device=device)
    strided = torch.empty(rows, hidden + 8, device=device, dtype=x.dtype)[:, :hidden].copy_(x)
    moved = torch.empty(rows * hidden + 1, device=device, dtype=x.dtype)[1:].view(rows, hidden).copy_(x)
    unaligned = torch.empty(rows + 1, device=device, dtype=target.dtype)[1:].copy_(target)
    others = [(strided, target, slice(None)), (moved, unaligned, slice(None))]
    if device != "cpu" or numpy_multiplies_a_row_alike_at_any_place():
        others.append((x[order], target[order], order))
    for other, index, places in others:
        for got, expected in zip(results_of(other, w, index), whole, strict=True):
            assert torch.equal(got, expected[places])


@pytest.mark.parametrize("bias", ["every other", "one for all"])
def test_strides_of_what_is_small(bias, device, product):
    """A bias and upstream gradients that are not contiguous."""
    (x, w, b), target = layer(20, 64, 300, device)
    b = (torch.cat([b, b]).view(2, 300).t().flatten()[::2] if bias == "every other" else b[:1].expand(300)).detach()
    found = L.linear_cross_entropy(x, w, target, b, reduction="none")
    wide, expected = exact((x, w), target, bias=b)
    compare(found, expected)
    upstream = torch.randn(40, device=device)[::2]
    gradients = torch.autograd.grad(found, (x, w), upstream)
    for got, right in zip(gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert error(got, right) < 8e-3
    assert product() == 2


def test_one_row_of_any_stride(device, product):
    """torch calls one row of a wider matrix contiguous, of the input as of the weight."""
    x = torch.randn(1, 12, device=device, dtype=torch.bfloat16)[:, :8].requires_grad_()
    w = torch.randn(1, 20, device=device, dtype=torch.bfloat16)[:, :8]
    value = L.linear_cross_entropy(x, w, torch.zeros(1, device=device, dtype=torch.int64), reduction="none")
    assert value.item() == 0
    assert (torch.autograd.grad(value.sum(), x)[0] == 0).all()
    assert product() == 2


@pytest.mark.parametrize(
    ("reason", "change"),
    {
        "float32": lambda x, w, t: ((x.float(), w.float(), t), {}),
        "rows that are no multiple of 16 bytes": lambda x, w, t: ((x[:, :60], w[:, :60].contiguous(), t), {}),
        "a weight that is not contiguous": lambda x, w, t: ((x, w.t().contiguous().t(), t), {}),
        "probabilities": lambda x, w, t: ((x, w, torch.rand(len(x), len(w), device=x.device).to(x.dtype)), {}),
        "a pair of classes": lambda x, w, t: ((x, w, t), {"target_b": t.flip(0), "lam": 0.3}),
        "smoothing with class weights": lambda x, w, t: ((x, w, t), {"label_smoothing": 0.1, "loss_weight": torch.ones_like(w[:, 0])}),
    }.items(),
)
def test_other_calls_take_chunks(reason, change, device, product):
    (x, w, _), target = layer(20, 64, 40, device)
    tensors, options = change(x, w, target)
    with torch.no_grad():
        found = L.linear_cross_entropy(*tensors, reduction="none", **options)
    assert product() == 0, reason
    assert found.shape == (20,)
    assert found.isfinite().all()


def test_memory_follows_from_the_rows(device, monkeypatch):
    """Without a gradient nothing of rows times classes is kept: beside the results, statistics of half tiles within a bound."""
    launch = kernels.load("linear.launch")
    sizes, empty = [], torch.empty
    (x, w, _), _ = layer(300, 64, 1000, device)

    def observed(*args, **kwargs):
        t = empty(*args, **kwargs)
        sizes.append(t.numel() * t.itemsize)
        return t

    monkeypatch.setattr(torch, "empty", observed)
    with torch.no_grad():
        L.linear_entropy(x, w)
    assert max(sizes) == 3 * 8 * 300 * 4  # planes, halves of tiles, rows
    assert max(sizes) <= launch.PARTS


@pytest.mark.gpu
@ON_GPU
@pytest.mark.large
def test_peak_memory(device):
    """Of 262,144 classes, forward alone: 64 MiB beside the results."""
    torch.use_deterministic_algorithms(False)
    x, w = (torch.randn(n, 512, device=device, dtype=torch.bfloat16) for n in (16_384, 262_144))
    target = torch.randint(262_144, (16_384,), device=device)

    def used():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        L.linear_selective_log_softmax(x, w, target, outputs=("entropy",))
        return torch.cuda.max_memory_allocated() - before

    with torch.no_grad():
        used()
        assert used() <= 64 * 2**20

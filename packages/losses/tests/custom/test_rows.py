"""Row-wise losses of one's own that know more than z: numbers of each class, and the sum of powers of a row's probabilities."""

import contextlib

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import triton
import triton.language as tl

from lossforge.losses import FormulaError, fuse_linear, ldam_loss, plain_torch, rowwise
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.testing import BOUNDS, error


@rowwise
@triton.jit
def nll(z):
    return z


@rowwise(hyper={"floor": 0.1, "gamma": 2.0})
@triton.jit
def focal(z, floor, gamma):
    """L = max((1 - p)^γ, floor) z"""
    return tl.maximum(tl.exp2(gamma * tl.log2(1.0 - tl.exp(-z))), floor) * z


@rowwise(hyper={"k": 3.0}, power="k")
@triton.jit
def power_score(z, s, k):
    """L = (1 - p^(k-1)) / (k - 1) - (1 - s) / k"""
    return (1.0 - tl.exp((1.0 - k) * z)) / (k - 1.0) - (1.0 - s) / k


@rowwise(hyper={"k": 2.0, "a": 0.3}, power="k")
@triton.jit
def coupled(z, s, k, a):
    """L = a z s + z ln s / k"""
    return a * z * s + z * tl.log(s) / k


@rowwise(hyper={"k": 2.0, "a": 0.3}, power="k")
@triton.jit
def coupled_by_hand(z, s, k, a):
    return a * z * s + z * tl.log(s) / k, a * s + tl.log(s) / k, a * z + z / (k * s)


def focal_torch(x, target, floor, gamma):
    z = F.cross_entropy(x, target, reduction="none")
    gamma = gamma[target] if gamma.ndim else gamma
    return ((1 - torch.exp(-z)) ** gamma).clamp(min=floor) * z


def power_score_torch(x, target, k):
    p = x.softmax(1)
    own = p.gather(1, target.unsqueeze(1)).squeeze(1)
    return (1 - own ** (k - 1)) / (k - 1) - (1 - (p**k).sum(1)) / k


def coupled_torch(x, target, k, a):
    z, s = F.cross_entropy(x, target, reduction="none"), (x.softmax(1) ** k).sum(1)
    a = a[target] if a.ndim else a
    return a * z * s + z * s.log() / k


def each(classes, device, low=0.2, high=1.5):
    """One number a class, in no order, every second element of its memory."""
    return torch.linspace(low, high, 2 * classes, device=device).flip(0)[::2]


CASES = {
    "numbers": (focal, focal_torch, {"floor": 0.05, "gamma": 1.5}),
    "a number of each class": (focal, focal_torch, {"floor": 0.05, "gamma": each}),
    "powers": (power_score, power_score_torch, {"k": 1.4}),
    "powers below 1": (power_score, power_score_torch, {"k": 0.5}),
    "powers and numbers": (coupled, coupled_torch, {"k": 2.5, "a": 0.7}),
    "powers and a number of each class": (coupled, coupled_torch, {"k": 3.0, "a": each}),
    "the gradient by hand": (coupled_by_hand, coupled_torch, {"k": 3.0, "a": each}),
}
SHAPES = {"one tile": (9, 12), "several tiles": (3, 9001), "image": (2, 5, 3, 4), "two classes": (9, 2)}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def made(hyper, classes, device):
    return {name: value(classes, device) if callable(value) else value for name, value in hyper.items()}


def in_dtype(hyper, dtype, device):
    return [torch.as_tensor(value, dtype=dtype, device=device) for value in hyper.values()]


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ("one tile", torch.float32, {}),
        ("one tile", torch.bfloat16, {"gradient": "backward"}),
        ("several tiles", torch.float32, {"gradient": "backward"}),
        ("several tiles", torch.bfloat16, {}),
        ("image", torch.float32, {"reduction": "none"}),
        ("two classes", torch.float32, {}),
    ],
    ids=str,
)
def test_value_and_gradient(case, shape, dtype, options, device):
    """Against autograd in float64; with class weights, bias, margins, scale, ignored rows, and gradients that arrive."""
    loss, plain, hyper = case
    rows, classes, *rest = SHAPES[shape]
    torch.manual_seed(0)
    x = (torch.randn(*rest, rows, classes, device=device) * 2).movedim((-2, -1), (0, 1)).to(dtype)  # classes next to each other
    target = torch.randint(0, classes, (rows, *rest), device=device)
    target.flatten()[1] = -100
    hyper, weight = made(hyper, classes, device), each(classes, device)
    bias, margin = each(classes, device, -2, 0), each(classes, device, 0.1, 0.5)
    leaf = x.clone().requires_grad_()
    value = loss(leaf, target, **hyper, weight=weight, class_bias=bias, class_margin=margin, scale=1.5, **options)
    upstream = torch.rand_like(value) + 0.5 if value.ndim else torch.full_like(value, 0.5)
    value.backward(upstream)

    counts, known = target != -100, target.clamp(min=0)
    own, per_class = F.one_hot(known, classes).movedim(-1, 1), (1, -1) + (1,) * len(rest)

    def in_torch(dtype):
        """Return value and gradient in plain torch."""
        wide = x.to(dtype).requires_grad_()
        w, b, m = (t.to(dtype) for t in (weight, bias, margin))
        moved = 1.5 * (wide - own * m.view(per_class)) + b.view(per_class)
        each_row = torch.where(counts, plain(moved, known, *in_dtype(hyper, dtype, device)) * w[known], 0.0)
        result = each_row if "reduction" in options else each_row.sum() / w[known][counts].sum()
        result.backward(upstream.to(dtype))
        return result.detach(), wide.grad

    exact = in_torch(torch.float64)
    for got, right, near, bound in zip((value, leaf.grad), exact, in_torch(torch.float32), (3e-6, BOUNDS[dtype]), strict=True):
        assert error(got, right) < error(near, right) + bound


@pytest.mark.parametrize("way", ["kernels", "plain torch", "float64"])
def test_margins_and_biases_are_ldam_and_balanced_softmax(way, device):
    torch.manual_seed(0)
    x = torch.randn(7, 10, dtype=torch.float64, device=device).clamp(-1, 1).requires_grad_()
    target, margin, counts = torch.arange(7, device=device), each(10, device), torch.arange(1.0, 11.0, device=device)
    log_prior = (counts / counts.sum()).log()
    own = F.one_hot(target, 10) * margin.double()
    expected = F.cross_entropy(30 * (x - own), target), F.cross_entropy(x + log_prior.double(), target)
    exact = [torch.autograd.grad(each, x)[0] for each in expected]
    leaf = x.detach().to(torch.float64 if way == "float64" else torch.float32).requires_grad_()

    def ours():
        return nll(leaf, target, class_margin=margin, scale=30.0), nll(leaf, target, class_bias=log_prior)

    with plain_torch() if way == "plain torch" else contextlib.nullcontext():
        values, ldam = ours(), ldam_loss(leaf, target, margin, 30.0)
    bound = 1e-13 if way == "float64" else 2e-6
    for value, right, slope in zip(values, expected, exact, strict=True):
        assert error(value, right) < bound
        assert error(torch.autograd.grad(value, leaf)[0], slope) < bound
    assert torch.equal(values[0], ldam)


def test_tensors_of_classes_have_gradients(device):
    """In float64 against differences; in float32 the same, with the kernels' gradient of the logits."""
    torch.manual_seed(0)
    x, target = torch.randn(5, 4, dtype=torch.float64, device=device), torch.tensor([0, 3, -100, 1, 3], device=device)
    tensors = [each(4, device, *ends).double() for ends in ((0.3, 1.2), (-1, 0), (0.1, 0.4))]

    def value(x, a, bias, margin):
        return coupled(x, target, k=2.5, a=a, class_bias=bias, class_margin=margin)

    leaves = [t.clone().requires_grad_() for t in (x, *tensors)]
    assert torch.autograd.gradcheck(value, leaves)
    assert torch.autograd.gradgradcheck(value, leaves)
    exact = torch.autograd.grad(value(*leaves), leaves)
    small = [t.detach().float().requires_grad_() for t in leaves]
    for got, right in zip(torch.autograd.grad(value(*small), small), exact, strict=True):
        assert error(got, right) < 2e-6
    (alone,) = torch.autograd.grad(value(small[0], *[t.detach() for t in small[1:]]), small[0])
    assert error(alone, exact[0]) < 2e-6


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_fused_with_a_linear_layer(case, mode, device):
    """By chunks of rows, and backward by chunks of classes, because there are more classes than rows."""
    loss, plain, hyper = case
    torch.manual_seed(0)
    features, head = torch.randn(6, 8, device=device), torch.randn(150, 8, device=device)
    target = torch.tensor([0, 149, -100, 70, 3, 128], device=device)
    given = {**made(hyper, 150, device), "class_bias": each(150, device), "class_margin": each(150, device), "reduction": "sum"}
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (features, head)]
        if dtype == torch.float32:
            value = fuse_linear(loss)(*leaves, target, **given, gradient=mode, chunk=2)
        else:
            own = F.one_hot(target.clamp(min=0), 150) * given["class_margin"].double()
            moved = leaves[0] @ leaves[1].T - own + given["class_bias"].double()
            arguments = in_dtype({name: given[name] for name in hyper}, dtype, device)
            value = torch.where(target == -100, 0.0, plain(moved, target.clamp(min=0), *arguments)).sum()
        found.append([value.detach(), *torch.autograd.grad(value * 0.5, leaves)])
    for got, exact in zip(*found, strict=True):
        assert error(got, exact) < 1e-5


def test_mixup_pairs(device):
    """A row whose second index is ignored has no number of a class for it: the formula would be nan at 0."""

    @rowwise(hyper={"k": 2.0, "q": 0.7}, power="k")
    @triton.jit
    def divided(z, s, k, q):
        return s * (1.0 - tl.exp(-q * z)) / q

    torch.manual_seed(0)
    x, q = torch.randn(4, 6, device=device, requires_grad=True), each(6, device)
    a, b = torch.tensor([0, 5, 2, -100], device=device), torch.tensor([1, -100, 2, -100], device=device)
    wide_x = x.detach().double().requires_grad_()
    p = wide_x.softmax(1)

    def one(index):
        own, number = p.gather(1, index.clamp(min=0)[:, None])[:, 0], q.double()[index.clamp(min=0)]
        return torch.where(index == -100, 0.0, p.square().sum(1) * (1 - own**number) / number)

    expected = 0.3 * one(a) + 0.7 * one(b)
    expected.sum().backward()
    for mode in ("forward", "backward"):
        value = divided(x, a, q=q, target_b=b, lam=0.3, reduction="sum", gradient=mode)
        (g,) = torch.autograd.grad(value, x)
        assert error(value, expected.sum()) < 2e-6
        assert error(g, wide_x.grad) < 2e-6
    assert error(divided(x, a, q=q, target_b=b, lam=0.3, reduction="none"), expected) < 2e-6


@pytest.mark.parametrize("by", ["kernels", pytest.param("torch", marks=pytest.mark.slow)])
def test_compiled(by, device, monkeypatch):
    """Without a graph break; another k, other numbers and a third number of rows compile nothing."""
    if by == "torch":
        monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def value(x, target, k, a, bias):
        return coupled(x, target, k=k, a=a, class_bias=bias, class_margin=a)

    compiled = torch.compile(value, fullgraph=True, backend=compiles)
    frames = []
    for rows, k in ((6, 2.0), (5, 3.0), (9, 1.5), (7, 0.5)):
        x, target = torch.randn(rows, 8, device=device, requires_grad=True), torch.randint(0, 8, (rows,), device=device)
        given = torch.tensor(k), each(8, device) * k, each(8, device)
        found, expected = compiled(x, target, *given), value(x, target, *given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad(each, x)[0] for each in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)
        frames.append(compiles.frame_count)
    assert frames[-1] == frames[1] <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges(dtype, device):
    """Classes of probability 0, a row with one class left, an ignored row of nan, a target out of reach, sums too small for float32."""
    inf = float("inf")
    x = torch.tensor([[0.0, -inf, 0.0], [5.0, -inf, -inf], [float("nan")] * 3, [0.0, 1e4, 0.0]], dtype=dtype, device=device)
    target = torch.tensor([0, 0, -100, 0], device=device)
    for mode in ("forward", "backward"):
        leaf = x.clone().requires_grad_()
        loss = power_score(leaf, target, k=2.0, reduction="sum", gradient=mode)
        loss.backward()
        assert loss.item() == pytest.approx(0.25 + 0.0 + 0.0 + 1.0)  # half of Σ (p - y)²
        half = torch.tensor([[-0.25, 0.0, 0.25], *[[0.0] * 3] * 3], dtype=dtype, device=device)
        torch.testing.assert_close(leaf.grad, half * 1.0)
    alone = torch.randn(3, 1, dtype=dtype, device=device, requires_grad=True)
    value = coupled(alone, torch.zeros(3, dtype=torch.int64, device=device), reduction="none")
    value.sum().backward()
    assert not value.any()
    torch.testing.assert_close(alone.grad, torch.zeros_like(alone), atol=1e-6, rtol=0)
    even = torch.zeros(1, 10, dtype=dtype, device=device, requires_grad=True)
    value = power_score(even, torch.tensor([3], device=device), k=60.0)  # Σ p^60 = 1e-59
    value.backward()
    assert value.item() == pytest.approx(1 / 59 - 1 / 60, rel=1e-5)
    assert even.grad.isfinite().all()


def test_module(device):
    x, target, gamma, bias = torch.randn(4, 5, device=device), torch.arange(4, device=device), each(5, device), each(5, device)
    module = focal.module(gamma=gamma, class_bias=bias, class_margin=None, reduction="sum")
    assert {*dict(module.named_buffers())} == {"gamma", "class_bias"}
    assert torch.equal(module(x, target), focal(x, target, gamma=gamma, class_bias=bias, reduction="sum"))
    module.gamma = 1.0
    assert torch.equal(module(x, target), focal(x, target, gamma=1.0, class_bias=bias, reduction="sum"))
    assert "class_margin" not in repr(module)


def test_reference_of_powers(device):
    """A reference gives the value, or also both gradients."""

    @rowwise(hyper={"k": 2.0}, power="k", reference=lambda z, s, k: (z * s, 3 * s, 5 * z))
    @triton.jit
    def steep(z, s, k):
        return z * s, 3.0 * s, 5.0 * z

    @rowwise(hyper={"k": 2.0}, power="k", reference=lambda z, s, k: (z, s))
    @triton.jit
    def short(z, s, k):
        return z * s, s, z

    x, target = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True), torch.arange(3, device=device)
    z, s = F.cross_entropy(x, target, reduction="none"), x.softmax(1).square().sum(1)
    expected = torch.autograd.grad((3 * s.detach() * z + 5 * z.detach() * s).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(steep(x, target, reduction="sum"), x)[0], expected)
    small = x.detach().float().requires_grad_()
    assert error(torch.autograd.grad(steep(small, target, reduction="sum"), small)[0], expected) < 2e-6
    with pytest.raises(FormulaError, match=r"must return the value or \(value, gradient by z, gradient by s\), got a tuple of 2"):
        short(x, target)


@rowwise(hyper={"k": 2.0}, power="k")
@triton.jit
def wrong_slope(z, s, k):
    return z * s, s, z * s


def test_check():
    for loss in (power_score, coupled, coupled_by_hand):
        report = Report(loss.__name__)
        check_formula(loss.loss, report, 0)
        assert report.passed, str(report)
        assert len(report.findings) == 4
    report = Report("wrong_slope")
    check_formula(wrong_slope.loss, report, 0)
    assert "gradient 2" in report.failures[0].detail


def test_errors():
    x, target, five = torch.zeros(4, 5), torch.arange(4), torch.ones(5)
    with pytest.raises(ValueError, match="k must be finite and above 0, got 0"):
        power_score(x, target, k=0.0)
    with pytest.raises(TypeError, match=r"k must be a number or a 0-d tensor, got a tensor of shape \(5,\)"):
        power_score(x, target, k=five)
    with pytest.raises(TypeError, match=r"floor must be a number or a 0-d tensor, got a tensor of shape \(5,\)"):
        focal(x, target, floor=five)
    with pytest.raises(ValueError, match=r"gamma must hold one number a class, shape \(5,\), got \(4,\)"):
        focal(x, target, gamma=torch.ones(4))
    with pytest.raises(TypeError, match=r"gamma must be of a floating dtype, got torch.int64"):
        focal(x, target, gamma=torch.ones(5, dtype=torch.int64))
    for name in ("class_bias", "class_margin"):
        with pytest.raises(ValueError, match=rf"{name} must hold one number a class, shape \(5,\), got \(5, 1\)"):
            nll(x, target, **{name: five[:, None]})
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got float"):
            nll(x, target, **{name: 0.5})
    with pytest.raises(ValueError, match=r"class_bias excludes softcap, got softcap=2\.0"):
        nll(x, target, class_bias=five, softcap=2.0)
    with pytest.raises(ValueError, match="class_margin excludes target_b"):
        nll(x, target, class_margin=five, target_b=target, lam=0.5)
    with pytest.raises(TypeError, match="input must be a tensor"):
        nll(1.0, target)
    with pytest.raises(ValueError, match="power must be the name of a hyper-parameter, one of k, got 'p'"):
        rowwise(hyper={"k": 2.0}, power="p")(power_score)
    with pytest.raises(ValueError, match=r"power must be the name of a hyper-parameter, one of none, got 2"):
        rowwise(power=2)(power_score)


def test_definition_errors():
    with pytest.raises(FormulaError, match=r"its arguments must be z, s \(under any name\), then those of hyper .*: k; got \(z, k\)"):

        @rowwise(hyper={"k": 2.0}, power="k")
        @triton.jit
        def without_sum(z, k):
            return z * k

    with pytest.raises(FormulaError, match="returns 2 values; a formula returns its value, or \\(value, 2 derivatives\\)"):

        @rowwise(hyper={"k": 2.0}, power="k")
        @triton.jit
        def half_a_gradient(z, s, k):
            return z * s, s

    with pytest.raises(FormulaError, match="class_bias is the name of an option that every loss has"):

        @rowwise(hyper={"class_bias": 2.0})
        @triton.jit
        def taken(z, class_bias):
            return z * class_bias

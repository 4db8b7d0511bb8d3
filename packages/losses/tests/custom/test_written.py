"""A gradient that a formula writes, or derives around a factor that it holds, is the same wherever and however the loss is computed.

Expected gradients are torch's, in float64, of formulas in which `.detach()` holds the factor.
"""

import contextlib
import io
import re

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd import forward_ad

from lossforge.kernels.math import hold, logistic
from lossforge.losses import FormulaError, boxes, check, elementwise, fuse_linear, plain_torch, rowwise
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.custom.written import SecondDerivativeError
from lossforge.losses.testing import error


@elementwise(hyper={"tau": 1.0})
@triton.jit
def written_bce(x, y, tau):
    p, _, log1p = logistic(x)
    return p * tau * (tl.maximum(x, 0.0) - x * y + log1p), p * tau * (p - y)


@elementwise(hyper={"tau": 1.0})
@triton.jit
def held_bce(x, y, tau):
    p, _, log1p = logistic(x)
    return hold(p) * tau * (tl.maximum(x, 0.0) - x * y + log1p)


@rowwise
@triton.jit
def written_dft(z):
    p = tl.exp(-z)
    return p * z, p


@rowwise
@triton.jit
def held_dft(z):
    """Dynamic Fine-Tuning (arXiv 2508.05629): L = sg(p) (-ln p)."""
    return hold(tl.exp(-z)) * z


@triton.jit
def side_and_slope(a, b):
    d = a - b
    return d * d, 2.0 * d


@boxes
@triton.jit
def written_corners(x1, y1, x2, y2, u1, v1, u2, v2):
    weight = 1.0 / (1.0 + (x2 - x1) * (y2 - y1))
    a, da = side_and_slope(x1, u1)
    b, db = side_and_slope(y1, v1)
    c, dc = side_and_slope(x2, u2)
    d, dd = side_and_slope(y2, v2)
    value = weight * (a + b + c + d)
    return value, weight * da, weight * db, weight * dc, weight * dd, -weight * da, -weight * db, -weight * dc, -weight * dd


@triton.jit
def of_area(x1, y1, x2, y2):
    return hold(1.0 / (1.0 + (x2 - x1) * (y2 - y1)))


@boxes
@triton.jit
def held_corners(x1, y1, x2, y2, u1, v1, u2, v2):
    return of_area(x1, y1, x2, y2) * ((x1 - u1) ** 2 + (y1 - v1) ** 2 + (x2 - u2) ** 2 + (y2 - v2) ** 2)


def bce_torch(x, y, tau=1.0, reduction="mean"):
    values = x.sigmoid().detach() * tau * F.binary_cross_entropy_with_logits(x, y.to(x.dtype), reduction="none")
    return values if reduction == "none" else values.mean()


def dft_torch(x, y, reduction="mean"):
    z = F.cross_entropy(x, y, reduction="none")
    values = (-z).exp().detach() * z
    return values if reduction == "none" else values.mean()


def corners_torch(x, y, reduction="mean"):
    values = (x - y.to(x.dtype)).square().sum(-1) / (1 + (x[..., 2:] - x[..., :2]).prod(-1)).detach()
    return values if reduction == "none" else values.mean()


LOSSES = {
    "elements": (written_bce, held_bce, bce_torch),
    "rows": (written_dft, held_dft, dft_torch),
    "boxes": (written_corners, held_corners, corners_torch),
}
EVERY = pytest.mark.parametrize(("kind", "held"), [(kind, held) for kind in LOSSES for held in (False, True)])


def case(kind, held, device):
    """Return the loss, the loss in torch, and a call's tensors."""
    x, y = torch.randn(6, 5, device=device), torch.rand(6, 5, device=device)
    if kind == "rows":
        y = torch.arange(6, device=device) % 5
    if kind == "boxes":
        x, y = (torch.cat([t[:, :2], t[:, :2] + t[:, 2:4].abs() + 0.5], 1) for t in (x, y))
    written, derived, plain = LOSSES[kind]
    return derived if held else written, plain, x, y


def exact(plain, x, y):
    wide = x.double().requires_grad_()
    return torch.autograd.grad(plain(wide, y), wide)[0]


def gradient(loss, x, y, **options):
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, y, **options), leaf)[0]


def compiled(loss, x, y, backend="aot_eager", **options):
    torch.compiler.reset()
    function = torch.compile(lambda a: loss(a * 1.0, y, **options), fullgraph=True, dynamic=True, backend=backend)
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def traced(loss, x, y):
    """Traced, saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(lambda a: loss(a, y), (x,), check_trace=False), file)
    file.seek(0)
    return gradient(lambda a, _: torch.jit.load(file)(a), x, y)


def exported(loss, x, y):
    class Criterion(torch.nn.Module):
        def forward(self, a):
            return loss(a, y)

    return gradient(lambda a, _: torch.export.export(Criterion(), (x,)).module()(a), x, y)


def in_plain_torch(way):
    def call(loss, x, y):
        with plain_torch():
            return way(loss, x, y)

    return call


def in_double(way):
    return lambda loss, x, y: way(loss, x.double(), y.double() if y.is_floating_point() else y)


def by_func(loss, x, y):
    return torch.func.grad(lambda a: loss(a, y))(x)


def by_vmap(loss, x, y):
    """The gradient of each row's own loss; the mean over rows is what is compared."""
    return torch.func.vmap(torch.func.grad(lambda a, b: loss(a[None], b[None])))(x, y) / len(x)


def by_tangents(loss, x, y):
    """The Jacobian in forward mode, a column a time."""
    return torch.func.jacfwd(lambda a: loss(a, y))(x)


def by_dual(loss, x, y):
    found = []
    for direction in torch.eye(x.numel(), dtype=x.dtype, device=x.device).view(-1, *x.shape):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(loss(forward_ad.make_dual(x, direction), y)).tangent)
    return torch.stack(found).view(x.shape)


WAYS = {
    "gradient in forward": lambda loss, x, y: gradient(loss, x, y, gradient="forward"),
    "gradient in backward": lambda loss, x, y: gradient(loss, x, y, gradient="backward"),
    "in the place of the logits": lambda loss, x, y: gradient(lambda a, b: loss(a * 1.0, b, inplace=True), x, y),
    "plain torch": in_plain_torch(gradient),
    "float64": in_double(gradient),
    "module": lambda loss, x, y: gradient(loss.module(), x, y),
    "reference": lambda loss, x, y: gradient(loss.reference, x, y),
    "compiled": compiled,
    "compiled, plain torch": in_plain_torch(compiled),
    "compiled, float64": in_double(compiled),
    "compiled torch.func": lambda loss, x, y: torch.compile(lambda a: by_func(loss, a, y), backend="aot_eager")(x),
    "torch.func.grad": by_func,
    "torch.func.vmap": by_vmap,
    "torch.func.jacfwd": by_tangents,
    "dual numbers": by_dual,
    "traced and saved": in_plain_torch(traced),
    "exported": in_plain_torch(exported),
}


@pytest.mark.each
@pytest.mark.parametrize("way", WAYS)
@EVERY
def test_every_way_gives_one_gradient(kind, held, way, device):
    if kind == "boxes" and way == "in the place of the logits":
        pytest.skip("boxes have no inplace")
    loss, plain, x, y = case(kind, held, device)
    assert error(WAYS[way](loss, x, y), exact(plain, x, y)) < 3e-6
    assert loss.gradient == ("derived" if held else "given")


@pytest.mark.parametrize("backend", ["kernels", "plain torch", "float64"])
@EVERY
def test_options_and_upstream_gradients(kind, held, backend, device):
    """Values a row, weighed, under any upstream gradient."""
    loss, plain, x, y = case(kind, held, device)
    x, y = (t.double() if backend == "float64" and t.is_floating_point() else t for t in (x, y))
    weight = torch.rand(5 if kind == "rows" else 6, 1, device=device, dtype=x.dtype).squeeze(1 if kind != "elements" else ())
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with plain_torch() if backend == "plain torch" else contextlib.nullcontext():
        values = loss(leaf, y, reduction="none", weight=weight)
        upstream = torch.linspace(-1, 2, values.numel(), device=device).view(values.shape)
        (got,) = torch.autograd.grad(values, leaf, upstream.to(values.dtype))
    expected = plain(wide, y, reduction="none") * (weight[y] if kind == "rows" else weight).double()
    assert error(values, expected) < 1e-6
    assert error(got, torch.autograd.grad(expected, wide, upstream.double())[0]) < 3e-6


@pytest.mark.parametrize("backend", ["kernels", "plain torch", "float64", "compiled", "torch.func"])
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", ["elements", "rows"])
def test_fused_with_a_layer(kind, held, mode, backend, device):
    loss, plain, _, y = case(kind, held, device)
    dtype = torch.float64 if backend == "float64" else torch.float32
    features, head = torch.randn(6, 8, device=device, dtype=dtype), torch.randn(5, 8, device=device, dtype=dtype) / 2
    y = y.to(dtype) if kind == "elements" else y
    if kind == "elements":
        y = torch.arange(-1, 5, device=device)
    fused = fuse_linear(loss)
    leaves = [features.requires_grad_(), head.requires_grad_()]
    with plain_torch() if backend == "plain torch" else contextlib.nullcontext():
        if backend == "torch.func":
            got = torch.func.grad(lambda *a: fused(*a, y, gradient=mode, chunk=4), (0, 1))(*leaves)
        else:
            torch.compiler.reset()
            call = torch.compile(fused, fullgraph=True, backend="aot_eager") if backend == "compiled" else fused
            got = torch.autograd.grad(call(*leaves, y, gradient=mode, chunk=4), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    target = y if kind == "rows" else (y[:, None] == torch.arange(5, device=device)).double()
    expected = torch.autograd.grad(plain(wide[0] @ wide[1].T, target), wide)
    for ours, theirs in zip(got, expected, strict=True):
        assert error(ours, theirs) < 3e-6


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("loss", [written_dft, held_dft], ids=lambda loss: loss.__name__)
def test_fused_in_half_precision(loss, mode, device):
    """On GPUs from sm_90 on the product computes the loss."""
    features, head = (torch.randn(n, 64, device=device).bfloat16().requires_grad_() for n in (64, 96))
    y = torch.arange(64, device=device)
    with torch.no_grad():
        head /= 8
    got = torch.autograd.grad(fuse_linear(loss)(features, head, y, gradient=mode, logits="float32"), (features, head))
    wide = [t.detach().double().requires_grad_() for t in (features, head)]
    expected = torch.autograd.grad(dft_torch(wide[0] @ wide[1].T, y), wide)
    for ours, theirs in zip(got, expected, strict=True):
        assert error(ours, theirs) < 2**-7


@pytest.mark.parametrize("backend", ["kernels", "float64"])
def test_targets_and_hyper_parameters_are_differentiated_by_the_value(backend, device):
    """A written gradient is one of the logits; it stays so where others are differentiated, too."""
    _, _, x, y = case("elements", False, device)
    dtype = torch.float64 if backend == "float64" else torch.float32
    tau = torch.linspace(0.5, 1.5, 5, device=device)
    ours, wide = ([t.to(d).requires_grad_() for t in (x, y, tau)] for d in (dtype, torch.float64))
    got = torch.autograd.grad(written_bce(ours[0], ours[1], tau=ours[2]), ours)
    expected = torch.autograd.grad(bce_torch(*wide), wide)
    for one, other in zip(got, expected, strict=True):
        assert error(one, other) < 3e-6
    gx, gy, gt = torch.autograd.grad(written_bce(ours[0], ours[1], tau=ours[2]), ours, create_graph=True)
    for first, by in ((gx, 0), (gx, 1), (gx, 2), (gy, 0), (gt, 0)):
        with pytest.raises(SecondDerivativeError, match="written_bce: it has no second derivative"):
            torch.autograd.grad(first.sum(), ours[by], retain_graph=True)
    of_tau = torch.autograd.grad(gy.sum(), ours[2], retain_graph=True)[0]
    assert error(of_tau, -(x.double().sigmoid() * x.double()).sum(0) / x.numel()) < 3e-6


def twice(loss, x, y):
    leaf = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf, y), leaf, create_graph=True)
    return torch.autograd.grad(g.square().sum(), leaf)[0]


def twice_compiled(loss, x, y):
    torch.compiler.reset()
    return twice(torch.compile(loss, fullgraph=True, backend="eager"), x, y)


def twice_by_func(outer, inner):
    def second(loss, x, y):
        found = outer(lambda a: inner(lambda b: loss(b, y))(a).square().sum())(x)
        return found.detach()

    return second


TWICE = {
    "kernels": twice,
    "plain torch": in_plain_torch(twice),
    "float64": in_double(twice),
    "compiled without a second compiler": in_plain_torch(twice_compiled),
    "reverse over reverse": twice_by_func(torch.func.grad, torch.func.grad),
    "reverse over forward": twice_by_func(torch.func.grad, torch.func.jacfwd),
    "forward over reverse": twice_by_func(torch.func.jacfwd, torch.func.grad),
    "forward over forward": twice_by_func(torch.func.jacfwd, torch.func.jacfwd),
}


@pytest.mark.parametrize("way", TWICE)
@EVERY
def test_second_derivatives(kind, held, way, device):
    """A held factor is a constant to the second derivative, too; of a written gradient there is none, and the error says what to do."""
    loss, plain, x, y = case(kind, held, device)
    if held:
        assert error(TWICE[way](loss, x, y), twice(plain, x.double(), y)) < 1e-5
    else:
        cure = rf"^{loss.__name__}: it has no second derivative, because the formula writes its gradient.*lossforge\.kernels\.math\.hold"
        with pytest.raises(SecondDerivativeError, match=cure):
            TWICE[way](loss, x, y)


@elementwise
@triton.jit
def all_held(x, y):
    return hold(x) * y


@boxes
@triton.jit
def first_held(x1, y1, x2, y2, u1, v1, u2, v2):
    return (hold(x1) - u1) ** 2 + hold(y1 + x2 - y2) * v2


@boxes
@triton.jit
def step(x1, y1, x2, y2, u1, v1, u2, v2):
    return tl.where(x1 > u1, 1.0, 0.5)


@pytest.mark.parametrize("way", ["gradient in backward", "plain torch", "float64", "compiled, plain torch", "torch.func.grad"])
@pytest.mark.parametrize(("loss", "of_both"), [(all_held, False), (all_held, True), (first_held, False), (first_held, True), (step, False)])
def test_gradient_is_0_where_everything_is_held(loss, of_both, way, device):
    """A loss whose value does not follow from the logits for autograd, be it with a target that is differentiated."""
    x, y = torch.rand(3, 4, device=device), torch.rand(3, 4, device=device, requires_grad=of_both)
    assert torch.equal(WAYS[way](loss, x, y), torch.zeros(3, 4, device=device))
    assert loss.reference(x, y, reduction="none").shape == ((3, 4) if loss is all_held else (3,))


def test_operator_of_a_written_gradient():
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    arguments = ("name", y * 2, [x], [torch.ones(5)], [y.detach()])
    assert set(torch.library.opcheck(torch.ops.lossforge.written.default, arguments).values()) == {"SUCCESS"}


@EVERY
def test_check_holds_factors(kind, held, device):
    """Differences of the value leave held factors as they are. Without `hold` a factor of the value is no constant, and check says so."""
    loss, *_ = case(kind, held, device)
    report = Report(loss.__name__)
    check_formula(loss.loss, report, 0)
    assert report.passed == held, str(report)


@elementwise
@triton.jit
def written_and_held(x, y):
    p, _, log1p = logistic(x)
    return hold(p) * (tl.maximum(x, 0.0) - x * y + log1p), p * (p - y)


@pytest.mark.slow
def test_all_checks_pass_for_a_written_gradient_with_a_held_factor(device):
    report = check(written_and_held, device=device)
    assert report.passed, str(report)
    assert {f.name for f in report.findings} >= {"second derivative", "torch.func.grad", "float32"}


@elementwise(reference=lambda x, y: (x - y).square())
@triton.jit
def value_by_reference(x, y):
    d = x - y
    return d * d, d


def bits_reference(x, y):
    return (x - y).square(), x - y


@triton.jit
def bits(x, y):
    d = x - y
    return d * d, d + tl.umulhi(tl.where(x == x, 0, 0).to(tl.uint32), 0)


@pytest.mark.parametrize("loss", [value_by_reference, elementwise(bits, reference=bits_reference)], ids=["value", "value and gradient"])
def test_a_reference_does_not_replace_the_written_gradient(loss, device):
    """Twice as large by autograd of the reference."""
    x, y = torch.randn(7, device=device), torch.rand(7, device=device)
    for way in ("plain torch", "float64", "torch.func.grad"):
        torch.testing.assert_close(WAYS[way](loss, x, y).float(), (x - y) / 7)
    torch.testing.assert_close(loss.reference(x, y), (x - y).square().mean())


def test_a_reference_of_boxes_may_return_gradients(device):
    @boxes(reference=lambda a, b: ((a - b).square().sum(-1), a - b, b - a))
    @triton.jit
    def squares(x1, y1, x2, y2, u1, v1, u2, v2):
        a, b, c, d = x1 - u1, y1 - v1, x2 - u2, y2 - v2
        none = tl.umulhi(tl.where(x1 == x1, 0, 0).to(tl.uint32), 0)
        return a * a + b * b + c * c + d * d + none, a, b, c, d, -a, -b, -c, -d

    x, y = (torch.rand(3, 4, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value = squares(x, y, reduction="sum")
    assert error(value, (x - y).square().sum()) < 1e-6
    for got, expected in zip(torch.autograd.grad(value, (x, y)), (x - y, y - x), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_reference_that_returns_something_else_is_refused(device):
    x = torch.zeros(3, device=device, dtype=torch.float64)
    for formula, returned, message in (
        (bits, (x, x, x), r"bits: reference= must return the value or \(value, gradient\), got a tuple of 3"),
        (bits, 0.0, r"bits: reference= must return the value or \(value, gradient\), got float"),
        (side, (x, x), "side: reference= must return the value, a tensor, for the gradient is derived; got a tuple of 2"),
    ):
        with pytest.raises(FormulaError, match=message):
            elementwise(formula, reference=lambda *_, returned=returned: returned)(x, x)


@triton.jit
def side(x, y):
    return hold(x - y) * (x - y)


@pytest.mark.parametrize("forgets", [False, True])
def test_check_finds_a_reference_that_forgets_to_hold(forgets):
    report = Report("side")
    check_formula(elementwise(side, reference=lambda x, y: (x - y) * (x - y if forgets else (x - y).detach())).loss, report, 0)
    assert report.passed != forgets, str(report)
    if forgets:
        (failure,) = report.failures
        assert failure.name == "reference against the formula"
        assert re.search(r"gradient is .*, the formula's", failure.detail), failure


def test_a_gradient_without_a_counterpart_in_torch_is_asked_for(device):
    loss = elementwise(bits, reference=lambda x, y: (x - y).square())
    message = r"bits: reference= must return \(value, gradient\), because .* translated .*tl.umulhi has no plain-torch counterpart"
    with pytest.raises(FormulaError, match=message):
        loss(torch.zeros(3, device=device, dtype=torch.float64), torch.zeros(3, device=device, dtype=torch.float64))

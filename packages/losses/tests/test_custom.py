"""Losses of one's own: derived gradients, their plain-torch counterparts, what is refused, and where they work."""

import importlib.util
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language import sigmoid
from triton.language.extra import libdevice

from lossforge.kernels.formulas import asymmetric, bce, focal, poly, regression
from lossforge.kernels.math import exp, log1p_unit, logistic, powers, reciprocal, tanh
from lossforge.losses import FormulaError, boxes, check, distance_box_iou_loss, elementwise, rowwise
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.custom.derive import with_gradients
from lossforge.losses.custom.twin import torch_of
from lossforge.losses.formulas import DeviceFunctions
from lossforge.losses.testing import error

HALF = tl.constexpr(0.5)


@triton.jit
def bump(a, b, c=2.0):
    """Two values, an argument left to its default."""
    s = exp(-a * a) + HALF
    s += b
    return s, a * c


@triton.jit
def winding(x, y, gamma):
    """Every kind of statement and most operations."""
    d: tl.tensor = x - y
    u, v = bump(d, gamma)
    p, not_p, log1p = logistic(x)
    w, _ = powers(p, gamma + 1.0)
    z = tl.where((d > 0) & (y < 0.9), u * v, tl.maximum(u, v))
    z -= tl.minimum(v, 0.25) / (1.0 + x * x)
    t = tanh(d) + tl.sqrt(1.0 + d * d) + tl.abs(d) + tl.sin(x) * tl.cos(x) + tl.sigmoid(d) + tl.erf(d)
    e = log1p_unit(tl.exp(-tl.abs(x))) + tl.log(2.0 + d * d) + tl.log2(1.0 + p) + tl.exp2(d * 0.1) + reciprocal(1.0 + not_p)
    r = tl.rsqrt(1.0 + x * x).to(tl.float32) + tl.clamp(d, -0.7, 0.7) + tl.fma(x, d, y) + tl.floor(x) * 0.0
    return -(w * log1p) + z + t * 0.1 + e - +r


@triton.jit
def ends_with_a_call(x, y):
    return winding(x, y, 1.5)


FORMULAS = {
    "winding": (winding, (1.5,)),
    "ends with a call": (ends_with_a_call, ()),
}
OURS = {
    "focal": (focal.focal, (1.5, 0.3)),
    "asymmetric": (asymmetric.asymmetric_clipped, (2.5, 1.5, 0.05, 1.3)),
    "asymmetric without clip": (asymmetric.asymmetric_unclipped, (2.5, 1.5, 0.0, 1.3)),
    "poly_bce": (poly.poly_bce, (1.0, 1.5, 0.3)),
    "huber": (regression.huber, (1.0,)),
    "bce_with_logits": (bce.bce_with_logits, (1.2,)),
}


def points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator, dtype=torch.float64) * 2
    return x.requires_grad_(), torch.rand(500, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", FORMULAS)
def test_derived_gradient_is_autograds(name):
    """The derivative written out, translated to torch, against autograd of the value translated to torch."""
    formula, hyper = FORMULAS[name]
    x, y = points()
    value = torch_of(formula)(x, y, *hyper)
    (expected,) = torch.autograd.grad(value.sum(), x)
    again, gradient = torch_of(with_gradients(formula))(x.detach(), y, *hyper)
    torch.testing.assert_close(again, value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OURS)
def test_translation_finds_our_own_gradients(name):
    """Autograd of a shipped formula's value, translated, against the gradient that the formula returns."""
    formula, hyper = OURS[name]
    x, y = points()
    value, gradient = torch_of(formula)(x, y, *hyper)
    (expected,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


BESIDE_ITS_REFERENCE = """
from lossforge.losses.device_names import exp, log1p_unit, tl

WIDTH = 0.5

def scaled(x):
    return x / WIDTH

def soft_distance(x, y, gamma):
    return log1p_unit(exp(-tl.abs(scaled(x - y)))) * gamma

def soft_distance_and_slope(x, y, gamma):
    return soft_distance(x, y, gamma), x
"""


def test_a_plain_function_becomes_a_device_function(tmp_path):
    """As built-in losses have them: in a file without Triton, whose names stay as they are."""
    file = tmp_path / "plain_formula.py"
    file.write_text(BESIDE_ITS_REFERENCE)
    spec = importlib.util.spec_from_file_location("plain_formula", file)
    plain = sys.modules["plain_formula"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    before = set(vars(plain))
    x, y = points()
    value, gradient = torch_of(DeviceFunctions()(plain.soft_distance))(x, y, 1.5)
    wanted = torch.log1p(torch.exp(-2 * (x - y).abs())) * 1.5
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-9)
    assert torch_of(DeviceFunctions()(plain.soft_distance_and_slope))(x, y, 1.5)[1] is x  # a gradient that is given stays
    with pytest.raises(FormulaError, match="returns 2 values; a formula returns its value, or \\(value, 8 derivatives\\)"):
        DeviceFunctions()(plain.soft_distance_and_slope, variables=8)
    assert set(vars(plain)) == before


@elementwise(hyper={"delta": 1.0})
@triton.jit
def charbonnier(x, y, delta):
    """L = sqrt((x - y)² + δ²) - δ"""
    d = x - y
    return tl.sqrt(d * d + delta * delta) - delta


def charbonnier_torch(x, y, delta):
    return ((x - y).square() + delta**2).sqrt() - delta


@elementwise
@triton.jit
def without_hyper(x, y):
    return (x - y) * (x - y)


@elementwise(reference=lambda x, y: F.softplus(x) - x * y)
@triton.jit
def with_reference(x, y):
    p, _, log1p = logistic(x)
    return tl.maximum(x, 0.0) - x * y + log1p, p - y


def test_kernel_computes_value_and_gradient(device):
    x, y = (t.detach().float().view(20, 25).to(device) for t in points())
    for loss, hyper, plain in ((charbonnier, {"delta": 0.5}, charbonnier_torch), (without_hyper, {}, lambda x, y: (x - y).square())):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        value = loss(leaf, y, **hyper, weight=y[:1])
        value.backward()
        expected = (plain(wide, y.double(), **hyper) * y[:1]).mean()
        expected.backward()
        assert error(value, expected) < 1e-6
        assert error(leaf.grad, wide.grad) < 1e-6
    index = torch.tensor([*range(18), -1, -2], device=device)
    one_hot = (index.unsqueeze(1) == torch.arange(25, device=device)).float()
    expected = charbonnier_torch(x, one_hot, 0.5)[:-1].mean()
    assert error(charbonnier(x, index, delta=0.5), expected) < 1e-6


def test_a_tensor_as_the_last_hyper_parameter(device):
    x, y = (t.detach().float().view(20, 25).to(device) for t in points())
    delta = torch.linspace(0.1, 1.0, 25, device=device)
    expected = charbonnier_torch(x, y, delta).mean()
    assert error(charbonnier(x, y, delta=delta), expected) < 1e-6
    module = charbonnier.module(delta=delta)
    assert "delta" in dict(module.named_buffers())
    assert error(module(x, y), expected) < 1e-6


def test_module_keeps_its_options():
    x, y = (t.detach().float() for t in points())
    module = charbonnier.module(delta=0.5, reduction="sum")
    assert torch.equal(module(x, y), charbonnier(x, y, delta=0.5, reduction="sum"))
    assert "delta=0.5" in repr(module)
    with pytest.raises(TypeError, match=r"CustomModule\(\) got an unexpected keyword argument 'delto'; did you mean 'delta'"):
        charbonnier.module(delto=0.5)


def test_names_survive_a_pickle():
    assert pickle.loads(pickle.dumps(charbonnier)) is charbonnier
    assert charbonnier.__doc__ == "L = sqrt((x - y)² + δ²) - δ"
    assert "delta=1.0" in repr(charbonnier)
    assert "derived" in repr(charbonnier)
    assert "given" in repr(with_reference)


def test_second_definition_takes_its_own_formula():
    made = []
    for _ in range(2):

        @elementwise
        @triton.jit
        def twice(x, y):
            return (x - y) * 2.0

        made.append(twice)
    assert made[0].loss.name != made[1].loss.name


@rowwise(hyper={"q": 0.7})
@triton.jit
def bounded(z, q):
    """L = (1 - exp(-q z)) / q"""
    return (1.0 - tl.exp(-q * z)) / q


@boxes(hyper={"eps": 1e-6})
@triton.jit
def distance_iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """L = 1 - I/U + ρ²/d²"""
    w, h = tl.minimum(x2, u2) - tl.maximum(x1, u1), tl.minimum(y2, v2) - tl.maximum(y1, v1)
    inter = tl.where((w > 0) & (h > 0), w * h, 0.0)
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - inter
    wide, high = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    dx, dy = (x1 + x2) - (u1 + u2), (y1 + y2) - (v1 + v2)
    return 1.0 - inter / (union + eps) + 0.25 * (dx * dx + dy * dy) / (wide * wide + high * high + eps)


def test_a_row_wise_loss_of_ones_own(device):
    x = torch.randn(9, 12, device=device, requires_grad=True)
    target = torch.arange(9, device=device)
    weight = torch.rand(12, device=device)
    (g,) = torch.autograd.grad(bounded(x, target, q=0.5, weight=weight), x)
    wide = x.detach().double().requires_grad_()
    p = wide.softmax(1)[torch.arange(9), target]
    expected = (weight[target] * (1 - p**0.5) / 0.5).sum() / weight[target].sum()
    expected.backward()
    assert error(bounded(x, target, q=0.5, weight=weight), expected) < 1e-6
    assert error(g, wide.grad) < 1e-6
    with pytest.raises(TypeError, match="target must hold class indices"):
        bounded(x, x.softmax(1))


def test_a_loss_of_boxes_of_ones_own(device):
    """Beside the library's own, whose gradient is written out."""
    corner, side = torch.rand(2, 50, 2, device=device), torch.rand(2, 50, 2, device=device) + 0.1
    one, other = (torch.cat([c, c + s], -1).requires_grad_() for c, s in zip(corner, side, strict=True))
    ours = torch.autograd.grad(distance_iou(one, other, eps=1e-12), (one, other))
    theirs = torch.autograd.grad(distance_box_iou_loss(one, other, "mean"), (one, other))
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b) < 1e-5
    assert error(distance_iou.module(reduction="sum")(one, other), distance_box_iou_loss(one, other, "sum")) < 1e-5


@pytest.mark.parametrize("loss", [bounded, distance_iou], ids=lambda loss: loss.__name__)
def test_formulas_of_rows_and_boxes_are_checked(loss):
    report = Report(loss.__name__)
    check_formula(loss.loss, report, 0)
    assert report.passed, str(report)
    assert len(report.findings) >= 3


@pytest.mark.parametrize("loss", [charbonnier, *([bounded, distance_iou] if torch.cuda.is_available() else [])], ids=repr)
def test_all_checks_pass(loss, device):
    report = check(loss, device=device)
    assert report.passed, str(report)
    assert len(report.findings) > 12
    assert {f.name for f in report.findings if f.passed is None} <= {"CUDA graph, no host synchronisation"}


@elementwise(reference=lambda x, y: (x - y).abs())
@triton.jit
def wrong_reference(x, y):
    d = x - y
    return d * d


def test_check_finds_a_wrong_reference():
    report = Report("wrong_reference")
    check_formula(wrong_reference.loss, report, 0)
    (failure,) = report.failures
    assert failure.name == "reference against the formula"
    assert re.match(r"at x=.*, y=.*: formula .*, reference", failure.detail)
    assert not report


def refused(function):
    return pytest.raises(FormulaError, match=function)


def test_what_cannot_be_derived_is_named():
    @triton.jit
    def branches(x, y):
        if y > 0:
            x = -x
        return x

    @triton.jit
    def sums(x, y):
        return tl.sum(x * y, 0)

    @triton.jit
    def remainder(x, y):
        return x % 2.0

    @triton.jit
    def three(x, y):
        return x, y, x

    @triton.jit
    def other_names(x, y, beta):
        return x - y

    @triton.jit
    def taken(x, y, dim):
        return x - y

    for formula, hyper, message in (
        (branches, {}, r"branches: if is no formula: .* choose by tl.where, in `if y > 0:` \(.*test_custom.py:\d+\)"),
        (sums, {}, r"sums: has no derivative here; return the gradient beside the value, in `tl.sum\(x \* y, 0\)`"),
        (remainder, {}, r"remainder: has no derivative here.* in `x % 2.0`"),
        (three, {}, "three: returns 3 values"),
        (other_names, {"gamma": 1.0}, r"its arguments must be x, y .*: gamma; got \(x, y, beta\)"),
        (taken, {"dim": 1.0}, "taken: dim is the name of an option that every loss has"),
        (lambda x, y: x, {}, "a formula is a @triton.jit function, got function"),
    ):
        with refused(message):
            elementwise(formula, hyper=hyper)
    with refused(r"zeros: zeros_like cannot stand here: .* write tl.where\(z == z, 0.0, 0.0\), in `tl.zeros_like\(z\)`"):

        @rowwise
        @triton.jit
        def zeros(z):
            return z + tl.zeros_like(z), 1.0

    with pytest.raises(TypeError, match=r"hyper\['delta'\] must be a number, got str"):
        elementwise(sums, hyper={"delta": "a"})


PLAIN = 0.5
TWO = tl.constexpr(2)


def test_what_the_compiler_refuses_is_refused_without_a_gpu():
    beta = 0.3

    @triton.jit
    def reads_global(x, y):
        return PLAIN * x - y

    @triton.jit
    def reads_closure(x, y):
        return beta * x - y

    @triton.jit
    def calls_one(x, y):
        return reads_global(x, y), 1.0

    @triton.jit
    def joins(x, y):
        return tl.where((x > 0) and (y > 0), x, y), 1.0

    @triton.jit
    def either(x, y):
        return tl.where((x > 0) or (y > 0), x, y)

    @triton.jit
    def negates(x, y):
        return tl.where(not (x > 0), x, y)

    @triton.jit
    def chains(x, y):
        return tl.where(0 < x < 1, x, y)

    @triton.jit
    def chooses(x, y):
        return x if x > y else y

    @triton.jit
    def undefined(x, y):
        return marginn * x - y  # noqa: F821

    @triton.jit
    def too_early(x, y):
        a = b * x  # noqa: F821
        b = a + y
        return b * y

    @triton.jit
    def misspelt(x, y):
        return tl.maxmum(x, y), 1.0

    @triton.jit
    def python_min(x, y):
        return min(x, y)

    @triton.jit
    def torch_exp(x, y):
        return torch.exp(x) * y

    @triton.jit
    def without_module(x, y):
        return sigmoid(x - y)

    @triton.jit
    def of_one_maker(x, y):
        return libdevice.tanh(x - y)

    @triton.jit
    def fifth(x, y):
        return (x - y) ** 5

    @triton.jit
    def of_variable(x, y):
        return 2.0**x - y

    instead = r"write PLAIN = tl.constexpr\(0.5\), or make it a hyper-parameter: hyper=\{'PLAIN': 0.5\}, in `PLAIN` \(.*test_custom.py:"
    for formula, message in (
        (reads_global, f"reads_global: PLAIN is a float from outside of the function, which Triton does not compile; {instead}"),
        (reads_closure, r"reads_closure: beta is a float from outside of the function.* write beta = tl.constexpr\(0.3\)"),
        (calls_one, "reads_global: PLAIN is a float from outside"),
        (joins, r"joins: `and` takes one truth value, .* write \(a\) & \(b\), in `x > 0 and y > 0`"),
        (either, r"either: `or` takes one truth value, .* write \(a\) | \(b\)"),
        (negates, "negates: `not` takes one truth value"),
        (chains, r"chains: Triton takes no chained comparison; write \(a < b\) & \(b < c\), in `0 < x < 1`"),
        (chooses, r"chooses: `if` takes one truth value.* write tl.where\(a, b, c\)"),
        (undefined, "undefined: marginn is not defined, in `marginn`"),
        (too_early, "too_early: b is not defined"),
        (misspelt, r"misspelt: triton.language has no function maxmum; write tl.maximum, in `tl.maxmum\(x, y\)`"),
        (python_min, "python_min: calls min, which is neither .*; write tl.minimum"),
        (torch_exp, "torch_exp: calls torch.exp, which is neither .*; write tl.exp"),
        (without_module, "without_module: sigmoid is called without its module; write tl.sigmoid"),
        (of_one_maker, "of_one_maker: calls libdevice.tanh, which is neither .*; write tl.tanh"),
        (fifth, r"fifth: an exponent must be one of 2, 3, 4, as a constant; write tl.sqrt\(a\) for a \*\* 0.5"),
        (of_variable, "of_variable: an exponent must be one of 2, 3, 4"),
    ):
        with refused(message):
            elementwise(formula)
    if isinstance(joins, triton.runtime.JITFunction):
        return  # which cannot be made of a lambda
    with refused("a formula is a function written with def, got a lambda"):
        elementwise(triton.jit(lambda x, y: x - y))


@triton.jit
def bent(x):
    return tl.tanh(x) ** 2


@elementwise(hyper={"delta": 1.0})
@triton.jit
def powers_and_tanh(x, y, delta):
    d = x - y
    return d**2 + d**3 * delta**2 / 8.0 + (d**TWO + 1.0) ** 4.0 / 64.0 + tl.tanh(d * delta) * 2**3 + bent(d)


@elementwise
@triton.jit
def powers_with_gradient(x, y):
    d = x - y
    return d**2 + bent(d), 2.0 * d + 2.0 * tl.tanh(d) * (1.0 - tl.tanh(d) ** 2)


def test_whole_powers_and_tanh_are_written_out(device):
    """Triton has neither; value and gradient beside torch's, in a formula, in a function that it calls, and beside a given gradient."""

    def plain(x, y, delta):
        d = x - y
        return d.pow(2) + d.pow(3) * delta**2 / 8 + (d.pow(2) + 1).pow(4) / 64 + 8 * torch.tanh(d * delta) + torch.tanh(d).pow(2)

    x, y = (t.detach().float().view(20, 25).to(device) for t in points())
    for loss, hyper, expected in (
        (powers_and_tanh, {"delta": 0.7}, lambda x, y: plain(x, y, 0.7)),
        (powers_with_gradient, {}, lambda x, y: (x - y).square() + torch.tanh(x - y).square()),
    ):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        value, exact = loss(leaf, y, **hyper), expected(wide, y.double()).mean()
        value.backward()
        exact.backward()
        assert error(value, exact) < 1e-6
        assert error(leaf.grad, wide.grad) < 1e-6
        assert error(loss.reference(x.double(), y.double(), **hyper), exact) < 1e-12
        report = Report(loss.__name__)
        check_formula(loss.loss, report, 0)
        assert report.passed, str(report)


def test_without_a_counterpart_in_torch_the_reference_is_asked_for():
    @elementwise
    @triton.jit
    def bits(x, y):
        d = x - y
        return d * d + tl.umulhi(tl.zeros_like(x).to(tl.uint32), tl.zeros_like(x).to(tl.uint32)), 2.0 * d

    with refused("tl.umulhi has no plain-torch counterpart; give reference="):
        bits(torch.zeros(3, dtype=torch.float64), torch.zeros(3))


def test_call_errors():
    x = torch.zeros(3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'gama'\. It takes delta, "):
        charbonnier(x, x, gama=1)
    with pytest.raises(TypeError, match="delta must be a number, got str"):
        charbonnier(x, x, delta="a")
    with pytest.raises(ValueError, match=r"target must have the shape of input, \(3,\), got \(2,\)"):
        charbonnier(x, x[:2])


def shell(*words):
    done = subprocess.run([sys.executable, "-m", "lossforge.losses.check", *words], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_check_in_the_shell(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import triton\nimport triton.language as tl\nfrom lossforge.losses import elementwise\n\n"
        "@elementwise\n@triton.jit\ndef wrong(x, y):\n    return (x - y) * (x - y), x - y\n"
    )
    status, output = shell(f"{file}:wrong")
    assert status == 1, output
    assert re.search(r"FAIL  gradient against differences, random +at x=.*, y=.*: value .*, gradient .*, differences", output)
    assert re.search(r"FAIL  float32 +dense, reduction='mean', gradient='forward': value off by .*, gradient by", output)
    for words, message in (
        ((f"{file}:absent",), "absent in .* does not exist; losses there: wrong"),
        (("nowhere.py:loss",), "no file nowhere.py"),
        (("focall",), "a loss is named .*In the registry: mae"),
    ):
        status, output = shell(*words)
        assert status == 2, output
        assert re.search(message, output), output

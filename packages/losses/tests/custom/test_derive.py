"""Gradients that are derived from a formula, and formulas that have none."""

import pytest
import torch
import triton
import triton.language as tl

from lossforge.kernels.math import exp, hold, log1p_unit, logistic, power, powers, reciprocal, tanh
from lossforge.losses import FormulaError, elementwise, rowwise
from lossforge.losses.formulas.derive import with_gradients
from lossforge.losses.formulas.translate import torch_of

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


@triton.jit
def held_parts(x, y, gamma):
    """Factors held in a formula, in one that it calls, and of a held value."""
    u, v = bump(hold(x - y), x)
    return u * v + hold(winding(x, y, gamma)) * x * x + hold(hold(x) * x) * gamma


FORMULAS = {
    "held parts": (held_parts, (1.5,)),
    "winding": (winding, (1.5,)),
    "ends with a call": (ends_with_a_call, ()),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_derived_gradient_is_autograds(name, points):
    """The derivative written out, translated to torch, against autograd of the value translated to torch."""
    formula, hyper = FORMULAS[name]
    x, y = points
    value = torch_of(formula)(x, y, *hyper)
    (expected,) = torch.autograd.grad(value.sum(), x)
    again, gradient = torch_of(with_gradients(formula))(x.detach(), y, *hyper)
    torch.testing.assert_close(again, value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@triton.jit
def to_a_power(x, y, gamma):
    return power(tl.abs(x - y), gamma)


@triton.jit
def to_two_powers(x, y, gamma):
    higher, lower = powers(tl.abs(x - y), gamma)
    return higher + 3.0 * lower


@triton.jit
def root_of_a_square(x, y):
    return tl.sqrt((x - y) * (x - y))


@triton.jit
def times_its_root(x, y):
    d = tl.abs(x - y)
    return d * tl.sqrt_rn(d)


@triton.jit
def end_of_a_power(x, y, gamma):
    return power(x, gamma) + y


@triton.jit
def softplus_of_parts(x, y):
    """Two kinks at x = y that cancel."""
    u = x - y
    _, _, log1p = logistic(u)
    return tl.maximum(u, 0.0) + log1p


@pytest.mark.parametrize(
    ("formula", "hyper", "expected"),
    [
        (to_a_power, (2.0,), 0.0),
        (to_a_power, (1.5,), 0.0),
        (to_a_power, (1.0,), 0.0),  # a kink
        (to_a_power, (0.0,), 0.0),
        (to_two_powers, (3.0,), 0.0),
        (to_two_powers, (2.0,), 0.0),  # a kink
        (root_of_a_square, (), 0.0),  # a kink
        (times_its_root, (), 0.0),
        (softplus_of_parts, (), 0.5),
        (end_of_a_power, (1.0,), 1.0),
        (end_of_a_power, (2.0,), 0.0),
        (end_of_a_power, (0.0,), 0.0),
    ],
)
def test_ends_of_a_domain_take_the_limit(formula, hyper, expected, device):
    """Where the argument of a power or root is 0: derived, in the kernel, and by autograd of what is translated to torch."""
    x = torch.zeros(3, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.float64):
        wide = x.detach().to(dtype).requires_grad_()
        (by_autograd,) = torch.autograd.grad(torch_of(formula)(wide, torch.zeros_like(wide), *hyper).sum(), wide)
        _, derived = torch_of(with_gradients(formula))(wide.detach(), torch.zeros_like(wide), *hyper)
        torch.testing.assert_close(by_autograd, torch.full_like(wide, expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(derived, torch.full_like(wide, expected), rtol=0, atol=1e-6)
    loss = elementwise(formula, hyper=dict(zip(("gamma",), hyper, strict=False)))
    (g,) = torch.autograd.grad(loss(x, torch.zeros_like(x), reduction="sum"), x)
    torch.testing.assert_close(g, torch.full_like(x, expected), rtol=0, atol=1e-6)


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
    def largest(x, y):
        return tl.max(x, 0), 1.0

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
        (branches, {}, r"branches: if is not allowed in a formula, .* choose by tl.where, in `if y > 0:` \(.*test_derive.py:\d+\)"),
        (sums, {}, r"sums: sum is over a tile of elements, and a formula sees one element, in `tl.sum\(x \* y, 0\)`"),
        (largest, {}, r"largest: max is over .*one element; write tl.maximum\(a, b\) for one of two, in `tl.max\(x, 0\)`"),
        (remainder, {}, r"remainder: has no derivative here.* in `x % 2.0`"),
        (three, {}, "three: returns 3 values"),
        (other_names, {"gamma": 1.0}, r"its arguments must be x, y .*: gamma; got \(x, y, beta\)"),
        (taken, {"dim": 1.0}, "taken: dim is the name of an option that every loss has"),
        (lambda x, y: x, {}, "a formula is a @triton.jit function, got function"),
    ):
        with pytest.raises(FormulaError, match=message):
            elementwise(formula, hyper=hyper)
    with pytest.raises(
        FormulaError, match=r"zeros: zeros_like cannot stand here: .* write tl.where\(z == z, 0.0, 0.0\), in `tl.zeros_like\(z\)`"
    ):

        @rowwise
        @triton.jit
        def zeros(z):
            return z + tl.zeros_like(z), 1.0

    with pytest.raises(TypeError, match=r"hyper\['delta'\] must be a number, got str"):
        elementwise(other_names, hyper={"delta": "a"})

"""Whole powers and tanh in formulas."""

import ast

import torch
import triton
import triton.language as tl

from lossforge.kernels.math import power
from lossforge.losses import boxes, elementwise
from lossforge.losses.check.ahead import used
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.formulas.source import is_device_function, parsed
from lossforge.losses.testing import error

TWO = tl.constexpr(2)


@triton.jit
def bent(x):
    return tl.tanh(x) ** 2


@elementwise(hyper={"delta": 1.0})
@triton.jit
def powers_and_tanh(x, y, delta):
    d = x - y
    higher = d
    higher **= 3
    higher *= delta**2 / (-2.0) ** 3
    return d**2 - higher + (d**TWO + 1.0) ** 4.0 / 64.0 + tl.tanh(d * delta) * 2**3 + bent(d)


@elementwise
@triton.jit
def powers_with_gradient(x, y):
    d = x - y
    squared = d
    squared **= 2
    return squared + bent(d), 2.0 * d + 2.0 * tl.tanh(d) * (1.0 - tl.tanh(d) ** 2)


def test_whole_powers_and_tanh_are_written_out(device, points):
    """Triton has neither; value and gradient beside torch's, in a formula, in a function that it calls, and beside a given gradient."""

    def plain(x, y, delta):
        d = x - y
        return d.pow(2) + d.pow(3) * delta**2 / 8 + (d.pow(2) + 1).pow(4) / 64 + 8 * torch.tanh(d * delta) + torch.tanh(d).pow(2)

    x, y = (t.detach().float().view(20, 25).to(device) for t in points)
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


@triton.jit
def square(a):
    """A name that the written-out powers have, too; it returns another number of values."""
    return a * a * a, a


@boxes(hyper={"value": 2.5})
@triton.jit
def powers_of_ratios(x1, y1, x2, slope_0, u1, v1, u2, nothing, value):
    """Names that a derived gradient uses for its own variables."""
    term_1 = (x2 - x1) / (u2 - u1)
    slope_3 = (slope_0 - y1) / (nothing - v1)
    part_8_0, part_8_1 = square(term_1)
    term_1 += power(slope_3, value)
    return term_1**2 + part_8_0 - slope_3 * part_8_1


def test_names_of_a_derived_gradient_are_not_the_formulas(device):
    def exact(boxes1, boxes2):
        width, height = ((boxes1[:, 2:] - boxes1[:, :2]) / (boxes2[:, 2:] - boxes2[:, :2])).unbind(-1)
        return (width + height**2.5).square() + width**3 - height * width

    corner, side = torch.rand(2, 7, 2), torch.rand(2, 7, 2) + 0.2
    first, second = torch.cat([corner, corner + side], -1).to(device)
    found, wanted = ([t.to(dtype, copy=True).requires_grad_() for t in (first, second)] for dtype in (torch.float32, torch.float64))
    value, right = powers_of_ratios(*found), exact(*wanted).mean()
    value.backward()
    right.backward()
    assert error(value, right) < 1e-6
    for t, of in zip(found, wanted, strict=True):
        assert error(t.grad, of.grad) < 1e-5


def test_functions_of_a_kernel_have_a_name_each():
    """Triton compiles two functions of one module and name, called with arguments of the same types, once."""
    seen = {}

    def see(function):
        source = parsed(function)
        text = ast.unparse(source.definition)
        assert seen.setdefault((function.fn.__module__, function.fn.__qualname__), text) == text
        for value in map(source.names.get, used(source)):
            if is_device_function(value) and not value.fn.__module__.startswith("lossforge.kernels"):
                see(value)

    see(FORMULAS[powers_of_ratios.loss.formula].kernels.formula)
    assert sum(name == "square_derived_1" for _, name in seen) == 2

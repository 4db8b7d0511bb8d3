"""Whole powers and tanh in formulas."""

import torch
import triton
import triton.language as tl

from lossforge.losses import elementwise
from lossforge.losses.check.formula import check_formula
from lossforge.losses.check.report import Report
from lossforge.losses.testing import error

TWO = tl.constexpr(2)


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

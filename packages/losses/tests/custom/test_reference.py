"""Formulas translated to torch."""

import pytest
import torch
import triton
import triton.language as tl

from lossforge.kernels.formulas import regression
from lossforge.kernels.formulas.binary import asymmetric, bce, focal
from lossforge.kernels.math import complement
from lossforge.losses import FormulaError, elementwise
from lossforge.losses.formulas.translate import torch_of


@triton.jit
def distribution(t):
    return complement(t)


OURS = {
    "focal": (focal.focal, (1.5, 0.3)),
    "asymmetric": (asymmetric.asymmetric_clipped, (2.5, 1.5, 0.05, 1.3)),
    "asymmetric without clip": (asymmetric.asymmetric_unclipped, (2.5, 1.5, 0.0, 1.3)),
    "poly_bce": (focal.poly_bce, (1.0, 1.5, 0.3)),
    "huber": (regression.huber, (1.0,)),
    "bce_with_logits": (bce.bce_with_logits, (1.2,)),
}


@pytest.mark.parametrize("name", OURS)
def test_translation_finds_our_own_gradients(name, points):
    """Autograd of a shipped formula's value, translated, against the gradient that the formula returns."""
    formula, hyper = OURS[name]
    x, y = points
    value, gradient = torch_of(formula)(x, y, *hyper)
    (expected,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_the_complement_keeps_its_gradient_where_it_is_1():
    """Of 1 - e⁻ᵗ it is e⁻ᵗ."""
    t = torch.tensor([0.0, 1e-6, 0.5, 3.0, 40.0, 80.0], requires_grad=True)
    value, rest = torch_of(distribution)(t)
    (slope,) = torch.autograd.grad(value.sum(), t)
    torch.testing.assert_close(value, -torch.expm1(-t.detach()))
    torch.testing.assert_close(slope, torch.exp(-t.detach()), rtol=1e-6, atol=0)
    torch.testing.assert_close(rest, slope, rtol=1e-6, atol=0)


def test_without_a_counterpart_in_torch_the_reference_is_asked_for():
    @elementwise
    @triton.jit
    def bits(x, y):
        d = x - y
        return d * d + tl.umulhi(tl.zeros_like(x).to(tl.uint32), tl.zeros_like(x).to(tl.uint32)), 2.0 * d

    with pytest.raises(FormulaError, match=r"tl.umulhi has no plain-torch counterpart; give reference="):
        bits(torch.zeros(3, dtype=torch.float64), torch.zeros(3))

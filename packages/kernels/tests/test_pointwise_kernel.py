"""The kernel of several tensors over sizes, alignments and what it writes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lossforge.kernels.call import Formulas
from lossforge.kernels.elements import pointwise
from lossforge.kernels.elements.calls import PointwiseCall
from lossforge.kernels.formulas.regression import gaussian_nll

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_sizes_and_alignment(launches, by_plan, offset, shift):
    """Whole tiles and the rest of one, from memory that begins anywhere."""
    torch.manual_seed(0)
    for n, dtype in itertools.product((1, 1023, 1024, 1025, 3000), (torch.float32, torch.bfloat16)):
        each = [t.to(dtype) for t in (torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE), torch.rand(n, device=DEVICE) + 0.2)]
        wide = [t.double().requires_grad_() for t in each]
        exact = F.gaussian_nll_loss(*wide, eps=1e-6, reduction="sum")
        exact.backward()
        given = [offset(t, shift) for t in each]
        gradients = [offset(torch.full_like(t, float("nan")), shift) for t in each]
        for _ in range(2):
            call = PointwiseCall("gaussian_nll", *given, hyper=[0.0, 1e-6])
            value, _ = by_plan(pointwise.forward, call, Formulas(gaussian_nll), gradients, False)
            torch.testing.assert_close(value.double(), exact.detach(), rtol=1e-5, atol=1e-4)
            for g, leaf in zip(gradients, wide, strict=True):
                torch.testing.assert_close(g.double(), leaf.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


@pytest.mark.parametrize("wanted", itertools.product((True, False), repeat=3))
def test_writes_the_gradients_that_are_asked_for(wanted):
    """Each has the same bits, alone or with others."""
    torch.manual_seed(0)
    call = PointwiseCall("gaussian_nll", *(torch.rand(5, 7, device=DEVICE) + 0.2 for _ in range(3)), hyper=[0.0, 1e-6], reduction="none")
    upstream = torch.rand(7, 5, device=DEVICE).t()
    every = [torch.full((5, 7), float("nan"), device=DEVICE) for _ in range(3)]
    pointwise.backward(call, Formulas(gaussian_nll), (None,), (upstream,), every)
    some = [torch.full_like(t, float("nan")) if want else None for t, want in zip(every, wanted, strict=True)]
    pointwise.backward(call, Formulas(gaussian_nll), (None,), (upstream,), some)
    assert all(torch.equal(a, b) for a, b in zip(every, some, strict=True) if b is not None)
    wide = [t.double().requires_grad_() for t in call[1:4]]
    F.gaussian_nll_loss(*wide, reduction="none").backward(upstream.double())
    for g, leaf in zip(every, wide, strict=True):
        torch.testing.assert_close(g.double(), leaf.grad, rtol=1e-5, atol=1e-6)

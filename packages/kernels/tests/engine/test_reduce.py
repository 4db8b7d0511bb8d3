"""Sums in a fixed order, divisors, and scaling in place."""

import functools

import pytest
import torch

from lossforge.kernels import launch_counts, scale_
from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.elements.elementwise.launch import forward
from lossforge.kernels.engine import launch
from lossforge.kernels.engine.reduce import count
from lossforge.kernels.formulas.regression import l1

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_sum_over_many_programs_is_exact_and_repeatable():
    """Whole numbers up to 2²⁴ add without rounding, so every part must be there once; the ticket is back at zero each time."""
    x = torch.randint(0, 8, (50_001,), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    for _ in range(3):
        assert forward(ElementwiseCall("l1", x, torch.zeros_like(x)), Formulas(l1), [None], False)[0] == x.sum()


def test_a_group_of_programs_leaves_its_count_at_zero(monkeypatch):
    """The next launch of a stream counts in the same memory."""
    kept = functools.cache(lambda programs, device, second=False: launch._new_workspace(programs, device))
    monkeypatch.setattr(launch, "workspace", kept)
    x = torch.ones(300_000, device=DEVICE)
    for size in (300_000, 200_000, 300_000):
        call = ElementwiseCall("l1", x[:size], torch.zeros_like(x[:size]))
        assert forward(call, Formulas(l1), [None], False)[0] == size


@pytest.mark.parametrize("divisor", [0.0, 4.0])
def test_a_divisor_in_device_memory(divisor):
    x, to = torch.full((3, 4), 2.0, device=DEVICE), torch.empty(3, 4, device=DEVICE)
    for empty in (False, True):
        call = ElementwiseCall("l1", x, torch.zeros_like(x), normalizer=torch.tensor(divisor, device=DEVICE), empty_is_zero=empty)
        value = forward(call, Formulas(l1), [to], False)[0]
        factor = 1 / divisor if divisor else 0.0 if empty else float("inf")
        assert value == 24 * factor
        assert torch.equal(to, torch.full_like(to, factor))


def test_count():
    target = torch.tensor([0, 2, -100, 1, 5, -7] * 1000, device=DEVICE)
    weight = torch.tensor([1.0, 2.0, 4.0], device=DEVICE)
    assert count(target, 3, -100) == 5000
    assert count(target, 3, -100, scale=3.0) == 15000
    assert count(target, 3, -100, weight=weight) == 7000  # an index out of range has no weight, and reads none
    other = torch.full_like(target, -100)
    other[2] = 1
    assert count(target, 3, -100, target_b=other) == 5001
    lam = torch.full((), 0.25, device=DEVICE)
    torch.testing.assert_close(count(target, 3, -100, target_b=other, lam=lam).item(), 5000 * 0.25 + 0.75)
    assert count(target[::2], 3, -100) == (target[::2] != -100).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1,), (4096,), (20_001,), (3, 9000), (5000, 1, 4097), (2, 3, 4, 5, 6000)])
def test_scale(sizes, dtype):
    tensors = [torch.randn(n, device=DEVICE).to(dtype) for n in sizes]
    before = [t.clone() for t in tensors]
    scale_(torch.ones((), device=DEVICE), *tensors)
    assert all(map(torch.equal, tensors, before))
    scale_(torch.full((), -4.0, device=DEVICE), *tensors)
    assert all(torch.equal(t, -4 * b) for t, b in zip(tensors, before, strict=True))


def test_launches_are_counted():
    before = launch_counts().get("count_kernel", 0)
    count(torch.zeros(3, dtype=torch.long, device=DEVICE), 2, -1)
    assert launch_counts()["count_kernel"] == before + 1

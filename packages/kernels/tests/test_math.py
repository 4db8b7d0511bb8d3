"""Device functions against float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from lossforge.kernels.math import atan_ratio, complement, log1p_unit, logistic, powers, product, tanh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 2.0**-23


@triton.jit
def unary(x_ptr, out_ptr, function: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, function(tl.load(x_ptr + i)))


@triton.jit
def log1p_exp(x):
    _, _, log1p = logistic(x)
    return log1p + tl.zeros_like(x)


@triton.jit
def sigma(x):
    p, _, _ = logistic(x)
    return p + tl.zeros_like(x)


@triton.jit
def sigma_of_minus(x):
    _, q, _ = logistic(x)
    return q + tl.zeros_like(x)


def apply(function, x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    unary[(1,)](x, out, function=function, N=len(x))
    return out.double()


def relative(got: torch.Tensor, exact: torch.Tensor, floor: float = 1e-37) -> float:
    return ((got - exact).abs() / exact.abs().clamp(min=floor)).max().item()


def test_log1p_unit():
    x = torch.cat([torch.logspace(-30, 0, 2048), torch.linspace(0, 1, 2048)]).to(DEVICE)
    assert relative(apply(log1p_unit, x), x.double().log1p()) < 2 * EPS


def test_logistic():
    x = torch.cat([torch.linspace(-80, 80, 2047), torch.tensor([0.0])]).to(DEVICE)
    wide = x.double()
    assert relative(apply(sigma, x), wide.sigmoid()) < 60 * EPS  # e^x itself loses |x| rounding units
    assert relative(apply(sigma_of_minus, x), (-wide).sigmoid()) < 60 * EPS
    assert relative(apply(log1p_exp, x), torch.log1p(torch.exp(-wide.abs()))) < 60 * EPS
    extremes = torch.tensor([1e4, -1e4, float("inf"), float("-inf")] * 4, device=DEVICE)
    assert torch.equal(apply(sigma, extremes), (extremes > 0).double())


def test_tanh():
    x = torch.cat([torch.logspace(-30, 2, 1024), -torch.logspace(-30, 2, 1024)]).to(DEVICE)
    assert relative(apply(tanh, x), x.double().tanh()) < 8 * EPS
    extremes = torch.tensor([float("inf"), float("-inf")] * 8, device=DEVICE)
    assert torch.equal(apply(tanh, extremes), extremes.sign().double())


@triton.jit
def binary(x_ptr, y_ptr, out_ptr, function: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, function(tl.load(x_ptr + i), tl.load(y_ptr + i)))


def apply_two(function, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    binary[(1,)](x, y, out, function=function, N=len(x))
    return out


def test_atan_ratio():
    """atan(y / x) in every quadrant, also where the quotient is 0 or infinite."""
    ratio = torch.cat([torch.logspace(-20, 20, 1022), torch.tensor([1.0, 0.0])]).to(DEVICE)
    for x in (1.0, -1.0, 3e-5, -7e4):
        for sign in (1.0, -1.0):
            y = sign * ratio * x
            got = apply_two(atan_ratio, y, torch.full_like(y, x)).double()
            assert relative(got, torch.atan(y.double() / x)) < 5 * EPS
    quarter = math.pi / 2
    y = torch.tensor([2.0, -2.0, 1e-30, -1e-30, 0.0, 0.0, 0.0, float("nan")], device=DEVICE)
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 3.0, -3.0, 1.0], device=DEVICE)
    expected = torch.tensor([quarter, -quarter, quarter, -quarter, 0.0, 0.0, 0.0, float("nan")], device=DEVICE)
    torch.testing.assert_close(apply_two(atan_ratio, y, x), expected, equal_nan=True)


@triton.jit
def rounding_error(x, y):
    return product(x, y) - product(y, x)


def test_products_are_not_fused():
    """x y - y x is 0; fused with the subtraction, one of the two products would keep the digits that the other rounds away."""
    x, y = torch.rand(2, 1024, device=DEVICE)
    assert (apply_two(rounding_error, x, y) == 0).all()
    assert torch.equal(apply_two(product, x, y), x * y)


@triton.jit
def powers_kernel(q_ptr, power_ptr, lower_ptr, gamma, N: tl.constexpr):
    i = tl.arange(0, N)
    power, lower = powers(tl.load(q_ptr + i), gamma)
    tl.store(power_ptr + i, power)
    tl.store(lower_ptr + i, lower)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 1.5, 2.0, 3.0, 7.25])
def test_powers(gamma):
    q = torch.cat([torch.logspace(-10, 0, 127), torch.zeros(1)]).to(DEVICE)
    power, lower = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    powers_kernel[(1,)](q, power, lower, gamma, N=128)
    assert power.isfinite().all()
    assert lower.isfinite().all()
    wide = q.double()[:-1]
    bound = 60 * (1 + gamma) * EPS  # the exponent γ log2 q reaches 33 γ, and each unit of it rounds
    assert relative(power[:-1].double(), wide**gamma, floor=1e-30) < bound  # a GPU takes what is below the smallest normal float32 as 0
    if gamma:
        assert relative(lower[:-1].double(), wide ** (gamma - 1), floor=1e-30) < bound
        assert power[-1] < 1e-11


@triton.jit
def complement_kernel(t_ptr, out_ptr, e_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    u, e = complement(tl.load(t_ptr + i))
    tl.store(out_ptr + i, u)
    tl.store(e_ptr + i, e)


def test_complement():
    """1 - e^-t keeps its digits down to the smallest t, and across the place where its series ends."""
    t = torch.cat([torch.logspace(-30, 1.9, 127), torch.tensor([0.0])]).to(DEVICE)
    t[100:103] = torch.tensor([0.4999, 0.5, 0.5001])
    u, e = torch.full_like(t, float("nan")), torch.full_like(t, float("nan"))
    complement_kernel[(1,)](t, u, e, N=128)
    wide = t.double()
    assert relative(u.double(), -torch.expm1(-wide)) < 4 * EPS
    assert relative(e.double(), torch.exp(-wide)) < 150 * EPS  # e^-t itself loses t rounding units

"""SILog: equal to transformers' and ultralytics' formulas, gradients, invalid pixels, one graph."""

import pytest
import torch
from torch import Tensor

from lossforge.losses import silog_loss
from lossforge.losses.testing import error


def by_hand(x: Tensor, y: Tensor, lambd: float = 0.5, eps: float = 0.0) -> Tensor:
    """ultralytics' form: the variance of the logarithms' differences, and a share of the mean's square."""
    d = x[y > 0].log() - y[y > 0].log()
    return (((d - d.mean()) ** 2).mean() + (1 - lambd) * d.mean() ** 2 + eps).sqrt()


def problem(device: str, shape=(3, 1, 37, 41)) -> tuple[Tensor, Tensor]:
    x, y = (0.1 + 5 * torch.rand(shape, dtype=torch.float64, device=device) for _ in range(2))
    return x, torch.where(torch.rand(shape, device=device) > 0.3, y, 0.0)


@pytest.mark.parametrize("options", [{}, {"lambd": 0.85}, {"lambd": 0.0}, {"lambd": 1.0, "eps": 1e-6}], ids=str)
def test_by_hand(options, device):
    x, y = problem(device)
    leaf = x.clone().requires_grad_()
    exact = by_hand(leaf, y, **options)
    (wanted,) = torch.autograd.grad(3 * exact, leaf)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 3e-6), (torch.bfloat16, 2.0**-6)):
        for given in (x.to(dtype), x.to(dtype).mT.contiguous().mT):
            given = torch.where(y > 0, given, torch.nan).requires_grad_()
            value = silog_loss(given, y.float() if dtype == torch.bfloat16 else y.to(dtype), **options)
            (g,) = torch.autograd.grad(3 * value, given)
            assert g.dtype == dtype
            assert not g[y <= 0].any()
            assert error(value, exact) < bound
            assert error(g, wanted) < bound


def test_as_transformers(device):
    loss = pytest.importorskip("transformers.models.glpn.modeling_glpn").SiLogLoss()
    x, y = problem(device)
    assert error(silog_loss(x.float(), y.float()), loss(x, y)) < 1e-6


def test_per_image_and_without_root(device):
    x, y = problem(device)
    each = torch.stack([by_hand(a, b, 0.3) for a, b in zip(x, y, strict=True)])
    for dtype in (torch.float64, torch.float32):
        assert error(silog_loss(x.to(dtype), y.to(dtype), 0.3, per_image=True), each.mean()) < 3e-6
        assert error(silog_loss(x.to(dtype), y.to(dtype), 0.3, per_image=True, root=False), each.square().mean()) < 3e-6
        assert silog_loss(x.to(dtype), torch.zeros_like(y, dtype=dtype)).isnan()


def test_equal_differences(device):
    """With λ = 1 the loss is 0, beside which the mean of d, up to 4.1, must cost no digits."""
    for factor in torch.linspace(2, 60, 20).tolist():
        y = torch.rand(2, 37, device=device) + 0.1
        for per_image in (False, True):
            assert silog_loss(factor * y, y, 1.0, per_image=per_image) < 2e-6


def test_small_differences_beside_a_large_mean(device):
    """Large images, one of them with other depths, one without a valid pixel: value and gradient as in float64."""
    y = 0.1 + 5 * torch.rand(3, 1, 70, 90, dtype=torch.float64, device=device)
    scale = torch.tensor([60.0, 60.05, 1.0], dtype=torch.float64, device=device).view(3, 1, 1, 1)
    x = (scale * y * torch.exp(1e-3 * torch.randn_like(y))).float()
    y = torch.where(torch.rand_like(y) > 0.3, y, 0.0).float()
    y[2] = 0.0
    exact = x.double().requires_grad_()
    wanted = by_hand(exact, y.double(), 1.0)
    leaf = x.requires_grad_()
    value = silog_loss(leaf, y, 1.0)
    assert error(value, wanted) < 1e-4  # of the rounding of ln x
    assert error(*(torch.autograd.grad(total, of)[0] for total, of in ((value, leaf), (wanted, exact)))) < 1e-3


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_fit_has_gradient_0(dtype, per_image, device):
    """The root has no gradient at 0. One image that is not exact has its own."""
    y = (torch.rand(2, 37, device=device) + 0.1).to(dtype)
    x = y.clone().requires_grad_()
    value = silog_loss(x, y, per_image=per_image)
    assert value == 0
    assert not torch.autograd.grad(value, x)[0].any()
    x = torch.stack([y[0], 1.5 * y[1]]).requires_grad_()
    (g,) = torch.autograd.grad(silog_loss(x, y, per_image=True), x)
    assert not g[0].any()
    assert error(g[1], torch.autograd.grad(silog_loss(x[1:], y[1:]), x)[0][1] / 2) < 1e-6

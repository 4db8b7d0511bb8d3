"""The mean squared difference of two Gram matrices, X Xᵀ and Y Yᵀ of features (B, N, D), from the difference E = X - Y.

    W = X Xᵀ - Y Yᵀ = X Eᵀ + E Xᵀ - E Eᵀ = ½ (E Sᵀ + S Eᵀ),  S = X + Y
    ‖W‖² = 2 ⟨F, A⟩ + 2 ⟨C, Cᵀ⟩ - 4 ⟨F, C⟩ + ⟨F, F⟩,  A = Xᵀ X, C = Eᵀ X, F = Eᵀ E,  W X = E A + Y C

Each term has E as a factor, so that features that are nearly equal cost no digits, which a difference of the two matrices loses. The second
line needs D × D products alone; it is taken where N > 2 D. Otherwise W has at most twice as many elements as X, and is computed itself.
Where negative similarities are set to 0, both matrices are needed: by blocks of rows.

The gradient 4 W X is computed with the value, so that no product is kept for backward.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lossforge.losses.base.state import plain, without_autocast

Clamped = Literal["none", "target", "both"]
"""Whose negative similarities are set to 0."""
BLOCK = 2**24
"""Elements of a matrix that are in memory at a time, where it is computed by blocks."""


def gram_difference(x: Tensor, y: Tensor, clamped: Clamped) -> Tensor:
    """Return the mean over all elements of W². x, y: (B, N, D), in float32 or float64; y without gradient."""
    graded = torch.is_grad_enabled() and x.requires_grad
    found: Tensor = _Written.apply(x, y, clamped) if graded and plain(x, y) else differentiable(x, y, clamped)
    return found


def differentiable(x: Tensor, y: Tensor, clamped: Clamped) -> Tensor:
    """Return the same, by operations that autograd and torch.compile differentiate."""
    with without_autocast(x):
        if clamped == "none" and by_features(x):
            return _from_products(*_products(x, y)) * _inverse(x)
        return _difference(x, y, clamped).square().sum() * _inverse(x)


def by_features(x: Tensor) -> bool:
    """Return whether products of features, D × D, are fewer than those of rows."""
    return x.shape[1] > 2 * x.shape[2]


def _inverse(x: Tensor) -> float:
    count = x.shape[0] * x.shape[1] ** 2
    return 1.0 / count if count else float("nan")


def _products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, C and F."""
    e = x - y
    return x.mT @ x, e.mT @ x, e.mT @ e


def _from_products(a: Tensor, c: Tensor, f: Tensor) -> Tensor:
    return (f * (2 * a - 4 * c + f)).sum() + 2 * (c * c.mT).sum()


def _difference(x: Tensor, y: Tensor, clamped: Clamped) -> Tensor:
    """Return W, (B, N, N)."""
    if clamped == "none":
        half = (x - y) @ (x + y).mT
        return 0.5 * (half + half.mT)
    own, wanted = x @ x.mT, y @ y.mT
    return (own if clamped == "target" else torch.where(own < 0, 0.0, own)) - torch.where(wanted < 0, 0.0, wanted)


def _by_blocks(x: Tensor, y: Tensor, clamped: Clamped) -> tuple[Tensor, Tensor]:
    """Return the sum of W², and W X with W where a similarity is below 0 and set to 0."""
    total, gradient = x.new_zeros(()), torch.empty_like(x)
    images, n, _ = x.shape
    rows = min(max(BLOCK // max(n, 1), 1), max(n, 1))
    several = max(BLOCK // max(n * rows, 1), 1)
    for first in range(0, images, several):
        some = slice(first, first + several)
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            w = x[some, part] @ x[some].mT
            below = w < 0
            w = torch.where(below, 0.0, w) if clamped == "both" else w
            w -= (y[some, part] @ y[some].mT).clamp_(min=0)
            total += w.square().sum()
            w = w.masked_fill_(below, 0.0) if clamped == "both" else w
            gradient[some, part] = w @ x[some]
    return total, gradient


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, clamped: Clamped) -> Tensor:
        with without_autocast(x):
            if clamped != "none":
                total, product = _by_blocks(x, y, clamped)
            elif by_features(x):
                a, c, f = _products(x, y)
                total, product = _from_products(a, c, f), torch.baddbmm((x - y) @ a, y, c)
            else:
                w = _difference(x, y, clamped)
                total, product = w.square().sum(), w @ x
        ctx.clamped = clamped
        ctx.save_for_backward(x, y, product.mul_(4 * _inverse(x)))
        return total * _inverse(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y, gradient = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return gradient * grads[0], None, None
        value = differentiable(x, y, ctx.clamped)  # which may be differentiated again
        return torch.autograd.grad(value, x, grads[0], create_graph=True)[0], None, None

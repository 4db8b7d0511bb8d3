"""Relative depth (MiDaS, arXiv 1907.01341): errors after the best scale and shift of each image, and of their edges."""

from torch import Tensor


def aligned(input: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Return s x + t with the scale s and shift t of least squares over each image's valid pixels (eq. 3). All: (N, H, W)."""
    m = valid.to(input.dtype)
    n, x, y, xx, xy = (t.sum((1, 2)) for t in (m, m * input, m * target, m * input * input, m * input * target))
    determinant = n * xx - x * x
    scale = (n * xy - x * y) / determinant
    shift = (xx * y - x * xy) / determinant
    return scale[:, None, None] * input + shift[:, None, None]


def affine_invariant_loss(input: Tensor, target: Tensor, valid: Tensor, alpha: float = 0.5, scales: int = 4) -> Tensor:
    """Return 1/2M Σ (s x + t - y)² + α G, as a mean over images of their M valid pixels (eqs. 3, 10). All: (N, H, W); valid: bool.

    G = Σₖ 1/M Σ |∂R| + |∂'R|, R = s x + t - y, across and down, over `scales` scales k, of which each takes every other pixel of the one
    before.
    """
    m = valid.to(input.dtype)
    error = m * (aligned(input, target, valid) - target)
    loss = error.square().sum((1, 2)) / (2 * m.sum((1, 2)))
    for k in range(scales):
        step = slice(None, None, 2**k)
        r, v = error[:, step, step], m[:, step, step]
        across = (v[:, :, 1:] * v[:, :, :-1] * (r[:, :, 1:] - r[:, :, :-1]).abs()).sum((1, 2))
        down = (v[:, 1:] * v[:, :-1] * (r[:, 1:] - r[:, :-1]).abs()).sum((1, 2))
        loss = loss + alpha * (across + down) / v.sum((1, 2)).clamp(min=1)
    return loss.mean()

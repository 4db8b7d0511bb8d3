"""Losses of pairs of rotated boxes (cx, cy, w, h, angle), one a row of two tensors (..., 5)."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from lossforge.kernels.boxes.calls import RotatedCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss
from lossforge.losses.base.option_types import NonNegative, Positive, Reduction
from lossforge.losses.base.options import WeightedOptions
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.formulas.device_names import (
    bhattacharyya,
    complement,
    larger,
    log1p,
    offset,
    root,
    sides,
    spread,
    surplus,
    tl,
)
from lossforge.losses.templates.plain_forms import one_minus_exp
from lossforge.losses.templates.rotated import ROTATED, rotated_loss

SHAPES = ("none", "log1p", "sqrt")
"""What is taken of a distance, by the number that the kernels get."""
ENDS = ("none", "ln", "exp")


def _sides(b1: Tensor, b2: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Return a₁, b₁, a₂, b₂ and sin²δ, the second box turned by 90° where it is wide and the first is tall, or the reverse."""
    a1, b1_ = b1[..., 2:4].abs().clamp(min=eps).unbind(-1)
    a2, b2_ = b2[..., 2:4].abs().clamp(min=eps).unbind(-1)
    turned = (a1 - b1_) * (a2 - b2_) < 0
    delta = b1[..., 4] - b2[..., 4]
    square = torch.where(turned, delta.cos(), delta.sin()).square()
    return a1, b1_, torch.where(turned, b2_, a2), torch.where(turned, a2, b2_), square


def _between(s1: Tensor, s2: Tensor) -> Tensor:
    """Return (s₁ - s₂)² / 2 s₁ s₂, without a square of a length."""
    return (s1 - s2) / s1 * ((s1 - s2) / s2) / 2


def _uneven(a: Tensor, b: Tensor) -> Tensor:
    """Return (a² - b²) / ab."""
    return (a - b) / a * ((a + b) / b)


def _spread(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, square: Tensor) -> Tensor:
    """Return det((Σ₁ + Σ₂)/2) / √(det Σ₁ det Σ₂) - 1."""
    across, down = _between(a1, a2), _between(b1, b2)
    return across + down + across * down + square * _uneven(a1, b1) * _uneven(a2, b2) / 4


def _offset(b1: Tensor, b2: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offset of the centres along the sides of a box of this angle."""
    (dx, dy), c, s = (b1[..., :2] - b2[..., :2]).unbind(-1), angle.cos(), angle.sin()
    return dx * c + dy * s, dy * c - dx * s


def _root(x: Tensor, eps: float) -> Tensor:
    return x / x.clamp(min=eps).sqrt()


def probiou_log(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps):
    return bhattacharyya(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps)


def probiou(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps):
    square, _ = complement(bhattacharyya(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps))
    return root(square, eps)


@formula("probiou_log", DeviceFormula(probiou_log, variables=10, heavy=True))
def bhattacharyya_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    a1, s1, a2, s2, square = _sides(b1, b2, eps)
    v = _spread(a1, s1, a2, s2, square)
    quadratic = torch.zeros_like(v)
    for box, area in ((b1, a2 * s2), (b2, a1 * s1)):
        p, q = _offset(b1, b2, box[..., 4])
        w, h = box[..., 2:4].abs().clamp(min=eps).unbind(-1)
        quadratic = quadratic + (p.square() * (h / w) + q.square() * (w / h)) / area
    return 0.75 * quadratic / (1 + v) + torch.log1p(v) / 2


@formula("probiou", DeviceFormula(probiou, variables=10, heavy=True))
def probiou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    return _root(one_minus_exp(bhattacharyya_reference(b1, b2, eps)), eps)


@loss(
    "probiou",
    ROTATED,
    Module("ProbIoULoss", "Loss of the probabilistic IoU of two rotated boxes"),
    switches=("log",),
    options=({"eps": 0.3}, {"log": True}),
    paper="arXiv 2106.06072",
)
def probiou_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: Positive = 1e-7,
    *,
    log: bool = False,
    **options: Unpack[WeightedOptions],
) -> CheckedCall[RotatedCall]:
    """Loss of the probabilistic IoU of two rotated boxes (ProbIoU; Llerena et al. 2021, arXiv 2106.06072), as ultralytics has it.

    L = w √(1 - e^(-D)) with D the Bhattacharyya distance of the two boxes' Gaussians, whose covariances are those of a uniform density on
    the box, R diag(w²/12, h²/12) Rᵀ. ProbIoU is 1 - √(1 - e^-D). ultralytics adds its eps to denominators and below the root, so that its
    loss of equal boxes is 5e-4; ours is 0.

    When to use it: Take it first for rotated boxes. It has a gradient where boxes do not overlap, no units, and no jump where an angle
    passes a full or a half turn.

    When not: Leave it where the angle of squares matters, because a square's Gaussian has no angle.

    Args:
        log: take D in place of √(1 - e^-D), the paper's second loss. It does not saturate at 1, so that distant boxes are pulled
            harder. The paper begins with it.
    """
    return rotated_loss("probiou_log" if log else "probiou", boxes1, boxes2, reduction, eps, options, above_0=True)


def shaped(distance, eps, kind, tau):
    taken = tl.where(kind == 1.0, log1p(distance), tl.where(kind == 2.0, root(distance, eps), distance))
    return tl.where(tau >= 1.0, (tau - 1.0 + taken) / (tau + taken), taken)


def _shaped(distance: Tensor, eps: float, kind: float, tau: float) -> Tensor:
    taken = (distance, torch.log1p(distance), _root(distance, eps))[int(kind)]
    return (tau - 1 + taken) / (tau + taken) if tau >= 1 else taken


def wasserstein(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps, kind, tau, alpha, normalize):
    a1, b1, a2, b2, square = sides(w1, h1, t1, w2, h2, t2, eps)
    dx, dy, da, db = x1 - x2, y1 - y2, a1 - a2, b1 - b2
    along, crossed = a1 * a2 + b1 * b2, (a1 * b2 + b1 * a2) / (a1 * a2 + b1 * b2)
    coupled = along * (1.0 + tl.sqrt(larger(1.0 - square * (1.0 - crossed) * (1.0 + crossed), 1e-12)))
    turn = square * ((a1 - b1) * (a1 + b1)) * (((a2 - b2) * (a2 + b2)) / coupled)
    distance = root(dx * dx + dy * dy + 0.25 * alpha * alpha * (da * da + db * db + 2.0 * turn), eps)
    size = tl.sqrt(tl.sqrt(a1 * b1)) * tl.sqrt(tl.sqrt(a2 * b2))
    return shaped(tl.where(normalize > 0.0, distance / size, distance), eps, kind, tau)


@formula("gwd", DeviceFormula(wasserstein, variables=10, heavy=True))
def gwd_reference(b1: Tensor, b2: Tensor, eps: float, kind: float, tau: float, alpha: float, normalize: float) -> Tensor:
    a1, s1, a2, s2, square = _sides(b1, b2, eps)
    along = a1 * a2 + s1 * s2
    crossed = (a1 * s2 + s1 * a2) / along
    coupled = along * (1 + (1 - square * (1 - crossed) * (1 + crossed)).clamp(min=1e-12).sqrt())
    turn = square * ((a1 - s1) * (a1 + s1)) * ((a2 - s2) * (a2 + s2) / coupled)
    shapes = (a1 - a2).square() + (s1 - s2).square() + 2 * turn
    distance = _root((b1[..., :2] - b2[..., :2]).square().sum(-1) + alpha**2 / 4 * shapes, eps)
    return _shaped(distance / (a1 * s1).sqrt().mul((a2 * s2).sqrt()).sqrt() if normalize else distance, eps, kind, tau)


Shape = Literal["log1p", "sqrt", "none"]


def _distance_numbers(fun: str, tau: float, alpha: float) -> tuple[float, float, float]:
    checks.one_of("fun", fun, SHAPES)
    return float(SHAPES.index(fun)), checks.number("tau", tau, 0.0), checks.number("alpha", alpha, 0.0, exclusive=True)


@loss(
    "gwd",
    ROTATED,
    Module("GWDLoss", "Gaussian Wasserstein distance of two rotated boxes as a loss"),
    switches=("normalize",),
    options=({"fun": "sqrt", "tau": 2.0, "alpha": 0.5}, {"fun": "none", "tau": 0.0, "normalize": False, "eps": 3.0}),
    paper="arXiv 2101.11952",
)
def gwd_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: Positive = 1e-7,
    *,
    fun: Shape = "log1p",
    tau: NonNegative = 1.0,
    alpha: Positive = 1.0,
    normalize: bool = True,
    **options: Unpack[WeightedOptions],
) -> CheckedCall[RotatedCall]:
    """Gaussian Wasserstein distance of two rotated boxes as a loss (GWD; Yang et al. 2021, arXiv 2101.11952), as mmrotate's gwd_loss.

    L = w [1 - 1 / (τ + f(d))] with d² = ρ² + α² tr(Σ₁ + Σ₂ - 2 (Σ₁^½ Σ₂ Σ₁^½)^½), ρ the distance of the centres, Σ = R diag(w²/4, h²/4) Rᵀ,
    and d divided by the geometric mean of the four sides. For τ below 1 it is w f(d).

    When to use it: Take it where rotated boxes may be distant, and in recipes of mmrotate that were tuned with it.

    When not: Do not use it with `normalize=False` where small and large boxes must count the same: its distance then has the units of the
    boxes. It does not weigh the angle by the aspect ratio as `kld` does.

    Args:
        fun: f: "log1p" for ln(1 + d), "sqrt" for √d, "none" for d.
        tau: τ of at least 0. From 1 on the loss is 1 - 1 / (τ + f(d)), which is bounded; below 1 it is f(d).
        alpha: α above 0, the weight of sides and angle beside the centres.
        normalize: divide d by the geometric mean of the four sides, so that it has no units.
    """
    numbers = _distance_numbers(fun, tau, alpha)
    return rotated_loss("gwd", boxes1, boxes2, reduction, eps, options, *numbers, float(normalize), above_0=True)


def kullback_leibler(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps, kind, tau, alpha, rooted):
    a1, b1, a2, b2, square = sides(w1, h1, t1, w2, h2, t2, eps)
    p, q = offset(x1, y1, x2, y2, t1)
    p, q = p / a1, q / b1
    turn = square * (((a1 - b1) / a1) * ((a1 + b1) / a1)) * (((a2 - b2) / b1) * ((a2 + b2) / b1))
    distance = 2.0 * (p * p + q * q) / (alpha * alpha) + 0.5 * (surplus(a2, a1) + surplus(b2, b1) + turn)
    return shaped(tl.where(rooted > 0.0, root(distance, eps), distance), eps, kind, tau)


def _surplus(s2: Tensor, s1: Tensor) -> Tensor:
    """Return r² - 1 - ln r² of the ratio r of two sides.

    With u = r² - 1 and w = u / (2 + u) it is wu - 2w³ (1/3 + w²/5 + w⁴/7 + ...), which keeps its digits near r = 1.
    """
    u = (s2 - s1) / s1 * ((s2 + s1) / s1)
    small = u.abs() < 0.125
    near = torch.where(small, u, 0.0)
    w = near / (2 + near)
    series = torch.zeros_like(w)
    for power in range(17, 1, -2):
        series = series * w.square() + 1 / power
    return torch.where(small, w * near - 2 * w**3 * series, u - 2 * torch.where(small, 1.0, s2 / s1).log())


@formula("kld", DeviceFormula(kullback_leibler, variables=10, heavy=True))
def kld_reference(b1: Tensor, b2: Tensor, eps: float, kind: float, tau: float, alpha: float, rooted: float) -> Tensor:
    a1, s1, a2, s2, square = _sides(b1, b2, eps)
    p, q = _offset(b1, b2, b1[..., 4])
    turn = square * ((a1 - s1) / a1 * ((a1 + s1) / a1)) * ((a2 - s2) / s1 * ((a2 + s2) / s1))
    distance = 2 * ((p / a1).square() + (q / s1).square()) / alpha**2 + (_surplus(a2, a1) + _surplus(s2, s1) + turn) / 2
    return _shaped(_root(distance, eps) if rooted else distance, eps, kind, tau)


@loss(
    "kld",
    ROTATED,
    Module("KLDLoss", "Kullback-Leibler divergence of two rotated boxes as a loss"),
    switches=("sqrt",),
    options=({"fun": "sqrt", "tau": 2.0, "alpha": 0.5}, {"fun": "none", "tau": 0.0, "sqrt": False, "eps": 3.0}),
    paper="arXiv 2106.01883",
)
def kld_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: Positive = 1e-7,
    *,
    fun: Shape = "log1p",
    tau: NonNegative = 1.0,
    alpha: Positive = 1.0,
    sqrt: bool = True,
    **options: Unpack[WeightedOptions],
) -> CheckedCall[RotatedCall]:
    """Kullback-Leibler divergence of two rotated boxes as a loss (KLD; Yang et al. 2021, arXiv 2106.01883), as mmrotate's kld_loss.

    L = w [1 - 1 / (τ + f(√D))] with D = Δᵀ Σ₁⁻¹ Δ / 2α² + ½ [tr(Σ₁⁻¹ Σ₂) + ln(det Σ₁ / det Σ₂)] - 1, Δ the offset of the centres and
    Σ = R diag(w²/4, h²/4) Rᵀ. boxes1 are the predictions. For τ below 1 it is w f(√D).

    When to use it: Take it where boxes are long and the angle must be precise: the narrower the box, the more D weighs its angle and the
    offset across it. It has no units.

    When not: Leave it where predicted boxes may be much smaller than their targets at the start, because D then grows as the square of the
    ratio. Take `probiou`.

    Args:
        fun: f: "log1p" for ln(1 + d), "sqrt" for √d, "none" for d.
        tau: τ of at least 0. From 1 on the loss is 1 - 1 / (τ + f), which is bounded; below 1 it is f.
        alpha: α above 0; a larger one weighs the centres less.
        sqrt: take √D, else D.
    """
    numbers = _distance_numbers(fun, tau, alpha)
    return rotated_loss("kld", boxes1, boxes2, reduction, eps, options, *numbers, float(sqrt), above_0=True)


def kalman(x1, y1, w1, h1, t1, x2, y2, w2, h2, t2, eps, kind):
    a1, b1, a2, b2, square = sides(w1, h1, t1, w2, h2, t2, eps)
    p, q = tl.sqrt(a1 / a2), tl.sqrt(b1 / b2)
    areas = ((a1 - a2) / a2 * q + (b1 - b2) / b2 / q) / p  # r - 1/r of r² = A₁/A₂, so that the slope of r + 1/r does not cancel at 1
    inverse = 2.0 * tl.sqrt(4.0 + areas * areas) * tl.sqrt(1.0 + spread(a1, b1, a2, b2, square)) - 1.0
    rest = (inverse - 1.0) / inverse
    return tl.where(kind == 1.0, tl.log2(inverse) * 0.6931471805599453, tl.where(kind == 2.0, tl.exp(rest) - 1.0, rest))


@formula("kfiou", DeviceFormula(kalman, variables=10, heavy=True))
def kfiou_reference(b1: Tensor, b2: Tensor, eps: float, kind: float) -> Tensor:
    a1, s1, a2, s2, square = _sides(b1, b2, eps)
    p, q = (a1 / a2).sqrt(), (s1 / s2).sqrt()
    areas = ((a1 - a2) / a2 * q + (s1 - s2) / s2 / q) / p
    inverse = 2 * (4 + areas.square()).sqrt() * (1 + _spread(a1, s1, a2, s2, square)).sqrt() - 1
    rest = (inverse - 1) / inverse
    return (rest, inverse.log(), rest.expm1())[int(kind)]


@loss(
    "kfiou",
    ROTATED,
    Module("KFIoULoss", "Loss of the Kalman filter's IoU of two rotated boxes"),
    options=({"fun": "ln"}, {"fun": "exp", "eps": 3.0}),
    paper="arXiv 2201.12558",
)
def kfiou_loss(
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: Reduction = "none",
    eps: NonNegative = 1e-7,
    *,
    fun: Literal["none", "ln", "exp"] = "none",
    **options: Unpack[WeightedOptions],
) -> CheckedCall[RotatedCall]:
    """Loss of the Kalman filter's IoU of two rotated boxes (KFIoU; Yang et al. 2023, arXiv 2201.12558), as mmrotate's kfiou_loss has it.

    L = w [1 - V / (A₁ + A₂ - V)] with A the areas of the boxes, V = 4 √det(Σ₁ (Σ₁ + Σ₂)⁻¹ Σ₂), Σ = R diag(w²/4, h²/4) Rᵀ. It takes the
    centres for equal: add a smooth L1 loss of the centres, encoded as mmrotate does, where it is the loss of a detector. Equal boxes have
    V / (A₁ + A₂ - V) = 1/3, which is the most.

    When to use it: Take it with the sum that the paper trains, where a loss should follow the trend of the rotated IoU.

    When not: Do not use it alone, because it has no gradient in the centres. `probiou` and `kld` have one.

    Args:
        eps: of at least 0; a side below it is eps. So gradients stay finite where eps is above 0.
        fun: "none" for 1 - KFIoU, "ln" for -ln KFIoU, "exp" for e^(1 - KFIoU) - 1.
    """
    checks.one_of("fun", fun, ENDS)
    return rotated_loss("kfiou", boxes1, boxes2, reduction, eps, options, float(ENDS.index(fun)))


def _within(x: Tensor, limit: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(x, limit), -limit)


def _column(x: Tensor, y: Tensor, dx: Tensor, dy: Tensor, half_w: Tensor, half_h: Tensor) -> Tensor:
    """Return ∫ y dx along an edge, where x lies within half_w, with y kept within half_h."""
    steep, one = dx.abs() < 1e-30, torch.ones_like(dx)
    slope = torch.where(steep, 0.0, 1 / torch.where(steep, one, dx))
    start, end = _within(x, half_w), _within(x + dx, half_w)
    first, last = (y + (_within((at - x) * slope - 0.5, one / 2) + 0.5) * dy for at in (start, end))
    low, high = torch.minimum(first, last), torch.maximum(first, last)
    inner_low, inner_high = _within(low, half_h), _within(high, half_h)
    below = torch.minimum(high, -half_h) - torch.minimum(low, -half_h)
    above = torch.maximum(high, half_h) - torch.maximum(low, half_h)
    flat = high - low < 1e-30
    mean = half_h * (above - below) + (inner_high - inner_low) * (inner_high + inner_low) / 2
    return (end - start) * torch.where(flat, (inner_high + inner_low) / 2, mean / torch.where(flat, one, high - low))


@torch.no_grad()
def _integral(center: tuple[Tensor, Tensor], c: Tensor, s: Tensor, sides: tuple[Tensor, Tensor], box: tuple[Tensor, Tensor]) -> Tensor:
    """Return -∮ y dx around a box, with x and y kept within a box about 0: the area that they share. `_inner` explains the arguments."""
    (x, y), (w, h) = center, sides
    dx, dy, ex, ey = c * w, s * w, -s * h, c * h
    x, y = (torch.stack([m - (d + e) / 2, m + (d - e) / 2, m + (d + e) / 2, m + (e - d) / 2], -1) for m, d, e in ((x, dx, ex), (y, dy, ey)))
    to_x, to_y = torch.stack([dx, ex, -dx, -ex], -1), torch.stack([dy, ey, -dy, -ey], -1)
    total = _column(x, y, to_x, to_y, box[0].unsqueeze(-1) / 2, box[1].unsqueeze(-1) / 2).sum(-1)
    return torch.maximum(-total, torch.zeros_like(total)).detach()


def _slab(x: Tensor, dx: Tensor, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and last t in [-½, ½] with x + t dx within the limit, and the share that counts: ½ on the limit itself."""
    parallel, half = dx.abs() < 1e-30, torch.full_like(dx, 0.5)
    step = torch.where(parallel, torch.ones_like(dx), dx)
    a, b = (limit - x) / step, (-limit - x) / step
    begin, end = torch.maximum(torch.minimum(a, b), -half), torch.minimum(torch.maximum(a, b), half)
    counts = torch.where(x.abs() < limit, 1.0, torch.where(x.abs() == limit, 0.5, 0.0)).to(dx.dtype)
    return torch.where(parallel, -half, begin), torch.where(parallel, half, end), torch.where(parallel, counts, torch.ones_like(dx))


def _inner(center: tuple[Tensor, Tensor], c: Tensor, s: Tensor, sides: tuple[Tensor, Tensor], box: tuple[Tensor, Tensor]) -> Tensor:
    """Return lengths and first moments, (2, ..., 4), of the edges of a box within a box about 0.

    Args:
        center: of the edges' box.
        c, s: cosine and sine of its angle.
        sides: its width and height; the edges are those at the ends of the width, then those at the ends of the height.
        box: width and height of the box about 0.
    """
    x, y, half_w, half_h = (t.unsqueeze(-1) for t in (*center, box[0] / 2, box[1] / 2))
    w, h = sides
    nx, ny, far = torch.stack([c, c, -s, -s], -1), torch.stack([s, s, c, c], -1), torch.stack([w, -w, h, -h], -1) / 2
    length = torch.stack([h, h, w, w], -1)
    begin_x, end_x, counts_x = _slab(x + far * nx, -ny * length, half_w)
    begin_y, end_y, counts_y = _slab(y + far * ny, nx * length, half_h)
    begin, end = torch.maximum(begin_x, begin_y), torch.minimum(end_x, end_y)
    share = (end - begin).clamp(min=0) * counts_x * counts_y
    return torch.stack([share * length, share * (begin + end) / 2 * length.square()])


def _shared_area(b1: Tensor, b2: Tensor) -> Tensor:
    """Return the area of the intersection.

    Its derivatives are lengths: an edge that moves outwards changes the area by its length within the other box. What
    autograd gives of the integral cancels to them, and loses digits.
    """
    (x, y), (p, q) = _offset(b1, b2, b2[..., 4]), _offset(b2, b1, b1[..., 4])
    delta, (w1, h1), (w2, h2) = b1[..., 4] - b2[..., 4], b1[..., 2:4].abs().unbind(-1), b2[..., 2:4].abs().unbind(-1)
    c, s = delta.cos(), delta.sin()
    lengths, moments = _inner((x, y), c, s, (w1, h1), (w2, h2))
    others, _ = _inner((p, q), c, -s, (w2, h2), (w1, h1))
    area = torch.where((lengths + others).sum(-1) == 0, 0.0, _integral((x, y), c, s, (w1, h1), (w2, h2)))
    (right, left, top, bottom), turns = lengths.unbind(-1), moments.unbind(-1)
    slopes = (
        (x, (right - left) * c - (top - bottom) * s),
        (y, (right - left) * s + (top - bottom) * c),
        (delta, turns[1] - turns[0] + turns[3] - turns[2]),
        *((w1, (right + left) / 2), (h1, (top + bottom) / 2)),
        *((w2, others[..., :2].sum(-1) / 2), (h2, others[..., 2:].sum(-1) / 2)),
    )
    for variable, slope in slopes:  # adds 0, whose first derivatives are the slopes, and whose second ones are theirs
        area = area + (variable - variable.detach()) * (slope + slope.detach()) / 2
    return area


@formula("rotated_iou", DeviceFormula("rotated.rotated_iou", heavy=True))
def rotated_iou_reference(b1: Tensor, b2: Tensor, eps: float) -> Tensor:
    shared = _shared_area(b1, b2)
    union = ((b1[..., 2] * b1[..., 3]).abs() + ((b2[..., 2] * b2[..., 3]).abs() - shared)).clamp(min=eps)
    return (union - shared) / union


@loss(
    "rotated_iou",
    ROTATED,
    Module("RotatedIoULoss", "Loss of the intersection over union of two rotated boxes"),
    options=({"eps": 3e3},),
    paper="arXiv 1908.03851",
)
def rotated_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: Reduction = "none", eps: NonNegative = 1e-7, **options: Unpack[WeightedOptions]
) -> CheckedCall[RotatedCall]:
    """Loss of the intersection over union of two rotated boxes (Zhou et al. 2019, arXiv 1908.03851), as mmrotate's RotatedIoULoss.

    L = w [1 - I/U] with I the exact area of the intersection of both polygons, U that of the union. I is the integral around one box of
    its height within the other, seen along the other's sides. So no corners are sorted, and edges that lie on each other do no harm.

    When to use it: Take it to refine boxes that overlap their targets, and with reduction "none" to evaluate: IoU = 1 - L.

    When not: Leave it where boxes may not overlap, because its gradient is 0 there. Take `probiou` or `kld`.

    Args:
        eps: of at least 0; a union below it is eps.
    """
    return rotated_loss("rotated_iou", boxes1, boxes2, reduction, eps, options)

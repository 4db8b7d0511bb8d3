"""Losses of self-supervised features without negatives: self-distillation, and what spreads features."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import DivergenceCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss, public
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import BatchReduction, NonNegative, Positive
from lossforge.losses.base.options import CappedDivergenceOptions, DivergenceOptions
from lossforge.losses.base.record import SCALAR, CheckedCall, TemplateDocs
from lossforge.losses.base.state import kernels_apply, without_autocast
from lossforge.losses.engine.operators import ANY_DEVICE, define, launched
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.divergence import DIVERGENCE, divergence_loss
from lossforge.losses.templates.plain_forms import accurate, root_of, size_of, unit_rows

__all__ = ["sinkhorn_center"]

ROWS = 2048  # of similarities that are in memory at a time
TWO_VIEWS = "input1: Tensor, input2: Tensor"
FEATURES = TemplateDocs(targets="features", returns=f"{SCALAR}.")


@formula("soft_cross_entropy", DeviceFormula("softmax.soft_cross_entropy", averaged="softmax.soft_cross_entropy_averaged"))
def soft_cross_entropy_reference(lp: Tensor, lq: Tensor) -> Tensor:
    q = lq.exp()
    return torch.where(q == 0, 0.0, -q * torch.where(q == 0, 0.0, lp))


@loss(
    "dino",
    DIVERGENCE,
    Module("DINOLoss", "Cross entropy of a student's softmax from a teacher's centred and sharpened one"),
    formula="soft_cross_entropy",
    options=({"teacher_temperature": 0.07}, {"student_temperature": 1.0, "teacher_temperature": 2.0}),
    domain="cosines",
    without=("hard_weight", "temperature", "scale", "softcap", "target_scale", "target_softcap"),
    like="lossforge.losses.testing.oracles.divergence:dino",
    paper="arXiv 2104.14294",
)
def dino_loss(
    input: Tensor,  # (C,), (N, C), (N, C, d…)
    target_logits: Tensor,  # as input
    student_temperature: Positive = 0.1,
    teacher_temperature: Positive = 0.04,
    reduction: BatchReduction = "batchmean",
    *,
    center: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    **options: Unpack[DivergenceOptions],
) -> CheckedCall[DivergenceCall]:
    """Cross entropy of a student's softmax from a teacher's centred and sharpened one, the loss of DINO (Caron et al. 2021, arXiv
    2104.14294), iBOT (2111.07832) and SwAV (2006.09882).

    L = -Σⱼ qⱼ ln pⱼ, p = softmax(input / Tₛ), q = softmax((target_logits - c) / Tₜ), with the temperatures Tₛ of the student and Tₜ of the
    teacher.

    - DINO and iBOT: c is the running mean of the teacher's logits over batches. DINO takes the mean over the pairs of two different views.
    - iBOT of masked patches: `weight` has one over the number of masked patches of the image; reduction="sum", normalizer: the images.
    - SwAV, and DINOv2's and DINOv3's Sinkhorn-Knopp: c = sinkhorn_center(target_logits, Tₜ), of this batch.

    Neither softmax is in memory. `fuse_linear(dino_loss)` computes the student's prototypes too, by chunks.

    When to use it: Take it to learn features without labels from views of an image, with a teacher that is the student's running mean.

    When not: Leave it where a teacher's logits are sure to mean classes (`kl`). Without a centre all images soon get one prototype.

    Args:
        input: the student's logits (C,), (N, C) or (N, C, d…), of any floating dtype.
        target_logits: the teacher's, in the shape of input.
        student_temperature: Tₛ above 0.
        teacher_temperature: Tₜ above 0, below Tₛ, so that the teacher is sharper.
        center: c, subtracted from the teacher's logits in float32; None for 0. It has no gradient.
        labels: integers (N, d…); rows whose label is ignore_index are left out. Other labels mean nothing.
        validate: without effect.

    Examples:
        >>> student, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
        >>> dino_loss(student, teacher, center=teacher.mean(0)).backward()
    """
    student = checks.number("student_temperature", student_temperature, 0.0, exclusive=True)
    teacher = checks.number("teacher_temperature", teacher_temperature, 0.0, exclusive=True)
    given: CappedDivergenceOptions = {**options, "target_scale": student / teacher}
    if center is not None:
        checks.floating("input", input)
        checks.floating_beside("target_logits", target_logits, input)
        checks.floating_beside("center", center, input)
        checks.without_gradient("center", center)
        classes = input.shape[min(1, input.ndim - 1) :][:1]
        checks.fits("center", center, center.shape == classes, "have one entry a class, {}", tuple(classes))
        center = center.to(torch.promote_types(target_logits.dtype, torch.float32)).contiguous()
    call = DivergenceCall("soft_cross_entropy", input, target_logits, center=center, temperature=student, reduction=reduction)
    return divergence_loss(call._replace(ignore_index=ignore_index), given, False)


@checks.named
def sinkhorn_center(scores: Tensor, temperature: float = 0.05, iterations: int = 3) -> Tensor:
    """Centre by which a teacher's logits spread a batch evenly over all prototypes: Sinkhorn-Knopp, as in SwAV (Caron et al. 2020, arXiv
    2006.09882) and DINOv2.

    softmax((scores - c) / T) is what lightly's sinkhorn(scores, iterations, T) and DINOv2's sinkhorn_knopp_teacher return: exp(scores / T),
    divided in turn by the sums of its columns and by those of its rows. In logarithms, so that no score overflows; beside the centre and
    parts of the sums nothing is written.

    Args:
        scores: (N, C), the teacher's logits of N samples for C prototypes, of any floating dtype and strides. Those of several processes
            have to be gathered.
        temperature: T above 0.
        iterations: at least 1, each with one sum over the samples, and all but the last one over the prototypes too.

    Returns:
        c (C,), float32 (float64 for float64), without gradient; to a constant that softmax does not see.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import dino_loss, sinkhorn_center
        >>> student, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
        >>> dino_loss(student, teacher, 0.1, 0.05, center=sinkhorn_center(teacher, 0.05)).backward()
    """
    checks.whole("scores", scores)
    checks.fits("scores", scores, scores.ndim == 2, "have shape (N, C)")
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    iterations = checks.whole_number("iterations", iterations)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    found: Tensor = OPERATORS.sinkhorn_center(scores.detach().resolve_neg(), temperature, iterations)
    return found


def _center(scores: Tensor, temperature: float, iterations: int) -> Tensor:
    if scores.numel() and kernels_apply(scores):
        launched_center: tuple[Tensor] = launched("features.sinkhorn", "center", (scores,), temperature, iterations)
        return launched_center[0]
    x = accurate(scores) / temperature
    u = x.new_zeros(len(x), 1)
    v = -(x + u).logsumexp(0)
    for _ in range(iterations - 1):
        u = -(x + v).logsumexp(1, keepdim=True)
        v = -(x + u).logsumexp(0)
    return v * -temperature


def _fake_center(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape[1], dtype=torch.promote_types(scores.dtype, torch.float32))


define("sinkhorn_center(Tensor scores, float temperature, int iterations) -> Tensor", _center, _fake_center, ANY_DEVICE)


@public(FEATURES, Module("KoLeoLoss", "Kozachenko-Leonenko entropy of features as lightly's KoLeoLoss", forward="input: Tensor"))
def koleo_loss(
    input: Tensor,  # (N, D)
    eps: NonNegative = 1e-8,
) -> Tensor:
    """Kozachenko-Leonenko entropy of features, as DINOv2's and lightly's KoLeoLoss (Sablayrolles et al. 2019, arXiv 1806.03198).

    L = -1/N Σᵢ ln(‖zᵢ - zₚ + ε‖ + ε), z the rows divided by their lengths, p the nearest other row of i, ε = eps.

    The matrix of similarities is in memory for 2,048 rows at a time. In plain PyTorch: torch.compile of the formula was quicker than an
    operator around it (one H200, 8192×1024, float32: 2.96 ms to 3.63).

    When to use it: Take it beside `dino_loss`, by a factor of 0.1, so that the features of a batch spread over the sphere.

    When not: Leave it where rows of a batch may be equal, such as two views of one image: give it one view at a time.

    Args:
        input: (N, D), the features of N > 1 samples, of any floating dtype.
        eps: ε of at least 0.

    Examples:
        >>> koleo_loss(torch.randn(8, 32, requires_grad=True)).backward()
    """
    checks.whole("input", input)
    checks.fits("input", input, input.ndim == 2 and len(input) > 1, "have shape (N, D) with at least two rows")
    eps = checks.number("eps", eps, 0.0)
    with without_autocast(input):
        x = unit_rows(input, eps)
        return -(F.pairwise_distance(x, x[_nearest(x.detach())], eps=eps) + eps).log().mean()


def _nearest(x: Tensor) -> Tensor:
    """Return of each row the other row with the largest product."""
    found = []
    for first, rows in enumerate(x.split(ROWS)):
        products = rows @ x.T
        products.diagonal(first * ROWS).fill_(-torch.inf)
        found.append(products.argmax(1))
    return torch.cat(found)


def _two_views(input1: Tensor, input2: Tensor) -> tuple[Tensor, Tensor]:
    checks.whole("input1", input1)
    checks.floating_beside("input2", input2, input1, "input1")
    checks.fits("input1", input1, input1.ndim == 2 and len(input1) > 1, "have shape (N, D) with at least two rows")
    checks.fits("input2", input2, input2.shape == input1.shape, "have the shape of input1, {}", input1.shape)
    dtype = torch.promote_types(input1.dtype, input2.dtype)
    return accurate(input1.to(dtype)), accurate(input2.to(dtype))


def _standardised(x: Tensor, eps: float) -> Tensor:
    """Return each column less its mean, over √(Var + ε); both over a size of the column, so that no square overflows."""
    x = x - x.mean(0)
    size = size_of(x, 0)
    x = x / size
    return x / (x.square().mean(0) + eps / size / size).sqrt()


def _others(a: Tensor, b: Tensor) -> Tensor:
    """Return Σᵢ≠ⱼ (aᵀ b)ᵢⱼ² of a and b (N, D), by the smaller of the matrices D × D and N × N: ‖aᵀ b‖² = Σ (a aᵀ) (b bᵀ)."""
    n, d = a.shape
    if n >= d > 0:  # the diagonal is left out, because its squares would cost the digits of features that are nearly independent
        return (a.T @ b).flatten()[:-1].reshape(d - 1, d + 1)[:, 1:].square().sum()
    gram = a @ a.T
    return (gram.square() if a is b else gram * (b @ b.T)).sum() - (a * b).sum(0).square().sum()


@public(FEATURES, Module("VICRegLoss", "Variance, invariance and covariance of two views as lightly's VICRegLoss", forward=TWO_VIEWS))
def vicreg_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    lambda_param: NonNegative = 25.0,
    mu_param: NonNegative = 25.0,
    nu_param: NonNegative = 1.0,
    eps: NonNegative = 1e-4,
) -> Tensor:
    """Variance, invariance and covariance of two views, as lightly's VICRegLoss (Bardes et al. 2022, arXiv 2105.04906).

    L = λ mean (z - z′)² + μ/2 [v(z) + v(z′)] + ν [c(z) + c(z′)], v(z) = 1/D Σⱼ max(0, 1 - √(Var zⱼ + ε)), c(z) = 1/D Σᵢ≠ⱼ Cov(z)ᵢⱼ², with
    λ = lambda_param, μ = mu_param, ν = nu_param, ε = eps.

    For N < D the squares of the covariances come from the N × N products of samples, because both have one sum of squares: no matrix D × D
    is in memory.

    When to use it: Take it for features of two views without negatives, a teacher or large batches.

    When not: Leave it where batches are large enough for `nt_xent_loss`.

    Args:
        input1: (N, D), the features of one view, N > 1. Those of several processes have to be gathered.
        input2: (N, D), the features of the other view, in the same order.
        lambda_param: λ of at least 0, the weight of the invariance.
        mu_param: μ of at least 0, the weight of the variance.
        nu_param: ν of at least 0, the weight of the covariance.
        eps: ε of at least 0, added to each variance. With 0, too, a feature that is equal in all samples has gradient 0 in v.

    Examples:
        >>> vicreg_loss(torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)).backward()
    """
    a, b = _two_views(input1, input2)
    numbers = {"lambda_param": lambda_param, "mu_param": mu_param, "nu_param": nu_param, "eps": eps}
    invariance, variance, covariance, eps = [checks.number(name, value, 0.0) for name, value in numbers.items()]
    with without_autocast(a):
        total = invariance * F.mse_loss(a, b)
        for z in (a - a.mean(0), b - b.mean(0)):
            own = z.square().sum(0) / (len(z) - 1)
            others = _others(z, z) / (len(z) - 1) ** 2
            total = total + 0.5 * variance * F.relu(1 - root_of(own + eps)).mean() + covariance * others / z.shape[1]
        return total


@public(FEATURES, Module("BarlowTwinsLoss", "Redundancy of two views' features as lightly's BarlowTwinsLoss", forward=TWO_VIEWS))
def barlow_twins_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    lambda_param: NonNegative = 5e-3,
    eps: Positive = 1e-5,
) -> Tensor:
    """Redundancy of two views' features, as lightly's BarlowTwinsLoss (Zbontar et al. 2021, arXiv 2103.03230).

    L = Σᵢ (1 - Cᵢᵢ)² + λ Σᵢ≠ⱼ Cᵢⱼ², C = zᵀ z′ / N, z the features less their mean over √(Var + ε), λ = lambda_param, ε = eps.

    For N < D the squares come from N × N products of samples: no matrix D × D is in memory.

    When to use it: Take it for features of two views without negatives or a teacher.

    When not: Leave it where features have few dimensions: it needs thousands.

    Args:
        input1: (N, D), the features of one view, N > 1. Those of several processes have to be gathered.
        input2: (N, D), the features of the other view, in the same order.
        lambda_param: λ of at least 0, the weight of the products of different features.
        eps: ε above 0, added to each variance.

    Examples:
        >>> barlow_twins_loss(torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)).backward()
    """
    a, b = _two_views(input1, input2)
    weight, eps = checks.number("lambda_param", lambda_param, 0.0), checks.number("eps", eps, 0.0, exclusive=True)
    with without_autocast(a):
        a, b = _standardised(a, eps), _standardised(b, eps)
        own = (a * b).mean(0)
        return (1 - own).square().sum() + weight * _others(a, b) / len(a) ** 2

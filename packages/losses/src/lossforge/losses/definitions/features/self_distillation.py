"""Losses of self-supervised features without negatives: self-distillation, and what spreads features."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.classes.calls import DivergenceCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, loss, public
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.option_types import BatchReduction, DeviceMesh, NonNegative, Positive, ProcessGroup
from lossforge.losses.base.options import CappedDivergenceOptions, DivergenceOptions
from lossforge.losses.base.record import SCALAR, CheckedCall, TemplateDocs
from lossforge.losses.base.state import kernels_apply, without_autocast
from lossforge.losses.engine.gram import gram_difference
from lossforge.losses.engine.operators import ANY_DEVICE, define, launched
from lossforge.losses.engine.parallel import spread
from lossforge.losses.engine.parallel.batch import Batch, batch_of
from lossforge.losses.formulas import DeviceFormula, formula
from lossforge.losses.templates.divergence import DIVERGENCE, divergence_loss
from lossforge.losses.templates.plain_forms import accurate, root_of, size_of, unit_rows

__all__ = ["mean_center", "sinkhorn_center"]

ROWS = 2048  # of similarities that are in memory at a time
TWO_VIEWS = "input1: Tensor, input2: Tensor"
FEATURES = TemplateDocs(
    targets="features",
    arguments={
        "group": (
            "processes over which the rows are spread, a ProcessGroup or a DeviceMesh of one dimension: each gives its own rows, of any "
            "number. The scalar is that of all rows, in every process. Gradients are those of the sum of what all processes return, which "
            "DDP averages. torch.compile breaks its graph."
        )
    },
    returns=f"{SCALAR}.",
)


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

    - DINO and iBOT: c is the running mean of the teacher's logits over batches, `mean_center`. DINO takes the mean over the pairs of two
      different views.
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


@spread.over_processes
@checks.named
def mean_center(
    scores: Tensor, center: Tensor | None = None, momentum: float = 0.9, *, group: ProcessGroup | DeviceMesh | None = None
) -> Tensor:
    """Centre of a teacher's logits as DINO and iBOT have it: their running mean (Caron et al. 2021, arXiv 2104.14294).

    c ← m c + (1 - m) mean(scores), m = momentum, as lightly's Center(mode="mean") and DINO's update_center. Over processes each row counts
    once, also where the processes have different numbers.

    Args:
        scores: (N, C), the teacher's logits of N samples, of any floating dtype.
        center: c before, (C,); None for the mean alone.
        momentum: m from 0 to 1.
        group: processes over which the samples are spread, a ProcessGroup or a DeviceMesh of one dimension: each gives its own, of any
            number, and all get one centre.

    Returns:
        c (C,), float32 (float64 for float64), without gradient. Give it to `dino_loss` of the next batch.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import dino_loss, mean_center
        >>> student, teacher = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
        >>> center = torch.zeros(64)
        >>> dino_loss(student, teacher, center=center).backward()
        >>> center = mean_center(teacher, center)
    """
    x = _scores(scores)
    momentum = checks.number("momentum", momentum, 0.0, 1.0)
    if center is not None:
        checks.floating_beside("center", center, scores, "scores")
        checks.fits("center", center, center.shape == scores.shape[1:], "have one entry a class, {}", tuple(scores.shape[1:]))
    batch = batch_of(group, "scores", x, least=1)
    mean = batch.mean(x)
    return mean if center is None else mean.lerp(center.detach().to(mean.dtype), momentum)


def _scores(scores: Tensor) -> Tensor:
    """Return scores without gradient, in float32 (float64 for float64)."""
    checks.whole("scores", scores)
    checks.fits("scores", scores, scores.ndim == 2, "have shape (N, C)")
    return accurate(scores.detach())


@spread.over_processes
@checks.named
def sinkhorn_center(
    scores: Tensor, temperature: float = 0.05, iterations: int = 3, *, group: ProcessGroup | DeviceMesh | None = None
) -> Tensor:
    """Centre by which a teacher's logits spread a batch evenly over all prototypes: Sinkhorn-Knopp, as in SwAV (Caron et al. 2020, arXiv
    2006.09882) and DINOv2.

    softmax((scores - c) / T) is what lightly's sinkhorn(scores, iterations, T) and DINOv2's sinkhorn_knopp_teacher return: exp(scores / T),
    divided in turn by the sums of its columns and by those of its rows. In logarithms, so that no score overflows; beside the centre and
    parts of the sums nothing is written.

    Args:
        scores: (N, C), the teacher's logits of N samples for C prototypes, of any floating dtype and strides.
        temperature: T above 0.
        iterations: at least 1, each with one sum over the samples, and all but the last one over the prototypes too.
        group: processes over which the samples are spread, a ProcessGroup or a DeviceMesh of one dimension: each gives its own, of any
            number, and all get one centre. The processes exchange C numbers an iteration.

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
    x = _scores(scores)
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    iterations = checks.whole_number("iterations", iterations)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if group is not None:
        return _center_over_processes(scores.detach().resolve_neg(), temperature, iterations, batch_of(group, "scores", x))
    found: Tensor = OPERATORS.sinkhorn_center(scores.detach().resolve_neg(), temperature, iterations)
    return found


def _center(scores: Tensor, temperature: float, iterations: int) -> Tensor:
    if scores.numel() and kernels_apply(scores):
        launched_center: tuple[Tensor] = launched("features.sinkhorn", "center", (scores,), temperature, iterations)
        return launched_center[0]
    return _plain_center(accurate(scores), temperature, iterations, Batch([len(scores)]))


def _center_over_processes(scores: Tensor, temperature: float, iterations: int, batch: Batch) -> Tensor:
    if not scores.numel() or not kernels_apply(scores):
        return _plain_center(accurate(scores), temperature, iterations, batch)

    def of_all(u: Tensor | None) -> Tensor:
        (own,) = launched("features.sinkhorn", "of_columns", (scores, u), temperature)
        return batch.logsumexp(own.unsqueeze(0) / temperature) * temperature

    center = of_all(None)
    for _ in range(iterations - 1):
        (u,) = launched("features.sinkhorn", "of_rows", (scores, center), temperature)
        center = of_all(u)
    return center


def _plain_center(x: Tensor, temperature: float, iterations: int, batch: Batch) -> Tensor:
    x = x / temperature
    v = -batch.logsumexp(x)
    for _ in range(iterations - 1):
        u = -(x + v).logsumexp(1, keepdim=True)
        v = -batch.logsumexp(x + u)
    return v * -temperature


def _fake_center(scores: Tensor, *_: object) -> Tensor:
    return scores.new_empty(scores.shape[1], dtype=torch.promote_types(scores.dtype, torch.float32))


define("sinkhorn_center(Tensor scores, float temperature, int iterations) -> Tensor", _center, _fake_center, ANY_DEVICE)


@public(FEATURES, Module("KoLeoLoss", "Kozachenko-Leonenko entropy of features as lightly's KoLeoLoss", forward="input: Tensor"))
@spread.over_processes
def koleo_loss(
    input: Tensor,  # (N, D)
    eps: NonNegative = 1e-8,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
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
    checks.fits("input", input, input.ndim == 2, "have shape (N, D)")
    eps = checks.number("eps", eps, 0.0)
    batch = batch_of(group, "input", input, least=2)
    with without_autocast(input):
        x = unit_rows(input, eps)
        every = batch.gathered(x)
        distances = F.pairwise_distance(x, every[_nearest(x.detach(), every.detach(), batch.first)], eps=eps)
        return batch.for_own_rows(batch.summed(-(distances + eps).log().sum()) / batch.total)


def _nearest(x: Tensor, every: Tensor, first: int) -> Tensor:
    """Return of each row of x, the rows of `every` from `first` on, the other row of `every` with the largest product."""
    found = []
    for place, rows in enumerate(x.split(ROWS)):
        products = rows @ every.T
        products.diagonal(first + place * ROWS).fill_(-torch.inf)
        found.append(products.argmax(1))
    return torch.cat(found)


def _two_views(input1: Tensor, input2: Tensor) -> tuple[Tensor, Tensor]:
    checks.whole("input1", input1)
    checks.floating_beside("input2", input2, input1, "input1")
    checks.fits("input1", input1, input1.ndim == 2, "have shape (N, D)")
    checks.fits("input2", input2, input2.shape == input1.shape, "have the shape of input1, {}", input1.shape)
    dtype = torch.promote_types(input1.dtype, input2.dtype)
    return accurate(input1.to(dtype)), accurate(input2.to(dtype))


def _standardised(x: Tensor, eps: float, batch: Batch) -> Tensor:
    """Return each column less its mean, over √(Var + ε); both over a size of the column, so that no square overflows."""
    x = x - batch.mean(x)
    size = batch.largest(size_of(x, 0).expand(1, x.shape[1]))
    x = x / size
    return x / (batch.mean(x.square()) + eps / size / size).sqrt()


def _others(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Return Σᵢ≠ⱼ (aᵀ b)ᵢⱼ² of a and b (N, D), by the smaller of the matrices D × D and N × N: ‖aᵀ b‖² = Σ (a aᵀ) (b bᵀ)."""
    n, d = batch.total, a.shape[1]
    if n >= d > 0:  # the diagonal is left out, because its squares would cost the digits of features that are nearly independent
        return batch.summed(a.T @ b).flatten()[:-1].reshape(d - 1, d + 1)[:, 1:].square().sum()
    gram = a @ batch.gathered(a).T
    products = gram.square() if a is b else gram * (b @ batch.gathered(b).T)
    return batch.summed(products.sum()) - batch.summed((a * b).sum(0)).square().sum()


@public(FEATURES, Module("VICRegLoss", "Variance, invariance and covariance of two views as lightly's VICRegLoss", forward=TWO_VIEWS))
@spread.over_processes
def vicreg_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    lambda_param: NonNegative = 25.0,
    mu_param: NonNegative = 25.0,
    nu_param: NonNegative = 1.0,
    eps: NonNegative = 1e-4,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Variance, invariance and covariance of two views, as lightly's VICRegLoss (Bardes et al. 2022, arXiv 2105.04906).

    L = λ mean (z - z′)² + μ/2 [v(z) + v(z′)] + ν [c(z) + c(z′)], v(z) = 1/D Σⱼ max(0, 1 - √(Var zⱼ + ε)), c(z) = 1/D Σᵢ≠ⱼ Cov(z)ᵢⱼ², with
    λ = lambda_param, μ = mu_param, ν = nu_param, ε = eps.

    For N < D the squares of the covariances come from the N × N products of samples, because both have one sum of squares: no matrix D × D
    is in memory.

    When to use it: Take it for features of two views without negatives, a teacher or large batches.

    When not: Leave it where batches are large enough for `nt_xent_loss`.

    Args:
        input1: (N, D), the features of one view, N > 1.
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
    batch = batch_of(group, "input1", a, b, least=2)
    n, d = batch.total, a.shape[1]
    with without_autocast(a):
        total = batch.summed(F.mse_loss(a, b, reduction="sum")) * (invariance / n / d)
        for z in (a - batch.mean(a), b - batch.mean(b)):
            own = batch.summed(z.square().sum(0)) / (n - 1)
            total = total + 0.5 * variance * F.relu(1 - root_of(own + eps)).mean() + _others(z, z, batch) * (covariance / (n - 1) ** 2 / d)
        return batch.for_own_rows(total)


@public(FEATURES, Module("BarlowTwinsLoss", "Redundancy of two views' features as lightly's BarlowTwinsLoss", forward=TWO_VIEWS))
@spread.over_processes
def barlow_twins_loss(
    input1: Tensor,  # (N, D)
    input2: Tensor,  # (N, D)
    lambda_param: NonNegative = 5e-3,
    eps: Positive = 1e-5,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Redundancy of two views' features, as lightly's BarlowTwinsLoss (Zbontar et al. 2021, arXiv 2103.03230).

    L = Σᵢ (1 - Cᵢᵢ)² + λ Σᵢ≠ⱼ Cᵢⱼ², C = zᵀ z′ / N, z the features less their mean over √(Var + ε), λ = lambda_param, ε = eps.

    For N < D the squares come from N × N products of samples: no matrix D × D is in memory.

    When to use it: Take it for features of two views without negatives or a teacher.

    When not: Leave it where features have few dimensions: it needs thousands.

    Args:
        input1: (N, D), the features of one view, N > 1.
        input2: (N, D), the features of the other view, in the same order.
        lambda_param: λ of at least 0, the weight of the products of different features.
        eps: ε above 0, added to each variance.

    Examples:
        >>> barlow_twins_loss(torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)).backward()
    """
    a, b = _two_views(input1, input2)
    weight, eps = checks.number("lambda_param", lambda_param, 0.0), checks.number("eps", eps, 0.0, exclusive=True)
    batch = batch_of(group, "input1", a, b, least=2)
    with without_autocast(a):
        a, b = _standardised(a, eps, batch), _standardised(b, eps, batch)
        own = batch.summed((a * b).sum(0)) / batch.total
        return batch.for_own_rows((1 - own).square().sum() + weight * _others(a, b, batch) / batch.total**2)


@public(FEATURES, Module("GramAnchoringLoss", "Gram anchoring of patches as DINOv3's GramLoss"))
def gram_anchoring_loss(
    input: Tensor,  # (B, N, D), (N, D)
    target: Tensor,  # as input
    img_level: bool = True,
    *,
    normalize: bool = True,
    remove_neg: bool = False,
    remove_only_teacher_neg: bool = False,
) -> Tensor:
    """Gram anchoring: the difference of two models' similarities of patches, as DINOv3's GramLoss (Siméoni et al. 2025, arXiv 2508.10104).

    L = ‖X Xᵀ - Y Yᵀ‖² / N², X and Y the features of N patches over their lengths: the mean over all pairs of patches, and over pictures.

    All is computed from X - Y, in float32: a student that is near its teacher loses no digits. For more than 2 D patches the squares come
    from D × D products of features, and no matrix of similarities is in memory. For fewer the matrix is computed, of at most twice the
    features' size. With remove_neg or remove_only_teacher_neg it is computed in blocks of rows, from both matrices, whose difference loses
    what they share. torch.compile differentiates the whole matrix where that is the way.

    When to use it: Take it late in a long self-supervised training, against an earlier teacher, so that features of patches stay good for
    dense tasks.

    When not: Leave it where features of the teacher itself must be met; `dino_loss` and `mse` compare each patch with its own.

    Args:
        input: the student's patches (B, N, D) of B pictures, or (N, D) of one, of any floating dtype.
        target: the teacher's, in the shape of input. It has no gradient.
        img_level: compare the patches of each picture among themselves; False: those of the batch, as one picture of B · N patches.
        normalize: divide each patch's features by their length first, in float32 (float64 for float64): DINOv3's apply_norm.
        remove_neg: set similarities below 0 to 0, in both. DINOv3's class does so by default; its configurations and paper do not.
        remove_only_teacher_neg: set the teacher's alone to 0.

    Examples:
        >>> student, teacher = torch.randn(2, 49, 32, requires_grad=True), torch.randn(2, 49, 32)
        >>> gram_anchoring_loss(student, teacher).backward()
    """
    checks.whole("input", input)
    checks.floating_beside("target", target, input, "input")
    checks.fits("input", input, input.ndim in (2, 3), "have shape (B, N, D) or (N, D)")
    checks.fits("target", target, target.shape == input.shape, "have the shape of input, {}", tuple(input.shape))
    checks.without_gradient("target", target)
    if remove_neg and remove_only_teacher_neg:
        raise ValueError("remove_neg and remove_only_teacher_neg exclude each other, got both")
    dtype = torch.promote_types(input.dtype, target.dtype)
    pictures = input.shape[0] if img_level and input.ndim == 3 else 1
    x, y = (accurate(t.to(dtype)).reshape(-1, t.shape[-1]) for t in (input, target))
    if normalize:
        x, y = unit_rows(x), unit_rows(y)
    x, y = (t.view(pictures, len(t) // max(pictures, 1), t.shape[-1]) for t in (x, y))
    return gram_difference(x, y, "both" if remove_neg else "target" if remove_only_teacher_neg else "none")

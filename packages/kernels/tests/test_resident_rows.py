"""Rows so long that they stay on chip between their two sweeps: the kernel that only a GPU can run."""

import pytest
import torch

from lossforge.kernels import launch_counts
from lossforge.losses import (
    cross_entropy,
    js_div_with_logits,
    kl_div_with_logits,
    logit_adjusted_cross_entropy,
    plain_torch,
    total_variation_with_logits,
)
from lossforge.losses.testing import error

pytestmark = [pytest.mark.large, pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled kernels need a GPU")]

# 32 KiB rows up: two programs a multiprocessor, one, with chunks in registers, with chunks fetched twice; rows that begin anywhere
CLASSES = [17000, 33001, 50257, 65536, 100003, 128256, 150001, 262144, 262145]
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weights": {"weight": None},
    "pair": {"target_b": None, "lam": 0.3},
    "all": {"target_b": None, "lam": 0.3, "label_smoothing": 0.2, "z_loss": 1e-3},
    "sum": {"reduction": "sum", "weight": None},
}


def logits_and_target(rows: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """With ignored rows that hold nan, -inf among the logits, and a common offset."""
    generator = torch.Generator("cuda").manual_seed(classes)
    x = torch.randn(rows, classes, device="cuda", generator=generator) * 3
    x[5] += 1000
    x[8, ::3] = float("-inf")
    target = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    target[8] = 1
    target[2::5] = -100
    x[2::10] = float("nan")
    target[0], target[1] = 0, classes - 1
    return x.to(dtype), target


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def judged(x, target, dtype=torch.float64, **options):
    wide = x.detach().to(dtype, copy=True).requires_grad_()
    options = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    with plain_torch():
        value = cross_entropy(wide, target, **options)
    value.backward()
    return value.detach(), wide.grad


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_against_float64(dtype, classes, name):
    x, target = logits_and_target(300, classes, dtype)
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = torch.rand(classes, device="cuda") + 0.5
    if "target_b" in options:
        options["target_b"] = target.flip(0).clone()
        options["target_b"][3] = target[3]
    if options.get("label_smoothing"):
        x = x.clamp(min=-50)  # label smoothing of -inf is inf
    stays = not ("target_b" in options and classes % (16 // dtype.itemsize))
    before = launch_counts().get("resident_kernel", 0)
    leaf = x.clone().requires_grad_()
    value = cross_entropy(leaf, target, **options)
    value.backward()
    assert launch_counts().get("resident_kernel", 0) == before + stays
    exact, gradient = judged(x, target, **options)
    assert error(value, exact) < 1e-5
    _, plain = judged(x.float(), target, torch.float32, **options)
    assert torch.equal(leaf.grad[2::10][0], torch.zeros_like(leaf.grad[2])) or "target_b" in options
    kept = ~gradient.isnan().any(1) & ~leaf.grad.isnan().any(1)
    assert kept.sum() >= 240
    for part in (kept, 0, -1):
        bound = (2.0**-8 if dtype == torch.bfloat16 else 2e-6) + 2 * relative(plain[part], gradient[part])
        assert relative(leaf.grad[part], gradient[part]) < bound
    again = x.clone().requires_grad_()
    cross_entropy(again, target, **options).backward()
    assert torch.equal(again.grad.nan_to_num(7), leaf.grad.nan_to_num(7))


@pytest.mark.parametrize(("rows", "options"), [(40, {"weight": None}), (300, {"weight": None}), (300, {"label_smoothing": 0.1})])
@pytest.mark.parametrize("classes", [17000, 21841, 24001, 32002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_priors_against_float64(dtype, classes, rows, options):
    """A bias a class stays on chip beside the row where both fit."""
    x, target = logits_and_target(rows, classes, dtype)
    x = x.clamp(min=-50)
    prior = torch.rand(classes, device="cuda").log() * 3
    if "weight" in options:
        options = {"weight": torch.rand(classes, device="cuda") + 0.5}
    before = launch_counts().get("resident_kernel", 0)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    value = logit_adjusted_cross_entropy(leaf, target, prior, 1.3, **options)
    value.backward()
    assert launch_counts().get("resident_kernel", 0) == before + ((classes + 7) * (4 + dtype.itemsize) < 200_000)
    with plain_torch():
        exact = logit_adjusted_cross_entropy(wide, target, prior, 1.3, **options)
    exact.backward()
    assert error(value, exact) < 1e-5
    assert error(leaf.grad[2::10], torch.zeros_like(leaf.grad[2::10])) == 0  # ignored
    for kept in (target != -100, 0, -1):
        assert error(leaf.grad[kept], wide.grad[kept]) < (2.0**-8 if dtype == torch.bfloat16 else 1e-5)


WIDE = pytest.mark.parametrize("classes", [33000, 50257, 128256, 262145])


def gradient_of_40_rows(x: torch.Tensor, target: torch.Tensor | None = None, reduction: str = "mean") -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    target = torch.randint(0, x.shape[1], (40,), device="cuda") if target is None else target
    cross_entropy(leaf, target, reduction=reduction).backward()
    return leaf.grad


@WIDE
def test_a_class_index_out_of_range_is_nan_in_its_row_alone(classes):
    target = torch.randint(0, classes, (40,), device="cuda")
    target[3], target[4] = classes, -7
    grad = gradient_of_40_rows(torch.randn(40, classes, device="cuda"), target)
    assert grad[3:5].isnan().all()
    assert grad[:3].isfinite().all()
    assert grad[5:].isfinite().all()


@WIDE
def test_infinite_logits_are_nan_in_their_row_alone(classes):
    x = torch.randn(40, classes, device="cuda")
    x[6, 5], x[8] = float("inf"), float("-inf")
    grad = gradient_of_40_rows(x, reduction="sum")
    assert grad[6].isnan().any()
    assert grad[8].isnan().all()
    assert grad[[0, 5, 7, 9, 39]].isfinite().all()


@WIDE
def test_ignored_rows_alone_have_a_gradient_of_0(classes):
    ignored = torch.full((40,), -100, device="cuda")
    assert (gradient_of_40_rows(torch.randn(40, classes, device="cuda"), ignored) == 0).all()


@WIDE
@pytest.mark.parametrize(
    "of",
    [lambda x: x[:1], lambda x: x[:, :-17], lambda x: x[::3], lambda x: x[:, 5:]],
    ids=["one row", "columns before the last", "every third row", "columns from the fifth"],
)
def test_parts_of_logits_against_float64(classes, of):
    x = of(torch.randn(40, classes, device="cuda"))
    target = torch.randint(0, x.shape[1], (len(x),), device="cuda")
    leaf = x.detach().requires_grad_()
    value = cross_entropy(leaf, target)
    (found,) = torch.autograd.grad(value, leaf)
    exact, gradient = judged(x, target)
    assert error(value, exact) < 1e-5
    assert error(found, gradient) < 2e-6


KL, JS, TV = kl_div_with_logits, js_div_with_logits, total_variation_with_logits
DIVERGENCES = [(KL, o) for o in ({}, {"reverse": True}, {"temperature": 2.0}, {"labels": True}, {"weight": True})]
DIVERGENCES += [(JS, o) for o in ({}, {"beta": 0.1, "temperature": 2.0}, {"labels": True}, {"weight": True})]
DIVERGENCES += [(TV, o) for o in ({}, {"temperature": 2.0}, {"labels": True, "weight": True})]


@pytest.mark.parametrize(("function", "options"), DIVERGENCES, ids=lambda v: getattr(v, "__name__", None) or " ".join(v) or "plain")
@pytest.mark.parametrize("classes", [8200, 20000, 28672, 29000, 32000, 50256, 57344])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_divergence_against_float64(dtype, classes, function, options):
    """Two programs a multiprocessor, one, room for rows ahead, none, chunks in registers, a last chunk of few classes, slopes found again.

    -inf on both sides and, where the loss stays finite, on one; an offset; rows left out that hold nan.
    """
    generator = torch.Generator("cuda").manual_seed(classes)
    x, teacher = (torch.randn(300, classes, device="cuda", generator=generator) * 2 for _ in range(2))
    x[5] += 1000
    x[7, ::3] = teacher[7, ::3] = float("-inf")
    x[7, classes // 4 : classes // 2] = teacher[7, classes // 4 : classes // 2] = float("-inf")
    if function is not KL:
        x[8, ::4] = teacher[9, 1::4] = float("-inf")
        x[299, -3:] = teacher[299, -1] = float("-inf")
    options, left_out = dict(options), torch.arange(300, device="cuda") % 5 == 2
    if "labels" in options:
        options["labels"] = torch.where(left_out, -100, 1)
    if "weight" in options:
        options["weight"] = torch.where(left_out, 0.0, torch.rand(300, device="cuda", generator=generator) + 0.5)
    x, teacher = x.to(dtype), teacher.to(dtype)
    if function is TV:
        teacher = distinct(x, teacher, options.get("temperature", 1.0))
    if "labels" in options or "weight" in options:
        x[2::10], teacher[7::10][:, 1] = float("nan"), float("inf")
    in_registers = 32 * 1024 if function is not KL and dtype == torch.float32 else 0
    stays = classes * 2 * dtype.itemsize <= 224 * 1024 + in_registers
    before = launch_counts().get("resident_divergence_kernel", 0)
    grads = []
    for rows in (300, 300, 3):
        leaf = x[:rows].clone().requires_grad_()
        few = {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        value = function(leaf, teacher[:rows], **few, gradient="forward")
        value.backward()
        grads.append(leaf.grad)
        wide = x[:rows].double().requires_grad_()
        with plain_torch():
            exact = function(wide, teacher[:rows].double(), **few)
        (gradient,) = torch.autograd.grad(exact, wide)
        assert error(value, exact) < 1e-5
        bound = 2e-5 if dtype == torch.float32 else 2.0**-8
        assert all(relative(leaf.grad[part], gradient[part]) < bound for part in (slice(None), 0, -1))
    assert torch.equal(grads[0], grads[1])
    assert launch_counts().get("resident_divergence_kernel", 0) == before + 3 * stays


def distinct(x: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """A teacher for whom no class is as likely as for the student: where rounding decides which is the likelier, a gradient may jump."""
    for _ in range(4):
        gap = (x.double() / temperature).log_softmax(1) - (teacher.double() / temperature).log_softmax(1)
        teacher = torch.where(gap.abs() < 1e-4, (teacher * 1.01 + 1e-3).to(teacher.dtype), teacher)
    return teacher


ON_CHIP = pytest.mark.parametrize(
    ("classes", "dtype"), [(8200, torch.float32), (32000, torch.float32), (32000, torch.bfloat16), (50256, torch.bfloat16)]
)
DIVERGENCES = pytest.mark.parametrize("function", [JS, TV], ids=lambda f: f.__name__)


@pytest.fixture
def two_softmaxes(classes, dtype):
    """Return logits of both sides; the divergence of them must be computed on chip, by one launch."""
    before = launch_counts().get("resident_divergence_kernel", 0)
    yield tuple(torch.randn(140, classes, device="cuda").to(dtype) for _ in range(2))
    assert launch_counts().get("resident_divergence_kernel", 0) == before + 1


@DIVERGENCES
@ON_CHIP
def test_the_divergence_of_equal_logits_is_0(two_softmaxes, function):
    x, _ = two_softmaxes
    leaf = x.clone().requires_grad_()
    value = function(leaf, x)
    value.backward()
    assert value.abs() < 2e-6
    assert leaf.grad.abs().max() < 1e-6
    if function is TV:
        assert value == 0
        assert torch.equal(leaf.grad, torch.zeros_like(leaf.grad))


@DIVERGENCES
@ON_CHIP
def test_rows_of_infinities_and_nan_are_nan_alone_whichever_side_holds_them(two_softmaxes, function):
    x, teacher = two_softmaxes
    broken, other = x.clone(), teacher.clone()
    broken[0] = other[1] = float("-inf")
    broken[2, 3], other[3, -1], broken[4, -1] = float("inf"), float("nan"), float("nan")
    leaf = broken.requires_grad_()
    function(leaf, other, reduction="sum").backward()
    assert leaf.grad[:5].isnan().any(1).all()
    assert leaf.grad[5:].isfinite().all()
    wide = x[5:].double().requires_grad_()
    with plain_torch():
        function(wide, teacher[5:].double(), reduction="sum").backward()
    if function is JS:  # total variation's gradient jumps where rounding decides which side is the likelier
        assert relative(leaf.grad[5:], wide.grad) < (2.0**-8 if x.dtype == torch.bfloat16 else 2e-5)


@DIVERGENCES
@ON_CHIP
def test_the_divergence_of_rows_all_left_out_has_a_gradient_of_0(two_softmaxes, function):
    x, teacher = two_softmaxes
    leaf = x.clone().requires_grad_()
    function(leaf, teacher, labels=torch.full((140,), -100, device="cuda")).backward()
    assert torch.equal(leaf.grad, torch.zeros_like(leaf.grad))

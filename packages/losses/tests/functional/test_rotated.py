"""What is the rotated boxes' own: the papers' matrices, ultralytics' ProbIoU, polygons that are clipped, edges and errors."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from lossforge.losses import gwd_loss, kfiou_loss, kld_loss, plain_torch, probiou_loss, rotated_iou_loss
from lossforge.losses.testing import error

OF_GAUSSIANS = (probiou_loss, gwd_loss, kld_loss)


def random(n: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of boxes in float64 that mostly overlap."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(2, n, 5, generator=generator, dtype=torch.float64)
    scale, shift = torch.tensor([30.0, 30, 60, 30, 6], dtype=torch.float64), torch.tensor([0.0, 0, 4, 4, -3], dtype=torch.float64)
    first, second = (numbers * scale + shift).to(device)
    return first, second


def results(function, boxes1: Tensor, boxes2: Tensor, **options) -> tuple[Tensor, ...]:
    """Values, and the gradients of both boxes for an upstream gradient of 1, 2, ...."""
    leaves = [b.detach().clone().requires_grad_() for b in (boxes1, boxes2)]
    values = function(*leaves, **options)
    upstream = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    return values.detach(), *torch.autograd.grad(values, leaves, upstream)


def compare(function, judge, boxes: tuple[Tensor, Tensor], **options) -> None:
    """Against another computation in float64: plain torch in float64, and the kernels in float32."""
    exact = results(judge, *boxes)
    for got, wanted in zip(results(function, *boxes, **options), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    for got, wanted in zip(results(function, *(b.float() for b in boxes), **options), exact, strict=True):
        assert error(got, wanted) < 3e-6


def gaussian(boxes: Tensor, share: float) -> Tensor:
    """R diag(w², h²) Rᵀ · share."""
    c, s = boxes[:, 4].cos(), boxes[:, 4].sin()
    turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    return turn @ torch.diag_embed(boxes[:, 2:4].square() * share) @ turn.mT


def root_of(matrix: Tensor) -> Tensor:
    """The root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag_embed(values.clamp(min=0).sqrt()) @ vectors.mT


def quadratic(d: Tensor, matrix: Tensor) -> Tensor:
    return (d.unsqueeze(1) @ torch.linalg.solve(matrix, d.unsqueeze(2))).flatten()


def bhattacharyya(b1: Tensor, b2: Tensor) -> Tensor:
    s1, s2 = gaussian(b1, 1 / 12), gaussian(b2, 1 / 12)
    middle = (s1 + s2) / 2
    determinants = torch.linalg.det(middle).log() - (torch.linalg.det(s1) * torch.linalg.det(s2)).log() / 2
    return quadratic(b1[:, :2] - b2[:, :2], middle) / 8 + determinants / 2


def wasserstein(b1: Tensor, b2: Tensor, alpha: float = 1.0) -> Tensor:
    s1, s2 = gaussian(b1, 1 / 4), gaussian(b2, 1 / 4)
    half = root_of(s1)
    shapes = torch.diagonal(s1 + s2 - 2 * root_of(half @ s2 @ half), dim1=1, dim2=2).sum(1)
    return ((b1[:, :2] - b2[:, :2]).square().sum(1) + alpha**2 * shapes).sqrt()


def kullback_leibler(b1: Tensor, b2: Tensor, alpha: float = 1.0) -> Tensor:
    s1, s2 = gaussian(b1, 1 / 4), gaussian(b2, 1 / 4)
    trace = torch.diagonal(torch.linalg.solve(s1, s2), dim1=1, dim2=2).sum(1)
    return quadratic(b1[:, :2] - b2[:, :2], s1) / 2 / alpha**2 + (trace + (torch.linalg.det(s1) / torch.linalg.det(s2)).log()) / 2 - 1


def kalman(b1: Tensor, b2: Tensor) -> Tensor:
    s1, s2 = gaussian(b1, 1 / 4), gaussian(b2, 1 / 4)
    shared = 4 * torch.linalg.det(s1 @ torch.linalg.solve(s1 + s2, s2)).sqrt()
    return shared / (b1[:, 2:4].prod(1) + b2[:, 2:4].prod(1) - shared)


def bounded(distance: Tensor, tau: float) -> Tensor:
    return 1 - 1 / (tau + distance)


def size(b1: Tensor, b2: Tensor) -> Tensor:
    return (b1[:, 2:4].prod(1) * b2[:, 2:4].prod(1)) ** 0.25


@pytest.mark.parametrize(
    ("function", "judge", "options"),
    [
        (probiou_loss, lambda a, b: (1 - (-bhattacharyya(a, b)).exp()).sqrt(), {}),
        (probiou_loss, bhattacharyya, {"log": True}),
        (gwd_loss, lambda a, b: bounded((wasserstein(a, b) / size(a, b)).log1p(), 1.0), {}),
        (gwd_loss, lambda a, b: wasserstein(a, b, 0.5).sqrt(), {"fun": "sqrt", "tau": 0.5, "alpha": 0.5, "normalize": False}),
        (kld_loss, lambda a, b: bounded(kullback_leibler(a, b).sqrt().log1p(), 1.0), {}),
        (kld_loss, lambda a, b: bounded(kullback_leibler(a, b, 2.0), 3.0), {"fun": "none", "tau": 3.0, "alpha": 2.0, "sqrt": False}),
        (kfiou_loss, lambda a, b: 1 - kalman(a, b), {}),
        (kfiou_loss, lambda a, b: -kalman(a, b).log(), {"fun": "ln"}),
        (kfiou_loss, lambda a, b: (1 - kalman(a, b)).exp() - 1, {"fun": "exp"}),
    ],
    ids=lambda v: v.__name__ if callable(v) else str(v),
)
def test_as_the_papers_have_them(function, judge, options, device):
    compare(function, judge, random(40, device), **options)


def test_probiou_is_ultralytics(device):
    """Whose eps, which is added, is almost 0 here."""
    probiou = pytest.importorskip("ultralytics.utils.metrics").probiou
    compare(probiou_loss, lambda a, b: 1 - probiou(a, b, eps=1e-14).squeeze(1), random(40, device))


def of_worst_row(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()


PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])


@PLAIN
def test_probiou_of_distant_boxes_keeps_its_gradient(plain, device):
    """e⁻ᴰ from 1 to 1e-30, where 1 - e⁻ᴰ is 1 in every dtype."""
    boxes1 = random(40, device)[0]
    boxes2 = boxes1 * (1 + 0.1 * random(40, device, 1)[0] / 60)
    boxes2[:, :2] += torch.linspace(0, 15, 40, device=device, dtype=torch.float64).unsqueeze(1) * boxes1[:, 2:4].amin(1, keepdim=True) / 3
    _, *exact = results(lambda a, b: (1 - (-bhattacharyya(a, b)).exp()).sqrt(), boxes1.float().double(), boxes2.float().double())
    distances = bhattacharyya(boxes1, boxes2)
    assert distances.max() > 60
    assert distances.min() < 1
    with plain_torch() if plain else nullcontext():
        for dtype, most in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
            _, *found = results(probiou_loss, boxes1.float().to(dtype), boxes2.float().to(dtype))
            for got, wanted in zip(found, exact, strict=True):
                assert of_worst_row(got, wanted) < most


@PLAIN
@pytest.mark.parametrize("function", [*OF_GAUSSIANS, kfiou_loss], ids=lambda f: f.__name__)
def test_nearly_equal_boxes_keep_their_gradient(function, plain, device):
    """Of each row, although a gradient is a small difference of the boxes there."""
    boxes1 = random(40, device)[0].float()
    boxes2 = boxes1 * (1 + 1e-4 * random(40, device, 1)[0].float() / 60)
    _, *exact = results(function, boxes1.double(), boxes2.double())
    with plain_torch() if plain else nullcontext():
        _, *found = results(function, boxes1, boxes2)
    for got, wanted in zip(found, exact, strict=True):
        assert of_worst_row(got, wanted) < 1e-5


def polygon(box: Tensor) -> list[tuple[Tensor, Tensor]]:
    x, y, w, h, angle = box.unbind()
    c, s = angle.cos(), angle.sin()
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    return [(x + (i * w * c - j * h * s) / 2, y + (i * w * s + j * h * c) / 2) for i, j in corners]


def cross(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], p: tuple[Tensor, Tensor]) -> Tensor:
    return (b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0])


def area_of_both(box1: Tensor, box2: Tensor) -> Tensor:
    """Cut the first polygon by each edge of the second (Sutherland and Hodgman)."""
    left, edges = polygon(box1), polygon(box2)
    for a, b in zip(edges, edges[1:] + edges[:1], strict=True):
        kept = []
        for p, q in zip(left, left[1:] + left[:1], strict=True):
            at_p, at_q = cross(a, b, p), cross(a, b, q)
            if at_p >= 0:
                kept.append(p)
            if (at_p > 0) != (at_q > 0) and at_p != at_q:
                t = at_p / (at_p - at_q)
                kept.append((p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])))
        left = kept
    doubled = [p[0] * q[1] - p[1] * q[0] for p, q in zip(left, left[1:] + left[:1], strict=True)]
    return sum(doubled, 0 * (box1 + box2).sum()) / 2


def by_polygons(b1: Tensor, b2: Tensor) -> Tensor:
    shared = torch.stack([area_of_both(p, q) for p, q in zip(b1, b2, strict=True)])
    return 1 - shared / (b1[:, 2:4].prod(1) + b2[:, 2:4].prod(1) - shared)


def test_rotated_iou_is_that_of_the_polygons(device):
    boxes1, boxes2 = random(60, "cpu", 3)
    boxes2[:5, 2:4] = boxes1[:5, 2:4] / 4  # nested
    boxes2[:5, :2] = boxes1[:5, :2] + 1
    boxes2[5:9, :2] += 90  # far apart
    exact = results(by_polygons, boxes1, boxes2)
    assert (exact[0] == 1).sum() >= 4
    moved = boxes1.to(device), boxes2.to(device)
    for got, wanted in zip(results(rotated_iou_loss, *moved), exact, strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-8, atol=1e-10)
    for got, wanted in zip(results(rotated_iou_loss, *(b.float() for b in moved)), exact, strict=True):
        assert error(got.cpu(), wanted) < 3e-6


@pytest.mark.parametrize("function", [probiou_loss, gwd_loss, kld_loss, rotated_iou_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_equal_boxes_have_loss_zero(function, scale, device):
    """Exactly, and no gradient, also where the box is written in another way; nearly equal ones keep their digits."""
    boxes = random(40, device)[0].float() * torch.tensor([scale] * 4 + [1], device=device)
    value, *gradients = results(function, boxes, boxes)
    assert torch.equal(value, torch.zeros_like(value))
    assert all((g[:, :4] * boxes[:, 2:4].amin(1, keepdim=True)).abs().max() < 1e-4 for g in gradients)
    other = boxes[:, [0, 1, 3, 2, 4]] + torch.tensor([0, 0, 0, 0, math.pi / 2], device=device)
    assert function(boxes, other).abs().max() < 2e-3  # a root of what float32 leaves of the angle
    near = boxes * (1 + 1e-4)
    exact = function(boxes.double(), near.double())
    assert error(function(boxes, near), exact) < 2e-3


def test_iou_along_shared_edges(device):
    """Boxes that are cut in halves and quarters, at any angle: no edge counts twice, and none is lost."""
    angle = torch.linspace(-4, 4, 41, device=device)
    whole = torch.stack([0 * angle, 0 * angle, 0 * angle + 4, 0 * angle + 2, angle], 1)
    right = torch.stack([angle.cos(), angle.sin(), 0 * angle + 2, 0 * angle + 2, angle], 1)
    quarter = torch.stack([angle.cos() - angle.sin() / 2, angle.sin() + angle.cos() / 2, 0 * angle + 2, 0 * angle + 1, angle], 1)
    for part, wanted in ((whole, 0.0), (right, 0.5), (quarter, 0.75)):
        for pair in ((whole, part), (part, whole)):
            torch.testing.assert_close(rotated_iou_loss(*pair), torch.full_like(angle, wanted), rtol=0, atol=1e-6)


def test_gradients_of_upright_boxes(device):
    """Their edges are parallel to the axes, exactly; the derivatives are those of the formula of boxes that are not turned."""
    boxes1 = torch.tensor([[0.0, 0, 4, 2, 0]], device=device).expand(4, 5)
    boxes2 = torch.tensor([[0.5, 0.2, 2, 1, 0], [3, 1, 4, 2, 0], [-1.5, 0.4, 2, 1.5, 0], [0.3, 0.1, 5, 1, 0]], device=device)

    def upright(b1, b2):
        low = torch.maximum(b1[:, :2] - b1[:, 2:4] / 2, b2[:, :2] - b2[:, 2:4] / 2)
        high = torch.minimum(b1[:, :2] + b1[:, 2:4] / 2, b2[:, :2] + b2[:, 2:4] / 2)
        shared = (high - low).clamp(min=0).prod(1)
        return 1 - shared / (b1[:, 2:4].prod(1) + b2[:, 2:4].prod(1) - shared)

    exact = results(upright, boxes1.double(), boxes2.double())
    for dtype in (torch.float32, torch.float64):
        for got, wanted in zip(results(rotated_iou_loss, boxes1.to(dtype), boxes2.to(dtype)), exact, strict=True):
            torch.testing.assert_close(got[..., :4].double(), wanted[..., :4], rtol=1e-5, atol=1e-6)


def test_sides_below_eps(device):
    """Count as eps, and a negative side as its absolute value: finite values, and gradients as in float64."""
    boxes1 = torch.tensor([[0.0, 0, 0, 2, 0.5], [0, 0, 0, 0, 0.5], [1, 2, -3, 2, 0.5]], device=device)
    boxes2 = torch.tensor([[0.0, 1, 2, 2, 0.25], [1.0, 0, 0, 0, 0.5], [1, 1, 3, 2.5, 0.25]], device=device)
    for function in (*OF_GAUSSIANS, kfiou_loss, rotated_iou_loss):
        exact = results(function, boxes1.double(), boxes2.double(), eps=0.5)
        for got, wanted in zip(results(function, boxes1, boxes2, eps=0.5), exact, strict=True):
            assert got.isfinite().all()
            assert error(got, wanted) < 3e-6
        assert results(function, boxes1, boxes2)[0].isfinite().all()
        positive = torch.cat([boxes1[:, :2], boxes1[:, 2:4].abs(), boxes1[:, 4:]], 1)
        torch.testing.assert_close(function(boxes1, boxes2), function(positive, boxes2))


@pytest.mark.large
def test_offsets_beyond_32_bits(device):
    """A small view of a large tensor: the offsets need 64 bits, between pairs, and between the numbers of a box."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # untouched pages take no memory
    memory = torch.empty(2**32, dtype=torch.float16, device=device)
    first, second = (b.to(device) for b in random(3, "cpu"))
    for strides in ((2**30 + 2**28, 7), (2, 2**29 + 2**28)):
        boxes = memory.as_strided((3, 5), strides)
        boxes.copy_(first)
        exact = results(probiou_loss, boxes.double(), second)
        for got, wanted in zip(results(probiou_loss, boxes, second.float()), exact, strict=True):
            assert error(got, wanted) < (1e-6 if got.dtype == torch.float32 else 1e-3)


BOX = torch.ones(3, 5)


@pytest.mark.parametrize(
    ("kind", "message", "boxes1", "boxes2", "options"),
    [
        (ValueError, r"boxes1 must have shape \(..., 5\), got \(3, 4\)", torch.zeros(3, 4), torch.zeros(3, 4), {}),
        (ValueError, r"boxes2 must have the shape of boxes1, \(3, 5\), got \(1, 5\)", BOX, BOX[:1], {}),
        (ValueError, r"weight must hold one weight a pair and broadcast to \(3,\), got \(4,\)", BOX, BOX, {"weight": torch.ones(4)}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_mistakes(kind, message, boxes1, boxes2, options):
    for function in (*OF_GAUSSIANS, kfiou_loss, rotated_iou_loss):
        with pytest.raises(kind, match=message):
            function(boxes1, boxes2, **options)


@pytest.mark.parametrize("function", OF_GAUSSIANS)
def test_a_root_needs_eps_above_0(function):
    with pytest.raises(ValueError, match="eps must be finite and above 0, got 0"):
        function(BOX, BOX, eps=0)
    value, *gradients = results(function, BOX, BOX, eps=1e-30)
    assert all(torch.equal(t, 0 * t) for t in (value, *gradients))
    for other in (kfiou_loss, rotated_iou_loss):
        assert all(t.isfinite().all() for t in results(other, BOX, BOX, eps=0))


def test_mistakes_in_options():
    for function in (gwd_loss, kld_loss):
        with pytest.raises(ValueError, match="fun must be one of 'none', 'log1p', 'sqrt', got 'log'"):
            function(BOX, BOX, fun="log")
        with pytest.raises(ValueError, match="alpha must be finite and above 0, got 0"):
            function(BOX, BOX, alpha=0)
        with pytest.raises(ValueError, match="tau must be finite and at least 0, got -1"):
            function(BOX, BOX, tau=-1)
    with pytest.raises(ValueError, match="fun must be one of 'none', 'ln', 'exp', got 'log1p'"):
        kfiou_loss(BOX, BOX, fun="log1p")

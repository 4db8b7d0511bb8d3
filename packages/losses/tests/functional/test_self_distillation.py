"""Losses of features without negatives against the code of their papers and of lightly, in float64."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import (
    barlow_twins_loss,
    dino_loss,
    gram_anchoring_loss,
    koleo_loss,
    mean_center,
    plain_torch,
    sinkhorn_center,
    vicreg_loss,
)
from lossforge.losses.testing import error

generator = torch.Generator().manual_seed(0)
PATHS = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])


def normal(*shape, device="cpu"):
    return torch.randn(shape, generator=generator).to(device)


def path(plain):
    return plain_torch() if plain else contextlib.nullcontext()


def sinkhorn(scores, iterations=3, epsilon=0.05):
    """DINOv2's sinkhorn_knopp_teacher, in one process; lightly's sinkhorn has the same steps."""
    q = (scores.double() / epsilon).exp().T
    prototypes, samples = q.shape
    q /= q.sum()
    for _ in range(iterations):
        q /= q.sum(1, keepdim=True)
        q /= prototypes
        q /= q.sum(0, keepdim=True)
        q /= samples
    return (q * samples).T


def koleo(x, eps=1e-8):
    """DINOv2's KoLeoLoss."""
    x = F.normalize(x, eps=eps, p=2, dim=-1)
    dots = x @ x.T
    dots.view(-1)[:: len(x) + 1].fill_(-1)
    nearest = dots.argmax(1)
    return -torch.log(torch.nn.PairwiseDistance(2, eps=1e-8)(x, x[nearest]) + eps).mean()


def gram(output_feats, target_feats, img_level=True, apply_norm=True, remove_neg=False, remove_only_teacher_neg=False):
    """DINOv3's GramLoss."""
    if apply_norm:
        output_feats, target_feats = F.normalize(output_feats, dim=-1), F.normalize(target_feats, dim=-1)
    if not img_level and output_feats.ndim == 3:
        output_feats, target_feats = output_feats.flatten(0, 1), target_feats.flatten(0, 1)
    target_sim, student_sim = (t @ t.transpose(-1, -2) for t in (target_feats, output_feats))
    if remove_neg:
        target_sim[target_sim < 0] = 0.0
        student_sim[student_sim < 0] = 0.0
    elif remove_only_teacher_neg:
        target_sim[target_sim < 0] = 0.0
        student_sim[(student_sim < 0) & (target_sim < 0)] = 0.0
    return F.mse_loss(student_sim, target_sim)


def off_diagonal(x):
    return x[~torch.eye(len(x), dtype=torch.bool, device=x.device)]


def vicreg(a, b, lambda_param=25.0, mu_param=25.0, nu_param=1.0, eps=1e-4):
    """The code of facebookresearch/vicreg."""
    repr_loss = F.mse_loss(a, b)
    a, b = a - a.mean(0), b - b.mean(0)
    std = [torch.sqrt(t.var(0) + eps) for t in (a, b)]
    std_loss = sum(F.relu(1 - s).mean() / 2 for s in std)
    cov = [t.T @ t / (len(t) - 1) for t in (a, b)]
    cov_loss = sum(off_diagonal(c).pow(2).sum() / a.shape[1] for c in cov)
    return lambda_param * repr_loss + mu_param * std_loss + nu_param * cov_loss


def barlow_twins(a, b, lambda_param=5e-3, eps=1e-5):
    """The code of facebookresearch/barlowtwins."""
    a, b = ((t - t.mean(0)) / torch.sqrt(t.var(0, unbiased=False) + eps) for t in (a, b))
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).pow(2).sum() + lambda_param * off_diagonal(c).pow(2).sum()


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("samples", "prototypes", "iterations"), [(5, 7, 3), (150, 70, 3), (9, 200, 1), (70, 2100, 2), (1, 3, 3)])
def test_sinkhorn(samples, prototypes, iterations, dtype, plain, device):
    scores = normal(samples, prototypes, device=device).to(dtype)
    for given in (scores, scores.T.contiguous().T):
        with path(plain):
            center = sinkhorn_center(given, 0.05, iterations)
        found = ((scores.double() - center) / 0.05).softmax(1)
        assert center.dtype == torch.float32
        torch.testing.assert_close(found, sinkhorn(scores, iterations), rtol=2e-4, atol=1e-7)


def test_mean_center(device):
    """DINO's update_center, in one process."""
    scores, center = normal(20, 7, device=device), normal(7, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        expected = 0.8 * center.double() + 0.2 * scores.to(dtype).double().mean(0)
        torch.testing.assert_close(mean_center(scores.to(dtype), center, 0.8), expected.float())
    torch.testing.assert_close(mean_center(scores.double().requires_grad_()), scores.double().mean(0))


@PATHS
def test_sinkhorn_of_scores_that_overflow(plain, device):
    """exp(1000 / 0.05) is inf, so that DINOv2's own code gives nan; a common offset changes nothing."""
    scores = normal(20, 30, device=device).mul(64).round() / 64
    with path(plain):
        near, far = sinkhorn_center(scores), sinkhorn_center(scores + 1000)
    torch.testing.assert_close((scores - near).div(0.05).softmax(1), (scores - far).div(0.05).softmax(1), rtol=5e-2, atol=1e-3)
    assert far.isfinite().all()


@PATHS
def test_dino(plain, device):
    """DINO's formula with its centre, iBOT's weights of masked patches, and SwAV's codes."""
    student, teacher, center = normal(40, 65, device=device), normal(40, 65, device=device), normal(65, device=device)
    weight = torch.rand(40, generator=generator).to(device)
    exact = {}
    leaf = student.double().requires_grad_()
    for name, q in {"dino": ((teacher - center).double() / 0.04).softmax(1), "swav": sinkhorn(teacher)}.items():
        exact[name] = -(q * (leaf / 0.1).log_softmax(1)).sum(1)
    calls = {
        "dino": ({"center": center}, exact["dino"].mean()),
        "ibot": ({"center": center, "weight": weight, "reduction": "sum", "normalizer": 4.0}, (exact["dino"] * weight).sum() / 4),
        "swav": ({"center": sinkhorn_center(teacher), "teacher_temperature": 0.05}, exact["swav"].mean()),
    }
    for name, (options, value) in calls.items():
        x = student.clone().requires_grad_()
        with path(plain):
            found = dino_loss(x, teacher, **options)
        assert error(found, value.detach()) < 1e-5, name
        (g,), (right,) = torch.autograd.grad(2 * found, x), torch.autograd.grad(2 * value, leaf, retain_graph=True)
        assert error(g, right) < 1e-5, name


@PATHS
@pytest.mark.parametrize(("rows", "features"), [(2, 3), (9, 16), (200, 7), (2100, 64)])
def test_koleo(rows, features, plain, device):
    x = normal(rows, features, device=device)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    right = koleo(exact)
    with path(plain):
        found = koleo_loss(leaf)
    assert error(found, right.detach()) < 5e-6
    assert error(torch.autograd.grad(3 * found, leaf)[0], torch.autograd.grad(3 * right, exact)[0]) < 2e-5


def test_koleo_of_half_precision(device):
    """The nearest row is that of the rows as they are, not rounded a second time."""
    x = normal(50, 12, device=device).bfloat16()
    assert error(koleo_loss(x), koleo(x.double())) < 5e-6


@PATHS
@pytest.mark.parametrize("shape", [(5, 1001), (2, 20_001), (3, 70, 4, 8)], ids=str)
def test_dino_of_a_center_over_rows_of_any_layout(shape, plain, device):
    """Rows that begin anywhere, are longer than a tile, or are read several at once; logits of half precision are not rounded again."""
    student, teacher = normal(*shape, device=device).bfloat16(), normal(*shape, device=device).bfloat16()
    center = normal(shape[1], device=device)
    leaf = student.double().requires_grad_()
    q = ((teacher.double() - center.double().view(-1, *[1] * (len(shape) - 2))) / 0.04).softmax(1)
    right = -(q * (leaf / 0.1).log_softmax(1)).sum()
    for mode in ("forward", "backward"):
        x = student.clone().requires_grad_()
        with path(plain):
            found = dino_loss(x, teacher, center=center, reduction="sum", gradient=mode)
        assert error(found, right.detach()) < 3e-6
        assert error(torch.autograd.grad(found, x)[0], torch.autograd.grad(right, leaf, retain_graph=True)[0]) < 2**-7


def test_dino_of_a_center_in_float64(device):
    student, teacher, center = normal(4, 7, device=device), normal(4, 7, device=device), normal(7, device=device)
    found = dino_loss(student, teacher, center=center.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, dino_loss(student, teacher, center=center))


GRAMS = ({}, {"img_level": False}, {"remove_neg": True}, {"remove_only_teacher_neg": True, "img_level": False}, {"apply_norm": False})


@pytest.mark.parametrize("options", GRAMS, ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("shape", [(3, 9, 4), (3, 5, 16), (7, 3)], ids=str)
def test_gram_anchoring(shape, options, device, monkeypatch):
    """More patches than twice the features, fewer, and one picture without a dimension of its own; similarities in blocks of rows."""
    if len(shape) == 2 and "img_level" not in options:
        options = options | {"img_level": False}  # the only way of DINOv3's with (N, D)
    monkeypatch.setattr("lossforge.losses.engine.gram.BLOCK", 40)
    ours = {("normalize" if name == "apply_norm" else name): value for name, value in options.items()}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        teacher = normal(*shape, device=device).to(dtype)
        x = (teacher + normal(*shape, device=device)).to(dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        found, right = gram_anchoring_loss(x, teacher, **ours), gram(exact, teacher.double(), **options)
        digits = 1e-12 if dtype == torch.float64 else 1e-5
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert error(found, right.detach()) < digits
        first = torch.autograd.grad(3 * found, x, retain_graph=True)[0]
        assert error(first, torch.autograd.grad(3 * right, exact, retain_graph=True)[0]) < (2**-7 if dtype == torch.bfloat16 else digits)
        g, wanted = (torch.autograd.grad(3 * loss, leaf, create_graph=True)[0] for loss, leaf in ((found, x), (right, exact)))
        assert error(g.detach(), first) < (2**-7 if dtype == torch.bfloat16 else digits)
        if dtype != torch.bfloat16:
            second, of_second = (torch.autograd.grad(t.square().sum(), leaf)[0] for t, leaf in ((g, x), (wanted, exact)))
            assert error(second, of_second) < 10 * digits


@pytest.mark.parametrize("shape", [(2, 40, 16), (2, 20, 16)], ids=str)
def test_gram_anchoring_of_a_student_near_its_teacher(shape, device):
    """Differences of 2⁻¹⁴ leave float32 ten bits of each; those of the matrices' elements would have lost the gradient's digits."""
    teacher = normal(*shape, device=device).mul(256).round() / 256
    x = (teacher + normal(*shape, device=device).sign() * 2.0**-14).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, right = gram_anchoring_loss(x, teacher, normalize=False), gram(exact, teacher.double(), apply_norm=False)
    assert error(found, right.detach()) < 1e-6
    assert error(torch.autograd.grad(found, x)[0], torch.autograd.grad(right, exact)[0]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "features"), [(4, 9), (6, 40), (64, 20), (33, 33)])
@pytest.mark.parametrize(("ours", "theirs"), [(vicreg_loss, vicreg), (barlow_twins_loss, barlow_twins)])
def test_two_views(ours, theirs, rows, features, dtype, device):
    leaves = [normal(rows, features, device=device).to(dtype).requires_grad_() for _ in range(2)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, right = ours(*leaves), theirs(*exact)
    assert found.dtype == torch.float32
    assert error(found, right.detach()) < 1e-5
    for got, expected in zip(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * right, exact), strict=True):
        assert error(got, expected) < (2e-4 if dtype == torch.float32 else 2.0**-7)


@pytest.mark.parametrize(
    ("ours", "theirs", "numbers"), [(vicreg_loss, vicreg, (0.0, 0.0, 1.0, 1e-4)), (barlow_twins_loss, barlow_twins, (1.0, 1e-12))]
)
def test_nearly_independent_features(ours, theirs, numbers, device):
    """The products of different features, about 1e-4, keep their digits beside those of each with itself, which are 1."""
    signs = torch.ones(1, 1, device=device)
    for _ in range(6):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    x = (signs[:, 1:33] + 1e-3 * normal(64, 32, device=device)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found, right = ours(x, x, *numbers), theirs(exact, exact, *numbers)
    assert error(found, right.detach()) < 1e-4
    assert error(torch.autograd.grad(found, x)[0], torch.autograd.grad(right, exact)[0]) < 1e-3


def test_vicreg_of_a_constant_feature_without_eps(device):
    """Its standard deviation has no gradient at 0, and adds none to the others'."""
    a, b = normal(8, 4, device=device), normal(8, 4, device=device)
    a[:, 1] = 2.0
    leaf = a.requires_grad_()
    (g,) = torch.autograd.grad(vicreg_loss(leaf, b, 0.0, 1.0, 0.0, eps=0.0), leaf)
    assert not g[:, 1].any()
    exact = a.detach().double()[:, [0, 2, 3]].requires_grad_()
    (wanted,) = torch.autograd.grad(F.relu(1 - exact.std(0)).sum() / 8, exact)
    assert error(g[:, [0, 2, 3]], wanted) < 1e-6


@pytest.mark.parametrize("ours", [vicreg_loss, barlow_twins_loss])
def test_two_views_of_different_dtypes(ours, device):
    a, b = normal(6, 9, device=device).bfloat16(), normal(6, 9, device=device)
    for first, second in ((a, b), (b.double(), b.flip(0)), (b, b.double().flip(0))):
        dtype = torch.promote_types(first.dtype, second.dtype)
        leaves, wide = ([t.to(to or t.dtype).requires_grad_() for t in (first, second)] for to in (None, dtype))
        found, right = ours(*leaves), ours(*wide)
        assert torch.equal(found, right)
        for got, expected in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(right, wide), strict=True):
            assert torch.equal(got, expected.to(got.dtype))


BOTH = {"remove_neg": True, "remove_only_teacher_neg": True}


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("scores must have shape", lambda: sinkhorn_center(torch.zeros(3))),
        ("center must have one entry a class", lambda: mean_center(torch.zeros(3, 2), torch.zeros(3))),
        ("iterations must be at least 1", lambda: sinkhorn_center(torch.zeros(3, 2), iterations=0)),
        ("temperature must be finite and above 0", lambda: sinkhorn_center(torch.zeros(3, 2), 0.0)),
        ("center must have one entry a class", lambda: dino_loss(torch.zeros(3, 2), torch.zeros(3, 2), center=torch.zeros(3))),
        ("input must have shape .* at least 2 rows", lambda: koleo_loss(torch.zeros(1, 2))),
        ("target must have the shape of input", lambda: gram_anchoring_loss(torch.zeros(3, 2), torch.zeros(2, 2))),
        ("remove_neg and remove_only_teacher_neg exclude", lambda: gram_anchoring_loss(*torch.zeros(2, 3, 2), True, **BOTH)),
        ("input2 must have the shape of input1", lambda: vicreg_loss(torch.zeros(3, 2), torch.zeros(2, 2))),
    ],
)
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()

"""Losses of a margin: labels, kinks, extremes and broadcasting, against torch."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import launch_counts
from lossforge.losses import (
    hinge_embedding_loss,
    margin_ranking_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    poisson_nll_loss,
    soft_margin_loss,
)

OF_ELEMENTS = [
    (soft_margin_loss, F.soft_margin_loss, {}),
    (hinge_embedding_loss, F.hinge_embedding_loss, {"margin": 0.75}),
    (margin_ranking_loss, F.margin_ranking_loss, {"margin": 0.25}),
]
EACH = pytest.mark.parametrize(("ours", "theirs", "options"), OF_ELEMENTS, ids=[ours.__name__ for ours, *_ in OF_ELEMENTS])


def compare(ours, theirs, tensors, labels, **options):
    """Compare values and gradients of the tensors with torch's in float64."""
    found = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        value = function(*leaves, labels if function is ours else labels.to(dtype), **options)
        upstream = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
        value.backward(upstream)
        found.append((value.detach(), *[t.grad for t in leaves]))
    for got, exact in zip(*found, strict=True):
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels(ours, theirs, options, reduction, dtype, device):
    torch.manual_seed(0)
    labels = (torch.randint(0, 2, (9, 7), device=device) * 2 - 1).to(dtype)
    tensors = torch.randn(2, 9, 7, device=device)
    tensors = tensors if ours is margin_ranking_loss else tensors[:1].abs()
    compare(ours, theirs, tensors, labels, **options, reduction=reduction)


@EACH
def test_kinks(ours, theirs, options, device):
    """At a hinge the slope is 1, as of torch's clamp."""
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    x = torch.tensor([0.25, 0.75, 0.0, -0.25], device=device)
    tensors = (x, torch.tensor([0.0, 0.5, 0.0, -0.5], device=device)) if ours is margin_ranking_loss else (x,)
    compare(ours, theirs, tensors, labels, **options, reduction="none")


@pytest.mark.parametrize("label", [0.0, 0.5, 2.0, float("nan")])
def test_other_labels_of_hinge_embedding(label, device):
    """Torch adds both parts."""
    x = torch.tensor([-0.5, 0.5, 1.5], device=device)
    compare(hinge_embedding_loss, F.hinge_embedding_loss, (x,), torch.full_like(x, label), reduction="none")


def test_soft_margin_beyond_what_an_exponential_holds(device):
    x = torch.tensor([1e4, -1e4, 1e30, -200.0], device=device, requires_grad=True)
    label = torch.tensor([1.0, 1.0, -1.0, -1.0], device=device)
    value = soft_margin_loss(x, label, reduction="none")
    assert value.tolist() == [0.0, 1e4, pytest.approx(1e30), 0.0]
    value.sum().backward()
    assert x.grad.tolist() == [0.0, -1.0, 1.0, 0.0]


BROADCAST = [*OF_ELEMENTS[:2], (poisson_nll_loss, F.poisson_nll_loss, {})]


@pytest.mark.parametrize(("ours", "theirs", "options"), BROADCAST, ids=[ours.__name__ for ours, *_ in BROADCAST])
@pytest.mark.parametrize(
    ("shape", "other"), [((4, 3), (3,)), ((4, 3), (4, 1)), ((4, 3), ()), ((4, 1), (4, 3)), ((3,), (4, 3)), ((4, 1), (1, 3))], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_broadcast(ours, theirs, options, shape, other, reduction, device):
    """With a warning, which points at the call; gradients are summed to the shapes of the tensors."""
    x, labels = torch.rand(shape, device=device), torch.rand(other, device=device).add(0.5).sign()

    def expanded(x, y, **options):  # torch's soft_margin_loss writes into the smaller of the two, and fails
        return theirs(*torch.broadcast_tensors(x, y), **options)

    launches = launch_counts().get("pointwise_kernel", 0)
    with pytest.warns(UserWarning, match=r"Using a target size .* that is different to the input size") as warned:
        compare(ours, expanded, (x,), labels, **options, reduction=reduction)
    assert warned[0].filename == __file__
    assert launch_counts()["pointwise_kernel"] > launches


@pytest.mark.parametrize("function", [soft_margin_loss, hinge_embedding_loss, poisson_nll_loss])
def test_shapes_that_do_not_broadcast(function, device):
    with pytest.raises(ValueError, match=r"target must have the shape of input, \(3, 4\), or broadcast with it, got \(3,\)"):
        function(torch.rand(3, 4, device=device), torch.rand(3, device=device))


def test_margin_ranking_takes_equally_many_dimensions(device):
    x, y = torch.rand(3, 4, device=device), torch.rand(4, device=device)
    for tensors in ((x, y, x), (x, x, y), (y, x, x)):
        with pytest.raises(ValueError, match="input1, input2 and target must have the same number of dimensions"):
            margin_ranking_loss(*tensors)
    with pytest.warns(UserWarning, match="Using a target size"):
        margin_ranking_loss(x, x, y.unsqueeze(0))


def equal(ours, theirs, x, target, **options):
    """Compare value and gradient with torch's in float64 on a CPU: on CUDA its gradient of multilabel_margin_loss lacks targets."""
    got, exact = gradient_of(ours, x, target, **options), gradient_of(theirs, x.double().cpu(), target.cpu(), **options)
    for one, other in zip(got, exact, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("classes", [1, 5, 70, 9_000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_multi_margin(reduction, classes, p, device):
    """A tile of rows, a tile of one row, and rows longer than a tile; one row alone too."""
    torch.manual_seed(0)
    x, target = torch.randn(3, classes, device=device), torch.randint(0, classes, (3,), device=device)
    weight = torch.rand(classes, device=device)
    equal(multi_margin_loss, F.multi_margin_loss, x, target, p=p, margin=0.75, reduction=reduction)
    for rows in (slice(None), 1):
        got, exact = (
            gradient_of(function, each[rows], target[rows], p=p, weight=w, reduction=reduction)
            for function, each, w in ((multi_margin_loss, x, weight), (F.multi_margin_loss, x.double(), weight.double()))
        )
        for one, other in zip(got, exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [4, 70, 2_000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lists_of_targets(reduction, classes, device):
    """Empty, full, with a class twice, with entries behind the first -1; of one row alone."""
    torch.manual_seed(0)
    x, target = torch.randn(5, classes, device=device), torch.randint(0, classes, (5, classes), device=device)
    for row, ends in enumerate((0, 1, 3, 3, min(classes, 64))):
        target[row, ends:] = -1
    target[2, 1] = target[2, 0]
    target[3, -1] = 1
    equal(multilabel_margin_loss, F.multilabel_margin_loss, x, target, reduction=reduction)
    equal(multilabel_margin_loss, F.multilabel_margin_loss, x[2], target[2], reduction=reduction)


def test_lists_longer_than_a_part(device):
    """Lists are read by parts of 32 classes, and end before, at or after the end of one, or with the row. A later class does not count."""
    torch.manual_seed(0)
    x, target = torch.randn(7, 70, device=device), torch.stack([torch.randperm(70, device=device) for _ in range(7)])
    for row, length in enumerate((0, 1, 31, 32, 33, 64, 70)):
        target[row, length : length + 1] = -1
    for rows in (slice(0, 7), slice(0, 3), slice(6, 7)):
        equal(multilabel_margin_loss, F.multilabel_margin_loss, x[rows], target[rows], reduction="none")


@pytest.mark.parametrize("p", [1, 2])
def test_equal_logits_of_margins(p, device):
    """Where a difference is the margin itself the slope is 0, as in torch."""
    x, target = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]], device=device), torch.tensor([0, 1], device=device)
    equal(multi_margin_loss, F.multi_margin_loss, x, target, p=p, reduction="none")
    equal(multilabel_margin_loss, F.multilabel_margin_loss, x, torch.tensor([[0, -1, 0], [1, 0, -1]], device=device), reduction="none")


@pytest.mark.parametrize("classes", [5, 5_000])
def test_infinite_logits_of_margins(classes, device):
    """One that is nan or infinite harms its own row alone, whose loss says so; torch's leaves nan out."""
    x = torch.zeros(4, classes, device=device)
    x[1, 2], x[2, 2], x[3, 2] = torch.inf, -torch.inf, torch.nan
    value, g = gradient_of(multi_margin_loss, x, torch.tensor([0, 1, 0, 0], device=device), reduction="none")
    share = (classes - 1) / classes
    assert value[:3].tolist() == pytest.approx([share, torch.inf, share - 1 / classes])
    assert value[3].isnan()
    assert g[:3].isfinite().all()
    assert g[2, 2] == 0


@pytest.mark.parametrize("index", [-1, 5, 2**33])
def test_an_index_out_of_range(index, device, monkeypatch):
    """It raises where the host can read it, with its row; unchecked its row alone is nan, by the kernel and by the reference."""
    x, target = torch.randn(3, 5, device=device), torch.tensor([1, index, 2], device=device)
    with pytest.raises(IndexError, match=f"target must hold 0 to 4, got {index} at row 1"):
        multi_margin_loss(x, target, validate=True)
    lists = torch.full((3, 5), -1, device=device)
    lists[:, 0] = target
    if index != -1:
        with pytest.raises(IndexError, match=rf"target must hold -1 to 4, got {index} at row \(1, 0\)"):
            multilabel_margin_loss(x, lists, validate=True)
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    for function, given in ((multi_margin_loss, target), (multilabel_margin_loss, lists)):
        for dtype in (torch.float32, torch.float64):
            value, g = gradient_of(function, x.to(dtype), given, reduction="none")
            wrong = [False, index != -1 or given is target, False]
            assert value.isnan().tolist() == g.isnan().all(1).tolist() == wrong
            assert g[[0, 2]].isfinite().all()


def test_arguments_of_margins():
    x, target = torch.rand(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="p must be one of 1, 2, got 3"):
        multi_margin_loss(x, target, p=3)
    with pytest.raises(ValueError, match=r"target must have shape \(3, 4\), got \(3,\)"):
        multilabel_margin_loss(x, target)
    with pytest.raises(ValueError, match=r"input must have shape \(C,\) or \(N, C\) with at least one class, got \(3, 4, 5\)"):
        multi_margin_loss(torch.rand(3, 4, 5), target)
    with pytest.raises(ValueError, match=r"weight must hold one number a class, shape \(4,\), got \(3,\)"):
        multi_margin_loss(x, target, weight=torch.rand(3))
    with pytest.raises(ValueError, match="input must have at most 16384 classes where targets are lists, got 16385"):
        multilabel_margin_loss(torch.rand(1, 16385), torch.zeros(1, 16385, dtype=torch.long))

"""Losses of vectors: gradients of each, labels, norms, lengths that no exponent holds, distances of 0, against torch."""

import pytest
import torch
import torch.nn.functional as F

from lossforge.kernels import launch_counts
from lossforge.losses import cosine_embedding_loss, triplet_margin_loss


def compare(ours, theirs, tensors, *labels, **options):
    """Compare values and all gradients with torch's in float64."""
    found = []
    launches = launch_counts().get("vectors_kernel", 0)
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        value = function(*leaves, *labels, **options)
        value.backward(torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view(value.shape))
        found.append((value.detach(), *[t.grad for t in leaves]))
    assert launch_counts()["vectors_kernel"] > launches
    for got, exact in zip(*found, strict=True):
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-6)


def vectors(number, *shape, device):
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", [1, 5, 64, 3000])
def test_cosine_embedding(count, reduction, dtype, device):
    """Labels of both kinds, and others, which add nothing."""
    x, y = vectors(2, 6, count, device=device)
    labels = torch.tensor([1, -1, 1, -1, 0, 2], device=device).to(dtype)
    compare(cosine_embedding_loss, F.cosine_embedding_loss, (x, y), labels, margin=-0.3, reduction=reduction)


def test_cosine_embedding_of_one_pair(device):
    x, y = vectors(2, 8, device=device)
    compare(cosine_embedding_loss, F.cosine_embedding_loss, (x, y), torch.tensor(-1, device=device), margin=-0.9)


def test_cosine_embedding_of_vectors_of_any_length(device):
    """Torch multiplies both squares, and gets 0 or infinity; of a vector of zeros the cosine is 0."""
    x, y = vectors(2, 3, 8, device=device)
    scale = torch.tensor([[1e13], [1e-3], [0.0]], device=device)
    labels = torch.ones(3, device=device)
    value = cosine_embedding_loss(x * scale, y * scale, labels, reduction="none")
    exact = F.cosine_embedding_loss((x * scale).double(), (y * scale).double(), labels, reduction="none")
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"swap": True}, {"p": 1.0}, {"p": 1.5, "swap": True}, {"p": 4.0}, {"margin": 0.1, "eps": 0.5}], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("count", [1, 5, 64, 3000])
def test_triplet_margin(count, reduction, options, device):
    tensors = vectors(3, 6, count, device=device) / count
    compare(triplet_margin_loss, F.triplet_margin_loss, tensors, **options, reduction=reduction)
    compare(triplet_margin_loss, F.triplet_margin_loss, [t[2] for t in tensors], **options)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("swap", [False, True])
def test_distances_of_zero(swap, p, device):
    """Equal vectors with ε = 0: the slope of a norm is 0 there."""
    x, y, _ = vectors(3, 2, 5, device=device)
    compare(triplet_margin_loss, F.triplet_margin_loss, (x, x.clone(), y), p=p, eps=0.0, swap=swap, margin=10.0, reduction="none")


def test_equally_distant_negatives(device):
    """A tie under `swap` halves the gradient, as torch's minimum does."""
    anchor, positive, negative = (torch.tensor([t], device=device) for t in ([0.0, 0.0], [2.0, 0.0], [1.0, 3.0]))
    compare(triplet_margin_loss, F.triplet_margin_loss, (anchor, positive, negative), eps=0.0, swap=True, margin=3.0)


def test_a_hinge_of_distances(device):
    """Where the loss is exactly 0 its slope is 1, as of torch's clamp."""
    anchor, positive, negative = (torch.tensor([t], device=device) for t in ([0.0, 0.0], [2.0, 0.0], [0.0, 3.0]))
    compare(triplet_margin_loss, F.triplet_margin_loss, (anchor, positive, negative), eps=0.0, margin=1.0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_broadcast(which, device):
    """One vector for all rows, with a warning that points at the call; it gets the sum of their gradients."""
    tensors = [*vectors(3, 4, 5, device=device)]
    tensors[which] = tensors[which][:1]
    with pytest.warns(UserWarning, match="that is different to the anchor size") as warned:
        compare(triplet_margin_loss, F.triplet_margin_loss, tensors)
    assert warned[0].filename == __file__


def test_arguments():
    x = torch.rand(3, 4)
    for options, said in (
        ({"margin": 0.0}, "margin must be finite and above 0, got 0"),
        ({"p": 0.5}, "p must be finite and at least 1, got 0.5"),
        ({"p": float("inf")}, "p must be finite and at least 1, got inf"),
    ):
        with pytest.raises(ValueError, match=said):
            triplet_margin_loss(x, x, x, **options)
    with pytest.raises(ValueError, match=r"negative must have the shape of anchor, \(3, 4\), or broadcast with it, got \(3, 5\)"):
        triplet_margin_loss(x, x, torch.rand(3, 5))
    with pytest.raises(ValueError, match=r"input1 and input2 must have the same number of dimensions, got \(3, 4\), \(4,\)"):
        cosine_embedding_loss(x, x[0], torch.ones(3))
    with pytest.raises(ValueError, match=r"target must have one label a row, shape \(3,\), got \(3, 4\)"):
        cosine_embedding_loss(x, x, x)
    with pytest.raises(ValueError, match="target has no gradient, got a tensor that requires grad: detach it"):
        cosine_embedding_loss(x, x, torch.ones(3, requires_grad=True))
    with pytest.raises(ValueError, match=r"input1 must have shape \(..., D\) with at least one element a vector, got \(3, 0\)"):
        cosine_embedding_loss(x[:, :0], x[:, :0], torch.ones(3))

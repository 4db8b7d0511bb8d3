"""Our losses of labelled features against those of pytorch-metric-learning: value and gradients."""

import pytest
import torch

from lossforge.losses import arcface_loss, circle_loss, multi_similarity_loss, nt_xent_loss, proxy_anchor_loss, supervised_contrastive_loss

NUMBER, WIDTH, CLASSES = 24, 12, 6
TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.float64: {"rtol": 1e-9, "atol": 1e-12}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture
def library():
    """Return the modules of losses and of miners; nothing else imports them, because that takes seconds."""
    where = "pytorch_metric_learning"
    reason = "needs pip install pytorch-metric-learning"
    return pytest.importorskip(f"{where}.losses", reason=reason), pytest.importorskip(f"{where}.miners", reason=reason)


def drawn(dtype, labels=None):
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (NUMBER,), generator=draw) if labels is None else labels
    return torch.randn(NUMBER, WIDTH, generator=draw, dtype=dtype).requires_grad_(), labels


def graded(value, *leaves):
    """Return the value and its gradients, under an upstream gradient that is not 1."""
    return value.detach(), *torch.autograd.grad(value, leaves, torch.tensor(1.7, dtype=value.dtype))


@DTYPES
@pytest.mark.parametrize("epsilon", [None, 0.1], ids=["all pairs", "mined"])
def test_multi_similarity(library, dtype, epsilon):
    losses, miners = library
    z, labels = drawn(dtype)
    mined = None if epsilon is None else miners.MultiSimilarityMiner(epsilon)(z, labels)
    expected = losses.MultiSimilarityLoss(alpha=2.0, beta=40.0, base=0.4)(z, labels, mined)
    found = multi_similarity_loss(z, labels, 2.0, 40.0, 0.4, epsilon=epsilon)
    torch.testing.assert_close(graded(found, z), graded(expected, z), **TOLERANCES[dtype])


@DTYPES
def test_circle(library, dtype):
    """Their mean divides by the rows whose loss is above 0; here that is all of them but those of a class with one sample."""
    losses, _ = library
    z, labels = drawn(dtype, torch.arange(NUMBER).div(5, rounding_mode="floor"))
    labels[0] = CLASSES
    expected = losses.CircleLoss(m=0.3, gamma=30)(z, labels)
    found = circle_loss(z, labels, 0.3, 30.0, normalizer=NUMBER - 1)
    torch.testing.assert_close(graded(found, z), graded(expected, z), **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("present", [CLASSES, CLASSES - 2], ids=["every class", "some classes"])
def test_proxy_anchor(library, dtype, present):
    losses, _ = library
    z, labels = drawn(dtype)
    labels = labels % present
    module = losses.ProxyAnchorLoss(CLASSES, WIDTH, margin=0.2, alpha=16).to(dtype)
    expected = module(z, labels)
    found = proxy_anchor_loss(z, module.proxies, labels, 0.2, 16.0)
    torch.testing.assert_close(graded(found, z, module.proxies), graded(expected, z, module.proxies), **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("sub_centers", [1, 3])
def test_arcface(library, dtype, sub_centers):
    """The library gives the margin in degrees and keeps the classes' vectors as columns, a class's own beside each other."""
    losses, _ = library
    z, labels = drawn(dtype)
    options = {"num_classes": CLASSES, "embedding_size": WIDTH, "margin": 20.0, "scale": 16}
    module = losses.ArcFaceLoss(**options) if sub_centers == 1 else losses.SubCenterArcFaceLoss(sub_centers=sub_centers, **options)
    module = module.to(dtype)
    expected = module(z, labels)
    cosines = torch.nn.functional.normalize(z, dim=1) @ torch.nn.functional.normalize(module.W, dim=0)
    found = arcface_loss(cosines, labels, torch.pi * 20.0 / 180.0, 16.0, sub_centers=sub_centers)
    torch.testing.assert_close(graded(found, z, module.W), graded(expected, z, module.W), **TOLERANCES[dtype])


@DTYPES
def test_supervised_contrastive(library, dtype):
    losses, _ = library
    z, labels = drawn(dtype, torch.arange(NUMBER) % CLASSES)
    expected = losses.SupConLoss(temperature=0.2)(z, labels)
    found = supervised_contrastive_loss(z, labels, 0.2, None)
    torch.testing.assert_close(graded(found, z), graded(expected, z), **TOLERANCES[dtype])


@DTYPES
def test_nt_xent(library, dtype):
    losses, _ = library
    z, _ = drawn(dtype)
    one, two = z.chunk(2)
    expected = losses.NTXentLoss(temperature=0.3)(torch.cat([one, two]), torch.arange(NUMBER // 2).repeat(2))
    torch.testing.assert_close(graded(nt_xent_loss(one, two, 0.3), z), graded(expected, z), **TOLERANCES[dtype])

"""A common offset of logits or similarities up to 1e8 costs no digits: value and gradient are those of the logits without it.

Logits are multiples of what float32 resolves at the offset, so that their sum with it is exact. Expected values are of float64 without the
offset.
"""

import contextlib
import inspect

import pytest
import torch

from lossforge import losses
from lossforge.losses import plain_torch

N, C = 6, 11
TARGET = torch.tensor([3, -100, 0, 10, 7, 7])
EXISTING = TARGET.clamp(min=0)
generator = torch.Generator().manual_seed(0)
SHARES = torch.rand(N, C, generator=generator).softmax(1)
WEIGHT = torch.rand(C, generator=generator) + 0.5
VALUES, INDICES = SHARES.log().topk(3, 1)
SEVERAL = torch.randint(0, C, (N, 3), generator=generator)
LABELS = torch.tensor([0, 1, 0, 2, 1, 2])
LISTS = torch.tensor([[1, 3, *[-1] * (C - 2)]] * N)
POSITIVE = (SHARES > 0.09).float()


def of_class(name, **options):
    return lambda x: getattr(losses, name)(x, TARGET, **options)


def of_teacher(name, **options):
    return lambda x: getattr(losses, name)(x, SHARES.log().to(x.dtype), **options)


LOGITS = {
    "cross entropy": of_class("cross_entropy", reduction="none"),
    "entropy": lambda x: losses.cross_entropy(x, TARGET, outputs=("entropy",)).entropy,
    "smoothing": of_class("cross_entropy", label_smoothing=0.1),
    "probabilities": lambda x: losses.cross_entropy(x, SHARES.to(x.dtype)),
    "class weights": lambda x: losses.cross_entropy(x, TARGET, WEIGHT.to(x.dtype)),
    "mixup": of_class("cross_entropy", target_b=TARGET.flip(0), lam=0.25),
    "scale": of_class("cross_entropy", scale=0.25),
    "seesaw": lambda x: losses.seesaw_loss(x, TARGET, torch.arange(1, C + 1), reduction="none"),
    **{
        name: of_class(name)
        for name in (
            "softmax_focal_loss",
            "poly_cross_entropy",
            "generalized_cross_entropy",
            "taylor_cross_entropy",
            "symmetric_cross_entropy",
            "asymmetric_loss_single_label",
            "ohem_cross_entropy",
        )
    },
    "multi_margin_loss": lambda x: losses.multi_margin_loss(x, EXISTING, reduction="none"),
    "multilabel_margin_loss": lambda x: losses.multilabel_margin_loss(x, LISTS),
    "two_way_loss": lambda x: losses.two_way_loss(x, POSITIVE),
    "two_way_loss, cool": lambda x: losses.two_way_loss(x, POSITIVE, tp=0.3, tn=1.7),
    "distribution_focal_loss": lambda x: losses.distribution_focal_loss(x, (SHARES[:, 0] * 40).to(x.dtype), reduction="none"),
    "kl": of_teacher("kl_div_with_logits", reduction="none"),
    "kl, T": of_teacher("kl_div_with_logits", temperature=1.7),
    "kl, reverse": of_teacher("kl_div_with_logits", temperature=1.7, reverse=True),
    "kl of a teacher with an offset": lambda x: losses.kl_div_with_logits(SHARES.log().to(x.dtype), x, temperature=1.7),
    "kl, scaled": of_teacher("kl_div_with_logits", scale=0.3, target_scale=1.2, temperature=1.7, labels=EXISTING, hard_weight=0.4),
    "js, scaled": of_teacher("js_div_with_logits", scale=0.3, target_scale=0.3, labels=EXISTING, hard_weight=0.4),
    "js": of_teacher("js_div_with_logits", temperature=1.7),
    "total variation": of_teacher("total_variation_with_logits", temperature=1.7),
    "draft": of_teacher("draft_loss_with_logits", temperature=1.7),
    "draft, log": of_teacher("draft_loss_with_logits", kind="log_tv", scale=0.3, target_scale=1.2, reduction="none"),
    "dino_loss": of_teacher("dino_loss", student_temperature=1.7, teacher_temperature=1.3, reduction="none"),
    "top-k": lambda x: losses.topk_kl_div_with_logits(x, VALUES.to(x.dtype), INDICES, temperature=1.7),
    "jsd": lambda x: losses.jsd_cross_entropy(x, EXISTING[:2], num_splits=3),
    "dkd": lambda x: losses.dkd_loss(x, SHARES.log().to(x.dtype), EXISTING),
    "dist": lambda x: losses.dist_loss(x, SHARES.log().to(x.dtype), temperature=1.7),
    "router": lambda x: losses.load_balancing_loss(x, 2),
    "selective_log_softmax": lambda x: losses.selective_log_softmax(x, EXISTING),
    "several tokens": lambda x: losses.selective_log_softmax(x, SEVERAL, temperature=2.0),
    "several tokens, entropy": lambda x: losses.selective_log_softmax(x, SEVERAL, outputs=("entropy",)).logps,
    **{name: (lambda x, name=name: getattr(losses, name)(x, EXISTING)) for name in ("dice_loss", "dice_ce_loss", "lovasz_softmax_loss")},
    "clip_loss": lambda x: losses.clip_loss(x, reduction="none"),
    "clip_loss, other columns": lambda x: losses.clip_loss(x, offset=3),
    "clip_loss, scale": lambda x: losses.clip_loss(x, scale=0.3, reduction="none"),
    "clip_loss, negative scale": lambda x: losses.clip_loss(x, scale=-0.3),
}
"""Of logits (N, C)."""

FEATURES = {
    "info_nce_loss": lambda a, b: losses.info_nce_loss(a, b, temperature=1.0, reduction="none", normalize=False),
    "info_nce_loss, T": lambda a, b: losses.info_nce_loss(a, b, temperature=0.3, normalize=False),
    "info_nce_loss, learned T": lambda a, b: losses.info_nce_loss(a, b, temperature=torch.tensor(0.5, dtype=a.dtype), normalize=False),
    "info_nce_loss, symmetric": lambda a, b: losses.info_nce_loss(a, b, temperature=0.7, symmetric=True, normalize=False),
    "info_nce_loss, queue": lambda a, b: losses.info_nce_loss(a, b[:N], b[N:], temperature=0.7, in_batch=False, normalize=False),
    "clip_loss_from_features": lambda a, b: losses.clip_loss_from_features(a, b, -0.3, "none"),
    "linear_cross_entropy": lambda a, b: losses.linear_cross_entropy(a[:, :-1], b[:, :-1], TARGET, b[:, -1]),
    "linear_selective_log_softmax": lambda a, b: losses.linear_selective_log_softmax(a[:, :-1], b[:, :-1], SEVERAL, b[:, -1]),
    "linear_entropy": lambda a, b: losses.linear_entropy(a[:, :-1], b[:, :-1], b[:, -1]),
    "linear_kl_div": lambda a, b: losses.linear_kl_div(a[:, :-1], b[:, :-1], SHARES.log().to(a.dtype), b[:, -1]),
}
"""Of features (N, C + 1), whose last is 1, and (C, C + 1), whose last is the offset: a bᵀ, or the layer of a bias, is x + offset."""

VIEWS = {
    "nt_xent_loss": lambda z: losses.nt_xent_loss(z[:3], z[3:], 0.3, "none", normalize=False),
    "supervised_contrastive_loss": lambda z: losses.supervised_contrastive_loss(z, LABELS, 0.3, None, "none", normalize=False),
}
"""Of features, one of which is the root of the offset in all rows."""


def multiples(offset, *shape, size=3.0):
    """Return random multiples of what float32 resolves at an offset, at least of 1/16."""
    at = torch.tensor(abs(offset))
    unit = max(2.0**-4, (at.nextafter(2 * at) - at).item())
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * max(size, unit) / unit).round() * unit
    assert torch.equal((x + offset).double(), x.double() + offset)
    return x


def graded(function, x, *args):
    leaf = x.clone().requires_grad_()
    value = function(leaf, *args)
    value.backward(torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).view(value.shape))
    return value.detach().double(), leaf.grad.double()


def agree(found, exact):
    for got, right in zip(found, exact, strict=True):
        torch.testing.assert_close(got, right, rtol=3e-6, atol=1e-6)


EACH = pytest.mark.parametrize("path", [contextlib.nullcontext, plain_torch], ids=["kernels", "plain"])
OFFSETS = pytest.mark.parametrize("offset", [1e2, 1e4, 1e6, 1e8, -1e8], ids="{:.0e}".format)


@EACH
@OFFSETS
@pytest.mark.parametrize("name", LOGITS)
def test_logits(name, offset, path):
    x = multiples(offset, N, C)
    with plain_torch():
        exact = graded(LOGITS[name], x.double())
    with path():
        agree(graded(LOGITS[name], x + offset), exact)


@EACH
@OFFSETS
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, offset, path):
    a = torch.cat([multiples(offset, N, C), torch.ones(N, 1)], 1)
    sides = [torch.cat([torch.eye(C), torch.full((C, 1), last)], 1) for last in (0.0, offset)]
    with plain_torch():
        value, gradient = graded(FEATURES[name], a.double(), sides[0].double())
    with path():
        found, of_a = graded(FEATURES[name], a, sides[1])
    agree((found, of_a[:, :-1]), (value, gradient[:, :-1]))  # the last feature's gradient is the offset times the others' sum


@EACH
@pytest.mark.parametrize("root", [8.0, 64.0, 1024.0, 8192.0])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name, root, path):
    z = torch.randint(-2, 3, (N, 5), generator=torch.Generator().manual_seed(3)).float() * max(1.0, root / 1024)
    near, far = (torch.cat([z, torch.full((N, 1), last)], 1) for last in (0.0, root))
    with plain_torch():
        value, gradient = graded(VIEWS[name], near.double())
    with path():
        found, of_z = graded(VIEWS[name], far)
    agree((found, of_z[:, :-1]), (value, gradient[:, :-1]))


@EACH
def test_by_hand(path):
    """Three equal similarities: ln 3, whatever they are."""
    with path():
        for value in (0.0, 1e2, 1e4, 1e8, -1e8):
            x = torch.full((3, 3), value, requires_grad=True)
            loss = losses.clip_loss(x)
            assert loss.item() == pytest.approx(1.0986123, rel=1e-6)
            (gradient,) = torch.autograd.grad(loss, x)
            torch.testing.assert_close(gradient, (torch.full((3, 3), 1 / 3) - torch.eye(3)) / 3, rtol=1e-6, atol=1e-7)


@EACH
@OFFSETS
def test_a_scale_rounds_as_the_offset_does(offset, path):
    """A scale that is no power of two, and log priors, are rounded once at the size of the logits: by half a unit in their last place."""
    x = multiples(offset, N, C)
    prior = WEIGHT.log()
    for function in (of_class("cross_entropy", scale=0.3), lambda x: losses.logit_adjusted_cross_entropy(x, TARGET, prior.to(x.dtype))):
        with plain_torch():
            value, gradient = graded(function, x.double())
        with path():
            found, of_x = graded(function, x + offset)
        bound = 2.0**-23 * abs(offset) + 1e-6
        assert abs(found - value) <= bound
        assert (of_x - gradient).abs().max() <= bound


def test_every_loss_of_logits_is_here():
    """What is not: losses of probabilities, of elements and of sigmoids, whose 0 is a threshold, and of angles, boxes and distances.

    Among the distances is the cosine distance of logits, whose 0 counts.
    """
    seen = " ".join(inspect.getsource(inspect.getmodule(test_logits)).split())
    templates = {"rowwise", "divergence", "topk", "margins", "margin_lists", "distribution"}
    names = [entry.function.__name__ for entry in losses.registry.LOSSES.values() if entry.template.name in templates]
    names += ["clip_loss_from_features", "jsd_cross_entropy", "load_balancing_loss", "dkd_loss", "dist_loss"]
    others = "arcface_loss", "cosface_loss", "ldam_loss", "cosine_distance_with_logits"
    assert not [name for name in names if name not in seen and name not in others]

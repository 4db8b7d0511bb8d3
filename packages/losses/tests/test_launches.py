"""How many kernels a call launches: of the value, of the gradient in forward or in backward, and one that multiplies what forward wrote."""

import functools
from collections import Counter

import pytest
import torch

from lossforge import losses
from lossforge.kernels import launch_counts
from lossforge.losses import backend

INDEX, LABELS = torch.arange(60) % 30, torch.arange(1800).view(60, 30) % 7 == 0
MULTILABEL, ROWS, ELEMENTS = "multilabel_kernel", ("rowwise_kernel", "rowwise_backward_kernel"), ("elementwise_kernel",) * 2
FUSED = {
    "cross_entropy": (losses.cross_entropy, (INDEX,), *ROWS),
    "asymmetric_loss_single_label": (
        losses.asymmetric_loss_single_label,
        (INDEX, 0.5, 3, 0.2),
        "rowwise_kernel",
        "rowwise_backward_kernel",
    ),
    "sigmoid_focal_loss": (
        functools.partial(losses.sigmoid_focal_loss, reduction="mean"),
        (LABELS.float(),),
        "elementwise_kernel",
        "elementwise_kernel",
    ),
    "siglip_loss": (functools.partial(losses.siglip_loss, offset=-1), (), *ELEMENTS),
    "kl_div_with_logits": (losses.kl_div_with_logits, (LABELS.float(),), "divergence_kernel", "divergence_backward_kernel"),
}
"""Losses whose gradient is written by the launch that computes the value, unless it waits for backward."""
OTHERS = {
    "clip_loss": (lambda x, **mode: losses.clip_loss(x[:30], **mode), {"contrastive_kernel": 1}, "contrastive_backward_kernel"),
    "clip_loss_from_features": (
        lambda x, **mode: losses.clip_loss_from_features(x, x.detach(), **mode),
        {"similarity_kernel": 1, "similarity_join_kernel": 2},
        "similarity_gradient_kernel",
    ),
    "dice_ce_loss": (lambda x, **mode: losses.dice_ce_loss(x, on(x, INDEX), **mode), {"overlap_kernel": 1}, "overlap_backward_kernel"),
    "zlpr_loss": (lambda x, **mode: losses.zlpr_loss(x, on(x, LABELS), **mode), {MULTILABEL: 1}, "multilabel_gradient_kernel"),
    "two_way_loss": (
        lambda x, **mode: losses.two_way_loss(x, on(x, LABELS), **mode),
        {"multilabel_kernel": 2},
        "multilabel_gradient_kernel",
    ),
    "load_balancing_loss": (
        lambda x, **mode: losses.load_balancing_loss(x, z_loss=1e-3, **mode),
        {"router_kernel": 1, "router_total_kernel": 1},
        "router_gradient_kernel",
    ),
}
"""Losses with a launch for the gradient: the kernels of the value, and that of the gradient."""


def on(x, t):
    return t.to(x.device)


def launched(call):
    """Return the kernels that a call launches, and how often, and its result."""
    before = Counter(launch_counts())
    found = call()
    return Counter(launch_counts()) - before, found


@pytest.fixture
def x(device):
    if backend(torch.zeros(1, device=device)) == "torch":
        pytest.skip("the kernels do not run here")
    return torch.randn(60, 30, device=device, requires_grad=True)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("name", FUSED)
def test_one_launch_for_value_and_gradient(name, mode, x):
    function, args, of_value, of_backward = FUSED[name]
    args = [on(x, t) if isinstance(t, torch.Tensor) else t for t in args]
    first, value = launched(lambda: function(x, *args, gradient=mode))
    second, _ = launched(value.backward)
    assert first == {of_value: 1}
    assert second - Counter(count_kernel=1) == {"scale_kernel" if mode == "forward" else of_backward: 1}


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize(
    ("loss", "kernel"), [(losses.binary_cross_entropy_with_logits, "elementwise_kernel"), (losses.poisson_nll_loss, "pointwise_kernel")]
)
def test_one_launch_more_for_a_mask(loss, kernel, mode, x):
    """It is summed once; backward keeps the sum."""
    mask = on(x, LABELS)
    first, value = launched(lambda: loss(x, on(x, LABELS.float()), mask=mask, gradient=mode))
    second, _ = launched(value.backward)
    assert first == {"sum_of_mask_kernel": 1, kernel: 1}
    assert second == {"scale_kernel" if mode == "forward" else kernel: 1}


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_launch_for_the_gradient(name, mode, x):
    function, of_value, of_gradient = OTHERS[name]
    found, _ = launched(lambda: function(x.detach(), gradient=mode))
    assert found == of_value
    first, value = launched(lambda: function(x, gradient=mode))
    second, (g,) = launched(lambda: torch.autograd.grad(value, x, retain_graph=True))
    assert (first == of_value) == (mode == "backward")
    assert second["scale_kernel"] <= (mode == "forward")
    total = first + second - Counter(scale_kernel=1)
    assert total == Counter({**of_value, of_gradient: 1})
    assert torch.equal(g, torch.autograd.grad(value, x)[0])
    assert torch.equal(value, function(x, gradient=mode))

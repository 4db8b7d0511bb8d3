"""Element-wise launches whose programs go over several tiles, each read before the one that comes before it is computed."""

import pytest
import torch

from lossforge.kernels.element import launch as element_launch
from lossforge.kernels.engine.launch import trial
from lossforge.kernels.tiles import ElementTiles
from lossforge.losses import binary_cross_entropy_with_logits, poly_binary_cross_entropy, siglip_loss, sigmoid_focal_loss
from lossforge.losses.testing import error

CASES = {
    "dense": (sigmoid_focal_loss, {"gamma": 1.5}),
    "quicker formula": (sigmoid_focal_loss, {"gamma": 2.0}),
    "weighted": (binary_cross_entropy_with_logits, {"weight": None}),
    "in place": (binary_cross_entropy_with_logits, {"inplace": True}),
    "class index": (poly_binary_cross_entropy, {"epsilon": 0.5}),
    "diagonal": (siglip_loss, {"offset": 3}),
}


@pytest.mark.parametrize(
    ("case", "reduction"),
    [
        *((case, "sum") for case in CASES),
        *((case, "none") for case in CASES if case != "in place"),  # a gradient that waits for upstream's takes no logits' place
        ("in place", "mean"),
    ],
)
def test_programs_of_several_tiles(case, reduction, device, monkeypatch):
    monkeypatch.setattr(element_launch, "PROGRAMS", 3)
    x, y, weight, upstream = torch.rand(4, 38, 91, device=device)
    label = torch.arange(-1, 75, 2, device=device)
    function, options = CASES[case]
    options = options | ({"weight": weight} if "weight" in options else {})
    target = {"class index": label, "diagonal": None}.get(case, y)
    leaf, wide = (6 * x - 3).requires_grad_(), (6 * x - 3).double().requires_grad_()
    with trial(ElementTiles(256, 2, 1, 3)):  # 13 tiles and a part of one
        value = function(leaf * 1.0, target, reduction=reduction, **options)
        value.backward(upstream if reduction == "none" else None)
    exact = function(
        wide,
        target.double() if target is y else target,
        reduction=reduction,
        **{k: v.double() if v is weight else v for k, v in options.items() if k != "inplace"},
    )
    exact.backward(upstream.double() if reduction == "none" else None)
    assert error(value.detach(), exact.detach()) < 1e-6
    assert error(leaf.grad, wide.grad) < 2e-6

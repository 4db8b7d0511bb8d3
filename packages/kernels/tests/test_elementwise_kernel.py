"""The element-wise kernel over sizes, alignments, strides and dtypes, and programs of several tiles."""

import pytest
import torch

from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.elements.elementwise import launch as element
from lossforge.kernels.formulas.binary.focal import focal
from lossforge.kernels.formulas.regression import l1
from lossforge.kernels.tiles import ElementTiles, trial
from lossforge.losses import binary_cross_entropy_with_logits, poly_binary_cross_entropy, siglip_loss, sigmoid_focal_loss
from lossforge.losses.testing import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SIZES = (1, 2, 15, 16, 17, 32, 1000)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_elementwise_over_sizes_and_alignment(launches, by_plan, offset, shift):
    torch.manual_seed(0)
    for n in SIZES:
        x, y = torch.randn(n, device=DEVICE), torch.rand(n, device=DEVICE)
        for gamma in (2.0, 1.0, 0.5, 2.0):
            a, b, g = offset(x, shift), offset(y, shift if n % 2 else 0), offset(x, shift)
            value, _ = by_plan(element.forward, ElementwiseCall("focal", a, b, hyper=[gamma, 0.25]), Formulas(focal), [g], False)
            p = x.double().sigmoid()
            p_t = p * y + (1 - p) * (1 - y)
            entropy = torch.nn.functional.binary_cross_entropy_with_logits(x.double(), y.double(), reduction="none")
            expected = ((0.25 * y + 0.75 * (1 - y)) * (1 - p_t) ** gamma * entropy).sum()
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
            assert g.isfinite().all()
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


def l1_sum(x, y):
    """A sum by the element-wise template."""
    return element.forward(ElementwiseCall("l1", x, y), Formulas(l1), [None], False)[0]


def test_elementwise_over_strides_and_dtypes(launches):
    """The second operand takes other strides and dtypes under one formula; each pair twice."""
    base = torch.arange(48.0, device=DEVICE).view(6, 8)
    x = torch.zeros(6, 8, device=DEVICE)
    for _ in range(2):
        for y in (base, base.t().contiguous().t(), base[:, :1].expand(6, 8), base.bfloat16(), base.half(), base.flip(0)):
            assert l1_sum(x, y) == y.float().sum()
        for index in (torch.arange(6, device=DEVICE), torch.arange(6, device=DEVICE).int(), torch.arange(12, device=DEVICE)[::2] // 2):
            assert l1_sum(base, index) == (base - torch.nn.functional.one_hot(index.long(), 8)).abs().sum()


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
    monkeypatch.setattr(element, "PROGRAMS", 3)
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

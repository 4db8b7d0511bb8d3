"""The kernel of boxes over sizes and alignments."""

import itertools

import pytest
import torch
import torchvision.ops

from lossforge.kernels.boxes import boxes as box
from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.kernels.call import Formulas
from lossforge.kernels.formulas.box import giou

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_boxes_over_sizes_and_alignment(launches, by_plan, offset, shift):
    """Whole tiles, the rest of one, and vectors of four that begin anywhere; in half precision a lane has two pairs."""
    torch.manual_seed(0)
    for n, dtype in itertools.product((1, 2, 127, 128, 129, 300), (torch.float32, torch.bfloat16)):
        low = torch.rand(2, n, 2, device=DEVICE) * 8
        sides = torch.rand(2, n, 2, device=DEVICE) * 8 + 1
        a, b = torch.cat([low, low + sides], 2).to(dtype)
        g1, g2 = (offset(torch.full((4 * n,), float("nan"), device=DEVICE, dtype=dtype), shift).view(n, 4) for _ in range(2))
        wide = [t.double().requires_grad_() for t in (a, b)]
        expected = torchvision.ops.generalized_box_iou_loss(*wide, reduction="sum", eps=0.0)
        expected.backward()
        a, b = (offset(t.reshape(-1), shift).view(n, 4) for t in (a, b))
        for _ in range(2):
            (value,) = by_plan(box.forward, BoxesCall("giou", a, b, hyper=[1e-7]), Formulas(giou), [g1, g2], False)
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            for g, leaf in zip((g1, g2), wide, strict=True):
                torch.testing.assert_close(g.double(), leaf.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)

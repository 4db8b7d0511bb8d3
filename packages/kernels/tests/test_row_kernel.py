"""The row kernels over sizes, alignments and strides, each launch through Triton first and then directly."""

import pytest
import torch
import triton

from lossforge.kernels.call import Formulas, RowCall
from lossforge.kernels.formulas.softmax import cross_entropy
from lossforge.kernels.row import launch as row
from lossforge.kernels.tiles import backward_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CROSS_ENTROPY = Formulas(cross_entropy)


@pytest.mark.parametrize("classes", [1, 64, 50257, 4_194_305, 2**28 + 1, 2**30])
def test_backward_grid_fits_its_second_axis(classes):
    for shift, adjacent in ((1, False), (8, False), (1, True)):
        assert triton.cdiv(classes + shift - 1, backward_tiles(classes, shift, adjacent).classes) <= 65535


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rowwise_over_sizes_and_alignment(launches, offset, dtype, shift):
    """Each twice: first through Triton, then directly; rows, classes, strides, target dtype, weights and hyper-parameters vary."""
    torch.manual_seed(0)
    for rows, classes in [(1, 16), (16, 1), (17, 17), (16, 16)]:
        x = torch.randn(rows, classes, device=DEVICE).to(dtype)
        index = torch.randint(0, classes, (rows,), device=DEVICE)
        weight = torch.rand(classes, device=DEVICE)
        layouts = (
            x,
            torch.randn(rows, 2 * classes, device=DEVICE).to(dtype)[:, ::2],
            torch.randn(classes, rows, device=DEVICE).to(dtype).t(),
        )
        for turn, logits in [*enumerate((*layouts, *layouts))] * 2:
            a = offset(logits, shift) if logits.is_contiguous() else logits
            target = offset(index if turn % 2 else index.int(), shift)
            w = offset(weight, shift) if turn % 3 else None
            smoothing = 0.1 + turn / 100 if turn % 2 else 0.0
            call = RowCall("ce", a, target, weight=w, label_smoothing=smoothing, ignore_index=-100 - turn % 2)
            gradient = torch.full_like(a, float("nan"))
            value, *_, stats = row.forward(call, CROSS_ENTROPY, [gradient], True)
            wide = logits.double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(
                wide, index, None if w is None else weight.double(), reduction="sum", label_smoothing=smoothing
            )
            expected.backward()
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
            back = torch.full_like(a, float("nan"))
            one = torch.full((), 1.0, device=DEVICE)
            row.backward(call, CROSS_ENTROPY, (None, stats, None), (one, None, None, None), [back])
            torch.testing.assert_close(back, gradient, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)

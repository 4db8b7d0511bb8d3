"""The row kernels over sizes, alignments and strides, each launch through Triton first and then directly."""

import pytest
import torch
import triton

from lossforge.kernels.call import Formulas
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.classes.rowwise import launch as row
from lossforge.kernels.formulas.softmax import cross_entropy
from lossforge.kernels.tiles import backward_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CROSS_ENTROPY = Formulas(cross_entropy)


@pytest.mark.parametrize("classes", [1, 64, 50257, 4_194_305, 2**28 + 1, 2**30])
def test_backward_grid_fits_its_second_axis(classes):
    for shift, adjacent in ((1, False), (8, False), (1, True)):
        assert triton.cdiv(classes + shift - 1, backward_tiles(classes, shift, adjacent).classes) <= 65535


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rowwise_over_sizes_and_alignment(launches, by_plan, offset, dtype, shift):
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
            call = RowwiseCall("ce", a, target, weight=w, label_smoothing=smoothing, ignore_index=-100 - turn % 2)
            gradient = torch.full_like(a, float("nan"))
            value, *_, stats = by_plan(row.forward, call, CROSS_ENTROPY, [gradient], True)
            wide = logits.double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(
                wide, index, None if w is None else weight.double(), reduction="sum", label_smoothing=smoothing
            )
            expected.backward()
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(gradient.double(), wide.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
            back = torch.full_like(a, float("nan"))
            one = torch.full((), 1.0, device=DEVICE)
            by_plan(row.backward, call, CROSS_ENTROPY, (None, stats, None), (one, None, None, None), [back])
            torch.testing.assert_close(back, gradient, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)
    if torch.cuda.is_available():
        assert any(direct for _, direct in launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"weight": True, "label_smoothing": 0.1},
        {"weight": True, "bias": True, "logit_scale": 1.5, "z_loss": 0.01},
        {"softcap": 5.0, "z_loss": 0.01},
        {"spread": 0.3, "focus": 1.5, "weight": True},
        {"angle": 0.5, "margin": 0.1, "logit_scale": 8.0, "weight": True},
        {"probabilities": True},
        {"probabilities": True, "weight": True, "label_smoothing": 0.2},
        {"pair": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_backward_of_some_classes_at_a_time(options, dtype):
    """The same as of all at once: of class indices of other parts, ignored, out of range; of all that may arrive."""
    torch.manual_seed(0)
    rows, classes = 6, 100
    x = torch.randn(rows, classes, device=DEVICE).to(dtype)
    given = {name: value for name, value in options.items() if name not in ("weight", "bias", "probabilities", "pair")}
    target = torch.tensor([0, 63, -100, 64, 99, 100], device=DEVICE)
    if options.get("probabilities"):
        target = torch.randn(rows, classes, device=DEVICE).softmax(1)
    if options.get("pair"):
        given |= {"target_b": target.flip(0).roll(1), "lam": torch.rand(rows, device=DEVICE)}
    given |= {name: torch.rand(classes, device=DEVICE) for name in ("weight", "bias") if options.get(name)}
    entropy = "focus" not in options
    call = RowwiseCall("ce", x, target, reduction="none", outputs=[True, True, entropy, *[False] * 4], **given)
    *results, _, stats = row.forward(call, CROSS_ENTROPY, [None], True)
    arriving = [torch.rand(rows, device=DEVICE), torch.rand(rows, device=DEVICE), torch.rand(rows, device=DEVICE)]
    arriving.append(torch.rand(rows, device=DEVICE) if entropy else None)
    if "z_loss" not in options:
        call, arriving[1] = call._replace(outputs=[False, True, entropy, *[False] * 4]), None
    kept = (None, stats, results[3])
    whole = torch.empty_like(x)
    row.backward(call, CROSS_ENTROPY, kept, arriving, [whole])
    parts = torch.full_like(x, float("nan"))
    for first, end in ((0, 64), (64, 100)):
        mine = call._replace(x=x[:, first:end].contiguous())
        if options.get("probabilities"):
            mine = mine._replace(target=target[:, first:end])
        if options.get("bias"):
            mine = mine._replace(bias=call.bias[first:end])
        gradient = torch.full_like(mine.x, float("nan"))
        row.backward(mine, CROSS_ENTROPY, kept, arriving, [gradient], (first, classes))
        parts[:, first:end] = gradient
    torch.testing.assert_close(parts, whole, rtol=0 if DEVICE == "cpu" else 1e-5, atol=0 if DEVICE == "cpu" else 1e-6, equal_nan=True)
    if not options.get("probabilities"):
        wrong = (target == classes) | (call.target == classes if call.target_b is None else call.target_b == classes)
        assert torch.equal(whole.isnan().all(1), wrong)
        assert torch.equal(whole.isnan().any(1), wrong)

"""The signed error of a loss at size: an approximation that is always off by the same sign adds up over classes and rows."""

import pytest
import torch

from lossforge.losses.base.record import DOMAINS, Make, Sample
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import run, third_argument

# the GPU's approximate instructions are what can be biased; the interpreter computes as numpy does
pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def large(loss, rows, classes, dtype):
    """Return the loss's usual call, of random logits or what its domain has, made on the device."""
    third, make = third_argument(loss), Make("cuda", dtype)
    of_domain = {**DOMAINS, "log-probabilities": lambda x: x.log_softmax(-1)}.get(loss.domain, lambda x: x)

    def random(*shape):
        return of_domain(torch.randn(shape, device="cuda")).to(dtype)

    match loss.template.name:
        case "boxes":
            return Sample("pairs", make.boxes(64 * rows), make.boxes(64 * rows))
        case "distribution":
            count = rows * classes // 16
            return Sample("dense", random(count, 16), 15 * torch.rand(count, device="cuda"))
        case "divergence":
            return Sample("dense", random(rows, classes), random(rows, classes))
        case "topk":
            values, indices = random(rows, classes).log_softmax(1).topk(16, 1)
            return Sample("dense", random(rows, classes), values, {"indices": indices})
        case "margin_lists":  # few, because plain torch takes memory for rows times the square of the classes
            rows, classes = min(rows, 256), min(classes, 512)
            index = torch.randint(0, classes, (rows, classes), device="cuda")
            return Sample("class index", random(rows, classes), torch.where(torch.arange(classes, device="cuda") < 4, index, -1))
        case "pointwise":
            x = random(rows, classes)
            return Sample("dense", x, torch.randn_like(x).abs(), {third: x.abs() + 0.5} if third else {})
        case "rotated":  # fewer, because plain torch keeps all corners of both polygons
            boxes, others = (torch.cat((make.boxes(8 * rows), torch.rand(8 * rows, 1, device="cuda").to(dtype)), 1) for _ in range(2))
            return Sample("pairs", boxes, others)
        case "vectors":
            x, y, z = (random(rows, classes) for _ in range(3))
            return Sample("dense", x, y, {third: z[:, 0].sign() if third == "target" else z})
    mask = loss.name == "lovasz_hinge"
    shape, end = ((rows, classes), 2) if mask else ((rows,), classes)
    return Sample("class index", random(rows, classes), torch.randint(0, end, shape, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(2048, 3200), (1024, 32000), (4096, 1000), (65536, 21)])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_signed_error(loss, rows, classes, dtype):
    """At most twice that of plain torch in float32, and 1e-7."""
    sample = large(loss, rows, classes, dtype)
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="sum").value
    theirs = (run(loss.reference, sample, dtype=torch.float32, reduction="sum").value - exact) / exact
    for mode in ("forward", "backward"):
        ours = (run(loss.function, sample, reduction="sum", gradient=mode).value - exact) / exact
        assert abs(ours) <= 2 * abs(theirs) + 1e-7, f"{ours:.2e}, torch {theirs:.2e}, {mode}"

"""The signed error of a loss at size: an approximation that is always off by the same sign adds up over classes and rows."""

import pytest
import torch

from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import Sample, run

# the GPU's approximate instructions are what can be biased; the interpreter computes as numpy does
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def large(loss, rows: int, classes: int, dtype: torch.dtype) -> Sample:
    """The loss's usual call, of random logits: class indices where it takes them, else a teacher's logits, or pairs of boxes."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    if loss.template == "boxes":
        pairs = [torch.cat([low, low + 60 * torch.rand_like(low) + 1], -1) for low in 100 * torch.rand(2, 64 * rows, 2, device="cuda")]
        return Sample("pairs", *(boxes.to(dtype) for boxes in pairs))
    x = normal(rows, classes)
    x = {"logits": x, "probabilities": x.sigmoid(), "log-probabilities": x.log_softmax(1)}[loss.domain].to(dtype)
    if loss.template == "divergence":
        return Sample("dense", x, normal(rows, classes).to(dtype))
    if loss.template == "topk":
        values, indices = normal(rows, classes).log_softmax(1).topk(16, 1)
        return Sample("dense", x, values.to(dtype), {"indices": indices})
    return Sample("class index", x, torch.randint(0, classes, (rows,), device="cuda"))


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

"""The signed error of a loss at size: an approximation that is always off by the same sign adds up over classes and rows."""

import pytest
import torch

from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import large_sample, run

# the GPU's approximate instructions are what can be biased; the interpreter computes as numpy does
pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(2048, 3200), (1024, 32000), (4096, 1000), (65536, 21)])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_signed_error(loss, rows, classes, dtype):
    """At most twice that of plain torch in float32, and 1e-7."""
    sample = large_sample(loss, rows, classes, "cuda", dtype)
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="sum").value
    theirs = (run(loss.reference, sample, dtype=torch.float32, reduction="sum").value - exact) / exact
    for mode in ("forward", "backward"):
        ours = (run(loss.function, sample, reduction="sum", gradient=mode).value - exact) / exact
        assert abs(ours) <= 2 * abs(theirs) + 1e-7, f"{ours:.2e}, torch {theirs:.2e}, {mode}"

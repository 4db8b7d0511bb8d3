"""The kernels of a similarity matrix over sizes, alignments and strides."""

import pytest
import torch

from lossforge.kernels.features.calls import ContrastiveCall


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarities_over_sizes_and_alignment(judged, offset, device, dtype):
    for rows, columns in [(1, 1), (3, 17), (33, 33), (70, 130)]:
        x = torch.randn(rows, columns, device=device).to(dtype)
        for shift, reduction in ((0, "sum"), (1, "none"), (8, "mean")):
            judged(ContrastiveCall("clip", offset(x, shift), offset=columns - rows, logit_scale=1.5, reduction=reduction))
        judged(ContrastiveCall("clip", x.t().contiguous().t()))

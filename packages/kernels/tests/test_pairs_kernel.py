"""The kernels of a similarity matrix over sizes, alignments and strides."""

import pytest
import torch

from lossforge.kernels.call import PairsCall


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarities_over_sizes_and_alignment(judged, offset, device, dtype):
    for rows, columns in [(1, 1), (3, 17), (33, 33), (70, 130)]:
        x = torch.randn(rows, columns, device=device).to(dtype)
        for shift, reduction in ((0, "sum"), (1, "none"), (8, "mean")):
            judged(PairsCall("clip", offset(x, shift), offset=columns - rows, logit_scale=1.5, reduction=reduction))
        judged(PairsCall("clip", x.t().contiguous().t()))

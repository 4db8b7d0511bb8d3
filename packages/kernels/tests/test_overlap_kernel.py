"""The kernels of regions over sizes, alignments and strides, with few classes and with many."""

import pytest
import torch

from lossforge.kernels.masks.calls import OverlapCall


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
def test_regions_over_sizes_and_alignment(judged, offset, device, activation, dtype):
    for shape in [(1, 2, 1), (2, 3, 17), (2, 5, 4, 9), (1, 40, 33)]:
        x = (torch.rand if activation is None else torch.randn)(shape, device=device).to(dtype)
        classes = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)
        dense = torch.rand(shape, device=device)
        for shift, target, reduction in ((0, classes, "sum"), (1, classes, "none"), (8, dense, "sum")):
            for batch in (False, True):
                call = OverlapCall("dice", offset(x, shift), target, hyper=[1.0, 1.0], activation=activation, batch=batch)
                judged(call._replace(reduction=reduction))

"""Host side of the seesaw loss's logits: the launch."""

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.seesaw.kernel import seesaw_kernel

MOST = 4096
"""Classes that a program reads at once, at most."""


def shifted(x: Tensor, target: Tensor, log_counts: Tensor, p: float, q: float, least: float) -> tuple[Tensor]:
    """Return the logits (N, C) in float32, contiguous. target and log_counts: contiguous."""
    rows, classes = x.shape
    out = new_like(x, ((rows, classes), torch.float32))
    block = min(triton.next_power_of_2(classes), MOST)
    arguments = (as_strided(x), target, log_counts, out, classes, p, q, least)
    Launch(seesaw_kernel, (rows,), arguments, BLOCK=block, num_warps=8 if block > 2048 else 4).start()
    return (out,)

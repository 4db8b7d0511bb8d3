"""Shift the logits of the seesaw loss: a program for each row, which it reads twice, the second time from the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import as_strided
from lossforge.kernels.math import exp, log

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


@triton.jit(do_not_specialize=("classes", "p", "q", "least"))
def seesaw_kernel(x, target_ptr, log_counts_ptr, out_ptr, classes, p, q, least, BLOCK: tl.constexpr):
    """Store x + p min(0, ln Nⱼ - ln N_t) + q max(0, ln σⱼ - max(ln σ_t, least)) beside the target t; x where t is not a class.

    x is relative to the row's largest logit, so that a common offset costs no digits.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    exists = (target >= 0) & (target < classes)
    of_target = tl.load(x.ptr + row * x.s0 + target * x.s1, mask=exists, other=0.0).to(tl.float32)
    count = tl.load(log_counts_ptr + target, mask=exists, other=0.0)
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        c = start + lane
        z = tl.load(x.ptr + row * x.s0 + c.to(tl.int64) * x.s1, mask=c < classes, other=float("-inf")).to(tl.float32)
        above = tl.maximum(highest, z, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * exp(highest - base) + exp(z - base)
        highest = above
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    ls = log(tl.sum(total * exp(highest - base), 0))
    own = tl.maximum((of_target - base) - ls, least, propagate_nan=tl.PropagateNan.ALL)
    for start in range(0, classes, BLOCK):
        c = start + lane
        mask = c < classes
        z = tl.load(x.ptr + row * x.s0 + c.to(tl.int64) * x.s1, mask=mask, other=0.0).to(tl.float32) - base
        rarer = tl.minimum(tl.load(log_counts_ptr + c, mask=mask, other=0.0) - count, 0.0)
        surer = tl.maximum(z - ls - own, 0.0, propagate_nan=tl.PropagateNan.ALL)
        shifted = z + (p * rarer + q * surer)
        tl.store(out_ptr + row * classes + c, tl.where(exists & (c != target), shifted, z), mask=mask)

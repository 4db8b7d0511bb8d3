"""What one call costs. A call is forward and backward of a loss; `leaf` is the tensor whose gradient it leaves."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

MIB = 2**20


def milliseconds(call: Callable[[], object], leaf: Tensor) -> float:
    """Median device time by CUDA events, the L2 cache flushed between runs; on CPU the median of wall time."""
    if leaf.is_cuda:
        return do_bench(call, grad_to_none=[leaf], return_mode="median", rep=200)

    def once() -> float:
        leaf.grad = None
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    once()
    return statistics.median(once() for _ in range(5))


def host_microseconds(call: Callable[[], object], leaf: Tensor, calls: int = 200) -> float:
    """Wall time of a call, back to back between two synchronisations: for small work, what the host costs. Median of five."""

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            leaf.grad = None
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    once()
    return statistics.median(once() for _ in range(5))


def peak_mebibytes(call: Callable[[], object], leaf: Tensor) -> float:
    """Most memory allocated during the call beyond what was allocated before it."""
    leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(leaf.device)
    before = torch.cuda.memory_allocated(leaf.device)
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated(leaf.device) - before) / MIB


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read plus written, of a copy far larger than the caches: the ceiling for work that moves bytes."""
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / (do_bench(lambda: target.copy_(source), return_mode="median", rep=200) / 1e3)

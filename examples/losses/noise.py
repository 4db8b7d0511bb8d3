"""Wrong labels: bi-tempered logistic loss. Its tempered softmax has a normaliser of its own, which Newton's method finds for each row."""

import torch
from torch import Tensor


def log_t(x: Tensor, t: float) -> Tensor:
    return x.log() if t == 1 else (x ** (1 - t) - 1) / (1 - t)


def exp_t(x: Tensor, t: float) -> Tensor:
    return x.exp() if t == 1 else (1 + (1 - t) * x).clamp(min=0) ** (1 / (1 - t))


def normaliser(x: Tensor, t: float, steps: int) -> Tensor:
    """Return λ (N, 1) with Σⱼ exp_t(xⱼ - λ) = 1. The sum is convex in λ and at least 1 at the maximum: no step passes the root."""
    found = x.amax(1, keepdim=True)
    for _ in range(steps):
        p = exp_t(x - found, t)
        found = found + (p.sum(1, keepdim=True) - 1) / (p**t).sum(1, keepdim=True)
    return found


def bi_tempered_loss(input: Tensor, target: Tensor, t1: float = 0.8, t2: float = 1.2, steps: int = 20) -> Tensor:
    """Return the bi-tempered loss (arXiv 1906.03361), a mean over rows. t1 in [0, 1] bounds it, t2 ≥ 1 gives the softmax heavy tails."""
    x = input if input.dtype == torch.float64 else input.float()
    with torch.no_grad():
        start = normaliser(x, t2, steps)
    p = exp_t(x - start, t2)
    p = exp_t(x - start - (p.sum(1, keepdim=True) - 1) / (p.detach() ** t2).sum(1, keepdim=True), t2)  # a last step has λ's gradient
    own = p.gather(1, target[:, None])[:, 0]
    return (-log_t(own, t1) - (1 - (p ** (2 - t1)).sum(1)) / (2 - t1)).mean()

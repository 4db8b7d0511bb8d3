"""What tests of preference objectives share: log-probabilities, as batches of each kind, and a call's value and gradients."""

import torch


def logps(*shape, seed=0, low=-6.0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=torch.float64) * (low + 0.05) - 0.05


def pairs(n=5, count=2):
    return [logps(n, seed=i) for i in range(count)]


def tokens(n=4, t=6, count=3):
    """Policy, old and reference so far apart that ratios are clipped on both sides, and a mask with one empty completion."""
    policy = logps(n, t, seed=1)
    return [policy, *(policy + (logps(n, t, seed=2 + i, low=-1.2) + 0.6) for i in range(count - 1))]


def none(*shape):
    """Return zeros that take a gradient."""
    return torch.zeros(*shape, requires_grad=True)


def value_and_gradients(function, *values, **kwargs):
    given = [torch.tensor(v, requires_grad=True) for v in values]
    out = function(*given, reduction="none", **kwargs)
    return out.tolist(), [g.tolist() for g in torch.autograd.grad(out.sum(), given)]


A = torch.tensor([1.3, -0.7, 0.4, -2.0], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0] * 6, [1] * 6])
KTO = [logps(4, seed=0), logps(3, seed=1), logps(2, seed=3), logps(4, seed=4), logps(3, seed=5), logps(2, seed=6) - 1.0]
POLICY, OLD, REF = tokens()

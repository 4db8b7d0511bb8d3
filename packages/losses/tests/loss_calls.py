"""What tests of several files need of a call: logits, the gradient, the operators that it runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def logits(n: int, c: int, device: str) -> torch.Tensor:
    """Return the same random logits at each call."""
    return torch.randn(n, c, generator=torch.Generator().manual_seed(0)).to(device)


def gradient_of(function, x, *args, **kwargs):
    """Return the value, and the gradient of the sum of its elements."""
    x = x.detach().clone().requires_grad_()
    value = function(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


class Operators(TorchDispatchMode):
    """Records the calls of our operators: their names and arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "lossforge":
            self.seen.append((function.overloadpacket.__name__, args))
        return function(*args, **(kwargs or {}))

    @property
    def names(self):
        return [name for name, _ in self.seen]

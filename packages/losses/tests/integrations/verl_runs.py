"""Compare verl's linear_cross_entropy over a process group, computed by ours, with the whole vocabulary in float64."""

import torch
import torch.distributed as dist
from verl.utils.kernel import linear_cross_entropy as kernel

from lossforge.integrations import verl as ours

CLASSES = 24


def trained(logps, entropy, leaves):
    """Return log-probabilities, entropies and both gradients under upstream gradients that differ by token."""
    upstream = torch.linspace(0.5, 2.0, logps.numel()).to(logps)
    return logps.detach(), entropy.detach(), *torch.autograd.grad(upstream @ logps - 0.3 * upstream @ entropy, leaves)


def compare(x, w, labels, temperature):
    """temperature: a number, or one a token."""
    exact = temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    wide = [x.double().requires_grad_(), w.double().requires_grad_()]
    z = (wide[0] @ wide[1].T / exact).log_softmax(-1).flatten(0, 1)
    expected = trained(z[torch.arange(10), labels.flatten()], -(z.exp() * z).sum(1), wide)
    own = [x.clone().requires_grad_(), w.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()]
    with ours.patch():
        found = trained(*kernel.linear_cross_entropy(*own, labels, temperature, "none", dist.group.WORLD), own)
    dist.all_reduce(found[2])  # as verl's own, this process's part of the sum
    right = (*expected[:3], expected[3].chunk(dist.get_world_size())[dist.get_rank()])
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, w, labels = torch.randn(2, 5, 8), torch.randn(CLASSES, 8), torch.randint(CLASSES, (2, 5))
    for temperature in (0.7, torch.rand(2, 5) + 0.5):
        compare(x, w, labels, temperature)
    print("equal to the whole vocabulary", flush=True)


if __name__ == "__main__":
    main()

"""Compare Megatron's cross entropy over a tensor-parallel group with ours, and both with the whole vocabulary on one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_cross_entropy
from megatron.core.models.common.language_module import language_module

from lossforge.integrations import megatron as ours

SHAPE = (5, 3)
CLASSES = 24


def part(whole):
    return whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()


def trained(compute, whole, upstream, *arguments, **given):
    """Return the loss, and the gradient of this process's logits."""
    logits = part(whole).requires_grad_()
    loss = compute(logits, *arguments, **given)
    (loss * upstream).sum().backward()
    return loss.detach().float(), logits.grad.float()


def check(dtype, size, offset):
    generator = torch.Generator().manual_seed(0)
    whole = (size * torch.randn(*SHAPE, CLASSES, generator=generator) + offset).to(dtype)
    target = torch.randint(CLASSES, SHAPE, generator=generator)
    upstream = torch.randn(SHAPE, generator=generator)
    group = parallel_state.get_tensor_model_parallel_group()
    double = whole.double().requires_grad_()
    loss = F.cross_entropy(double.flatten(0, 1), target.flatten(), reduction="none").view(SHAPE)
    (loss * upstream).sum().backward()
    expected = loss.detach().float(), part(double.grad).float()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    theirs = tensor_parallel.vocab_parallel_cross_entropy
    torch.testing.assert_close(trained(theirs, whole, upstream, target), expected, **close)
    torch.testing.assert_close(trained(ours.vocab_parallel_cross_entropy, whole, upstream, target, tp_group=group), expected, **close)
    double.grad = None
    epsilon = 0.1 * CLASSES / (CLASSES - 1)  # of which the target has a part, too
    smoothed = F.cross_entropy(double.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=epsilon).view(SHAPE)
    (smoothed * upstream).sum().backward()
    expected_smoothed = smoothed.detach().float(), part(double.grad).float()
    if (
        dist.get_world_size() == 1 and size == 1.0
    ):  # over several theirs smooths each process's classes alone, and at large logits it underflows
        torch.testing.assert_close(trained(theirs, whole, upstream, target, 0.1), expected_smoothed, **close)
    with ours.patch():
        assert tensor_parallel.vocab_parallel_cross_entropy is not theirs
        torch.testing.assert_close(trained(tensor_parallel.vocab_parallel_cross_entropy, whole, upstream, target), expected, **close)
        for module in (fused_cross_entropy, language_module):
            assert module.fused_vocab_parallel_cross_entropy.__module__ == ours.__name__
            found = trained(module.fused_vocab_parallel_cross_entropy, whole, upstream, target, group)
            torch.testing.assert_close(found, expected, **close)
        found = trained(tensor_parallel.vocab_parallel_cross_entropy, whole, upstream, target, 0.1)
        torch.testing.assert_close(found, expected_smoothed, **close)
    assert tensor_parallel.vocab_parallel_cross_entropy is theirs
    masked = target.clone()
    masked[0] = -100  # whose loss Megatron multiplies by 0
    of_loss = upstream * (masked >= 0)
    found, known = (trained(compute, whole, of_loss, masked) for compute in (ours.vocab_parallel_cross_entropy, theirs))
    torch.testing.assert_close(found[1], known[1], **close)
    torch.testing.assert_close(found[0][1:], known[0][1:], **close)


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    for dtype in (torch.float32, torch.bfloat16):
        for size, offset in ((1.0, 0.0), (30.0, 0.0), (1.0, 200.0)):
            check(dtype, size, offset)
    with pytest.raises(ValueError, match=r"label_smoothing must be from 0 to .* got 0\.99"):
        ours.vocab_parallel_cross_entropy(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64), 0.99)
    print("equal to the whole vocabulary", flush=True)


if __name__ == "__main__":
    main()

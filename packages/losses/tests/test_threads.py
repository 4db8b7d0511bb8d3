"""Losses may be called from several threads at once."""

from concurrent.futures import ThreadPoolExecutor

import torch

from lossforge.losses import cross_entropy, plain_torch, sigmoid_focal_loss

THREADS, CALLS = 8, 12


def test_threads_get_their_own_results():
    """Each thread meets shapes that no other has planned, and shapes that all plan at the same time. Triton's interpreter runs one kernel
    at a time, so that without a GPU the reference computes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def results(thread: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(thread)
        found = []
        for call in range(CALLS):
            rows, classes = 4 + call, 10 + (thread if call % 2 else 0)
            logits = torch.randn(rows, classes, generator=generator).to(device).requires_grad_()
            index = torch.randint(classes, (rows,), generator=generator).to(device)
            loss = cross_entropy(logits, index) + sigmoid_focal_loss(logits, index, reduction="mean")
            loss.backward()
            found += [loss.detach().cpu(), logits.grad.cpu()]
        return found

    def on_its_own(thread: int) -> list[torch.Tensor]:
        if device == "cuda":
            return results(thread)
        with plain_torch():
            return results(thread)

    expected = [on_its_own(thread) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(on_its_own, range(THREADS)))
    for got, wanted in zip(found, expected, strict=True):
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)

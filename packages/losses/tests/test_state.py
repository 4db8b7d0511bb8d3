"""plain_torch holds for the thread and the task that entered it, and in compiled functions; AMD GPUs always compute so."""

import asyncio
import threading

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

from lossforge.losses import mse_loss, plain_torch
from lossforge.losses.base import state


@pytest.fixture
def is_plain(device):
    """Whether a loss called now is computed by its plain-torch reference: in which state the operators see torch."""
    x = torch.zeros(2, 3, device=device)

    def now() -> bool:
        assert mse_loss(x, x + 2) == 4
        return state.state()[-1]

    return now


def test_other_threads_do_not_see_it(is_plain):
    entered, asked, seen = threading.Event(), threading.Event(), []

    def inside():
        with plain_torch():
            entered.set()
            asked.wait(10)
            seen.append(is_plain())

    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait(10)
    seen.append(is_plain())
    asked.set()
    thread.join()
    assert seen == [False, True]
    assert not is_plain()


def test_overlapping_contexts(is_plain):
    first, second = plain_torch(), plain_torch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_plain()
    second.__exit__(None, None, None)
    assert not is_plain()


def test_tasks_that_overlap(is_plain):
    async def inside(wait):
        with plain_torch():
            await asyncio.sleep(wait)
            return is_plain()

    async def outside():
        await asyncio.sleep(0.01)
        return is_plain()

    async def together():
        return await asyncio.gather(inside(0.02), inside(0.04), outside())

    assert asyncio.run(together()) == [True, True, False]
    assert not is_plain()


def test_a_context_within_another_ends_nothing_for_compiled_functions(device):
    torch._dynamo.reset()
    x = torch.zeros(2, 3, device=device)
    chosen = []

    def backend(graph, _):
        chosen.append(any("lossforge" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda: mse_loss(x, x + 2), fullgraph=True, backend=backend)
    with plain_torch():
        with plain_torch():
            assert compiled() == 4
        assert compiled() == 4
    assert True not in chosen


def test_compiled_functions(device):
    """Entered inside what is compiled, around it, and in one thread of two: the choice is guarded."""
    torch._dynamo.reset()
    x = torch.zeros(2, 3, device=device)
    chosen = []

    def backend(graph, _):
        chosen.append(any("lossforge" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda: mse_loss(x, x + 2), fullgraph=True, backend=backend)
    kernels = state.backend(x) != "torch"
    assert compiled() == 4
    with plain_torch():
        assert compiled() == 4
    if kernels:
        assert chosen == [True, False]
    thread = threading.Thread(target=compiled)
    with plain_torch():
        thread.start()
        thread.join()
    if kernels:
        assert all(chosen[2:])  # a thread may be traced anew, and is not in plain_torch

    def inside():
        with plain_torch():
            value = mse_loss(x, x + 2)
        return value, mse_loss(x, x + 2)

    chosen.clear()
    assert torch.compile(inside, fullgraph=True, backend=backend)() == (4, 4)
    assert chosen == [kernels]
    assert not state.state()[-1]


def test_amd_gpus_compute_in_plain_torch(monkeypatch):
    """torch built for ROCm calls its devices "cuda", and the kernels contain PTX."""
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    assert state.backend(x).startswith("triton")
    monkeypatch.setattr(state, "ROCM", True)
    assert state.backend(x) == "torch"

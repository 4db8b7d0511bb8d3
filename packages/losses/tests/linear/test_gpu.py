"""What only a GPU shows of fused losses: captured graphs, nothing that the host waits for, the same bits, compiled code."""

import pytest
import torch
from linear_calls import FUSED, layer, normal

from lossforge.losses import linear_cross_entropy, linear_objective, linear_selective_log_softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def of_template(loss, mode):
    """Return a template's call in float32, by chunks."""

    def make():
        targets = loss.targets(64, "cuda")
        return layer(64, "cuda"), lambda *leaves: loss.ours(*leaves, *targets, gradient=mode, chunk=16)

    return make


def of_product(call, rows=512, hidden=256, classes=5000):
    """Return a call in bfloat16, whose logits have a standard deviation of 4: a product computes it."""

    def make():
        leaves = [(normal(*shape, seed=i) * scale).to("cuda", torch.bfloat16).requires_grad_() for i, (shape, scale) in enumerate(sizes)]
        index = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1)).cuda()
        index[1::5] = -100
        return leaves, lambda x, w, b: call(x, w, index, b)

    sizes = ((rows, hidden), 4 / hidden**0.5), ((classes, hidden), 1.0), ((classes,), 1.0)
    return make


def of_tokens(x, w, index, b):
    logps, entropy = linear_selective_log_softmax(x, w, index, b, outputs=("entropy",))
    return (logps - 0.1 * entropy).sum()


PRODUCTS = {
    "exponentials": lambda x, w, index, b: linear_cross_entropy(x, w, index, b),
    "exponentials, backward": lambda x, w, index, b: linear_cross_entropy(x, w, index, b, gradient="backward"),
    "rows": lambda x, w, index, b: linear_cross_entropy(x, w, index, b, reduction="none", label_smoothing=0.1).sum(),
    "tokens": of_tokens,
    "objective": lambda x, w, index, b: linear_objective(x, w, index, lambda logps: logps.square().mean(), b, independent="tokens"),
}
CALLS = {f"{loss.name}, {mode}": of_template(loss, mode) for loss in FUSED for mode in ("forward", "backward")}
CALLS |= {name: of_product(call) for name, call in PRODUCTS.items()}
LARGE = {name: of_product(PRODUCTS[name], 1000, 256, 33_001) for name in ("exponentials", "rows")}
EACH = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _no_poison():
    """torch fills no memory, for which it may wait."""
    torch.use_deterministic_algorithms(False)


def step(leaves, call):
    value = call(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, torch.full_like(value, 3.0))


def same(found, expected):
    return all(torch.equal(got, right) for got, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "objective"])
def test_cuda_graph(name):
    """A graph replays what the device decides of new data, some of whose rows leave their offset."""
    leaves, call = CALLS[name]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(leaves, call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(leaves, call)
    for turn, size in enumerate((1.0, 0.5, 4.0)):
        with torch.no_grad():
            for i, t in enumerate(leaves):
                t.copy_(size * normal(*t.shape, seed=10 * turn + i))
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, step(leaves, call))


@EACH
def test_the_host_does_not_wait(name):
    leaves, call = CALLS[name]()
    for mode in ("default", "error"):  # free memory is asked once
        torch.cuda.set_sync_debug_mode(mode)
        try:
            value = call(*leaves)
            for _ in range(2):
                torch.autograd.grad(value, leaves, torch.full_like(value, 3.0), retain_graph=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", {**CALLS, **{f"{name}, large": None for name in LARGE}})
def test_the_same_bits_run_after_run(name):
    leaves, call = (LARGE[name.removesuffix(", large")] if name.endswith("large") else CALLS[name])()
    assert same(step(leaves, call), step(leaves, call))


@pytest.mark.parametrize("name", ["exponentials", "exponentials, backward", "tokens"])
def test_compiled(name, monkeypatch):
    """The same bits as an eager call. What the test makes of the results is not compiled, because compiled code sums in another order."""
    torch._dynamo.reset()
    leaves, call = CALLS[name]()
    expected = step(leaves, call)
    for function in (linear_cross_entropy, linear_selective_log_softmax):
        monkeypatch.setitem(globals(), function.__name__, torch.compile(function, fullgraph=True))
    assert same(step(leaves, call), expected)

"""A token's log-probability has the same bits in training and in sampling: the promise of docs/know/same_bits.md."""

import pytest
import torch
from linear_calls import launches_of, numpy_multiplies_a_row_alike_at_any_place

from lossforge import losses as L
from lossforge.kernels.plans import PLANS

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def policy(device, monkeypatch):
    """Return hidden states, a head's weight, tokens and their log-probabilities as a sampler computes them.

    They go by the product; an objective's go by exponentials, however little work there is.
    """
    launches_of("linear_join_kernel", device, monkeypatch)
    PLANS.clear()
    size = (300, 256, 5000) if device == "cuda" else (48, 64, 1500)
    rows, hidden, classes = size
    x, w = torch.randn(rows, hidden), torch.randn(classes, hidden) * 4 / hidden**0.5
    x, w = (t.to(device, torch.bfloat16).requires_grad_() for t in (x, w))
    tokens = torch.randint(classes, (rows,), device=device)
    with torch.no_grad():
        return x, w, tokens, L.linear_selective_log_softmax(x, w, tokens)


def test_alone_in_any_batch_and_in_any_order(policy):
    x, w, tokens, sampled = policy
    with torch.no_grad():
        elsewhere = x.is_cuda or numpy_multiplies_a_row_alike_at_any_place()
        for rows in (slice(1), slice(2), slice(10), *[slice(3, 10), slice(1, None)] * elsewhere):
            assert L.linear_selective_log_softmax(x[rows], w, tokens[rows]).equal(sampled[rows])
        if elsewhere:
            order = torch.randperm(len(x), device=x.device)
            assert L.linear_selective_log_softmax(x[order], w, tokens[order]).equal(sampled[order])
        batch = L.linear_selective_log_softmax(x.view(2, -1, x.shape[1]), w, tokens.view(2, -1))
        assert batch.flatten().equal(sampled)


def test_in_training_and_beside_further_results(policy):
    x, w, tokens, sampled = policy
    assert L.linear_selective_log_softmax(x, w, tokens).equal(sampled)
    assert L.linear_selective_log_softmax(x, w, tokens, outputs=("entropy",)).logps.equal(sampled)
    assert L.linear_selective_log_softmax(x, w, tokens, chunk=7).equal(sampled)
    assert (-L.linear_cross_entropy(x, w, tokens, reduction="none")).equal(sampled)
    with torch.inference_mode():
        assert L.linear_selective_log_softmax(x, w, tokens).equal(sampled)


def test_beside_the_likeliest_tokens(policy):
    """A row of its own for each: the sampled token has its bits, and each of the likeliest those of a call with it alone."""
    x, w, tokens, sampled = policy
    x, tokens, sampled = x[:8], tokens[:8], sampled[:8]
    same = torch.equal if x.is_cuda or numpy_multiplies_a_row_alike_at_any_place() else torch.allclose
    with torch.no_grad():
        found = torch.cat([tokens.unsqueeze(1), L.linear_top_k(x, w, 3).indices], 1)
        logps = L.linear_selective_log_softmax(x.unsqueeze(1).expand(*found.shape, -1), w, found)
        assert same(logps[:, 0], sampled)
        for place in range(1, 4):
            assert same(logps[:, place], L.linear_selective_log_softmax(x, w, found[:, place]))


def test_in_a_compiled_graph(policy):
    x, w, tokens, sampled = policy
    torch._dynamo.reset()
    compiled = torch.compile(L.linear_selective_log_softmax, fullgraph=True, backend="aot_eager")
    assert compiled(x, w, tokens).equal(sampled)
    with torch.no_grad():
        assert compiled(x, w, tokens).equal(sampled)


@pytest.mark.gpu
@ON_GPU
def test_in_a_cuda_graph(policy):
    x, w, tokens, sampled = policy
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = L.linear_selective_log_softmax(x, w, tokens)
    graph.replay()
    assert found.equal(sampled)


@pytest.mark.parametrize("gradient", [None, "backward"])
@pytest.mark.parametrize("independent", [None, "tokens"])
def test_the_ratio_of_a_policy_on_its_own_samples_is_1(gradient, independent, policy):
    x, w, tokens, sampled = policy
    ratios = []

    def objective(logps):
        ratios.append((logps - sampled).exp())
        return -(ratios[-1] * sampled.sin()).mean()

    found = L.linear_objective(x, w, tokens, objective, independent=independent, gradient=gradient)
    assert (ratios[-1] == 1).all()
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    right = objective(torch.log_softmax(exact[0] @ exact[1].t(), 1).gather(1, tokens[:, None]).squeeze(1))
    for got, expected in zip(torch.autograd.grad(found, (x, w)), torch.autograd.grad(right, exact), strict=True):
        assert (got.double() - expected).norm() < 1.2e-2 * expected.norm()

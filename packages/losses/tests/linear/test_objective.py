"""Objectives of log-probabilities from hidden states: each way to compute them, which tokens belong together, bad objectives."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from linear_calls import launches_of
from torch.utils.checkpoint import checkpoint

from lossforge import kernels
from lossforge.losses import dpo_loss, grpo_loss, linear_objective, linear_selective_log_softmax, sequence_logps
from lossforge.losses.engine import by_operators
from lossforge.losses.engine.calls import planned
from lossforge.losses.engine.linear import engine
from lossforge.losses.testing import error

N, T, HIDDEN, CLASSES = 4, 5, 16, 37
WAYS = {
    "exponentials": (torch.bfloat16, {}, 1.2e-2),
    "chunks": (torch.bfloat16, {"logits": "float32"}, 1.2e-2),
    "float32": (torch.float32, {}, 2e-5),
    "plain PyTorch": (torch.float64, {}, 1e-12),
}


@pytest.fixture
def by_exponentials(device, monkeypatch):
    """Let small products store exponentials, and return how many chunks did since."""
    monkeypatch.setattr(kernels.load("linear.launch"), "WORK", 0)
    return launches_of("linear_finish_kernel", device, monkeypatch)


@pytest.fixture
def products(by_exponentials, monkeypatch):
    """Return how many matrix products there were since by exponentials: the one that stores them, and torch's own two."""
    write, add, by_torch = engine.write_product, engine.add_transposed, []
    monkeypatch.setattr(engine, "write_product", lambda *given: by_torch.append(write(*given)))
    monkeypatch.setattr(engine, "add_transposed", lambda *given: by_torch.append(add(*given)))
    return lambda: by_exponentials() + len(by_torch)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def layer(device, dtype=torch.float32, lead=(N, T)):
    """Return input, weight and bias, and tokens, one of each sequence ignored."""
    leaves = drawn(*lead, HIDDEN) / 4, drawn(CLASSES, HIDDEN), drawn(CLASSES)
    index = torch.randint(CLASSES, lead, generator=torch.Generator().manual_seed(1))
    index[..., 1] = -100
    return [t.to(device, dtype).requires_grad_() for t in leaves], index.to(device)


def objectives(device):
    """Return objectives by name, each with the tokens that belong together."""
    old, reference = -drawn(N, T).abs().to(device) - 3, -drawn(T, N).abs().t().to(device) - 3
    advantages, mask = drawn(N).to(device), (torch.arange(T) < torch.tensor([[5], [3], [4], [1]])).to(device)

    def grpo(logps, **options):
        options = {"beta": 0.1, "epsilon": 0.9, "epsilon_high": 50.0, **options}
        return grpo_loss(logps, advantages, old, reference, mask, **options)

    def dpo(logps):
        return dpo_loss(*sequence_logps(logps).chunk(2), *sequence_logps(reference).chunk(2), beta=0.3)

    return {
        "grpo": ("tokens", grpo),
        "dapo": ("tokens", lambda logps: grpo(logps, loss_type="dapo")),
        "gspo": ("sequences", lambda logps: grpo(logps, importance_sampling_level="sequence")),
        "dpo": ("pairs", dpo),
        "of all": (None, lambda logps: logps.logsumexp(1).logsumexp(0)),
        "with entropy": ("tokens", lambda logps, entropy: grpo(logps) - 0.3 * entropy.square().mean()),
    }


def exact(leaves, index, objective, entropy, softened=lambda z: z):
    wide = [t.detach().double().requires_grad_() for t in leaves]
    log_p = softened(F.linear(*wide)).log_softmax(-1)
    logps = torch.where(index == -100, 0.0, log_p.gather(-1, index.clamp(min=0)[..., None]).squeeze(-1))
    value = objective(logps, -(log_p.exp() * log_p).sum(-1)) if entropy else objective(logps)
    return value, torch.autograd.grad(3 * value, wide)


@pytest.mark.each("name", "way")
@pytest.mark.parametrize("chunk", [None, 2 * T], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", objectives("cpu"))
def test_value_and_gradients(name, way, chunk, device, by_exponentials):
    dtype, options, most = WAYS[way]
    (x, w, b), index = layer(device, dtype)
    independent, objective = objectives(device)[name]
    entropy = name == "with entropy"
    found = linear_objective(x, w, index, objective, b, independent=independent, entropy=entropy, chunk=chunk, **options)
    expected, gradients = exact((x, w, b), index, objective, entropy)
    assert error(found, expected) < most / 10
    for got, right in zip(torch.autograd.grad(3 * found, (x, w, b)), gradients, strict=True):
        assert error(got, right) < most
    in_forward = not entropy and not (independent is None and chunk)
    assert by_exponentials() == (way == "exponentials" and in_forward) * (1 if chunk is None else 2)


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_slope_at_an_ignored_token_reaches_nothing(way, device, by_exponentials):
    dtype, options, most = WAYS[way]
    leaves, index = layer(device, dtype)
    root = lambda logps: (-logps).sqrt().sum()  # noqa: E731
    found = linear_objective(leaves[0], leaves[1], index, root, leaves[2], independent="tokens", chunk=T, **options)
    expected, gradients = exact(leaves, index, root, False)
    assert error(found, expected) < most / 10
    for got, right in zip(torch.autograd.grad(3 * found, leaves), gradients, strict=True):
        assert error(got, right) < most
    assert by_exponentials() == (way == "exponentials") * N


@pytest.mark.parametrize("name", ["gspo", "dpo"])
def test_a_chunk_parts_no_sequence_and_no_pair(name, device):
    """Of 20 tokens in sequences of 5: chunks of 10 in place of 11."""
    (x, w, b), index = layer(device)
    independent, objective = objectives(device)[name]
    found = linear_objective(x, w, index, objective, b, independent=independent, chunk=2 * T + 1)
    expected, gradients = exact((x, w, b), index, objective, False)
    assert error(found, expected) < 2e-6
    for got, right in zip(torch.autograd.grad(3 * found, (x, w, b)), gradients, strict=True):
        assert error(got, right) < 2e-5


def test_softened_logits(device, by_exponentials):
    (x, w, b), index = layer(device, torch.bfloat16)
    _, objective = objectives(device)["grpo"]
    found = linear_objective(x, w, index, objective, b, independent="tokens", temperature=0.7, scale=1.3, softcap=4.0)
    expected, gradients = exact((x, w, b), index, objective, False, lambda z: 4.0 * torch.tanh(1.3 * z / 4.0) / 0.7)
    assert error(found, expected) < 1e-4
    for got, right in zip(torch.autograd.grad(3 * found, (x, w, b)), gradients, strict=True):
        assert error(got, right) < 1.2e-2
    assert by_exponentials() == 1


@pytest.mark.each
@pytest.mark.parametrize("gradient", [None, "backward"])
def test_a_graph_is_walked_again(gradient, device):
    """The same bits, also where the objective has changed since; and derivatives of second order."""
    (x, w, b), index = layer(device)
    factor = [torch.rand(index.shape, device=device)]
    found = linear_objective(x, w, index, lambda logps: (logps * factor[0]).sum(), b, independent="tokens", chunk=T, gradient=gradient)
    factor[0] = torch.rand_like(factor[0])  # of later calls: the slopes are those of the first one
    first, second = (torch.autograd.grad(found, (x, w, b), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def squared(x, w, b):
        return linear_objective(x, w, index, lambda logps: logps.square().mean(), b, independent="tokens", gradient=gradient)

    wide = [t.detach().cpu().double().requires_grad_() for t in (x, w[:, :], b)]
    index = index.cpu()
    assert torch.autograd.gradgradcheck(squared, wide, fast_mode=True)


def test_a_frozen_part_gets_nothing(device):
    (x, w, b), index = layer(device)
    w.requires_grad_(False)
    _, objective = objectives(device)["grpo"]
    linear_objective(x, w, index, objective, b, independent="tokens", chunk=3).backward()
    _, gradients = exact((x, w, b), index, objective, False)
    assert error(3 * x.grad, gradients[0]) < 2e-5
    assert error(3 * b.grad, gradients[2]) < 2e-5
    assert w.grad is None
    with torch.no_grad():
        assert not linear_objective(x, w, index, objective, b).requires_grad


@pytest.mark.parametrize("options", [{"skip_ignored": True}, {"valid": N * T - N}], ids=str)
@pytest.mark.parametrize("name", ["grpo", "gspo", "dpo"])
def test_ignored_tokens_are_left_out(name, options, device):
    (x, w, b), index = layer(device)
    with torch.no_grad():
        x[0, 1] = torch.nan
    independent, objective = objectives(device)[name]
    found = linear_objective(x, w, index, objective, b, independent=independent, **options)
    expected, gradients = exact((x.nan_to_num(), w, b), index, objective, False)
    assert error(found, expected) < 2e-5
    for got, right in zip(torch.autograd.grad(3 * found, (x, w, b)), gradients, strict=True):
        assert error(got, right) < 2e-5


@pytest.mark.parametrize(("independent", "chunk"), [("tokens", 3), ("sequences", T)])
def test_tokens_that_are_not_independent_give_nan(independent, chunk, device):
    """Two sequences decide the slopes of each other, and each chunk has one or less."""
    leaves, index = layer(device)
    x, w, b = leaves
    objective = objectives(device)["dpo"][1]
    found = linear_objective(x, w, index, objective, b, independent=independent, chunk=chunk)
    assert found.isnan()
    for again in ({"retain_graph": True}, {"retain_graph": True}, {"create_graph": True}):
        of_input, *of_layer = torch.autograd.grad(found, leaves, **again)
        assert of_input[index != -100].isnan().all()
        assert all(g.isnan().all() for g in of_layer)
    found = linear_objective(x, w, index, objective, b, independent=independent)
    assert found.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(found, leaves))


def test_of_one_row_and_of_none(device):
    (x, w, b), index = layer(device)
    found = linear_objective(x[0, 0], w, index[0, 0], lambda logps: logps.exp(), b, independent="tokens")
    assert error(found, F.linear(x[0, 0], w, b).softmax(-1)[index[0, 0]]) < 1e-5
    assert linear_objective(x[:0], w, index[:0], lambda logps: logps.sum(), b, independent="sequences") == 0


GRAPHS = {
    "grpo, softened, frozen head": (
        "tokens",
        lambda logps, other: grpo_loss(logps, other[:, 0], other - 3, epsilon_high=50.0),
    ),
    "infinite slope of an ignored token, checkpoint": (None, lambda logps, other: (-logps).sqrt().sum()),
}


def compiled_objective(objective, **options):
    """Return an objective of input, weight, bias, tokens, one more tensor and a temperature, the same compiled, and what counts graphs."""

    def step(x, w, b, index, other, temperature):
        return linear_objective(x, w, index, lambda *given: objective(*given, other), b, temperature=temperature, **options)

    def kept(x, *given):
        return checkpoint(step, x, *given, use_reentrant=False)

    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return step, *[torch.compile(each, fullgraph=True, dynamic=True, backend=compiles) for each in (step, kept)], compiles


@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_takes_three_products(case, device, products):
    """With the bits of a call outside of it, and one graph for all numbers of rows. A checkpoint computes the first one again."""
    independent, objective = GRAPHS[case]
    step, compiled, kept, compiles = compiled_objective(objective, independent=independent, softcap=4.0)
    again, factor = "checkpoint" in case, torch.tensor(0.7 if "softened" in case else 1.0)
    frames = []
    for rows in (N, N + 2):
        leaves, index = layer(device, torch.bfloat16, (rows, T))
        leaves[1].requires_grad_("frozen" not in case)
        wanted, given = [t for t in leaves if t.requires_grad], (*leaves, index, drawn(rows, T).to(device), factor)
        expected = step(*given)
        expected = expected, *torch.autograd.grad(expected, wanted)
        before, found = products(), (kept if again else compiled)(*given)
        found = found, *torch.autograd.grad(found, wanted)
        assert products() - before == 3 + again - ("frozen" in case)
        assert all(map(torch.equal, found, expected))
        value, gradients = exact(leaves, index, lambda logps: objective(logps, given[4]), False, lambda z: 4 * torch.tanh(z / 4) / factor)  # noqa: B023
        assert error(found[0], value) < 1e-4
        for got, right in zip(found[1:], [g for g, t in zip(gradients, leaves, strict=True) if t.requires_grad], strict=True):
            assert error(3 * got.double(), right) < 1.2e-2
        frames.append(compiles.frame_count)
    assert frames[0] == frames[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"chunk": 2 * T}, id="chunks"),
        pytest.param({"gradient": "backward"}, id="backward", marks=pytest.mark.slow),
        pytest.param({"entropy": True}, id="entropy", marks=pytest.mark.slow),
    ],
)
def test_a_graph_takes_four_products(options, device, by_exponentials):
    """Where several chunks are wanted, or backward is to compute the logits again; entropies are no multiple of exponentials."""
    objective = lambda *given: (given[0] * given[-1]).sum() + sum(t.square().sum() for t in given[1:-1])  # noqa: E731
    _, compiled, _, _ = compiled_objective(objective, independent="tokens", **options)
    (leaves, index), other = layer(device, torch.bfloat16), drawn(N, T).to(device)
    found = torch.autograd.grad(3 * compiled(*leaves, index, other, 1.0), leaves)
    assert not by_exponentials()
    _, gradients = exact(leaves, index, lambda *given: objective(*given, other), "entropy" in options)
    for got, right in zip(found, gradients, strict=True):
        assert error(got, right) < 1.2e-2


@pytest.mark.usefixtures("by_exponentials")
def test_operators_of_a_graph(device):
    """As torch demands them of operators, which differentiate the plain computation a second time."""
    (x, w, b), index = layer(device, torch.bfloat16, (2, T))
    plan, tensors = planned(linear_selective_log_softmax.definition(x, w, index, b, temperature=0.7))
    operator, given = torch.ops.lossforge.linear_rowwise_exponentials.default, by_operators.arguments(plan.spec, tensors)
    result = torch.library.opcheck(operator, given)
    assert set(result.values()) == {"SUCCESS"}, result
    loss, exponentials, factors = operator(*given)
    assert not exponentials.requires_grad
    assert not factors.requires_grad
    result = torch.library.opcheck(
        torch.ops.lossforge.linear_rowwise_exponentials_backward.default,
        (x.detach().flatten(0, 1), w.detach(), b.detach(), exponentials, factors, loss.detach(), True, True, False),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(result.values()) == {"SUCCESS"}, result
    once, again = (torch.autograd.grad(loss.square().sum(), (x, w, b), create_graph=g, retain_graph=True) for g in (False, True))
    assert not any(g.requires_grad for g in once)
    assert all(g.requires_grad and error(g, t) < 1.2e-2 for g, t in zip(again, once, strict=True))


def test_refused(device):
    (x, w, b), index = layer(device)

    def refused(kind, message, objective=lambda logps: logps.sum(), **options):
        with pytest.raises(kind, match=message):
            linear_objective(options.pop("input", x), w, options.pop("index", index), objective, b, **options)

    refused(TypeError, "objective must be a function of log-probabilities, got int", 3)
    refused(TypeError, "objective must return a 0-d floating tensor, got float", lambda logps: 1.0)
    refused(ValueError, r"objective must return a 0-d floating tensor, got torch.float32 of shape \(4,\)", lambda logps: logps.sum(1))
    refused(ValueError, "objective must be computed from the log-probabilities", lambda logps: logps.detach().sum())
    held = torch.ones((), device=device, requires_grad=True)
    refused(ValueError, r"depends on another tensor, of shape \(\), that requires grad", lambda logps: logps.sum() * held)
    linear_objective(x, w, index, lambda logps: logps.sum() * held, b, gradient="backward").backward()
    assert held.grad is not None
    refused(ValueError, "independent must be", independent="rows")
    refused(ValueError, "even dimension 0 for pairs", independent="pairs", input=x[:3], index=index[:3])
    flat = {"independent": "pairs", "shift": 1, "input": x[0, :4], "index": index[0, :4]}
    refused(
        ValueError, r'index must have shape \(2N, T\), a sequence each, where independent="pairs" and shift is not 0, got \(4,\)', **flat
    )
    refused(ValueError, r"index must have shape \(4, 5\)", index=index[:, :3])
    refused(TypeError, "index must", index=index.float())
    refused(ValueError, "gradient must be", gradient="never")


def test_shifted_pairs(device):
    (x, w, b), index = layer(device)
    objective = objectives(device)["dpo"][1]
    found = linear_objective(x, w, index, objective, b, independent="pairs", shift=1, chunk=2 * T)
    after = torch.cat([index[:, 1:], torch.full_like(index[:, :1], -100)], 1)
    expected, gradients = exact((x, w, b), after, objective, False)
    assert error(found, expected) < 2e-6
    for got, right in zip(torch.autograd.grad(3 * found, (x, w, b)), gradients, strict=True):
        assert error(got, right) < 2e-5


def test_an_index_out_of_range_is_named():
    (x, w, b), index = layer("cpu")
    index[0, 1] = len(w)
    for call in (lambda: linear_objective(x, w, index, torch.sum, b), lambda: linear_selective_log_softmax(x, w, index, b)):
        with pytest.raises(IndexError, match=f"index must hold 0 to {len(w) - 1}, or -100 where ignored, got {len(w)}"):
            call()

"""Preference objectives against oracles written from the papers' formulas, one item at a time in Python's floats."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from preference_calls import KTO, MASK, OLD, POLICY, REF, A, logps, pairs

from lossforge import losses as L


def ln_sigma(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def smoothed(x, e):
    return -(1 - e) * ln_sigma(x) - e * ln_sigma(-x)


def bradley_terry(c, r, margin=None, label_smoothing=0.0, center_rewards_coefficient=0.0):
    m = np.broadcast_to(0.0 if margin is None else margin, c.shape)
    losses = [smoothed(a - b - k, label_smoothing) + center_rewards_coefficient * (a + b) ** 2 for a, b, k in zip(c, r, m, strict=True)]
    return losses, len(losses)


def dpo_one(h, beta, e, loss_type):
    x = beta * h
    return {
        "sigmoid": lambda: smoothed(x, e),
        "robust": lambda: ((1 - e) * -ln_sigma(x) - e * -ln_sigma(-x)) / (1 - 2 * e),
        "hinge": lambda: max(0.0, 1 - x),
        "ipo": lambda: (h - 0.5 / beta) ** 2,
    }[loss_type]()


def dpo(c, r, ref_c, ref_r, beta=0.1, label_smoothing=0.0, loss_type="sigmoid"):
    quadruples = zip(c, r, ref_c, ref_r, strict=True)
    losses = [dpo_one((a - b) - (p - q), beta, label_smoothing, loss_type) for a, b, p, q in quadruples]
    return losses, len(losses)


def cpo(c, r, beta=0.1, label_smoothing=0.0, loss_type="sigmoid", cpo_alpha=1.0, policy_nll_loss=None):
    nll = -c if policy_nll_loss is None else np.broadcast_to(policy_nll_loss, c.shape)
    triples = zip(c, r, nll, strict=True)
    return [dpo_one(a - b, beta, label_smoothing, loss_type) + cpo_alpha * n for a, b, n in triples], len(c)


def simpo(c, r, beta=2.0, gamma=0.5, label_smoothing=0.0, loss_type="sigmoid"):
    pairs = [beta * (a - b) - gamma for a, b in zip(c, r, strict=True)]
    return [max(0.0, 1 - x) if loss_type == "hinge" else smoothed(x, label_smoothing) for x in pairs], len(c)


def orpo(c, r, beta=0.1, alpha=1.0, policy_nll_loss=None):
    nll = -c if policy_nll_loss is None else np.broadcast_to(policy_nll_loss, c.shape)
    losses = []
    for a, b, n in zip(c, r, nll, strict=True):
        p, q = math.exp(a), math.exp(b)
        losses.append(alpha * n - beta * ln_sigma(math.log(p / (1 - p)) - math.log(q / (1 - q))))
    return losses, len(c)


def kto(c, r, kl_policy, ref_c, ref_r, kl_reference, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, kl=None):
    z = (0.0 if kl is None else float(kl)) if kl_policy is None else sum(kl_policy - kl_reference) / len(kl_policy)
    z = max(0.0, z)
    w_c, w_r = np.broadcast_to(desirable_weight, c.shape), np.broadcast_to(undesirable_weight, r.shape)
    good = [w * (1 - 1 / (1 + math.exp(-beta * (a - b - z)))) for a, b, w in zip(c, ref_c, w_c, strict=True)]
    bad = [w * (1 - 1 / (1 + math.exp(-beta * (z - a + b)))) for a, b, w in zip(r, ref_r, w_r, strict=True)]
    return good + bad, len(good) + len(bad)


def grpo(
    policy,
    advantages,
    old=None,
    ref=None,
    mask=None,
    epsilon=0.2,
    epsilon_high=None,
    beta=0.0,
    importance_sampling_level="token",
    loss_type="grpo",
    delta=None,
):
    n, length = policy.shape
    mask = np.ones((n, length)) if mask is None else mask
    old = policy if old is None else old
    high = 1 + (epsilon if epsilon_high is None else epsilon_high)
    tokens = np.zeros((n, length))
    for i in range(n):
        counted = [t for t in range(length) if mask[i, t]]
        for t in counted:
            shared = sum(policy[i, s] - old[i, s] for s in counted) / len(counted)
            r = math.exp(shared if importance_sampling_level == "sequence" else policy[i, t] - old[i, t])
            clipped = min(max(r, 1 - epsilon), high)
            a = advantages[i] if advantages.ndim == 1 else advantages[i, t]
            tokens[i, t] = -min((r if delta is None else min(r, delta)) * a, clipped * a)
            if beta:
                tokens[i, t] += beta * (math.exp(ref[i, t] - policy[i, t]) - (ref[i, t] - policy[i, t]) - 1)
    if loss_type == "grpo":
        return [tokens[i].sum() / max(1, mask[i].astype(bool).sum()) for i in range(n)], n
    most = loss_type.max_completion_length if isinstance(loss_type, L.DrGRPO) else length if loss_type == "dr_grpo" else None
    divisor = n * most if most else mask.astype(bool).sum()
    return tokens, divisor


def case(name, function, oracle, tensors, **kwargs):
    return pytest.param(function, oracle, tensors, kwargs, id=name)


CASES = [
    case("bt", L.bradley_terry_loss, bradley_terry, pairs()),
    case("bt_margin", L.bradley_terry_loss, bradley_terry, pairs(), margin=0.7, label_smoothing=0.2, center_rewards_coefficient=0.01),
    case("bt_margins", L.bradley_terry_loss, bradley_terry, pairs(count=3)),
    *(case(f"dpo_{t}", L.dpo_loss, dpo, pairs(count=4), loss_type=t, beta=0.3) for t in ("sigmoid", "robust", "hinge", "ipo")),
    *(case(f"dpo_{t}_smooth", L.dpo_loss, dpo, pairs(count=4), loss_type=t, label_smoothing=0.1) for t in ("sigmoid", "robust")),
    *(case(f"cpo_{t}", L.cpo_loss, cpo, pairs(), loss_type=t) for t in ("sigmoid", "hinge", "ipo")),
    case("cpo_smooth", L.cpo_loss, cpo, pairs(), label_smoothing=0.1, cpo_alpha=0.0),
    case("cpo_nll", L.cpo_loss, cpo, pairs(), policy_nll_loss=torch.tensor(1.7, dtype=torch.float64), cpo_alpha=0.5),
    case("simpo", L.simpo_loss, simpo, pairs()),
    case("simpo_hinge", L.simpo_loss, simpo, pairs(), loss_type="hinge", beta=0.4),
    case("simpo_smooth", L.simpo_loss, simpo, pairs(), gamma=1.2, label_smoothing=0.3),
    case("orpo", L.orpo_loss, orpo, pairs(8)),
    case("orpo_ratio", L.orpo_loss, orpo, pairs(8), alpha=0.0, beta=1.0),
    case("orpo_nll", L.orpo_loss, orpo, pairs(8), policy_nll_loss=logps(8, seed=9).abs()),
    case("kto", L.kto_loss, kto, KTO),
    case("kto_below", L.kto_loss, kto, [*KTO[:2], KTO[5], *KTO[3:5], KTO[2]], beta=0.5),
    case("kto_weights", L.kto_loss, kto, KTO, desirable_weight=1.33, undesirable_weight=torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)),
    case("kto_kl", L.kto_loss, kto, [*KTO[:2], None, *KTO[3:5], None], kl=0.8),
    case("kto_kl_tensor", L.kto_loss, kto, [*KTO[:2], None, *KTO[3:5], None], kl=torch.tensor(1.8, dtype=torch.float64)),
    case("kto_apo_zero", L.kto_loss, kto, [*KTO[:2], None, *KTO[3:5], None]),
    case("grpo", L.grpo_loss, grpo, [POLICY, A, OLD]),
    case("grpo_on_policy", L.grpo_loss, grpo, [POLICY, A]),
    case("grpo_on_policy_kl", L.grpo_loss, grpo, [POLICY, A, None, REF], beta=0.04, mask=MASK.bool()),
    case("grpo_kl", L.grpo_loss, grpo, [POLICY, A, OLD, REF, MASK], beta=0.04, epsilon_high=0.28),
    case("grpo_tokens", L.grpo_loss, grpo, [POLICY, logps(4, 6, seed=8) + 3, OLD, REF, MASK], beta=0.5),
    case("grpo_delta", L.grpo_loss, grpo, [POLICY, A, OLD, None, MASK], delta=1.4),
    case("grpo_eps_1", L.grpo_loss, grpo, [POLICY, A, OLD], epsilon=1.0, epsilon_high=0.0),
    *(case(t, L.grpo_loss, grpo, [POLICY, A, OLD, REF, MASK], loss_type=t, beta=0.1) for t in ("bnpo", "dapo", "dr_grpo")),
    case("dr_grpo_length", L.grpo_loss, grpo, [POLICY, A, OLD], loss_type=L.DrGRPO(10)),
    case("gspo", L.grpo_loss, grpo, [POLICY, A, OLD, REF, MASK], importance_sampling_level="sequence", epsilon=0.03, beta=0.04),
    case("gspo_dapo", L.grpo_loss, grpo, [POLICY, logps(4, 6, seed=8) + 3, OLD], importance_sampling_level="sequence", loss_type="dapo"),
    case("gspo_on_policy", L.grpo_loss, grpo, [POLICY, A, None, None, MASK], importance_sampling_level="sequence"),
]
every = pytest.mark.parametrize(("function", "oracle", "tensors", "kwargs"), CASES)


def mapped(change, values):
    return [change(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def exact(oracle, tensors, kwargs):
    def array(v):
        return v.cpu().numpy() if isinstance(v, torch.Tensor) else v

    losses, divisor = oracle(*map(array, tensors), **{k: array(v) for k, v in kwargs.items()})
    return torch.as_tensor(np.array(losses, dtype=np.float64)), divisor


@every
def test_values_and_reductions(function, oracle, tensors, kwargs, device):
    items, divisor = exact(oracle, tensors, kwargs)
    tensors = [t.to(device) if isinstance(t, torch.Tensor) else t for t in tensors]
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    check = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, check_device=False)
    check(function(*tensors, reduction="none", **kwargs), items)
    check(function(*tensors, reduction="sum", **kwargs), items.sum())
    check(function(*tensors, **kwargs), items.sum() / float(divisor))
    check(function(*tensors, normalizer=3.5, **kwargs), items.sum() / 3.5)
    count = torch.tensor(7, device=device)
    check(function(*tensors, normalizer=count, reduction="sum", **kwargs), items.sum() / 7)
    check(function(*tensors, normalizer=count, empty="zero", **kwargs), items.sum() / 7)
    assert function(*tensors, normalizer=0 * count, empty="zero", **kwargs) == 0
    assert not function(*tensors, normalizer=0 * count, **kwargs).isfinite()


@every
def test_gradients_of_every_argument(function, oracle, tensors, kwargs):
    names = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and k != "kl"]
    fixed = {k: v for k, v in kwargs.items() if k not in names}
    given = [*mapped(lambda t: t.clone().requires_grad_(), tensors), *(kwargs[k].clone().requires_grad_() for k in names)]
    if function is L.kto_loss and tensors[2] is not None:
        given[2], given[5] = tensors[2], tensors[5]
    if function is L.grpo_loss and not kwargs.get("beta") and len(tensors) > 3:
        given[3] = None

    def call(*values):
        return function(*values[: len(tensors)], **dict(zip(names, values[len(tensors) :], strict=True)), reduction="none", **fixed)

    if function is L.grpo_loss and tensors[2:3] in ([], [None]):
        # what is differentiated holds the sampling policy fixed, which differences do not: give it
        old = tensors[0].clone()
        ours = torch.autograd.grad(call(*given).square().sum(), given[0])[0]
        other = torch.autograd.grad(function(given[0], given[1], old, *given[3:], reduction="none", **kwargs).square().sum(), given[0])[0]
        assert torch.equal(ours, other)
        assert ours.any()
        return
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given, atol=1e-4)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(function, oracle, tensors, kwargs, dtype):
    """float32 inside: as exact on rounded arguments as float32 is."""
    tensors = mapped(lambda t: t.to(dtype), tensors)
    kwargs = dict(zip(kwargs, mapped(lambda t: t.to(dtype), kwargs.values()), strict=True))
    doubled = dict(zip(kwargs, mapped(torch.Tensor.double, kwargs.values()), strict=True))
    items, divisor = exact(oracle, mapped(torch.Tensor.double, tensors), doubled)
    given = mapped(lambda t: t.clone().requires_grad_(), tensors)
    none, mean = function(*given, reduction="none", **kwargs), function(*given, **kwargs)
    assert none.dtype == mean.dtype == torch.float32
    torch.testing.assert_close(none.double(), items, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(mean.double(), items.sum() / float(divisor), rtol=2e-6, atol=2e-6)
    mean.backward()
    wide = mapped(lambda t: t.double().requires_grad_(), tensors)
    function(*wide, **kwargs).backward()
    for a, b in zip(given, wide, strict=True):
        if isinstance(a, torch.Tensor) and a.grad is not None:
            assert a.grad.dtype == dtype
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=2 * torch.finfo(dtype).eps + 2e-5, atol=1e-6)


def test_mixed_precision_takes_the_widest():
    c, r = pairs()
    assert L.simpo_loss(c.half(), r.bfloat16()).dtype == torch.float32
    assert L.simpo_loss(c.half(), r).dtype == torch.float64


@pytest.mark.each("function", ci=True)
@every
def test_compile(function, oracle, tensors, kwargs):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: function(*t, **kwargs), fullgraph=True, dynamic=True, backend="aot_eager")
    given, again = (mapped(lambda t: t.clone().requires_grad_(), tensors) for _ in range(2))
    ours, eager = compiled(*given), function(*again, **kwargs)
    torch.testing.assert_close(ours, eager)
    ours.backward()
    eager.backward()
    for a, b in zip(given, again, strict=True):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if torch.cuda.is_available() else [])])
def test_compile_of_two(backend):
    module = L.GRPOLoss(beta=0.1)

    def step(chosen, rejected):
        return module(POLICY, A, OLD, REF, MASK) + L.orpo_loss(chosen, rejected)

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend=backend)(*pairs()), step(*pairs()))


@every
def test_autocast_changes_nothing(function, oracle, tensors, kwargs):
    tensors = mapped(torch.Tensor.float, tensors)
    kwargs = dict(zip(kwargs, mapped(torch.Tensor.float, kwargs.values()), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        inside = function(*tensors, **kwargs)
    assert torch.equal(inside, function(*tensors, **kwargs))


def test_new_settings_and_sizes_compile_few_graphs():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(L.dpo_loss, fullgraph=True, backend=backend)
    for n, beta in ((3, 0.1), (4, 0.2), (5, 0.3), (6, 0.4), (7, 0.5)):
        args = pairs(n, 4)
        torch.testing.assert_close(compiled(*args, beta), L.dpo_loss(*args, beta))
    assert len(graphs) <= 3


@every
def test_func(function, oracle, tensors, kwargs):
    """torch.func.grad is autograd's, and vmap is one call after another."""

    def call(x):
        return function(x, *tensors[1:], **kwargs)

    x = tensors[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x), x)
    torch.testing.assert_close(torch.func.grad(call)(tensors[0]), gradient)
    stacked = torch.stack([tensors[0], tensors[0] - 0.1])
    torch.testing.assert_close(torch.func.vmap(call)(stacked), torch.stack([call(x) for x in stacked]))
    direction = torch.cos(tensors[0])
    torch.testing.assert_close(torch.func.jvp(call, (tensors[0],), (direction,))[1], (gradient * direction).sum())


ZERO, ONE, LN2 = torch.zeros(1), torch.ones(1), math.log(2)
RATIO = torch.tensor([[2.0, 1.1, 0.5]]).log()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        pytest.param(lambda: L.bradley_terry_loss(ZERO, ZERO), LN2, id="bradley_terry, equal"),
        pytest.param(lambda: L.bradley_terry_loss(torch.tensor([math.log(3)]), ZERO), math.log(4 / 3), id="bradley_terry, ln 3 above"),
        pytest.param(
            lambda: L.bradley_terry_loss(ZERO + 2, ZERO - 1, center_rewards_coefficient=1.0, margin=3.0),
            LN2 + 1,
            id="bradley_terry, margin and centre",
        ),
        pytest.param(lambda: L.dpo_loss(ZERO, ZERO, ZERO, ZERO), LN2, id="dpo, equal"),
        pytest.param(lambda: L.dpo_loss(ZERO - 1, ZERO - 3, ZERO - 2, ZERO - 2, loss_type="ipo", beta=0.5), 1.0, id="dpo, ipo"),
        pytest.param(lambda: L.dpo_loss(ZERO - 1, ZERO - 3, ZERO - 2, ZERO - 2, loss_type="hinge", beta=0.25), 0.5, id="dpo, hinge"),
        pytest.param(lambda: L.simpo_loss(ZERO - 1, ZERO - 1.25), LN2, id="simpo, at the margin"),
        pytest.param(lambda: L.cpo_loss(ZERO - 2, ZERO - 2), LN2 + 2, id="cpo, equal"),
        pytest.param(  # odds 1 and 1/2: ln(1 + 1/2)
            lambda: L.orpo_loss(torch.tensor([0.5]).log(), torch.tensor([1 / 3]).log(), beta=1.0), math.log(1.5) + LN2, id="orpo"
        ),
        pytest.param(lambda: L.kto_loss(ZERO, ZERO, None, ZERO, ZERO, None), 0.5, id="kto, without a baseline"),
        pytest.param(lambda: L.kto_loss(ZERO[:0], ZERO, ZERO + 1, ZERO[:0], ZERO, ZERO, beta=math.log(3)), 0.25, id="kto, rejected alone"),
        pytest.param(lambda: L.grpo_loss(RATIO, ONE, 0 * RATIO), -(1.2 + 1.1 + 0.5) / 3, id="grpo, advantage 1"),
        pytest.param(lambda: L.grpo_loss(RATIO, -ONE, 0 * RATIO), (2.0 + 1.1 + 0.8) / 3, id="grpo, advantage -1"),
        pytest.param(lambda: L.grpo_loss(RATIO, -ONE, 0 * RATIO, delta=1.5), (1.5 + 1.1 + 0.8) / 3, id="grpo, delta"),
        pytest.param(
            lambda: L.grpo_loss(RATIO, ONE, 0 * RATIO, importance_sampling_level="sequence"), -(1.1 ** (1 / 3)), id="grpo, sequences"
        ),
    ],
)
def test_hand_computed(loss, expected):
    assert loss().item() == pytest.approx(expected)


def test_hand_computed_gradients():
    c, r = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    (3 * L.dpo_loss(c, r, torch.zeros(1), torch.zeros(1), beta=0.2)).backward()
    assert (c.grad.item(), r.grad.item()) == pytest.approx((-0.3, 0.3))
    x = torch.tensor([[2.0, 1.1, 0.5]]).log().requires_grad_()
    L.grpo_loss(x, torch.ones(1), torch.zeros(1, 3), loss_type="dapo").backward()
    assert x.grad[0].tolist() == pytest.approx([0, -1.1 / 3, -0.5 / 3])
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    L.grpo_loss(x, torch.tensor([2.0]), normalizer=4, reduction="sum", loss_type="dapo").backward()
    assert x.grad[0].tolist() == [-0.5, -0.5]

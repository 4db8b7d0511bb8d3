"""Every preference objective: reductions, precision, derivatives of second order, transforms and graphs; some values by hand.

test_pairs_of_options.py has values and gradients against formulas.
"""

import math
from functools import partial

import pytest
import torch
from preference_calls import KTO, MASK, OLD, POLICY, REF, A, logps, pairs

from lossforge import losses as L
from lossforge.losses.definitions.preference.objectives import DIVERGENCES, PAIRS, POLICIES

SMOOTHING = {name: 0.1 for name, each in PAIRS.items() if each.smoothed}
RECORDS = {"clip_cov": L.ClipCov(1.0, -0.5), "kl_cov": L.KLCov(0.5), "dr_grpo": L.DrGRPO(10)}


def case(name, function, tensors, **kwargs):
    return pytest.param(function, tensors, kwargs, id=name)


CASES = [
    case("bt_margin", L.bradley_terry_loss, pairs(), margin=0.7, label_smoothing=0.2, center_rewards_coefficient=0.01),
    case("bt_margins", L.bradley_terry_loss, pairs(count=3)),
    *(case(f"dpo_{t}", L.dpo_loss, pairs(count=4), loss_type=t, beta=0.3, label_smoothing=SMOOTHING.get(t, 0.0)) for t in PAIRS),
    *(case(f"dpo_{f}", L.dpo_loss, pairs(count=4), beta=0.3, f_divergence_type=f) for f in DIVERGENCES),
    case("cpo_smooth", L.cpo_loss, pairs(), label_smoothing=0.1),
    case("cpo_nll", L.cpo_loss, pairs(), policy_nll_loss=torch.tensor(1.7, dtype=torch.float64), cpo_alpha=0.5),
    case("simpo_hinge", L.simpo_loss, pairs(), loss_type="hinge", beta=0.4),
    case("simpo_alpha", L.simpo_loss, pairs(), gamma=1.2, label_smoothing=0.3, alpha=-0.5),
    case("orpo_nll", L.orpo_loss, pairs(8), policy_nll_loss=logps(8, seed=9).abs()),
    case("tpo-l", L.tpo_loss, pairs(count=3), beta=0.3, label_smoothing=0.1, loss_type=L.TpoL(0.2)),
    case("ppo_value", L.ppo_value_loss, [POLICY, OLD, REF, MASK]),
    case("kto", L.kto_loss, KTO),
    case("kto_weights", L.kto_loss, KTO, desirable_weight=1.33, undesirable_weight=torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)),
    case("kto_kl_tensor", L.kto_loss, [*KTO[:2], None, *KTO[3:5], None], kl=torch.tensor(1.8, dtype=torch.float64)),
    case("grpo_on_policy_kl", L.grpo_loss, [POLICY, A, None, REF], beta=0.04, mask=MASK.bool()),
    case("grpo_tokens", L.grpo_loss, [POLICY, logps(4, 6, seed=8) + 3, OLD, REF, MASK], beta=0.5, delta=1.4),
    case("gspo", L.grpo_loss, [POLICY, A, OLD, REF, MASK], importance_sampling_level="sequence", epsilon=0.03, beta=0.04),
    *(case(t, L.grpo_loss, [POLICY, A, OLD, REF, MASK], loss_type=RECORDS.get(t, t), beta=0.1) for t in POLICIES),
]
HELD = ("cispo", "vespo", "dppo_tv", "dppo_kl")
"""Policies whose weights are held constant, which differences do not know."""
every = pytest.mark.parametrize(("function", "tensors", "kwargs"), CASES)


def mapped(change, values):
    return [change(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


@every
def test_reductions(function, tensors, kwargs):
    check = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    items = function(*tensors, reduction="none", **kwargs).sum()
    count = torch.tensor(7)
    check(function(*tensors, reduction="sum", **kwargs), items)
    check(function(*tensors, normalizer=3.5, **kwargs), items / 3.5)
    check(function(*tensors, normalizer=count, reduction="sum", **kwargs), items / 7)
    check(function(*tensors, normalizer=count, empty="zero", **kwargs), items / 7)
    assert function(*tensors, normalizer=0 * count, empty="zero", **kwargs) == 0
    assert not function(*tensors, normalizer=0 * count, **kwargs).isfinite()


@pytest.mark.parametrize(("function", "tensors", "kwargs"), [each for each in CASES if each.id not in HELD])
def test_derivatives_of_second_order(function, tensors, kwargs):
    given = mapped(lambda t: t.clone().requires_grad_(), tensors)
    if function is L.kto_loss:
        given[2], given[5] = tensors[2], tensors[5]
    if function is L.grpo_loss and tensors[2] is None:
        # what is differentiated holds the sampling policy fixed, which differences do not: give it
        ours = torch.autograd.grad(function(*given, **kwargs), given[0])[0]
        given[2] = tensors[0].clone()
        assert torch.equal(ours, torch.autograd.grad(function(*given, **kwargs), given[0])[0])
        return
    call = partial(function, reduction="none", **kwargs)
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given, atol=1e-4)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(function, tensors, kwargs, dtype):
    """float32 inside: as exact on rounded arguments as float32 is."""
    results = []
    for change in (lambda t: t.to(dtype), lambda t: t.to(dtype).double()):
        given = mapped(lambda t: change(t).requires_grad_(), tensors)  # noqa: B023
        options = dict(zip(kwargs, mapped(change, kwargs.values()), strict=True))
        none, mean = function(*given, reduction="none", **options), function(*given, **options)
        mean.backward()
        results.append((none, mean, [t.grad for t in given if isinstance(t, torch.Tensor) and t.grad is not None]))
    (none, mean, gradients), (exact, exact_mean, exact_gradients) = results
    assert none.dtype == mean.dtype == torch.float32
    torch.testing.assert_close((none.double(), mean.double()), (exact, exact_mean), rtol=5e-6, atol=5e-6)
    for got, right in zip(gradients, exact_gradients, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), right, rtol=2 * torch.finfo(dtype).eps + 2e-5, atol=1e-6)


def test_mixed_precision_takes_the_widest():
    c, r = pairs()
    assert L.simpo_loss(c.half(), r.bfloat16()).dtype == torch.float32
    assert L.simpo_loss(c.half(), r).dtype == torch.float64


@pytest.mark.each("function", ci=True)
@every
def test_compile(function, tensors, kwargs):
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


@every
def test_autocast_changes_nothing(function, tensors, kwargs):
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
def test_func(function, tensors, kwargs):
    """torch.func.grad is autograd's, and vmap is one call after another."""

    def call(x):
        return function(x, *tensors[1:], **kwargs)

    x = tensors[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x), x)
    torch.testing.assert_close(torch.func.grad(call)(tensors[0]), gradient)
    stacked = torch.stack([tensors[0], tensors[0] - 0.1])
    torch.testing.assert_close(torch.func.vmap(call, randomness="same")(stacked), torch.stack([call(x) for x in stacked]))
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

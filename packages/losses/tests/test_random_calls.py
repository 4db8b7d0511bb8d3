"""Random calls of every public loss against float64: shapes, strides, offsets, dtypes, options, targets, upstream gradients, ways to call.

random_calls.py makes each call from its seed, and makes one again by `python packages/losses/tests/random_calls.py SEED`.
"""

import inspect
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from loss_calls import Operators
from random_calls import OTHERS, Outcome, RandomCall, check, compared, computed, draw, draw_other

from lossforge.losses import functional
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.record import Make
from lossforge.losses.registry import LOSSES

GPU = torch.cuda.is_available()
CALLS, CALLS_INTERPRETED, PARTS = 2000, 2 * (len(LOSSES) + len(OTHERS)), 4


def outcomes(seeds: range, device: str) -> Iterator[Outcome]:
    """Check calls, on a GPU in a process a core, because their kernels are compiled."""
    workers = min(len(os.sched_getaffinity(0)), 16) if device == "cuda" else 1
    if workers < 2:
        yield from (check(seed, device) for seed in seeds)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(check, seeds, itertools.repeat(device))


def wrong_ones(seeds: range, device: str, capsys: pytest.CaptureFixture[str]) -> list[Outcome]:
    """Return the calls that are wrong, and say meanwhile how many were made, and the seed of each wrong one."""
    wrong, rounded, began = [], 0, time.monotonic()
    for done, outcome in enumerate(outcomes(seeds, device), 1):
        rounded += outcome.rounded
        if outcome.wrong:
            wrong.append(outcome)
        if outcome.wrong or done % 250 == 0 or done == len(seeds):
            with capsys.disabled():
                print(f"\nseed {outcome.seed}: {outcome.wrong}" if outcome.wrong else "", end="")
                print(
                    f"\n{done} of {len(seeds)} calls in {time.monotonic() - began:.0f} s: {len(wrong)} wrong, "
                    f"{rounded} right beside what one rounding of the inputs changes",
                    flush=True,
                )
    return wrong


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_random_calls_on_a_gpu(all_cases, capsys):
    if not all_cases:
        pytest.skip("takes minutes: runs with --all, or by its name")
    assert wrong_ones(range(CALLS), "cuda", capsys) == []


@pytest.mark.skipif(GPU, reason="a GPU makes more")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part, all_cases, capsys):
    """In the interpreter: of every loss two calls, by default of every fourth one."""
    seeds = range(part, CALLS_INTERPRETED, PARTS)
    assert wrong_ones(seeds if all_cases else seeds[::8], "cpu", capsys) == []


def test_every_public_loss_is_drawn():
    assert set(OTHERS) == {name for name, each in DECLARED.items() if not each.name} - {"linear_top_k"}  # it has no gradient


COMPILED = (
    "clip_loss",
    "info_nce_loss",
    "clip_loss_from_features",
    "zlpr_loss",
    "two_way_loss",
    "load_balancing_loss",
    "jsd_cross_entropy",
)
COMPILED += ("dkd_loss", "dist_loss", "koleo_loss", "selective_log_softmax")
"""Functions that are compiled by default, of each kernel one; the others are in CI."""
BESIDE = [(name, "twice") for name in OTHERS]
BESIDE += [(name, "in place") for name in OTHERS if "inplace" in inspect.signature(getattr(functional, name)).parameters]
BESIDE += [pytest.param(name, "aot_eager", marks=[pytest.mark.slow] * (name not in COMPILED)) for name in OTHERS]


def of_function(name: str, how: str) -> RandomCall:
    """Return a call of a function in a way, with gradients of all that has one, in float32."""
    drawn = (draw_other(name, Make("cpu", torch.float32, seed=seed), random.Random(seed)) for seed in itertools.count())
    call = next(each for each in drawn if each.wanted and each.how != "inference")
    return replace(call, how="eager" if how == "in place" else how, dynamic=True, inplace=call.wanted[0] if how == "in place" else None)


@pytest.mark.parametrize(("name", "how"), BESIDE)
def test_every_way_beside_the_registry(name, how):
    """Compiled, differentiated twice, and in the place of the logits, as test_operators.py and test_values.py have it of the registry."""
    found = compared(0, of_function(name, how), random.Random(0))
    assert not found.wrong, found.wrong


@pytest.mark.parametrize("name", OTHERS)
def test_operators_beside_the_registry(name):
    """torch's checks of each operator that a call runs, and the same bits at a second call and a second backward."""
    call = of_function(name, "repeated")
    with Operators() as operators:
        computed(call, None, ours=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for operator, given in {each: args for each, args in operators.seen if not each.endswith("_backward")}.items():
        result = torch.library.opcheck(getattr(torch.ops.lossforge, operator).default, given, test_utils=tests)
        assert set(result.values()) == {"SUCCESS"}, (operator, result)
    first, second = (computed(call, None, ours=True) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def test_a_number_always_makes_the_same_call():
    for seed in (3, 40, 80):
        first, second = draw(seed, "cpu"), draw(seed, "cpu")
        assert str(first) == str(second)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first.tensors.values(), second.tensors.values(), strict=True))


class Squares(torch.autograd.Function):
    """Σ x², times numbers that should be 1."""

    @staticmethod
    def forward(ctx, x, of_value, of_gradient):
        ctx.save_for_backward(x)
        ctx.of_gradient = of_gradient
        return x.square().sum() * of_value

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0] * ctx.of_gradient, None, None


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([(1.0, 1.0)] * 2, ""),
        ([(1.00004, 1.0)] * 2, "value: error 4"),
        ([(1.0, 1.00002)] * 2, "x: error 2"),
        ([(1.0, 1.0), (1.0, 1.000001)], "other bits at the second call"),
    ],
    ids=str,
)
def test_a_wrong_call_is_found(factors, said):
    """By its value, its gradient, or what it gives at the second call."""
    turns, x = iter(factors), torch.linspace(-1, 2, 5)
    call = RandomCall("squares", lambda x: Squares.apply(x, *next(turns)), lambda x: x.square().sum(), {"x": x}, ("x",), wanted=("x",))
    found = compared(0, replace(call, how="repeated"), random.Random(0))
    assert said in found.wrong
    assert bool(found.wrong) == bool(said)

"""Objectives of pairs: odds near 1 and far from it, label noise, shapes."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from preference_calls import pairs, value_and_gradients

from lossforge import losses as L

INF = math.inf


@pytest.mark.parametrize("small", [1e-3, 1e-6, 1e-12, 1e-30])
def test_odds_near_one(small):
    """odds = 1 / expm1(-log p); at p = 1 - 1e-12 the quotient p / (1 - p) of float32 is a division by 0."""
    for a, b in ((small, 0.5), (0.5, small), (small, 3 * small), (small, 90.0), (small, 1e4)):
        (loss,), gradients = value_and_gradients(L.orpo_loss, [-a], [-b], beta=1.0, alpha=0.0)
        a, b = float(np.float32(a)), float(np.float32(b))
        u, v = math.expm1(a), math.expm1(min(b, 700.0))
        assert loss == pytest.approx(math.log1p(u / v), rel=1e-5, abs=1e-40)
        wanted = [-math.exp(a) / (u + v), u * math.exp(min(b, 700.0)) / v / (u + v)]
        assert [g[0] for g in gradients] == pytest.approx(wanted, rel=1e-5, abs=1e-37)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (30.0, 95.0), (95.0, 100.0), (100.0, 95.0), (200.0, 1e4), (1e4, 1e4)])
def test_small_odds(a, b):
    """Far from 1, odds are p, and e^90 is beyond float32."""
    (loss,), gradients = value_and_gradients(L.orpo_loss, [-a], [-b], beta=1.0, alpha=0.0)
    share = 1 / (1 + math.exp(min(b - a, 700.0)))
    assert loss == pytest.approx(-math.log1p(-share), rel=1e-5)
    rise = math.e / (math.e - 1) if a == 1 else 1.0
    assert [g[0] for g in gradients] == pytest.approx([-rise * share, rise * share], rel=1e-5, abs=1e-37)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected", "slopes"),
    [
        pytest.param(0.0, -math.log(2), 0, (-1, 0), id="chosen for sure"),
        pytest.param(-math.log(2), 0.0, INF, (-2, None), id="rejected for sure"),
        pytest.param(-1.0, -INF, 0, (0, 0), id="rejected never"),
        pytest.param(-INF, -1.0, INF, (None, None), id="chosen never"),
        pytest.param(-1e4, -1.0, 1e4 - math.log(math.expm1(1)), (-1, math.e / (math.e - 1)), id="chosen hardly ever"),
        pytest.param(1e-9, -math.log(2), -1e-9, (-1, None), id="chosen above 1 by rounding"),
    ],
)
def test_odds_at_the_ends(chosen, rejected, expected, slopes):
    """Slopes are those of both log-probabilities; None where none is promised."""
    (loss,), gradients = value_and_gradients(L.orpo_loss, [chosen], [rejected], beta=1.0, alpha=0.0)
    assert loss == pytest.approx(expected, rel=1e-6, abs=0)
    for (found,), slope in zip(gradients, slopes, strict=True):
        assert slope is None or found == pytest.approx(slope, rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("chosen", "rejected"), [(0.0, 0.0), (-INF, -INF), (-1.0, 0.1)], ids=["both for sure", "both never", "no probability"]
)
def test_odds_without_a_ratio_are_nan(chosen, rejected):
    assert L.orpo_loss(torch.tensor([chosen]), torch.tensor([rejected])).isnan()


def test_robust_is_the_mean_over_the_noise_and_conservative_is_not():
    """Labels swapped at rate ε: the robust loss is the clean one in expectation (arXiv 2403.00409, lemma 3.1)."""
    c, r, p, q = pairs(count=4)
    clean = L.dpo_loss(c, r, p, q)
    for loss_type, same in (("robust", True), ("sigmoid", False)):
        loss = partial(L.dpo_loss, label_smoothing=0.2, loss_type=loss_type)
        assert torch.isclose(0.8 * loss(c, r, p, q) + 0.2 * loss(r, c, q, p), clean).item() is same


def test_shapes_of_any_number_of_dimensions():
    values = [t.view(2, 3) for t in pairs(6, 4)]
    assert L.dpo_loss(*values, reduction="none").shape == (2, 3)
    torch.testing.assert_close(L.dpo_loss(*values), L.dpo_loss(*pairs(6, 4)))
    strided = [torch.stack([t, t], -1)[..., 0] for t in values]
    assert torch.equal(L.dpo_loss(*strided), L.dpo_loss(*values))

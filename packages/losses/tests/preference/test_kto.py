"""KTO: batches of one side, the baseline, labels as weights."""

import pytest
import torch
from preference_calls import KTO, logps

from lossforge import losses as L


def test_kto_with_one_side_or_no_baseline():
    c, r, _, pc, pr, _ = KTO
    one = L.kto_loss(c, r[:0], None, pc, pr[:0], None)
    two = L.kto_loss(c[:0], r, None, pc[:0], pr, None)
    both = L.kto_loss(c, r, None, pc, pr, None)
    assert both.item() == pytest.approx((4 * one.item() + 3 * two.item()) / 7)
    assert L.kto_loss(c, r, c[:0], pc, pr, c[:0]).isnan()
    assert torch.equal(L.kto_loss(c, r, c[:0], pc, pr, c[:0], empty="zero"), both)
    assert torch.equal(L.kto_loss(c, r, None, pc, pr, None, kl=-3.0), both)


def test_kto_baseline_has_no_gradient():
    c, r, k, pc, pr, pk = (t.clone().requires_grad_() for t in KTO)
    L.kto_loss(c, r, k, pc, pr, pk).backward()
    assert k.grad is None
    assert pk.grad is None
    assert c.grad.any()


def test_kto_with_labels_as_weights():
    """Every completion on both sides, with weights 0 and 1: the batch has one shape whatever its labels."""
    x, ref, good = logps(6, seed=0), logps(6, seed=1), torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)
    masked = L.kto_loss(x, x, None, ref, ref, None, desirable_weight=good, undesirable_weight=1 - good, normalizer=6, kl=0.3)
    g = good.bool()
    torch.testing.assert_close(masked, L.kto_loss(x[g], x[~g], None, ref[g], ref[~g], None, kl=0.3))

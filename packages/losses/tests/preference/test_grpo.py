"""GRPO: ratios that overflow, masked tokens, no tokens."""

import math

import pytest
import torch
from preference_calls import MASK, OLD, POLICY, REF, A

from lossforge import losses as L

INF = math.inf


def test_ratios_that_overflow():
    """exp(1000) is inf: clipped, it gives the bound and no gradient; not clipped, the loss is as large as it is."""
    x = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    old = torch.zeros(1, 3)
    for advantage, losses, gradient in ((1.0, [-1.2, 0, -1], [0, 0, -1]), (0.0, [0, 0, 0], [0, 0, 0])):
        a = torch.tensor([advantage], requires_grad=True)
        out = L.grpo_loss(x, a, old, loss_type="dapo", reduction="none")
        assert out[0].tolist() == pytest.approx(losses)
        dx, da = torch.autograd.grad(out.sum(), (x, a))
        assert dx[0].tolist() == gradient
        assert da.item() == pytest.approx(-2.2 if advantage else -1.2 - 0.8 - 1)
    out = L.grpo_loss(x, torch.tensor([-1.0]), old, loss_type="dapo", reduction="none")
    assert out[0].tolist() == pytest.approx([INF, 0.8, 1])
    out = L.grpo_loss(x, torch.tensor([-1.0]), old, loss_type="dapo", reduction="none", delta=4.0)
    assert out[0].tolist() == pytest.approx([4, 0.8, 1])
    assert torch.autograd.grad(out.sum(), x)[0][0].tolist() == [0, 0, 1]


def test_a_gap_that_overflows_the_estimate_of_kl():
    """e^q - q - 1 at q = 100 is inf in float32, with gradient -inf; clamped it is that of the bound, without gradient beyond it."""
    x = torch.tensor([[-100.0, -3.0, 30.0]], requires_grad=True)
    options = {"ref_per_token_logps": torch.zeros(1, 3), "beta": 0.5, "loss_type": "dapo", "reduction": "none"}
    plain = L.grpo_loss(x, torch.zeros(1), **options)
    assert plain[0].tolist() == pytest.approx([INF, 0.5 * (math.exp(3) - 4), 0.5 * (math.exp(-30) + 29)])
    (gradient,) = torch.autograd.grad(plain.sum(), x)
    assert gradient[0].tolist() == pytest.approx([-INF, 0.5 * (1 - math.exp(3)), 0.5 * (1 - math.exp(-30))])
    found = L.grpo_loss(x, torch.zeros(1), **options | {"beta": L.KLPenalty(0.5, clamp=20.0)})
    expected = [0.5 * (math.exp(20) - 21), 0.5 * (math.exp(3) - 4), 0.5 * (math.exp(-20) + 19)]
    assert found[0].tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient[0].tolist() == pytest.approx([0.0, 0.5 * (1 - math.exp(3)), 0.0])
    criterion = L.GRPOLoss(beta=L.KLPenalty(0.5, clamp=20.0), loss_type="dapo", reduction="none")
    assert torch.equal(criterion(x, torch.zeros(1), None, torch.zeros(1, 3)), found)
    with pytest.raises(ValueError, match=r"KLPenalty\.clamp must be finite and above 0, got -1"):
        L.grpo_loss(x, torch.zeros(1), **options | {"beta": L.KLPenalty(0.5, clamp=-1)})


def test_a_clamped_estimate_of_kl_takes_no_gradient_through_the_ratio():
    """By hand: r (e^q - q - 1) has the derivative r (e^q - 1) q' + r (e^q - q - 1) = -r q within the bound, where r' = r and q' = -1."""
    for values, reference, clamp in (((-1.0, -12.0), (-1.2, -2.0), 5.0), ((-1.0, -30.0), (-1.2, -1.0), 20.0)):
        x, ref = (torch.tensor([each], dtype=torch.float64) for each in (values, reference))
        options = {"beta": L.KLPenalty(0.04, clamp, bias_correction=True), "loss_type": "dapo", "reduction": "sum"}
        for level, shares in (("token", [1.0]), ("sequence", [1.0, 1.0])):
            x.requires_grad_()
            out = L.grpo_loss(x, torch.zeros(1).double(), None, ref, importance_sampling_level=level, **options)
            (gradient,) = torch.autograd.grad(out, x)
            first = math.exp(-0.2) - 1 + 0.2  # of r = 1, whose derivative a sequence shares out
            expected = [1 - math.exp(-0.2) + first / len(shares), 0.0 if level == "token" else first / 2]
            assert gradient[0].tolist() == pytest.approx([0.04 * each for each in expected], rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_what_is_masked_does_not_matter(level, loss_type):
    clean = [t.clone().requires_grad_() for t in (POLICY, A.unsqueeze(1).expand(4, 6), OLD, REF)]
    dirty = [
        torch.where(MASK != 0, t.detach(), bad).requires_grad_() for t, bad in zip(clean, (torch.nan, INF, -INF, torch.nan), strict=True)
    ]
    results = []
    for values in (clean, dirty):
        out = L.grpo_loss(*values, MASK, beta=0.1, importance_sampling_level=level, loss_type=loss_type)
        results.append([out.detach(), *torch.autograd.grad(out, values)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert all((g[MASK == 0] == 0).all() for g in results[1][1:])
    # one advantage a completion, nan where the completion is empty
    a = torch.where(MASK.any(1), A, torch.nan)
    x = POLICY.clone().requires_grad_()
    out = L.grpo_loss(x, a, OLD, None, MASK, importance_sampling_level=level, loss_type=loss_type)
    out.backward()
    assert out.isfinite()
    assert x.grad.isfinite().all()


def test_an_estimate_of_kl_held_below_a_bound():
    """By hand, in float32: e^q overflows at q = 100. Beyond the bound the gradient is 0, also where q alone is within its own."""
    x, ref = torch.tensor([[-100.0, -10.0, -1.0, -3.0]], requires_grad=True), torch.tensor([[0.0, 0.0, 0.0, -1.0]])
    k3 = [math.e**1 - 2, math.e**2 - 3]
    for penalty, expected, slopes in (
        (L.KLPenalty(1.0, clamp_estimate=10.0), [10, 10, *k3], [0, 0, 1 - math.e, 1 - math.e**2]),
        (L.KLPenalty(1.0, clamp=20.0, clamp_estimate=10.0), [10, 10, *k3], [0, 0, 1 - math.e, 1 - math.e**2]),
        (L.KLPenalty(1.0, estimator="k1", clamp_estimate=10.0), [-10, -10, -1, -2], [0, 1, 1, 1]),
        (L.KLPenalty(1.0, estimator="k3+", clamp_estimate=10.0), [10, 10, *k3], [-100, -10, -1, -2]),
        (L.KLPenalty(1.0, bias_correction="on_policy", clamp_estimate=10.0), [10, 10, *k3], [0, 0, -1, -2]),
    ):
        out = L.grpo_loss(x, torch.zeros(1), None, ref, beta=penalty, loss_type="dapo", reduction="none")
        assert out[0].tolist() == pytest.approx(expected)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient[0].tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"])
def test_a_sampler_that_agrees_corrects_nothing(mode):
    """Bit for bit, with the bounds that hold the ratio 1 alone."""
    policy, old = POLICY.float(), OLD.float()
    given = {"importance_sampling_ratio": L.SamplerCorrection(old, mode, 1.0, 1.0)}
    assert torch.equal(L.grpo_loss(policy, A, old, mask=MASK, **given), L.grpo_loss(policy, A, old, mask=MASK))


def test_a_sequence_that_the_policy_has_left_is_dropped_where_it_is_bad():
    """By hand: means of log π_sampler - log π are 0.5, 0.5 and 0.1."""
    x = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    sampler = x.detach() + torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.2, 0.0]])
    correction = L.SamplerCorrection(sampler, "none", off_policy=0.4)
    out = L.grpo_loss(x, torch.tensor([1.0, -1.0, -1.0]), loss_type="gpg", importance_sampling_ratio=correction, reduction="none")
    assert out.tolist() == [[1.0, 2.0], [0.0, 0.0], [-1.0, -2.0]]

"""What is cross entropy's own: its further outputs, and the z-loss where no row or no weight counts."""

import math

import torch
import torch.nn.functional as F
from loss_calls import logits

from lossforge.losses import cross_entropy


def test_correct_needs_a_counted_target(device):
    x = -torch.rand(2, 4, device=device) - 1
    ignored, kept = torch.tensor([-100, 1], device=device), torch.tensor([2, 1], device=device)
    out = cross_entropy(x, ignored, target_b=kept, lam=0.5, return_correct=True)
    assert not out.correct[0]


def test_further_outputs(device):
    """lse, z-loss, entropy and correctness from the same pass, differentiable together; ties go to the first class."""
    for classes in (7, 9_001):
        x = logits(5, classes, device)
        target = torch.tensor([3, 0, -100, 6, 1], device=device)
        x[0, 3] = x[0].max() + 1
        x[1, :2] = x[1].max() + 1
        x[4, :2] = x[4].max() + 1
        x.requires_grad_()
        out = cross_entropy(x, target, z_loss=0.1, return_z_loss=True, return_lse=True, return_entropy=True, return_correct=True)
        weights = torch.rand(5, device=device)
        (out.loss * 2 + out.z_loss + (out.lse * weights).sum() + (out.entropy * weights).sum() * 0.5).backward()
        wide = x.detach().double().requires_grad_()
        keep = target >= 0
        lse = wide.logsumexp(1)
        z_loss = 0.1 * lse.square()[keep].mean()
        entropy = -(wide.softmax(1) * wide.log_softmax(1)).sum(1)
        loss = F.cross_entropy(wide, target) + z_loss
        (loss * 2 + z_loss + (lse * weights).sum() + (entropy * weights).sum() * 0.5).backward()
        for ours, exact in ((out.loss, loss), (out.z_loss, z_loss), (out.lse, lse), (out.entropy, entropy)):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-7)
        assert out.correct.tolist() == [True, True, False, x[3].argmax().item() == 6, False]


def test_z_loss_of_nothing(device):
    """No weight at all: nan as without z_loss; with empty="zero" the z-loss alone, and 0 where no row counts."""
    x = logits(2, 7, device)
    target, weight = torch.tensor([3, 0], device=device), torch.zeros(7, device=device)
    assert cross_entropy(x, target, weight, z_loss=0.1).isnan()
    alone = 0.1 * x.double().logsumexp(1).square().mean()
    torch.testing.assert_close(cross_entropy(x, target, weight, z_loss=0.1, empty="zero").double(), alone, rtol=2e-6, atol=0)
    ignored = torch.full((2,), -100, device=device)
    assert cross_entropy(x, ignored, weight + 1, z_loss=0.1).isnan()
    assert cross_entropy(x, ignored, weight + 1, z_loss=0.1, empty="zero") == 0


def test_returned_z_loss_has_no_weights(device):
    x, target = torch.zeros(2, 4, device=device), torch.tensor([0, 1], device=device)
    for w in (1.0, 10.0, 0.1):
        out = cross_entropy(x, target, weight=torch.full((4,), w, device=device), z_loss=0.1, return_z_loss=True)
        torch.testing.assert_close(out.z_loss, torch.tensor(0.1 * math.log(4) ** 2, device=device))

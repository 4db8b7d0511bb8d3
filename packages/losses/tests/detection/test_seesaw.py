"""Seesaw loss as mmdetection has it: values, gradients, the counts of the module, edges, operators."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of
from torch import Tensor

from lossforge.losses import SeesawLoss, plain_torch, seesaw_loss
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")


def theirs(x: Tensor, target: Tensor, counts: Tensor, p: float = 0.8, q: float = 2.0, eps: float = 1e-2, reduction: str = "mean") -> Tensor:
    """mmdetection's seesaw_ce_loss: weights of the logits from matrices of counts and of scores."""
    one_hot = F.one_hot(target, x.shape[1])
    ratio = counts[None, :].clamp(min=1).to(x.dtype) / counts[:, None].clamp(min=1)
    mitigation = torch.where(ratio < 1, ratio**p, 1.0)[target]
    scores = x.detach().softmax(1)
    ratio = scores / scores.gather(1, target[:, None]).clamp(min=eps)
    compensation = torch.where(ratio > 1, ratio**q, 1.0)
    return F.cross_entropy(x + (mitigation * compensation).log() * (1 - one_hot), target, reduction=reduction)


def problem(device: str, rows: int = 17, classes: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of float64, targets, counts with a long tail and a class without samples."""
    x = torch.randn(rows, classes, device=device, dtype=torch.float64) * 3
    counts = (1000 * torch.rand(classes, device=device) ** 4).long()
    counts[-1] = 0
    return x, torch.randint(0, classes, (rows,), device=device), counts


@pytest.mark.parametrize("options", [{}, {"p": 0.0}, {"q": 0.0}, {"p": 1.5, "q": 0.5, "eps": 0.3}], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(17, 11), (3, 1), (2, 5003)])
def test_as_mmdetection(rows, classes, options, device):
    x, target, counts = problem(device, rows, classes)
    for reduction in ("mean", "sum", "none"):
        value, slope = gradient_of(theirs, x, target, counts, **options, reduction=reduction)
        for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 3e-6)):
            got, g = gradient_of(seesaw_loss, x.to(dtype), target, counts, **options, reduction=reduction)
            assert got.dtype == g.dtype == dtype
            assert error(got, value) < bound
            assert error(g, slope) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_and_layouts(dtype, device):
    x, target, counts = problem(device)
    x = x.to(dtype)
    value, slope = gradient_of(theirs, x.double(), target, counts)
    for given in (x, x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        got, g = gradient_of(seesaw_loss, given, target.int(), counts.double())
        assert got.dtype == torch.float32
        assert g.dtype == dtype
        assert error(got, value) < 1e-5
        assert error(g, slope) < 2.0**-7


def test_ignored_rows_weights_and_the_divisor(device):
    x, target, counts = problem(device)
    kept = torch.arange(17, device=device) % 3 != 1
    ignored = torch.where(kept, target, -1)
    x[1] = NAN
    exact = theirs(x[kept], target[kept], counts, reduction="none")
    value, g = gradient_of(seesaw_loss, x.float(), ignored, counts, ignore_index=-1)
    assert error(value, exact.mean()) < 3e-6
    assert not g[~kept].any()
    weight = torch.rand(11, device=device)
    got = seesaw_loss(x.float(), ignored, counts, weight=weight, ignore_index=-1)
    w = weight[target[kept]].double()
    assert error(got, (exact * w).sum() / w.sum()) < 3e-6
    assert error(seesaw_loss(x.float(), ignored, counts, ignore_index=-1, normalizer=5), exact.sum() / 5) < 3e-6


def test_infinite_logits(device):
    """-inf beside the target is probability 0, at the target an infinite loss; +inf makes its own row nan."""
    x, target, counts = problem(device)
    plain = seesaw_loss(x.float(), target, counts, reduction="none")
    x[0, (target[0] + 1) % 11] = x[1, target[1]] = -INF
    x[2, 3] = INF
    for function in (seesaw_loss, lambda *a, **k: _reference(*a, **k)):
        value = function(x.float(), target, counts, reduction="none")
        assert value[0].isfinite()
        assert value[1] == INF
        assert value[2].isnan()
        torch.testing.assert_close(value[3:], plain[3:])


def _reference(*args, **kwargs):
    with plain_torch():
        return seesaw_loss(*args, **kwargs)


def test_the_module_counts_in_training(device):
    x, target, _ = problem(device)
    module = SeesawLoss(11, q=1.0, ignore_index=3).to(device)
    assert module.class_counts.tolist() == [0] * 11
    total = torch.zeros(11, dtype=torch.int64)
    for _ in range(3):
        total += torch.bincount(target[target != 3].cpu(), minlength=11)
        value = module(x.float(), target)
        assert module.class_counts.cpu().tolist() == total.tolist()
        keep = target != 3
        assert error(value, theirs(x[keep], target[keep], total.to(device), q=1.0)) < 3e-6
    module.eval()
    module(x.float(), target)
    assert module.class_counts.cpu().tolist() == total.tolist()
    again = SeesawLoss(11)
    again.load_state_dict(module.state_dict())
    assert torch.equal(again.class_counts.cpu(), module.class_counts.cpu())
    assert copy.deepcopy(module).class_counts.data_ptr() != module.class_counts.data_ptr()
    assert "num_classes=11, p=0.8, q=1.0" in repr(module)


def test_mistakes(device):
    x, target, counts = problem(device)
    for arguments, options, kind, message in (
        ((x[0], target, counts), {}, ValueError, r"input must have shape \(N, C\) with at least one class, got \(11,\)"),
        ((x, target[:3], counts), {}, ValueError, r"target must have shape \(17,\), got \(3,\)"),
        ((x, target, counts[:3]), {}, ValueError, r"class_counts must hold one number a class, shape \(11,\), got \(3,\)"),
        ((x, target, counts.float().requires_grad_()), {}, ValueError, "class_counts has no gradient"),
        ((x[:, :0], target, counts[:0]), {}, ValueError, "input must have shape .* with at least one class"),
    ):
        with pytest.raises(kind, match=message):
            seesaw_loss(*arguments, **options)
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        SeesawLoss(0)
    with pytest.raises(TypeError, match="target must be of an integer dtype"):
        SeesawLoss(11)(x, target.float())


def test_a_call_that_is_refused_counts_nothing():
    criterion, x = SeesawLoss(5), torch.randn(6, 5)
    for wrong in (lambda: criterion(x, torch.tensor([0, 1, 2, 3, 4, 9])), lambda: criterion(x[:, :3], torch.zeros(6, dtype=torch.int64))):
        with pytest.raises((IndexError, ValueError)):
            wrong()
    assert criterion.class_counts.tolist() == [0] * 5

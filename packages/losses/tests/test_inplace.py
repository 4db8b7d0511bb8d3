"""inplace=True: what is computed from the logits before the loss and after it, and through other views of their memory.

That value and gradient are right is tested in test_values.py and test_random_calls.py.
"""

import pytest
import torch

from lossforge.losses import cross_entropy, dice_loss, kl_div_with_logits, l1_loss, selective_log_softmax

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
LATER = "computed from the logits after the loss cannot be differentiated"
LOSSES = pytest.mark.parametrize(
    ("loss", "target"),
    [
        (cross_entropy, torch.tensor([1, 0, 4, 2])),
        (l1_loss, torch.linspace(-1, 1, 20).view(4, 5)),
        (kl_div_with_logits, torch.linspace(-1, 1, 20).view(4, 5)),
        (dice_loss, torch.linspace(0, 1, 20).view(4, 5).softmax(1)),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)


@pytest.fixture
def head(device):
    torch.manual_seed(0)
    return torch.nn.Linear(3, 5, device=device)


@pytest.fixture
def features(device):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(device)


@LOSSES
def test_regulariser_after_the_loss(loss, target, head, features, device):
    """Nothing is right about a sum of the loss and of what the overwritten logits give."""
    logits = head(features)
    value = loss(logits, target.to(device), inplace=True)
    with pytest.raises(RuntimeError, match=LATER):
        (value + 1e-3 * logits.square().mean()).backward()


@LOSSES
@MODES
def test_use_after_backward(loss, target, mode, head, features, device):
    logits = head(features)
    loss(logits, target.to(device), inplace=True, gradient=mode).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=LATER):
        logits.sum().backward()


@LOSSES
def test_between_forward_and_backward(loss, target, head, features, device):
    """With gradient="backward" the logits hold their values until then: what needs no values is right, what saved them raises."""
    target = target.to(device)
    logits = head(features)
    expected = torch.autograd.grad(loss(logits, target) + logits.sum(), head.weight)[0]
    logits = head(features)
    value = loss(logits, target, inplace=True, gradient="backward")
    (value + logits.sum()).backward()
    torch.testing.assert_close(head.weight.grad, expected)


@MODES
@pytest.mark.parametrize("later", ["the view", "its base", "another view"])
def test_views(mode, later, head, features, device):
    """The logits as a view of another tensor: the gradient is right, and a later use of either raises."""
    target = torch.tensor([[1, 0], [4, 2]], device=device)
    base = head(features.view(2, 2, 3))
    expected = torch.autograd.grad(cross_entropy(base.flatten(0, 1), target.flatten()), head.weight)[0]
    base = head(features.view(2, 2, 3))
    view, other = base.flatten(0, 1), base.movedim(2, 1)
    value = cross_entropy(view, target.flatten(), inplace=True, gradient=mode)
    (gradient,) = torch.autograd.grad(value, head.weight, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(RuntimeError, match=LATER):
        {"the view": view, "its base": base, "another view": other}[later].sum().backward()


def test_one_of_several_views(head, features, device):
    """Autograd cannot say of one view of several that it was overwritten: refused before anything is written."""
    first, _ = head(features).chunk(2)
    before = first.detach().clone()
    with pytest.raises(ValueError, match=r"inplace=True needs logits that autograd allows to be overwritten: .*view"):
        cross_entropy(first, torch.tensor([1, 0], device=device), inplace=True)
    assert torch.equal(first, before)


def test_hooks_of_before(head, features, device):
    """A hook on the logits still sees their gradient, and what it returns goes on."""
    logits = head(features)
    target = torch.tensor([1, 0, 4, 2], device=device)
    expected = torch.autograd.grad(cross_entropy(head(features), target), head.weight)[0]
    logits.register_hook(lambda g: 2 * g)
    cross_entropy(logits, target, inplace=True).backward()
    torch.testing.assert_close(head.weight.grad, 2 * expected)


def test_per_token(head, features, device):
    logits = head(features)
    logps = selective_log_softmax(logits, torch.tensor([1, 0, 4, 2], device=device), inplace=True)
    logps.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=LATER):
        logits.sum().backward()


def test_accuracy_with_the_loss(head, features, device):
    """The commonest use after the loss: the logits' largest class, which outputs=("correct",) gives."""
    logits = head(features)
    target = logits.argmax(1)
    target[0] = (target[0] + 1) % 5
    result = cross_entropy(logits, target, inplace=True, outputs=("correct",))
    assert result.correct.tolist() == [False, True, True, True]
    leaf = head(features).detach().requires_grad_()
    assert torch.equal(logits.detach(), torch.autograd.grad(cross_entropy(leaf, target), leaf)[0])


@LOSSES
def test_holes_and_overlaps_are_refused_and_any_order_is_taken(loss, target, device):
    target, leaf = target.to(device), torch.randn(4, 10, device=device, requires_grad=True)
    holes, overlap = (leaf * 1.0)[:, ::2], (leaf * 1.0)[:1, :5].expand(4, 5)
    for logits, strides in ((holes, r"\(10, 2\)"), (overlap, r"\(0, 1\)")):
        with pytest.raises(ValueError, match=rf"inplace=True needs logits without holes or overlaps in memory, .* with strides {strides}"):
            loss(logits, target, inplace=True)
    (expected,) = torch.autograd.grad(loss(leaf[:, :5], target), leaf)
    turned = (leaf[:, :5].T * 1.0).contiguous().T
    torch.testing.assert_close(torch.autograd.grad(loss(turned, target, inplace=True), leaf)[0], expected)

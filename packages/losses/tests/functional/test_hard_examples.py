"""Which rows online hard example mining keeps, by hand, and what that costs."""

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.losses import cross_entropy, fuse_linear, ohem_cross_entropy

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
P = torch.tensor([0.9, 0.2, 0.65, 0.5, 0.99, 0.3])  # of each row's class, the first of two


def rows(device):
    return torch.stack([P.log(), (1 - P).log()], 1).to(device), torch.zeros(6, dtype=torch.long, device=device)


@MODES
@pytest.mark.parametrize(
    ("threshold", "min_kept", "kept"),
    [
        (0.6, 0, [1, 3, 5]),
        (0.6, 2, [1, 3, 5]),
        (0.6, 4, [1, 2, 3, 5]),
        (0.1, 3, [1, 3, 5]),
        (0.0, 0, []),
        (1.0, 0, [0, 1, 2, 3, 4, 5]),
        (0.1, 100, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_kept_rows(threshold, min_kept, kept, mode, device):
    x, target = rows(device)
    value, g = gradient_of(ohem_cross_entropy, x, target, threshold, min_kept, gradient=mode)
    expected, g_expected = gradient_of(lambda x: F.cross_entropy(x[kept], target[kept]), x)
    torch.testing.assert_close(value, expected, equal_nan=True)
    torch.testing.assert_close(g, g_expected if kept else torch.zeros_like(g))
    each = ohem_cross_entropy(x, target, threshold, min_kept, reduction="none")
    assert (each > 0).nonzero().flatten().tolist() == kept


@MODES
def test_ignored_rows_are_not_counted_among_the_hardest(mode, device):
    """Also where they hold nan; class weights multiply the loss and change no choice."""
    x, target = rows(device)
    x[1], target[1], target[5] = torch.nan, -100, -100
    weight = torch.tensor([2.0, 5.0], device=device)
    value, g = gradient_of(ohem_cross_entropy, x, target, 0.1, 2, weight=weight, gradient=mode, reduction="sum")
    expected, g_expected = gradient_of(lambda x: 2 * F.cross_entropy(x[2:4], target[2:4], reduction="sum"), x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g, g_expected)


@MODES
@pytest.mark.parametrize(("threshold", "min_kept", "kept"), [(0.68, 0, [2, 3]), (0.0, 3, [2, 3, 5])])
def test_weights_of_rows_change_no_choice_and_divide_the_mean(threshold, min_kept, kept, mode, device):
    """A row of a heavy class is no harder for it, and one of a light class no easier."""
    x, _ = rows(device)
    target, weight = torch.tensor([0, 1, 0, 1, 0, 1], device=device), torch.tensor([0.1, 30.0], device=device)
    value, g = gradient_of(ohem_cross_entropy, x, target, threshold, min_kept, weight, gradient=mode)
    expected, g_expected = gradient_of(lambda x: F.cross_entropy(x[kept], target[kept], weight), x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g, g_expected)


def test_rows_as_hard_as_the_last_one_stay(device):
    x = torch.zeros(4, 3, device=device)
    value = ohem_cross_entropy(x, torch.zeros(4, dtype=torch.long, device=device), 0.0, 2, reduction="sum")
    torch.testing.assert_close(value, 4 * torch.tensor(3.0, device=device).log())


def test_a_row_out_of_range_is_nan_and_harms_no_choice(device):
    if device == "cpu":
        pytest.skip("raises on the CPU")
    x, target = rows(device)
    target[4] = 7
    each = ohem_cross_entropy(x, target, 0.1, 3, reduction="none")
    assert each[4].isnan()
    assert (each > 0).nonzero().flatten().tolist() == [1, 5]


def test_fused_with_its_linear_layer(device):
    """The same value and gradients as through the logits."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 8, generator=generator).to(device).requires_grad_() for n in (24, 5))
    target = torch.randint(0, 5, (24,), generator=generator).to(device)
    value = fuse_linear(ohem_cross_entropy)(x, head, target, 0.3, 6)
    expected = ohem_cross_entropy(x @ head.T, target, 0.3, 6)
    torch.testing.assert_close(value, expected)
    for got, wanted in zip(torch.autograd.grad(2 * value, (x, head)), torch.autograd.grad(2 * expected, (x, head)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_all_kept_is_the_cross_entropy(device):
    x = torch.randn(5, 7, 3, device=device)
    target = torch.randint(0, 7, (5, 3), device=device)
    assert torch.equal(ohem_cross_entropy(x, target), cross_entropy(x, target))

"""The Hungarian method over a batch: the least total cost, as scipy finds it, for ragged images and groups of queries."""

import itertools
import math

import pytest
import scipy.optimize
import torch

from lossforge.kernels import launch_counts
from lossforge.losses import backend, hungarian_assign, hungarian_match, plain_torch

NAN, INF = float("nan"), float("inf")
COUNTS = [3, 0, 40, 1]


def totals(cost, counts, found):
    """Exact sums of the usable costs of each image and group, and how many they are. Checks that each box has one query."""
    sums = []
    for of_image, part, first in zip(
        found.cpu(), cost.cpu().double().split(counts, 2), itertools.accumulate(counts, initial=0), strict=False
    ):
        for box, costs in zip(of_image, part, strict=True):
            queries = (box >= 0).nonzero()[:, 0]
            own = box[queries] - first
            assert len(own) == len(set(own.tolist())) == min(costs.shape)
            assert all(0 <= b < costs.shape[1] for b in own.tolist())
            usable = [c for c in costs[queries, own].tolist() if math.isfinite(c)]
            sums.append((math.fsum(usable), len(usable)))
    return sums


KINDS = {
    "random": lambda t: t,
    "ties": lambda t: t.round(),
    "all equal": torch.zeros_like,
    "nan and inf": lambda t: torch.where(t < -0.5, torch.where(t < -1, NAN, -INF), t),
    "no costs": lambda t: torch.full_like(t, NAN),
    "bfloat16": lambda t: t.bfloat16(),
    "large": lambda t: t * 1e37,
}


@pytest.mark.parametrize(("groups", "queries"), [(1, 9), (3, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_least_cost_of_groups_and_images(kind, groups, queries, device):
    """Also with more boxes than queries. The boxes stand first in memory, too."""
    counts = [3, 0, 11, 1]
    cost = KINDS[kind](torch.randn(groups, queries, sum(counts), generator=torch.Generator().manual_seed(1))).to(device)
    with plain_torch():
        expected = totals(cost, counts, hungarian_assign(cost, counts))
    before = sum(launch_counts().values())
    for each, given in ((cost, counts), (cost.mT.contiguous().mT, torch.tensor(counts, device=device))):
        found = hungarian_assign(each, given)
        assert found.shape == (4, groups, queries)
        assert found.dtype == torch.int64
        assert totals(cost, counts, found) == expected
    assert sum(launch_counts().values()) == before + 2 * (backend(cost) != "torch")


@pytest.mark.parametrize("kind", KINDS)
def test_ties_are_broken_as_by_scipy(kind, device):
    """The indices, of images with as many queries as boxes or more; steps of a tenth have sums that round."""
    counts = [12, 0, 5, 11, 1, 12]
    for step in (1.0, 0.1):
        cost = KINDS[kind]((3 * torch.randn(2, 12, sum(counts), generator=torch.Generator().manual_seed(1))).round() * step).to(device)
        with plain_torch():
            expected = hungarian_assign(cost, counts)
        assert torch.equal(hungarian_assign(cost, counts), expected)


def test_counts_beyond_the_boxes_name_none(device):
    """A tensor's sum is not checked: columns past the last do not exist, and none is read."""
    cost = torch.randn(5, 4, device=device)
    for counts in ([2, 1], [2, 9], [-1, 4], [7, 7]):
        found = hungarian_assign(cost, torch.tensor(counts, device=device))
        with plain_torch():
            assert torch.equal(found, hungarian_assign(cost, torch.tensor(counts, device=device)))


def test_nothing_to_assign(device):
    assert hungarian_assign(torch.zeros(3, 0, device=device), [0, 0]).tolist() == [[-1] * 3] * 2
    assert hungarian_assign(torch.zeros(2, 0, 4, device=device), [4]).shape == (1, 2, 0)
    assert hungarian_assign(torch.zeros(2, 3, device=device), torch.zeros(0, dtype=torch.int64, device=device)).shape == (0, 2)
    assert [len(q) for q, _ in hungarian_match(torch.zeros(3, 0, device=device), [0, 0])] == [0, 0]


def test_mistakes(device):
    cost = torch.zeros(4, 3, device=device)
    for call, kind, message in (
        (lambda: hungarian_assign(cost[0], [3]), ValueError, r"cost must have shape \(Q, T\) or \(G, Q, T\), got \(3,\)"),
        (lambda: hungarian_assign(cost, [2, 2]), ValueError, r"counts must hold 2 numbers of at least 0 with the sum 3, got \[2, 2\]"),
        (lambda: hungarian_assign(cost, [4, -1]), ValueError, r"counts must hold 2 numbers of at least 0 with the sum 3, got \[4, -1\]"),
        (lambda: hungarian_assign(cost, torch.tensor(3, device=device)), ValueError, r"counts must have shape \(B,\), got \(\)"),
        (lambda: hungarian_assign(cost, 2), TypeError, "counts must be a sequence of numbers, got int"),
        (lambda: hungarian_match(cost, 2), TypeError, "counts must be a sequence of numbers, got int"),
        (lambda: hungarian_match(cost, torch.tensor(2)), ValueError, r"counts must have shape \(B,\), got \(\)"),
        (lambda: hungarian_match(cost, [2]), ValueError, r"counts must hold 1 numbers of at least 0 with the sum 3, got \[2\]"),
        (lambda: hungarian_match(cost[0], [3]), ValueError, r"cost must have shape \(Q, T\) or \(G, Q, T\), got \(3,\)"),
    ):
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("queries", [21, 2])
def test_hungarian_method_finds_the_least_cost(queries, device):
    """Of each image what scipy finds of its costs alone; of the small ones no other matching costs less."""
    cost = torch.randn(queries, sum(COUNTS), device=device)
    matches = hungarian_match(cost, COUNTS)
    assert len(matches) == 4
    for part, (chosen, targets), n in zip(cost.cpu().split(COUNTS, 1), matches, COUNTS, strict=True):
        assert chosen.dtype == targets.dtype == torch.int64
        assert len(chosen) == len(targets) == min(queries, n)
        rows, columns = scipy.optimize.linear_sum_assignment(part)
        assert chosen.tolist() == rows.tolist()
        assert targets.tolist() == columns.tolist()
        if queries >= n and n <= 3:
            least = min(sum(part[q, t] for t, q in enumerate(each)) for each in itertools.permutations(range(queries), n))
            torch.testing.assert_close(part[chosen, targets].sum(), torch.as_tensor(least, dtype=torch.float32))
    assert all(
        torch.equal(a, b)
        for pair in zip(matches, hungarian_match(cost, torch.tensor(COUNTS)), strict=True)
        for a, b in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e13, 1e30])
def test_one_box_without_costs_spoils_no_other_match(scale):
    """Its queries' costs once took the place of digits of the others'."""
    for seed in range(40):
        cost = scale * torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        kept = cost[:, [0, 2, 3]]
        cost[:, 1] = (NAN, INF, -INF)[seed % 3]
        ((queries, boxes),) = hungarian_match(cost, [4])
        best = kept[scipy.optimize.linear_sum_assignment(kept.numpy())].sum()
        assert cost[queries, boxes][boxes != 1].sum() == pytest.approx(best.item(), rel=1e-12)
    square = torch.tensor([[1.0, NAN], [NAN, 1.0]]) * scale
    ((queries, boxes),) = hungarian_match(square, [2])
    assert boxes.tolist() == [0, 1]


def test_costs_that_are_nan_are_the_last_choice(device):
    cost = torch.tensor([[NAN, 1.0, 2.0], [3.0, INF, NAN], [5.0, 4.0, 9.0], [NAN, NAN, NAN]], device=device)
    [(queries, targets)] = hungarian_match(cost, [3])
    assert list(zip(queries.tolist(), targets.tolist(), strict=True)) == [(0, 2), (1, 0), (2, 1)]
    [(queries, _)] = hungarian_match(torch.full((4, 2), NAN, device=device), [2])
    assert len(queries) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("queries", "boxes"), [(300, 30), (900, 200), (60, 90)])
def test_many_images_as_scipy_without_a_wait(queries, boxes, device):
    counts = [boxes - i % 3 for i in range(40)]
    cost = torch.randn(1, queries, sum(counts), device=device)
    hungarian_assign(cost, counts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = hungarian_assign(cost, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with plain_torch():
        assert totals(cost, counts, found) == totals(cost, counts, hungarian_assign(cost, counts))

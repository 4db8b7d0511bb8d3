"""One query for each box, at the least total cost: the Hungarian method over a batch, on the device, or by scipy on the host."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.namespace import OPERATORS
from lossforge.losses.base.state import kernels_apply
from lossforge.losses.detection.counts import counts_on_device, counts_on_host
from lossforge.losses.engine.operators import ANY_DEVICE, define, launched

__all__ = ["hungarian_assign", "hungarian_match"]


@checks.named
def hungarian_assign(cost: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Assign boxes to queries of their image, each to one, at the least total cost (Kuhn 1955; Jonker and Volgenant 1987).

    On an NVIDIA GPU one launch computes all images and groups, and the host neither waits nor copies. In float64, in plain torch and on
    other devices scipy.optimize.linear_sum_assignment computes it on the host, which waits for the device. The total cost is the same. So
    are the indices, also where several assignments cost the same, of an image with at least as many queries as boxes. With fewer queries
    and equal costs the two may choose another assignment.

    An image with more boxes than queries leaves those boxes out that cost the most. A cost that is nan or infinite counts as larger than
    any other, so that a step with such predictions does not end the training.

    Args:
        cost: (Q, T), of `matching_cost` or your own, of a floating dtype: column t has the costs of box t for the queries of its image;
            or (G, Q, T) with groups of queries, each of which takes every box once: Group-DETR (arXiv 2207.13085).
        counts: how many boxes each image has: B numbers, or a tensor (B,) on the device of the costs, whose sum is not checked.

    Returns:
        (B, Q), or (B, G, Q) with groups, int64: the box of each query, its place among all T; -1 for a query without a box.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        ModuleNotFoundError: scipy computes it, and is not installed.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_assign
        >>> hungarian_assign(torch.tensor([[3.0, 1.0, 5.0], [2.0, 4.0, 0.0], [9.0, 9.0, 7.0]]), [2, 1])
        tensor([[ 1,  0, -1],
                [-1,  2, -1]])
    """
    checks.whole("cost", cost)
    checks.fits("cost", cost, cost.ndim in (2, 3), "have shape (Q, T) or (G, Q, T)")
    of_image = counts_on_device(counts, None, cost.shape[-1], cost, "cost")
    costs = cost.detach().resolve_neg()
    costs = costs if cost.ndim == 3 else costs.unsqueeze(0)
    if kernels_apply(costs) or torch.compiler.is_compiling() or cost.is_meta:  # traced, scipy runs within the operator
        found: Tensor = OPERATORS.hungarian_assign(costs, of_image)
    else:
        found = _assign(costs, of_image)
    return found if cost.ndim == 3 else found.squeeze(1)


@checks.named
def hungarian_match(cost: Tensor, counts: Sequence[int] | Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of query and box of each image on the host, as DETR's matchers do: `hungarian_assign`, and a copy of what it found.

    The copy waits for the device; counts as a tensor on the device are copied, too.

    Args:
        cost: (Q, T), of matching_cost or your own, of a floating dtype; or (G, Q, T) with groups of queries.
        counts: how many boxes each image has; best as numbers of the host.

    Returns:
        of each image the queries and the boxes that belong together, int64 on the CPU, by ascending queries; of each group min(Q, boxes).
        Boxes are numbered within their image, queries through the groups.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        ModuleNotFoundError: scipy computes it, and is not installed.

    Examples:
        >>> import torch
        >>> from lossforge.losses import hungarian_match
        >>> [(queries, targets)] = hungarian_match(torch.tensor([[3.0, 1.0], [2.0, 4.0], [9.0, 9.0]]), [2])
        >>> queries.tolist(), targets.tolist()
        ([0, 1], [1, 0])
    """
    checks.whole("cost", cost)
    checks.fits("cost", cost, cost.ndim in (2, 3), "have shape (Q, T) or (G, Q, T)")
    checks.with_values("cost", cost)
    numbers = counts_on_host(counts, None, cost.shape[-1])
    found = []
    for box, first in zip(hungarian_assign(cost, numbers).flatten(1).cpu(), itertools.accumulate(numbers, initial=0), strict=False):
        queries = (box >= 0).nonzero().view(-1)
        found.append((queries, box[queries] - first))
    return found


def assignment_reference(cost: Tensor, counts: Tensor) -> Tensor:
    """Return the box of each query (B, G, Q) by scipy. cost: (G, Q, T). Columns past the end, which counts may name, do not exist."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the Hungarian method on the host needs scipy, which is not installed: pip install scipy", name="scipy"
        ) from None
    (groups, queries, _), images = cost.shape, len(counts)
    values = cost.to("cpu", torch.float64 if cost.dtype == torch.float64 else torch.float32).double()
    box, first = torch.full((images, groups, queries), -1, device="cpu"), 0
    for of_image, n in zip(box, counts.tolist(), strict=True):
        part = values[:, :, first : first + max(n, 0)]
        for of_query, c in zip(of_image, part, strict=True):
            rows, columns = linear_sum_assignment(_comparable(c).numpy())
            of_query[torch.from_numpy(rows)] = first + torch.from_numpy(columns)
        first += part.shape[2]
    return box.to(cost.device)


def _comparable(cost: Tensor) -> Tensor:
    """Replace costs that are nan or infinite, which scipy refuses, by one that is larger than what all others could save together."""
    usable = cost.isfinite()
    if usable.all():
        return cost
    least, most = (cost[usable].min(), cost[usable].max()) if usable.any() else (cost.new_zeros(()), cost.new_zeros(()))
    return torch.where(usable, cost, most + most.abs() + min(cost.shape) * (most - least) + 1.0)


def _assign(cost: Tensor, counts: Tensor) -> Tensor:
    if cost.numel() == 0 or counts.numel() == 0:
        return _fake(cost, counts).fill_(-1)
    if not kernels_apply(cost):
        return assignment_reference(cost, counts)
    found: tuple[Tensor] = launched("assignment.hungarian", "assign", (cost, counts.contiguous()))
    return found[0]


def _fake(cost: Tensor, counts: Tensor) -> Tensor:
    return cost.new_empty((counts.shape[0], *cost.shape[:2]), dtype=torch.int64)


define("hungarian_assign(Tensor cost, Tensor counts) -> Tensor", _assign, _fake, ANY_DEVICE)

"""The Hungarian method: a program for each image and group of queries finds the least total cost of one query a box.

Boxes enter one after the other. Each finds the shortest augmenting path through the reduced costs c - u - v by Dijkstra's method, as Jonker
and Volgenant 1987 and Crouse 2016 (doi 10.1109/TAES.2016.140952), whose form scipy takes. The potentials u of boxes, v of queries and the
distances are float64, a lane a query, so that a step is a few operations on one vector. The lane of a query holds u of its box.

Sums are in scipy's order, and so is the choice among queries of equal distance: an image with at least as many queries as boxes has scipy's
assignment, also where others cost the same. scipy keeps a list of the queries that are not done, by falling number; the last one takes the
place of one that is done. Its choice is the last in the list that has no box, which ends the search, or else the first.

Where an image has more boxes than queries, each box after the first ones may take the place of another, which stays without a query.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import END, Strided, as_strided

LANES_A_WARP = 128
"""Queries that a warp of the Hungarian method holds in registers."""


class Assignments(NamedTuple):
    """Costs (G, Q, T) of groups of queries, counts (B,) of each image's boxes, and the box of each query (B, G, Q), which is written."""

    cost: Strided
    counts_ptr: Any
    out_ptr: Any
    end: Any = END


def assign(cost: Tensor, counts: Tensor) -> tuple[Tensor]:
    """Return the box of each query (B, G, Q) at the least total cost, int64, or -1. cost: (G, Q, T). counts: (B,), contiguous."""
    (groups, queries, count), images = cost.shape, len(counts)
    out = new_like(cost, ((images, groups, queries), torch.int64))
    lanes = triton.next_power_of_2(queries)
    sizes = {"LANES": lanes, "IMAGES": triton.next_power_of_2(images)}
    arguments = (Assignments(as_strided(cost), counts, out), queries, count, images, groups)
    warps = min(max(lanes // LANES_A_WARP, 1), 16)
    Launch(hungarian_kernel, (images * groups,), arguments, **sizes, num_warps=warps).start()
    return (out,)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def load_costs(where, t, step, inside):
    """Load the costs of box t for all queries. step: from a box to the next, int64."""
    return tl.load(where + t * step, mask=inside, other=float("inf")).to(tl.float32)


@triton.jit
def replacement(where, step, inside, first, boxes, queries, LANES: tl.constexpr):
    """Return the cost in place of those that are nan or infinite: larger than what all others of the image could save together."""
    least, most = tl.full([LANES], float("inf"), tl.float32), tl.full([LANES], float("-inf"), tl.float32)
    for t in range(first, first + boxes):
        c = load_costs(where, t, step, inside)
        least = tl.minimum(least, tl.where(is_finite(c), c, float("inf")))
        most = tl.maximum(most, tl.where(is_finite(c), c, float("-inf")))
    low, high = tl.min(least, 0).to(tl.float64), tl.max(most, 0).to(tl.float64)
    low, high = tl.where(low > high, 0.0, low), tl.where(low > high, 0.0, high)
    return high + tl.abs(high) + tl.minimum(boxes, queries).to(tl.float64) * (high - low) + 1.0


@triton.jit
def pick(x, there):
    """Return the number of the only lane that is there; 0 without one."""
    return tl.sum(tl.where(there, x, tl.zeros_like(x)), 0)


@triton.jit(do_not_specialize=("queries", "targets", "images", "groups"))
def hungarian_kernel(problem, queries, targets, images, groups, LANES: tl.constexpr, IMAGES: tl.constexpr):
    program = tl.program_id(0)
    image, group = program // groups, (program % groups).to(tl.int64)
    b, q = tl.arange(0, IMAGES), tl.arange(0, LANES)
    counts = tl.load(problem.counts_ptr + b, mask=b < images, other=0).to(tl.int32)
    counts = tl.maximum(counts, 0)
    first = tl.minimum(tl.sum(tl.where(b < image, counts, 0), 0), targets)
    boxes = tl.minimum(tl.sum(tl.where(b == image, counts, 0), 0), targets - first)
    inside = q < queries
    zero = tl.full([], 0, tl.int64)
    of_query, of_box = zero + problem.cost.s1, zero + problem.cost.s2
    square = boxes == queries  # scipy gives boxes to queries then: queries enter, and a lane is a box
    where = problem.cost.ptr + group * problem.cost.s0 + tl.where(square, first * of_box, zero)
    where += q.to(tl.int64) * tl.where(square, of_box, of_query)
    step, start = tl.where(square, of_query, of_box), tl.where(square, 0, first)
    worst = replacement(where, step, inside, start, boxes, queries, LANES)
    endless = tl.full([LANES], float("inf"), tl.float64)
    u, v, box = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.float64), tl.full([LANES], -1, tl.int32)
    for i in range(boxes):
        if i == queries:  # each query has a box: leaving one out costs -u, which must be at least 0
            highest = tl.max(tl.where(inside, u, float("-inf")), 0)
            u, v = u - highest, v + highest
        distance, via, done = endless, tl.full([LANES], -1, tl.int32), q >= queries
        place, listed = queries - 1 - q, queries  # of the queries in scipy's list, and its length
        low, u0 = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
        spare, spared = tl.where(i < queries, float("inf"), low), tl.full([], -1, tl.int32)  # the least cost to leave a box out; its query
        row, at = tl.full([], 0, tl.int32) + i, tl.full([], -1, tl.int32)
        while row >= 0:
            c = load_costs(where, start + row, step, inside)
            through = low + tl.where(is_finite(c), c.to(tl.float64), worst) - u0 - v
            closer = (through < distance) & (done == 0)
            distance, via = tl.where(closer, through, distance), tl.where(closer, at, via)
            rest = tl.where(done, float("inf"), distance)
            low = tl.min(rest, 0)
            order = tl.where(box < 0, LANES - 1 - place, LANES + place)
            chosen = tl.min(tl.where((rest == low) & (done == 0), order * LANES + q, 2 * LANES * LANES), 0)
            at, order = chosen % LANES, chosen // LANES
            leave = spare <= low
            row = tl.where(leave, -1, pick(box, q == at))
            at, low = tl.where(leave, spared, at), tl.where(leave, spare, low)
            seen = (q == at) & (row >= 0)
            done = done | seen
            listed -= 1
            place = tl.where(place == listed, tl.where(order < LANES, LANES - 1 - order, order - LANES), place)
            u0 = pick(u, seen)
            left = tl.where((row >= 0) & (i >= queries), low - u0, float("inf"))
            spare, spared = tl.where(left < spare, left, spare), tl.where(left < spare, at, spared)
        change = tl.where(done & inside, low - distance, 0.0)
        u, v = u + change, v - change
        while at >= 0:  # hand the boxes on along the path
            here, before = q == at, pick(via, q == at)
            own = q == before
            box = tl.where(here, tl.where(before < 0, i, pick(box, own)), box)
            u = tl.where(here, tl.where(before < 0, low, pick(u, own)), u)
            at = before
    query, found = tl.where(square, box, q), tl.where(square, first + q, tl.where(box < 0, -1, first + box))
    tl.store(problem.out_ptr + program.to(tl.int64) * queries + query, found.to(tl.int64), mask=inside)

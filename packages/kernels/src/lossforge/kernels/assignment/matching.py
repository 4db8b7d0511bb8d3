"""The cost of giving each target of a batch to each query of its image: a tile of queries × targets a program.

The targets of all images stand one after the other. A program finds the images of its targets from the counts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.assignment.calls import Weights
from lossforge.kernels.boxes.boxes import corners, load_sides
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import END, Strided, as_strided
from lossforge.kernels.formulas.similarity import giou
from lossforge.kernels.math import logistic, power


class Problem(NamedTuple):
    """Logits or probabilities (B, Q, C) and boxes (B, Q, 4) of queries; targets (1, T, 4) with labels (T,); counts (B,) of each image."""

    logits: Strided
    boxes: Strided
    targets: Strided
    labels_ptr: Any
    counts_ptr: Any
    end: Any = END


TILE = (16, 32)
"""Queries and targets of a tile."""


def costs(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Tensor, weights: Weights, centered: bool, softmax: bool
) -> tuple[Tensor]:
    """Return the costs (T, Q) of all targets, in float32. labels and counts: contiguous. softmax: logits are probabilities already."""
    (images, queries, classes), count = logits.shape, len(targets)
    out = new_like(logits, ((count, queries), torch.float32))
    problem = Problem(as_strided(logits), as_strided(boxes), Strided(targets, 0, *targets.stride()), labels, counts)
    rows, columns = TILE
    grid = (triton.cdiv(queries, rows) * triton.cdiv(count, columns),)
    sizes = {"ROWS": rows, "COLUMNS": columns, "IMAGES": triton.next_power_of_2(images)}
    arguments = (problem, out, queries, count, images, classes, weights)
    Launch(matching_kernel, grid, arguments, CENTERED=centered, SOFTMAX=softmax, **sizes, num_warps=4).start()
    return (out,)


@triton.jit
def image_of(counts_ptr, t, images, IMAGES: tl.constexpr):
    """Return the image of each target t: how many images' targets end before it."""
    b = tl.arange(0, IMAGES)
    ends = tl.cumsum(tl.load(counts_ptr + b, mask=b < images, other=0).to(tl.int32), 0)
    return tl.sum(((ends[None, :] <= t[:, None]) & (b < images)[None, :]).to(tl.int32), 1)


@triton.jit
def focal_cost(x, alpha, gamma):
    """Return the focal loss of the class as a positive minus that as a negative."""
    p, not_p, log1p = logistic(x)
    positive = alpha * power(not_p, gamma) * (tl.where(x < 0, -x, 0.0) + log1p)
    return positive - (1.0 - alpha) * power(p, gamma) * (tl.where(x > 0, x, 0.0) + log1p)


@triton.jit(do_not_specialize=("queries", "targets", "images", "classes"))
def matching_kernel(
    problem,
    out_ptr,
    queries,
    targets,
    images,
    classes,
    weights,
    CENTERED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IMAGES: tl.constexpr,
):
    """Store the costs (targets, queries), so that a target's lie together; nan where a class or an image does not exist.

    Args:
        SOFTMAX: problem.logits are probabilities, whose negative is the cost of the class.
    """
    across = tl.cdiv(targets, COLUMNS)
    program = tl.program_id(0)
    q = (program // across) * ROWS + tl.arange(0, ROWS)[:, None]
    t = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    image = image_of(problem.counts_ptr, t, images, IMAGES)
    label = tl.load(problem.labels_ptr + t, mask=t < targets, other=0).to(tl.int64)
    exists = (t < targets) & (image < images) & (label >= 0) & (label < classes)
    image, label, t = image.to(tl.int64)[None, :], label[None, :], t[None, :]
    mask = (q < queries) & exists[None, :]
    where = problem.logits.ptr + image * problem.logits.s0 + q.to(tl.int64) * problem.logits.s1 + label * problem.logits.s2
    x = tl.load(where, mask=mask, other=float("nan")).to(tl.float32)
    a, b, c, d = load_sides(problem.boxes.ptr + image * problem.boxes.s0 + q.to(tl.int64) * problem.boxes.s1, problem.boxes.s2, mask)
    e, f, g, h = load_sides(problem.targets.ptr + t.to(tl.int64) * problem.targets.s1, problem.targets.s2, exists[None, :])
    distance = tl.abs(a - e) + tl.abs(b - f) + tl.abs(c - g) + tl.abs(d - h)
    a, b, c, d = corners(a, b, c, d, CENTERED)
    e, f, g, h = corners(e, f, g, h, CENTERED)
    of_class = -x if SOFTMAX else focal_cost(x, weights.alpha, weights.gamma)
    cost = weights.classes * of_class + weights.corners * distance
    cost -= weights.overlap * giou(a, b, c, d, e, f, g, h, 1e-7)
    tl.store(out_ptr + t * queries + q, cost, mask=(q < queries) & (t < targets))

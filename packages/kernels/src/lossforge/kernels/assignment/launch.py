"""Host side of task-aligned assignment: its memory, tiles, and its launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.assignment.call import Numbers
from lossforge.kernels.assignment.kernel import (
    Assigned,
    Chosen,
    Given,
    Scores,
    choose_kernel,
    complete_kernel,
    narrow_kernel,
    resolve_kernel,
)
from lossforge.kernels.engine.launch import Launch, new_like
from lossforge.kernels.engine.layout import Strided, as_strided, constants
from lossforge.kernels.pairwise.launch import formula

CHOOSE, RESOLVE, COMPLETE = 1024, 128, 32
"""Anchors of a tile."""
CLASSES = 32
"""Classes of a tile, at most."""


def assign(
    scores: Tensor, boxes: Tensor, anchors: Tensor, labels: Tensor, targets: Tensor, mask: Tensor, numbers: Numbers
) -> tuple[Tensor, ...]:
    """Return labels, boxes, scores, quality, foreground and index of each anchor; no elements in scores unless they are asked for."""
    (batch, count, classes), (_, several, width) = scores.shape, targets.shape
    places = triton.next_power_of_2(numbers.topk)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return new_like(scores, (shape, dtype))

    s0, s1, s2 = scores.stride()
    given = Given(
        constants(Scores(scores, s0, s1, s2, numbers.logits)),
        as_strided(boxes),
        Strided(anchors, 0, *anchors.stride()),
        as_strided(labels),
        as_strided(targets),
        as_strided(mask),
        tl.constexpr(width),
    )
    bits = new(torch.int32, batch, several), new(torch.int32, batch, several)
    chosen = constants(Chosen(new(torch.int32, batch, several, places), *bits, places))
    of_anchor = (batch, count)
    found = (
        new(torch.int64, *of_anchor),
        new(targets.dtype, *of_anchor, width),
        new(scores.dtype, *of_anchor, classes) if numbers.dense else new(scores.dtype, 0),
        new(torch.float32, *of_anchor),
        new(torch.bool, *of_anchor),
        new(torch.int64, *of_anchor),
    )
    assigned = Assigned(*found)._replace(scores_ptr=found[2] if numbers.dense else None)
    sizes, exponents = (several, count, classes), (numbers.alpha, numbers.beta, numbers.margin, numbers.min_side)
    similarity, inside = formula(numbers.iou), not numbers.tood
    choose = (given, chosen, *sizes, numbers.topk, *exponents)
    Launch(choose_kernel, (batch * several,), choose, similarity=similarity, INSIDE=inside, BLOCK=CHOOSE, num_warps=4).start()
    resolve = (given, chosen, assigned, *sizes, *exponents)
    grid = (batch * triton.cdiv(count, RESOLVE),)
    Launch(resolve_kernel, grid, resolve, similarity=similarity, ANY=inside, BLOCK=RESOLVE, num_warps=4).start()
    if numbers.topk2:
        narrow = (given, chosen, assigned, *sizes, numbers.topk2)
        kept = triton.next_power_of_2(numbers.topk2)
        Launch(narrow_kernel, (batch * several,), narrow, similarity=similarity, PLACES=kept, BLOCK=CHOOSE, num_warps=4).start()
    columns = min(triton.next_power_of_2(classes), CLASSES)
    complete = (given, chosen, assigned, *sizes, numbers.eps)
    grid = (batch * triton.cdiv(count, COMPLETE),)
    Launch(complete_kernel, grid, complete, BLOCK=COMPLETE, CLASSES=columns, num_warps=4).start()
    return found

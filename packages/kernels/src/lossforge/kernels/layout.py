"""How a kernel addresses tensors: any strides, joined into as few dimensions as all tensors of a launch allow."""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Strided(NamedTuple):
    """A tensor as a kernel sees it. `s0 is None`: addressed by the flat index, in the order of the logits."""

    ptr: Tensor
    s0: int | None = None
    s1: int | None = None
    s2: int | None = None


@triton.jit
def offset(t, at) -> tl.tensor:
    """Offset into `t` of the elements `at` = (flat index, i0, i1, i2)."""
    if t.s0 is None:
        return at[0]
    return at[1] * t.s0 + at[2] * t.s1 + at[3] * t.s2


def collapse(sizes: Sequence[int], strides: Sequence[Sequence[int]], reorder: bool = True) -> tuple[list[int], list[list[int]]]:
    """Join neighbouring dimensions that every tensor walks in one stride.

    `strides` holds one list a tensor. Dimensions of size 1 disappear.
    With `reorder` they are first sorted as the first tensor lies in memory.
    """
    dims = [(n, [s[d] for s in strides]) for d, n in enumerate(sizes) if n != 1]
    if reorder:
        dims.sort(key=lambda d: -d[1][0])
    joined: list[tuple[int, list[int]]] = []
    for n, step in dims:
        if joined and all(outer == n * inner for outer, inner in zip(joined[-1][1], step, strict=True)):
            joined[-1] = (joined[-1][0] * n, step)
        else:
            joined.append((n, step))
    return [n for n, _ in joined], [[step[t] for _, step in joined] for t in range(len(strides))]

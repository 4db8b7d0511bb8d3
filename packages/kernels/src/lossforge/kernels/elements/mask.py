"""The sum of a mask over the elements that are not ignored, by which a mean divides.

The launch reads the mask as it lies in memory, bool or floats, once, and not again where it or the class indices repeat.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.elements.elementwise.kernel import Formula, all_tiles, coordinates
from lossforge.kernels.elements.layout import geometry
from lossforge.kernels.engine.launch import Launch, addressed, sum_slots
from lossforge.kernels.engine.layout import END, Strided, broadcast, constants, load, per_row, strided
from lossforge.kernels.engine.reduce import finish
from lossforge.kernels.math import widened
from lossforge.kernels.tiles import PROGRAMS

BLOCK = 4096


class Counting(NamedTuple):
    """A mask that broadcasts to the elements, and the class indices of their rows: none, one, or those of a mixup pair."""

    mask: Tensor
    target: Tensor | None = None
    target_b: Tensor | None = None


class Counted(NamedTuple):
    """The same as the kernel sees it."""

    mask: Strided
    target: Strided
    target_b: Strided
    space: Any
    ignore: Any
    end: Any = END


def _make(shape: Sequence[int], class_dim: int, ignore: int, counting: Counting) -> Launch | None:
    """None where the dimensions of the tensors do not join into three."""
    strides = [broadcast(counting.mask.shape, counting.mask.stride(), shape)]
    strides += [per_row(t.shape, t.stride(), shape, class_dim) for t in counting[1:] if t is not None]
    read = [d for d in range(len(shape)) if any(s[d] for s in strides)]  # along the others each element repeats
    sizes = [shape[d] for d in read]
    g = geometry(sizes, [[s[d] for d in read] for s in strides], None)
    if g is None:
        return None
    steps, n = iter(g.strides), math.prod(sizes)
    mask, target, target_b = [strided(t, steps) for t in counting]
    given = Counted(mask, target, target_b, constants(g.space(n, BLOCK)), ignore)
    arguments = given, Formula(), sum_slots(), float(math.prod(shape) // n), n
    return Launch(sum_of_mask_kernel, (min(triton.cdiv(n, BLOCK), PROGRAMS),), arguments, totals=1, num_warps=8)


def sum_of_mask(counting: Counting, shape: Sequence[int], class_dim: int = 0, ignore: int = 0) -> Tensor:
    """Return the sum of a mask over elements of a shape, 0-d, without those of rows whose class indices are all `ignore`."""
    return addressed(functools.partial(_make, shape, class_dim, ignore), counting, expands={"mask": shape}).start()[0]


@triton.jit
def one_tile(part, ahead, start, r, rest, given, formula):
    """Add a tile of the mask to `part`."""
    at = coordinates(start, r, 0, given.space)
    inside = None if rest is None else r < rest
    count = widened(load(given.mask, at, inside, 0.0))
    if given.target.ptr is not None:
        kept = load(given.target, at, inside, 0) != given.ignore
        if given.target_b.ptr is not None:
            kept = kept | (load(given.target_b, at, inside, 0) != given.ignore)
        count = tl.where(kept, count, 0.0)
    return part + count


@triton.jit(do_not_specialize=("scale", "n"))
def sum_of_mask_kernel(given, formula, sum, scale, n):
    """Sum a mask, times how often each of its elements stands for one."""
    part = all_tiles(tl.zeros([given.space.BLOCK], tl.float32), n, given, formula, one_tile)
    finish(tl.sum(part, 0), sum, scale)

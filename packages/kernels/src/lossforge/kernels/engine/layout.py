"""How a kernel addresses tensors of any strides. Dimensions are joined where the strides of all tensors of a launch allow it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.plans import in_order

END = tl.constexpr(None)
"""Must be the last field of every record that holds records, because otherwise Triton drops the constants of the inner records.

Triton updates a record's type when one of its fields is set. It sets constants last, in their order, and derives from the types what loops
and branches see. Without a constant after the inner records, their constants would be None there, so that a stride of 1 would be lost.
"""
Tensors = Sequence[Tensor | None]
Results = tuple[Tensor | None, ...]


class Strided(NamedTuple):
    """A tensor as a kernel sees it. Without `ptr`: absent. Without strides: addressed by the flat index, in the logits' order."""

    ptr: Tensor | None = None
    s0: int | None = None
    s1: int | None = None
    s2: int | None = None


def as_strided(t: Tensor | None) -> Strided:
    """Return a tensor of at most three dimensions with its own strides, or an absent one."""
    return Strided() if t is None else Strided(t, *t.stride())


def strided(t: Any, strides: Iterator[Sequence[int]]) -> Strided:
    """Return the tensor with the next strides, or an absent one if it is None."""
    return Strided() if t is None else Strided(t, *next(strides))


def constants(record: Any) -> Any:
    """Make compile-time constants of the fields named in capitals, because Triton takes plain numbers in a record as run-time values."""
    fixed = {name: _constant(v) for name, v in zip(record._fields, record, strict=True) if name.isupper() and v is not None}
    return record._replace(**fixed)


def _constant(value: Any) -> Any:
    return tuple(map(tl.constexpr, value)) if isinstance(value, tuple) else tl.constexpr(value)


def stepped(t: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a contiguous tensor and the step between its elements: 0 if all are one element, as in the gradient of a sum."""
    if t is None or not any(t.stride()):
        return t, 0
    return in_order(t), 1


@triton.jit
def longer(several, one):
    """Append one item to a tuple."""
    return several + (one,)


@triton.jit
def address(t, at) -> tl.tensor:
    """Return pointers to the elements of `t` at (start, lane, row, i0, i1, i2): flat index start + lane, or coordinates (row + i0, i1, i2).

    start and row are 64-bit scalars, so that lanes count in 32 bits.
    """
    start, lane, row, i0, i1, i2 = at
    where = t.ptr
    if t.s0 is None:
        where = where + start + lane
    else:
        where = where + row * t.s0 + (i0 * t.s0 + i1 * t.s1 + i2 * t.s2)
    return where


@triton.jit
def matrix_address(t, row, column):
    """Return pointers to the elements (row, column) of a matrix."""
    return t.ptr + row.to(tl.int64)[:, None] * t.s0 + column.to(tl.int64)[None, :] * t.s1


@triton.jit
def load_matrix(t, row, column, mask, other):
    """Load the elements (row, column) of a matrix in float32; `other` outside of the mask."""
    return tl.load(matrix_address(t, row, column), mask=mask, other=other).to(tl.float32)


@triton.jit
def place_in_groups(index, down, across, GROUP: tl.constexpr):
    """Return the row and column of a tile among (down, across). GROUP rows of tiles run together, so that the cache has their columns."""
    group = index // (GROUP * across)
    size = tl.minimum(down - group * GROUP, GROUP)
    within = index % (GROUP * across)
    return group * GROUP + within % size, within // size


@triton.jit
def halves_of(tile):
    """Split a tile into its first columns and its last. What takes one after the other needs fewer registers."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def load_tile(where, mask, other, EVICT: tl.constexpr):
    """Load the elements at `where`, with `other` outside of `mask`. If mask is None, all are loaded."""
    if mask is None:
        tile = tl.load(where, eviction_policy=EVICT)
    else:
        tile = tl.load(where, mask=mask, other=other, eviction_policy=EVICT)
    return tile


@triton.jit
def load(t, at, mask, other):
    """Load the elements `at` of `t`, as load_tile does."""
    return load_tile(address(t, at), mask, other, "")


@triton.jit
def store(t, at, mask, tile):
    tl.store(address(t, at), tile, mask=mask)


def collapse(sizes: Sequence[int], strides: Sequence[Sequence[int]], reorder: bool = True) -> tuple[list[int], list[list[int]]]:
    """Join neighbouring dimensions that every tensor traverses with one stride.

    Args:
        sizes: of the dimensions; those of size 1 are removed.
        strides: one list for each tensor.
        reorder: first sort the dimensions as they lie in the first tensor's memory.
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


def broadcast(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor expanded to `shape`: 0 along the dimensions that it lacks or repeats."""
    missing = len(shape) - len(sizes)
    if missing < 0 or any(n not in (1, m) for n, m in zip(sizes, shape[missing:], strict=True)):
        raise ValueError(f"shape {tuple(sizes)} does not broadcast to {tuple(shape)}")
    return (0,) * missing + tuple(s if n == m else 0 for n, s, m in zip(sizes, strides, shape[missing:], strict=True))


def per_row(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int], class_dim: int) -> tuple[int, ...]:
    """Return the strides of a tensor that lacks the classes' dimension, repeated along it."""
    rows = [*shape[:class_dim], *shape[class_dim + 1 :]]
    expanded = broadcast(sizes, strides, rows)
    return (*expanded[:class_dim], 0, *expanded[class_dim:])

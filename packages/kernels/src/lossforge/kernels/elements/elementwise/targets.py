"""Targets of element-wise losses: loaders that the template takes as an argument.

Each gets the targets, the diagonal's offset and the positions of a tile's elements. It returns the target y of each element, and its share:
1, 0 where it is ignored, nan where its target is invalid.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import END, Strided, load
from lossforge.kernels.math import widened

FAR = tl.constexpr(2**31 - 2**17)  # beyond every column by more than a tile's rows, where 32 bits hold the columns


class Targets(NamedTuple):
    """The targets; of a mixup pair also the second targets and λ. They are in the logits' coordinates: class indices have stride 0
    along the classes."""

    target: Strided
    target_b: Strided
    lam: Strided
    classes: int
    ignore: int
    end: Any = END


Where = namedtuple("Where", "at row column place mask")
"""Positions of a tile's elements, and of one element of each group, where values of the row are read once a group.

at: of the elements. row: of one element of each group. In a tile that lies in at most two rows: (start, None, row, whether a group lies in
the second, whether the tile's last element does, i2), so that values of the rows are read twice a tile. column: of each group's first
element. place: of each element in its group; adding it to `column` would take an instruction an element. mask: which elements exist; None:
all."""


@triton.jit
def dense(targets, offset, where):
    """Return y as given; every element counts."""
    return widened(load(targets.target, where.at, where.mask, 0.0)), 1.0


@triton.jit
def of_rows(t, row):
    """Load t of the first and of the last row of a tile, which may be the same."""
    first = t.ptr + row.row * t.s0
    return tl.load(first), tl.load(first + row.i1 * t.s0)


@triton.jit
def of_row(t, where, other):
    """Load t of each group's row."""
    if where.row.lane is None:
        first, last = of_rows(t, where.row)
        found = tl.where(where.row.i0 > 0, last, first)
    else:
        found = load(t, where.row, where.mask, other)
    return found


@triton.jit
def share_of(index, targets):
    valid = (index >= -1) & (index < targets.classes)
    return tl.where(index == targets.ignore, 0.0, tl.where(valid, 1.0, float("nan")))


@triton.jit
def in_class(target, targets, where):
    """Return y = 1 in the class that `target` gives the row. The index -1 is background (all y are 0); an index out of range is invalid."""
    if where.row.lane is None:
        first, last = of_rows(target, where.row)
        second = where.row.i0 > 0
        own = tl.where(second, last.to(where.column.dtype), first.to(where.column.dtype))
        share = tl.where(second, share_of(last, targets), share_of(first, targets))
    else:
        index = load(target, where.row, where.mask, targets.ignore)
        own, share = index.to(where.column.dtype), share_of(index, targets)
    return tl.where(own - where.column == where.place, 1.0, 0.0), share


@triton.jit
def class_index(targets, offset, where):
    """Return y = 1 in the row's class."""
    return in_class(targets.target, targets, where)


@triton.jit
def scored(targets, offset, where):
    """Return y = the row's score in its class, 0 elsewhere."""
    y, share = in_class(targets.target, targets, where)
    return tl.where(y > 0.0, of_row(targets.lam, where, 0.0).to(tl.float32), 0.0), share


@triton.jit
def diagonal(targets, offset, where):
    """Return y = 1 in column row + offset of a matrix, without reading a target; every element counts."""
    first = where.row.row + offset
    if where.column.dtype == tl.int32:
        first = tl.minimum(tl.maximum(first, -FAR), FAR).to(tl.int32)
    return tl.where(first + where.row.i0 + where.row.i2 - where.column == where.place, 1.0, 0.0), 1.0


@triton.jit
def mixup(targets, offset, where):
    """Return y = λ in the first class plus 1 - λ in the second. A row counts unless both its indices are ignored."""
    a, share_a = in_class(targets.target, targets, where)
    b, share_b = in_class(targets.target_b, targets, where)
    share = of_row(targets.lam, where, 1.0).to(tl.float32)
    y = share * tl.where(share_a == 0.0, 0.0, a) + (1.0 - share) * tl.where(share_b == 0.0, 0.0, b)
    return y, tl.where(share_a == 0.0, share_b, tl.where(share_b == 0.0, share_a, share_a * share_b))

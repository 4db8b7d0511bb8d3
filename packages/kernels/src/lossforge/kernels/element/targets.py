"""Targets of element-wise losses: loaders that a template takes as an argument.

Each gets the target, for a mixup pair the second target and λ, all in the logits' coordinates (class indices with stride 0 along the
classes), and returns for a tile of elements the target y and the share with which an element counts: 1, 0 where it is ignored, nan where
its target is invalid.
`at` are the coordinates of the elements, `at_row` those of one element of each group: what belongs to the row is read there, once a group.
`column`: that of each group's first element, and each element's place in its group. Adding them up would take an instruction an element.
A tile that lies in two rows at most has `at_row` = (start, None, row, whether a group lies in the second row, the same of the tile's last
element, i2): what belongs to the rows is read twice a tile. `offset` is that of a diagonal.
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import load
from lossforge.kernels.math import widened

FAR = tl.constexpr(2**31 - 2**17)  # no column, nor within a tile's rows of one, where 32 bits hold the columns


@triton.jit
def dense(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y as given; every element counts."""
    return widened(load(target, at, mask, 0.0)), 1.0


@triton.jit
def of_rows(t, at_row):
    """t of the first and of the last row of a tile, which may be the same."""
    first = t.ptr + at_row[2] * t.s0
    return tl.load(first), tl.load(first + at_row[4] * t.s0)


@triton.jit
def of_row(t, at_row, mask, other):
    """t of each group's row."""
    if at_row[1] is None:
        first, last = of_rows(t, at_row)
        found = tl.where(at_row[3] > 0, last, first)
    else:
        found = load(t, at_row, mask, other)
    return found


@triton.jit
def share_of(index, classes, ignore):
    valid = (index >= -1) & (index < classes)
    return tl.where(index == ignore, 0.0, tl.where(valid, 1.0, float("nan")))


@triton.jit
def class_index(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = 1 in the row's class. An index of -1 is background, all 0; one out of range is invalid."""
    if at_row[1] is None:
        first, last = of_rows(target, at_row)
        second = at_row[3] > 0
        own = tl.where(second, last.to(column[0].dtype), first.to(column[0].dtype))
        share = tl.where(second, share_of(last, classes, ignore), share_of(first, classes, ignore))
    else:
        index = load(target, at_row, mask, ignore)
        own, share = index.to(column[0].dtype), share_of(index, classes, ignore)
    first_column, lane = column
    return tl.where(own - first_column == lane, 1.0, 0.0), share


@triton.jit
def scored(target, target_b, score, classes, ignore, offset, at, at_row, column, mask):
    """y = the row's score in its class, 0 elsewhere."""
    y, share = class_index(target, target_b, score, classes, ignore, offset, at, at_row, column, mask)
    return tl.where(y > 0.0, of_row(score, at_row, mask, 0.0).to(tl.float32), 0.0), share


@triton.jit
def diagonal(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = 1 in column row + offset of a matrix, of which nothing is read; every element counts."""
    _, _, row, i0, _, i2 = at_row
    first = row + offset
    first_column, lane = column
    if first_column.dtype == tl.int32:
        first = tl.minimum(tl.maximum(first, -FAR), FAR).to(tl.int32)
    return tl.where(first + i0 + i2 - first_column == lane, 1.0, 0.0), 1.0


@triton.jit
def mixup(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = λ in the first class plus 1 - λ in the second; the row counts unless both are ignored."""
    a, share_a = class_index(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask)
    b, share_b = class_index(target_b, target_b, lam, classes, ignore, offset, at, at_row, column, mask)
    share = of_row(lam, at_row, mask, 1.0).to(tl.float32)
    y = share * tl.where(share_a == 0.0, 0.0, a) + (1.0 - share) * tl.where(share_b == 0.0, 0.0, b)
    return y, tl.where(share_a == 0.0, share_b, tl.where(share_b == 0.0, share_a, share_a * share_b))

"""Targets of element-wise losses: loaders that a template takes as an argument.

Each gets the target, for a mixup pair the second target and λ, all in the logits' coordinates (class indices with stride 0 along the
classes), and returns for a tile of elements the target y, whether the element counts (is not ignored), and whether its target is valid.
`at` are the coordinates of the elements, `at_row` those of one element of each group: what belongs to the row is read there, once a group.
`offset` is that of a diagonal.
"""

import triton
import triton.language as tl

from lossforge.kernels.layout import load

FAR = tl.constexpr(2**31 - 2**17)  # no column, nor within a tile's rows of one, where 32 bits hold the columns


@triton.jit
def dense(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y as given; every element counts."""
    return load(target, at, mask, 0.0).to(tl.float32), True, True


@triton.jit
def class_index(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = 1 in the row's class. An index of -1 is background, all 0; one out of range is invalid."""
    index = load(target, at_row, mask, ignore)
    return tl.where(index.to(column.dtype) == column, 1.0, 0.0), index != ignore, (index >= -1) & (index < classes)


@triton.jit
def scored(target, target_b, score, classes, ignore, offset, at, at_row, column, mask):
    """y = the row's score in its class, 0 elsewhere."""
    y, counts, valid = class_index(target, target_b, score, classes, ignore, offset, at, at_row, column, mask)
    return tl.where(y > 0.0, load(score, at_row, mask, 0.0).to(tl.float32), 0.0), counts, valid


@triton.jit
def diagonal(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = 1 in column row + offset of a matrix, of which nothing is read; every element counts."""
    _, _, row, i0, _, i2 = at_row
    first = row + offset
    if column.dtype == tl.int32:
        first = tl.minimum(tl.maximum(first, -FAR), FAR).to(tl.int32)
    return tl.where(first + i0 + i2 == column, 1.0, 0.0), True, True


@triton.jit
def mixup(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask):
    """y = λ in the first class plus 1 - λ in the second; the row counts unless both are ignored."""
    a, counts_a, valid_a = class_index(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask)
    b, counts_b, valid_b = class_index(target_b, target_b, lam, classes, ignore, offset, at, at_row, column, mask)
    share = load(lam, at_row, mask, 1.0).to(tl.float32)
    y = share * tl.where(counts_a, a, 0.0) + (1.0 - share) * tl.where(counts_b, b, 0.0)
    return y, counts_a | counts_b, (valid_a | (counts_a == 0)) & (valid_b | (counts_b == 0))

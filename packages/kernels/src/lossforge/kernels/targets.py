"""Targets of element-wise losses: loaders that a template takes as an argument.

Each returns, for a tile of elements, the target y, whether the element counts (not ignored), and whether its target is valid.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.layout import Strided, offset


class Indices(NamedTuple):
    """A class index per row; `at` lies in the logits' coordinates, with stride 0 along the classes."""

    at: Strided
    classes: int
    ignore: int


class Pair(NamedTuple):
    """Two class indices per row and the share λ of the first, as mixup and cutmix give."""

    a: Indices
    b: Indices
    lam: Strided


@triton.jit
def dense(target, at, column, mask):
    """y as given."""
    return tl.load(target.ptr + offset(target, at), mask=mask, other=0.0).to(tl.float32), mask, mask


@triton.jit
def class_index(target, at, column, mask):
    """y = 1 in the row's class. An index of -1 is background, all 0; one out of range is invalid."""
    index = tl.load(target.at.ptr + offset(target.at, at), mask=mask, other=-1)
    counts = mask & (index != target.ignore)
    valid = (index >= -1) & (index < target.classes)
    return tl.where(index.to(column.dtype) == column, 1.0, 0.0), counts, valid


@triton.jit
def mixup(target, at, column, mask):
    """y = λ in the first class plus 1 - λ in the second; the row counts unless both are ignored."""
    a, counts_a, valid_a = class_index(target.a, at, column, mask)
    b, counts_b, valid_b = class_index(target.b, at, column, mask)
    lam = tl.load(target.lam.ptr + offset(target.lam, at), mask=mask, other=1.0).to(tl.float32)
    y = lam * tl.where(counts_a, a, 0.0) + (1.0 - lam) * tl.where(counts_b, b, 0.0)
    return y, counts_a | counts_b, (valid_a | (counts_a != mask)) & (valid_b | (counts_b != mask))

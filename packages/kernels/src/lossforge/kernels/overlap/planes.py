"""Device functions of the overlap template: how it addresses images, and a tile of logits or targets, of BC classes and BP pixels."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Planes(NamedTuple):
    """A tensor (N, C, pixels) with its strides. Where pixels do not lie in one stride they are rows of `inner`, `row` apart."""

    ptr: Tensor | None = None
    image: int = 0
    channel: int = 0
    pixel: int = 0
    row: int | None = None


@triton.jit
def pointers(t, n, start, lane, c, inner, WIDE: tl.constexpr):
    """Where classes c of pixels start + lane of image n lie, (BC, BP). n and start are 64-bit; WIDE where 32 bits do not hold the rest."""
    if WIDE:
        lane = lane.to(tl.int64)
        c = c.to(tl.int64)
    if t.row is None:
        at = t.ptr + (n * t.image + start * t.pixel) + (c * t.channel)[:, None] + (lane * t.pixel)[None, :]
    else:
        i = start + lane if WIDE else start.to(tl.int32) + lane
        r = i // inner
        at = t.ptr + n * t.image + (c * t.channel)[:, None] + (r * t.row + (i - r * inner) * t.pixel)[None, :]
    return at


@triton.jit
def index_tile(target, n, start, lane, inside, inner, first, ignore, classes, WIDE: tl.constexpr):
    """Of each pixel (1, BP) its class index, -1 where it has none, whether it counts, and whether it names a class.

    inside: of the pixels, None where all are.
    """
    at = pointers(target, n, start, lane, tl.zeros([1], tl.int32), inner, WIDE)
    if inside is None:
        t = tl.load(at)
        keep = t.to(tl.int64) != ignore
    else:
        t = tl.load(at, mask=inside[None, :], other=0)
        keep = (t.to(tl.int64) != ignore) & inside[None, :]
    if target.ptr.dtype.element_ty.primitive_bitwidth < 32:
        t = t.to(tl.int32)
    valid = (t >= 0) & (t < classes + first)
    return tl.where(keep & valid, t, -1).to(tl.int32), keep, valid


@triton.jit
def label_tile(target, n, start, lane, c, inside, inner, first, ignore, classes, ALL: tl.constexpr, WIDE: tl.constexpr):
    """Targets y (BC, BP), and of each pixel (1, BP) whether it counts and whether it names a class; True for targets that say neither.

    A class index below `first` is background, 0 in all classes. inside: of the pixels, None where all are.
    """
    if target.ptr.dtype.element_ty.is_int():
        index, keep, valid = index_tile(target, n, start, lane, inside, inner, first, ignore, classes, WIDE)
        y = tl.where(index == (c + first)[:, None], 1.0, 0.0)
    else:
        at = pointers(target, n, start, lane, c, inner, WIDE)
        if inside is None:
            y = tl.load(at) if ALL else tl.load(at, mask=(c < classes)[:, None], other=0.0)
            keep, valid = True, True
        else:
            y = tl.load(at, mask=(c < classes)[:, None] & inside[None, :], other=0.0)
            keep, valid = inside[None, :], inside[None, :]
        y = y.to(tl.float32)
    return y, keep, valid


@triton.jit
def logit_tile(
    x,
    n,
    start,
    lane,
    c,
    inside,
    keep,
    inner,
    classes,
    SOFTMAX: tl.constexpr,
    MASKED: tl.constexpr,
    ALL: tl.constexpr,
    WIDE: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Logits (BC, BP) in float32: 0 where `keep` is false, which may hold nan; classes that do not exist have probability 0."""
    OTHER: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    at = pointers(x, n, start, lane, c, inner, WIDE)
    if inside is not None:
        tile = tl.load(at, mask=(c < classes)[:, None] & inside[None, :], other=OTHER, eviction_policy=EVICT)
    elif ALL:
        tile = tl.load(at, eviction_policy=EVICT)
    else:
        tile = tl.load(at, mask=(c < classes)[:, None], other=OTHER, eviction_policy=EVICT)
    tile = tile.to(tl.float32)
    if MASKED:
        tile = tl.where(keep, tile, 0.0)
    return tile

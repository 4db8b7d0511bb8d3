"""Device functions of both launches of the overlap template: tiles of logits or targets, of BC classes and BP pixels, and their softmax."""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.layout import END, load_tile, longer
from lossforge.kernels.math import LOG2E, exp2


class Planes(NamedTuple):
    """A tensor (N, C, pixels) with its strides. Pixels without a single stride are rows of `inner` pixels, with stride `row`."""

    ptr: Any = None
    image: int = 0
    channel: int = 0
    pixel: int = 0
    row: int | None = None


class Config(NamedTuple):
    """Compile-time constants of a launch.

    With few classes under a softmax a lane holds all classes of its OWN pixels, in tiles whose classes are powers of two: 21 are 16, 4
    and 1. A tile of all classes would be padded to the next power of two, and a pixel's classes would lie in several lanes, which
    exchange their maximum and sums. With several tiles nothing is padded or exchanged: for 21 classes the sums take 15 instructions a
    logit instead of 36. One tile a class would do the same, but takes the compiler 35 s for 21 classes and 180 s for 42, because it
    looks at all pairs of operations for each load.

    Attributes:
        INDEX: targets are class indices.
        MASK: there is a mask. The compiler does not compare one with None, because it has several fields.
        SOFTMAX, SIGMOID: the activation; without either there is none.
        SQUARED: probabilities and targets are squared in P and Y.
        BATCH: regions extend over all images.
        CE: a cross entropy is summed too.
        CONFUSION: the sums are Σ p y, Σ p (1 - y), Σ (1 - p) y and Σ (1 - p) (1 - y).
        HELD: classes of each of the tiles that together hold all classes which a pixel's probabilities depend on; empty: a sweep reads
            tiles of BC classes.
        OWN: neighbouring pixels of a lane, if it holds all their classes; else 0.
        ALL: the classes fill their tiles.
        WIDE: offsets from a tile's first pixel need 64 bits.
        BC, BP: classes and pixels of a tile.
        PRESENT: in the first launch: only classes that have target pixels count.
        SUMS: in the first launch: how many sums a region has.
        COUNT: in the first launch: the number of elements that count is one of the sums.
        COUNTED: in the first launch: ce_scale is divided by the count, or by the class weights of the pixels not ignored.
        V, ADJACENT: in the first launch: see kernel.grouped.
        BF, BK: in the first launch: classes and parts that are summed at once.
        EACH: in the second launch: each region and class has an upstream gradient.
    """

    INDEX: bool
    MASK: bool
    SOFTMAX: bool
    SIGMOID: bool
    SQUARED: bool
    BATCH: bool
    CE: bool
    CONFUSION: bool
    HELD: tuple[int, ...]
    OWN: int
    ALL: bool
    WIDE: bool
    BC: int
    BP: int
    SUMS: int = 3
    PRESENT: bool = False
    COUNT: bool = False
    COUNTED: bool = False
    V: int = 1
    ADJACENT: bool = False
    BF: int = 1
    BK: int = 1
    EACH: bool = False


class Images(NamedTuple):
    """Logits, targets, mask and gradient, in rows of `inner` pixels; the class index of channel 0, and the ignored index."""

    x: Planes
    target: Planes
    mask: Planes | None
    gradient: Planes | None
    classes: int
    inner: Any
    first: Any
    ignore: Any
    config: Config
    end: Any = END


Place = namedtuple("Place", "n start lane inside")
"""Pixels start + lane of image n. n and start are 64-bit. inside: which pixels exist; None: all."""
Labels = namedtuple("Labels", "index keep valid")
"""For each pixel (1, BP): its class index (-1 without one), whether it counts, and whether its index is valid.

If targets are not indices, keep and valid say only which pixels exist."""
Region = namedtuple("Region", "number regions classes skip coefficients_ptr grad_output_ptr")
"""One of `regions` regions, of all classes but the first `skip`.

coefficients_ptr: a and b, (regions, classes) each, then e (classes) with CE; with CONFUSION the four sums."""


@triton.jit
def pointers(t, place, c, inner, WIDE: tl.constexpr):
    """Return pointers to classes c of the pixels, (BC, BP)."""
    lane = place.lane
    if WIDE:
        lane = lane.to(tl.int64)
        c = c.to(tl.int64)
    if t.row is None:
        at = t.ptr + (place.n * t.image + place.start * t.pixel) + (c * t.channel)[:, None] + (lane * t.pixel)[None, :]
    else:
        i = place.start + lane if WIDE else place.start.to(tl.int32) + lane
        r = i // inner
        at = t.ptr + place.n * t.image + (c * t.channel)[:, None] + (r * t.row + (i - r * inner) * t.pixel)[None, :]
    return at


@triton.jit
def lanes(config):
    """Return the pixels of a tile from its first on. With OWN a load takes no more neighbours at once, for which it would divide a pixel's
    classes among lanes."""
    lane = tl.arange(0, config.BP)
    if config.OWN > 0:
        lane = tl.max_contiguous(lane, config.OWN)
    return lane


@triton.jit
def mask_of(images, place, c):
    """Return which elements of a tile of classes c exist, (BC, BP); None: all."""
    mask = None
    if place.inside is not None:
        mask = (c < images.classes)[:, None] & place.inside[None, :]
    elif not images.config.ALL:
        mask = (c < images.classes)[:, None]
    return mask


@triton.jit
def labels_of(images, place):
    keep = True if place.inside is None else place.inside[None, :]
    labels = Labels(True, keep, keep)
    if images.config.INDEX:
        at = pointers(images.target, place, tl.zeros([1], tl.int32), images.inner, images.config.WIDE)
        t = load_tile(at, None if place.inside is None else keep, 0, "")
        keep = (t.to(tl.int64) != images.ignore) & keep
        if images.target.ptr.dtype.element_ty.primitive_bitwidth < 32:
            t = t.to(tl.int32)
        valid = (t >= 0) & (t < images.classes + images.first)
        labels = Labels(tl.where(keep & valid, t, -1).to(tl.int32), keep, valid)
    return labels


@triton.jit
def share_tile(images, place, c):
    """Return how much elements of classes c count by their mask, (BC, BP); under a softmax (1, BP), the same for all classes."""
    if images.config.SOFTMAX:
        at = pointers(images.mask, place, tl.zeros([1], tl.int32), images.inner, images.config.WIDE)
        share = load_tile(at, None if place.inside is None else place.inside[None, :], 0, "")
    else:
        share = load_tile(pointers(images.mask, place, c, images.inner, images.config.WIDE), mask_of(images, place, c), 0, "")
    return share.to(tl.float32)


@triton.jit
def target_tile(images, place, labels, c):
    """Return the targets y of classes c, (BC, BP). A class index below `first` is background, 0 in all classes."""
    if images.config.INDEX:
        y = tl.where(labels.index == (c + images.first)[:, None], 1.0, 0.0)
    else:
        at = pointers(images.target, place, c, images.inner, images.config.WIDE)
        y = load_tile(at, mask_of(images, place, c), 0.0, "").to(tl.float32)
        if images.config.MASK:
            y = tl.where(share_tile(images, place, c) == 0.0, 0.0, y)
    return y


@triton.jit
def logit_tile(images, place, c, keep, EVICT: tl.constexpr):
    """Load logits (BC, BP) in float32. Pixels with `keep` false and elements of mask 0, which may hold nan, are 0; classes out of range get
    probability 0."""
    OTHER: tl.constexpr = float("-inf") if images.config.SOFTMAX else 0.0
    at = pointers(images.x, place, c, images.inner, images.config.WIDE)
    tile = load_tile(at, mask_of(images, place, c), OTHER, EVICT).to(tl.float32)
    if images.config.INDEX or place.inside is not None:
        tile = tl.where(keep, tile, 0.0)
    if images.config.MASK:
        tile = tl.where(share_tile(images, place, c) == 0.0, 0.0, tile)
    return tile


@triton.jit
def softmax_of(held):
    """Return, for each pixel, the maximum over the classes that the tiles hold, and Σ exp(x - maximum), both (1, BP)."""
    top = tl.max(held[0], 0)[None, :]
    for k in tl.static_range(1, len(held)):
        top = tl.maximum(top, tl.max(held[k], 0)[None, :])
    total = tl.sum(exp2((held[0] - top) * LOG2E), 0)[None, :]
    for k in tl.static_range(1, len(held)):
        total += tl.sum(exp2((held[k] - top) * LOG2E), 0)[None, :]
    return top, total


@triton.jit
def rest_of(held, top):
    """Return the part of softmax_of's sum that the maximum itself does not have, whose digits a sum with its 1 would lose."""
    rest = tl.sum(tl.where(held[0] == top, 0.0, exp2((held[0] - top) * LOG2E)), 0)[None, :]
    for k in tl.static_range(1, len(held)):
        rest += tl.sum(tl.where(held[k] == top, 0.0, exp2((held[k] - top) * LOG2E)), 0)[None, :]
    return rest


@triton.jit
def logits(images, place, keep, first, EVICT: tl.constexpr):
    """Load tiles of classes from `first` on, with their pixels' maximum and sum under a softmax."""
    held = ()
    for k in tl.static_range(len(images.config.HELD)):
        c = first + tl.arange(0, images.config.HELD[k])
        held = longer(held, logit_tile(images, place, c, keep, EVICT))
        first += images.config.HELD[k]
    top, total = 0.0, 1.0
    if images.config.SOFTMAX:
        top, total = softmax_of(held)
    return held, top, total


@triton.jit
def swept_softmax(images, place, keep):
    """Return the same as softmax_of, and with CONFUSION as rest_of, in a sweep over the classes."""
    top = tl.full([1, images.config.BP], LOWEST, tl.float32)
    total = tl.zeros([1, images.config.BP], tl.float32)
    rest = tl.zeros([1, images.config.BP], tl.float32)
    for first in range(0, images.classes, images.config.BC):
        tile = logit_tile(images, place, first + tl.arange(0, images.config.BC), keep, "evict_last")
        higher = tl.maximum(top, tl.max(tile, 0)[None, :])
        if images.config.CONFUSION:
            rest = tl.where(top == higher, rest, total * exp2((top - higher) * LOG2E))
            rest += tl.sum(tl.where(tile == higher, 0.0, exp2((tile - higher) * LOG2E)), 0)[None, :]
        total = total * exp2((top - higher) * LOG2E) + tl.sum(exp2((tile - higher) * LOG2E), 0)[None, :]
        top = higher
    return top, total, rest


@triton.jit
def store_gradient(images, place, c, keep, g):
    if images.config.INDEX or place.inside is not None:
        g = tl.where(keep, g, 0.0)
    if images.config.MASK:
        g = tl.where(share_tile(images, place, c) == 0.0, 0.0, g)
    to = pointers(images.gradient, place, c, images.inner, images.config.WIDE)
    tl.store(to, g, mask=mask_of(images, place, c), eviction_policy="evict_first")

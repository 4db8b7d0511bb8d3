"""Device functions of the overlap template: how it addresses images, and a tile of logits or targets, of BC classes and BP pixels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import END


class Planes(NamedTuple):
    """A tensor (N, C, pixels) with its strides. Where pixels do not lie in one stride they are rows of `inner`, `row` apart."""

    ptr: Any = None
    image: int = 0
    channel: int = 0
    pixel: int = 0
    row: int | None = None


class Config(NamedTuple):
    """What is known when a launch is planned.

    INDEX: targets are class indices. BATCH: regions reach over all images. CE: a cross entropy is summed beside.
    ONE_TILE: a tile holds all classes that a pixel's probabilities depend on. ALL: classes fill their tiles. BY_CLASS: a lane holds V
    pixels with all their classes, BC. WIDE: 32 bits do not hold the offsets from a tile's first pixel.

    Of the first launch: PRESENT: only classes that have target pixels count. COUNT: the elements not ignored are one of the S sums.
    COUNTED: ce_scale is divided by the count, or by the class weights of the pixels not ignored. V, ADJACENT: see terms.grouped.
    Of the second: EACH: gradients arrive at each region and class.
    """

    INDEX: bool
    SOFTMAX: bool
    SIGMOID: bool
    SQUARED: bool
    BATCH: bool
    CE: bool
    ONE_TILE: bool
    ALL: bool
    BY_CLASS: bool
    WIDE: bool
    BC: int
    BP: int
    PRESENT: bool = False
    COUNT: bool = False
    COUNTED: bool = False
    V: int = 1
    ADJACENT: bool = False
    BF: int = 1
    BK: int = 1
    EACH: bool = False


class Images(NamedTuple):
    """Logits, targets and their gradient, in rows of `inner` pixels; the class index of channel 0, and the one that is ignored."""

    x: Planes
    target: Planes
    gradient: Planes | None
    classes: int
    inner: Any
    first: Any
    ignore: Any
    config: Config
    end: Any = END


class Place(NamedTuple):
    """Pixels start + lane of image n, which are 64-bit; inside: those that exist, None where all do."""

    n: Any
    start: Any
    lane: Any
    inside: Any


class Labels(NamedTuple):
    """Targets y (BC, BP), and of each pixel (1, BP) whether it counts and whether it names a class; True for targets that say neither."""

    y: Any
    keep: Any
    valid: Any


@triton.jit
def pointers(t, place, c, inner, WIDE: tl.constexpr):
    """Where classes c of the pixels lie, (BC, BP)."""
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
def index_tile(images, place):
    """Of each pixel (1, BP) its class index, -1 where it has none, whether it counts, and whether it names a class."""
    at = pointers(images.target, place, tl.zeros([1], tl.int32), images.inner, images.config.WIDE)
    if place.inside is None:
        t = tl.load(at)
        keep = t.to(tl.int64) != images.ignore
    else:
        t = tl.load(at, mask=place.inside[None, :], other=0)
        keep = (t.to(tl.int64) != images.ignore) & place.inside[None, :]
    if images.target.ptr.dtype.element_ty.primitive_bitwidth < 32:
        t = t.to(tl.int32)
    valid = (t >= 0) & (t < images.classes + images.first)
    return Labels(tl.where(keep & valid, t, -1).to(tl.int32), keep, valid)


@triton.jit
def label_tile(images, place, c):
    """Labels of classes c. A class index below `first` is background, 0 in all classes."""
    if images.config.INDEX:
        labels = index_tile(images, place)
        y, keep, valid = tl.where(labels.y == (c + images.first)[:, None], 1.0, 0.0), labels.keep, labels.valid
    else:
        at = pointers(images.target, place, c, images.inner, images.config.WIDE)
        if place.inside is None:
            y = tl.load(at) if images.config.ALL else tl.load(at, mask=(c < images.classes)[:, None], other=0.0)
            keep, valid = True, True
        else:
            y = tl.load(at, mask=(c < images.classes)[:, None] & place.inside[None, :], other=0.0)
            keep, valid = place.inside[None, :], place.inside[None, :]
        y = y.to(tl.float32)
    return Labels(y, keep, valid)


@triton.jit
def logit_tile(images, place, c, keep, EVICT: tl.constexpr):
    """Logits (BC, BP) in float32: 0 where `keep` is false, which may hold nan; classes that do not exist have probability 0."""
    OTHER: tl.constexpr = float("-inf") if images.config.SOFTMAX else 0.0
    at = pointers(images.x, place, c, images.inner, images.config.WIDE)
    if place.inside is not None:
        tile = tl.load(at, mask=(c < images.classes)[:, None] & place.inside[None, :], other=OTHER, eviction_policy=EVICT)
    elif images.config.ALL:
        tile = tl.load(at, eviction_policy=EVICT)
    else:
        tile = tl.load(at, mask=(c < images.classes)[:, None], other=OTHER, eviction_policy=EVICT)
    tile = tile.to(tl.float32)
    if images.config.INDEX or place.inside is not None:
        tile = tl.where(keep, tile, 0.0)
    return tile


@triton.jit
def store_gradient(images, place, c, keep, g):
    if images.config.INDEX or place.inside is not None:
        g = tl.where(keep, g, 0.0)
    to = pointers(images.gradient, place, c, images.inner, images.config.WIDE)
    if place.inside is not None:
        tl.store(to, g, mask=(c < images.classes)[:, None] & place.inside[None, :], eviction_policy="evict_first")
    elif images.config.ALL:
        tl.store(to, g, eviction_policy="evict_first")
    else:
        tl.store(to, g, mask=(c < images.classes)[:, None], eviction_policy="evict_first")

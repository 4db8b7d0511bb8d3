"""Device functions of the overlap template: how it addresses images, and a tile of logits or targets, of BC classes and BP pixels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import END, load_tile


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
    HELD: tiles, of BC classes, that together hold all classes that a pixel's probabilities depend on; 0: a sweep over them does. ALL:
    classes fill their tiles. WIDE: 32 bits do not hold the offsets from a tile's first pixel.

    With few classes under a softmax each has its own tile, so that a lane holds all classes of its pixels. One tile of all would be as high
    as the next power of two, and a pixel's classes would lie in several lanes that exchange their maximum and sums. Here nothing is padded
    and nothing exchanged: of 21 classes the sums take 15 instructions a logit, not 36.

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
    HELD: int
    ALL: bool
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
    """Of each pixel (1, BP) its class index, -1 where it has none, whether it counts, and whether it names a class.

    True of targets that are not indices, but for the pixels that do not exist.
    """

    index: Any
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
def mask_of(images, place, c):
    """Which elements of a tile of classes c exist, (BC, BP); None where all do."""
    mask = None
    if place.inside is not None:
        mask = (c < images.classes)[:, None] & place.inside[None, :]
    elif not images.config.ALL:
        mask = (c < images.classes)[:, None]
    return mask


@triton.jit
def labels_of(images, place):
    if images.config.INDEX:
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
        labels = Labels(tl.where(keep & valid, t, -1).to(tl.int32), keep, valid)
    elif place.inside is not None:
        labels = Labels(True, place.inside[None, :], place.inside[None, :])
    else:
        labels = Labels(True, True, True)
    return labels


@triton.jit
def target_tile(images, place, labels, c):
    """Targets y of classes c, (BC, BP). A class index below `first` is background, 0 in all classes."""
    if images.config.INDEX:
        y = tl.where(labels.index == (c + images.first)[:, None], 1.0, 0.0)
    else:
        at = pointers(images.target, place, c, images.inner, images.config.WIDE)
        y = load_tile(at, mask_of(images, place, c), 0.0, "").to(tl.float32)
    return y


@triton.jit
def logit_tile(images, place, c, keep, EVICT: tl.constexpr):
    """Logits (BC, BP) in float32: 0 where `keep` is false, which may hold nan; classes that do not exist have probability 0."""
    OTHER: tl.constexpr = float("-inf") if images.config.SOFTMAX else 0.0
    at = pointers(images.x, place, c, images.inner, images.config.WIDE)
    tile = load_tile(at, mask_of(images, place, c), OTHER, EVICT).to(tl.float32)
    if images.config.INDEX or place.inside is not None:
        tile = tl.where(keep, tile, 0.0)
    return tile


@triton.jit
def store_gradient(images, place, c, keep, g):
    if images.config.INDEX or place.inside is not None:
        g = tl.where(keep, g, 0.0)
    to = pointers(images.gradient, place, c, images.inner, images.config.WIDE)
    tl.store(to, g, mask=mask_of(images, place, c), eviction_policy="evict_first")

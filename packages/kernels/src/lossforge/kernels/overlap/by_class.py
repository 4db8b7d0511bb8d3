"""The overlap template for few classes under a softmax: a lane holds all classes of its pixels, one tile (1, BP) each.

A tile of all classes would be as high as the next power of two, and a pixel's classes would lie in several lanes that exchange their
maximum and sums. Here nothing is padded and nothing exchanged: of 21 classes the sums take 15 instructions a logit, not 36.
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import longer
from lossforge.kernels.math import LOG2E, exp2, reciprocal
from lossforge.kernels.overlap.planes import Labels, index_tile, label_tile, logit_tile, store_gradient
from lossforge.kernels.overlap.terms import coefficients_of, grouped, slope, terms
from lossforge.kernels.row.rows import LOWEST


@triton.jit
def pixel_labels(images, place):
    """What index_tile says of the pixels; of dense targets, which are read class by class, which pixels exist."""
    if images.config.INDEX:
        labels = index_tile(images, place)
    elif place.inside is not None:
        labels = Labels(True, place.inside[None, :], place.inside[None, :])
    else:
        labels = Labels(True, True, True)
    return labels


@triton.jit
def logits(images, place, keep, EVICT: tl.constexpr):
    """Logits of every class, and the maximum and Σ exp(x - maximum) of each pixel."""
    held = ()
    for k in tl.static_range(images.config.BC):
        held = longer(held, logit_tile(images, place, tl.zeros([1], tl.int32) + k, keep, EVICT))
    top = tl.full([1, images.config.BP], LOWEST, tl.float32)
    for k in tl.static_range(images.config.BC):
        top = tl.maximum(top, held[k])
    total = tl.zeros([1, images.config.BP], tl.float32)
    for k in tl.static_range(images.config.BC):
        total += exp2((held[k] - top) * LOG2E)
    return held, top, total


@triton.jit
def label(labels, images, place, c):
    """y of one class (1, BP)."""
    if images.config.INDEX:
        y = tl.where(labels.y == (c + images.first)[:, None], 1.0, 0.0)
    else:
        y = label_tile(images, place, c).y
    return y


@triton.jit
def add_classes(sums, images, place, c):
    """`sums`, of every class I, P, Y and where asked for the cross entropy, (1, BP / V) each, with a tile's `terms` added."""
    MASKED: tl.constexpr = images.config.INDEX or place.inside is not None
    S: tl.constexpr = 3 + images.config.CE
    labels = pixel_labels(images, place)
    held, top, total = logits(images, place, labels.keep, "")
    added = ()
    for k in tl.static_range(images.config.BC):
        y = label(labels, images, place, tl.zeros([1], tl.int32) + k)
        found = terms(held[k], Labels(y, labels.keep, labels.valid), top, total, MASKED, images.config)
        for s in tl.static_range(S):
            added = longer(added, sums[S * k + s] + grouped(found[s], images.config.V, True))
    return added


@triton.jit
def gradient_of_classes(images, place, c, region, coefficients):
    """As backward.tile_gradient."""
    labels = pixel_labels(images, place)
    held, top, total = logits(images, place, labels.keep, "evict_first")
    share = reciprocal(total)
    dot = share * 0.0
    for sweep in tl.static_range(2):
        for k in tl.static_range(images.config.BC):
            c = tl.zeros([1], tl.int32) + k
            a, b, e = coefficients_of(coefficients, region, k, images.config)
            y = label(labels, images, place, c)
            p = exp2((held[k] - top) * LOG2E) * share
            h = slope(p, y, a, b, images.config.SQUARED)
            if sweep == 0:  # Σ p h, less what the cross entropy adds to every class
                dot += p * h
                if images.config.CE:
                    dot -= e * y
            else:
                g = p * (h - dot)
                if images.config.CE:
                    g -= e * y
                store_gradient(images, place, c, labels.keep, g)

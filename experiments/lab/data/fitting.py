"""The size in which a model sees images of files, where the settings leave it to the images."""

from collections.abc import Sequence

ENLARGED = 1.7
"""From this factor on, enlarging costs much for nothing. COCO's images become 1.67 times as large."""
STEP = 32
"""Backbones halve an image's size five times."""
SMALLEST = 64
"""Pixels a side below which a network's coarse levels have hardly a cell left."""


def median_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return height and width of the median image by area."""
    return sorted(sizes, key=lambda size: size[0] * size[1])[len(sizes) // 2]


def fit(setting: str, size: tuple[int, int], edge: int, usual: int, step: int = 1) -> tuple[int, str]:
    """Choose the edge that images get: the usual one, or their own if the usual one would enlarge them much.

    Args:
        setting: the setting that is auto.
        size: height and width of the median training image.
        edge: which of them is meant.
        usual: the edge for photos.
        step: their own edge is rounded up to a multiple of it.

    Returns:
        The edge, and what was chosen, in words.
    """
    own = usual >= ENLARGED * edge
    chosen = max(-(-edge // step) * step, SMALLEST) if own else usual
    why = f", which {usual} would enlarge {usual / edge:.1f} times" if own else ""
    return chosen, f"{setting}=auto: {chosen} pixels; the median training image is {size[1]}×{size[0]}{why}"

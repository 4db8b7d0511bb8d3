"""Masks of instances as COCO's run-length encodings, made of polygons or of other encodings, which are checked before C code reads them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lab.data.images.exif import Size
from lab.data.images.files import CorruptError

LONGEST = 60  # bits of a number in an encoding
OUTLINE = 2**22  # pixels of a polygon's sides together, for each of which C code takes about 50 bytes


def rle_of(segmentation: Any, size: Size) -> bytes:
    """Return the compressed encoding of an annotation's mask.

    Args:
        segmentation: polygons [[x, y, x, y, ...], ...], or an encoding {"size": [height, width], "counts": ...}, whose counts are a list
            of run lengths or COCO's compressed text.
        size: height and width of the image.

    Raises:
        CorruptError: it is neither, or does not fit the image.
    """
    from faster_coco_eval.core import mask

    height, width = size
    if segmentation is None:
        raise CorruptError("no segmentation; polygons or a run-length encoding are expected (task=detection learns boxes alone)")
    if isinstance(segmentation, list) and segmentation:
        polygons = [checked_polygon(each, size) for each in segmentation]
        return bytes(mask.merge(mask.frPyObjects(polygons, height, width))["counts"])
    if not isinstance(segmentation, dict):
        raise CorruptError(f"segmentation {segmentation!r:.100}; polygons or a run-length encoding are expected")
    if segmentation.get("size") != [height, width]:
        raise CorruptError(f"segmentation: its size is {segmentation.get('size')!r:.100}, and the image's [{height}, {width}]")
    counts = segmentation.get("counts")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs) or sum(runs) != height * width:
        raise CorruptError(f"segmentation: counts {counts!r:.100}; lengths that fill the image, {height * width} pixels, are expected")
    return bytes(mask.frPyObjects({"size": [height, width], "counts": runs}, height, width)["counts"])


def decoded(rles: Sequence[bytes], size: Size) -> np.ndarray:
    """Return masks (D, H, W) uint8, 1 inside, of encodings that `rle_of` or `encoded` made."""
    from faster_coco_eval.core import mask

    if not rles:
        return np.zeros((0, *size), dtype=np.uint8)
    return np.ascontiguousarray(mask.decode([as_coco(each, size) for each in rles]).transpose(2, 0, 1))


def framed(rles: Iterable[bytes], size: Size) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the top row and the left column of each mask's tight box, and its pixels there (h, w) bool."""
    from faster_coco_eval.core import mask

    for rle in rles:
        left, top, width, height = (int(side) for side in mask.toBbox([as_coco(rle, size)])[0])
        ends = np.cumsum(_runs(rle.decode("ascii")) or []).clip(left * size[0], (left + width) * size[0])
        columns = np.repeat(np.arange(len(ends)) % 2 == 1, np.diff(ends, prepend=left * size[0])).reshape(width, size[0])
        yield top, left, columns[:, top : top + height].T


def encoded(masks: np.ndarray) -> list[bytes]:
    """Return the encodings of masks (D, H, W) bool."""
    from faster_coco_eval.core import mask

    if not len(masks):
        return []
    return [bytes(each["counts"]) for each in mask.encode(np.asfortranarray(masks.transpose(1, 2, 0), dtype=np.uint8))]


def areas_of(rles: Sequence[bytes], size: Size) -> list[float]:
    """Return how many pixels each mask has."""
    from faster_coco_eval.core import mask

    return [float(area) for area in mask.area([as_coco(each, size) for each in rles])] if rles else []


def as_coco(rle: bytes, size: Size) -> dict[str, Any]:
    """Return an encoding as COCO's files and its library have it; `counts` is text that JSON can hold."""
    return {"size": list(size), "counts": rle.decode("ascii")}


def checked_polygon(given: Any, size: Size) -> list[float]:
    """Return a polygon of which every corner is in the image, or as near to it as its longer side."""
    if not isinstance(given, list) or len(given) < 6 or len(given) % 2:
        raise CorruptError(f"segmentation: polygon {given!r:.100}; [x, y, x, y, ...] of three corners or more is expected")
    longer = max(size)
    if not all(isinstance(each, (int, float)) and -longer <= each <= 2 * longer for each in given):
        raise CorruptError(f"segmentation: polygon {given!r:.100} is not numbers in the image ({size[1]}×{size[0]})")
    points = np.array(given, dtype=np.float64).reshape(-1, 2)
    outline = np.abs(points - np.roll(points, 1, 0)).max(1).sum() if 3 * longer * len(points) > OUTLINE else 0
    if outline > OUTLINE:
        raise CorruptError(
            f"segmentation: polygon {given!r:.100} has sides of {outline:.0f} pixels together; at most {OUTLINE} are expected"
        )
    return [float(each) for each in given]


def _runs(text: str) -> list[int] | None:
    """Return the run lengths of COCO's compressed text: groups of 5 bits, differences from the second run before; else None."""
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        group = ord(letter) - 48
        if not 0 <= group < 64 or shift > LONGEST:
            return None
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            value -= (1 << shift) if group & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return None if shift else runs

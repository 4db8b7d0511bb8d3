"""Detections of models whose predictions match boxes one to one, so that nothing is suppressed."""

import torch
from torch import Tensor

from lab.tasks.detection.types import DetectorOutput


def unsuppressed(output: DetectorOutput, boxes: Tensor, count: int, threshold: float) -> list[dict[str, Tensor]]:
    """Return each image's best pairs of box and class as Detector.detections does, none of them suppressed, with `index`, their queries.

    Args:
        output: the last layer's.
        boxes: (N, A, 4 or 5), the predicted boxes in pixels.
        count: the most detections of an image.
        threshold: the score above which a detection is kept.
    """
    best, labels, index = best_of(output, count)
    parts = {"boxes": rows_at(boxes, index), "scores": best, "labels": labels, "index": index}
    return [{name: part[image][sure] for name, part in parts.items()} for image, sure in enumerate(best > threshold)]


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Return boxes (N, A, 4) inside of their images. sizes: (N, 2) height and width of each image inside its padding."""
    return boxes.clamp(min=0).minimum(sizes.to(boxes).flip(1).repeat(1, 2)[:, None])


def least(first: int, second: int) -> int:
    """Return the smaller number, as a symbol in torch.export, which would bind the image's size by a comparison."""
    return torch.sym_min(first, second) if torch.compiler.is_exporting() else min(first, second)


def best_of(output: DetectorOutput, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best scores (N, D), their classes (N, D) and the indices of their queries (N, D)."""
    scores, classes = output.logits.float().sigmoid(), output.logits.shape[-1]
    best, place = scores.flatten(1).topk(least(count, scores.shape[1] * classes))
    return best, place % classes, place // classes


def rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows (N, D, X) of (N, A, X) at the indices (N, D)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))

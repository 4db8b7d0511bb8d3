"""RetinaNet's encoding of boxes, for batches."""

import math

import torch
from torch import Tensor

LARGEST = math.log(1000.0 / 16)  # torchvision's limit, so that no predicted side overflows


class DeltaCoder:
    """Offsets of centres in units of the anchor's sides, and logarithms of ratios of sides; Ren et al. 2015 (arXiv 1506.01497).

    The same as torchvision's BoxCoder with weights of 1, which takes single images and waits for the device, because it copies constants
    from the host in each call.
    """

    def encode(self, anchors: Tensor, boxes: Tensor) -> Tensor:
        """Return deltas (..., 4) from anchors (A, 4) or (..., 4) to boxes (..., 4)."""
        center, sides = _center_and_sides(boxes)
        anchor_center, anchor_sides = _center_and_sides(anchors)
        return torch.cat([(center - anchor_center) / anchor_sides, (sides / anchor_sides).log()], -1)

    def decode(self, deltas: Tensor, anchors: Tensor) -> Tensor:
        """Return boxes (..., 4) from deltas (..., 4) and anchors (A, 4) or (..., 4)."""
        anchor_center, anchor_sides = _center_and_sides(anchors)
        center = deltas[..., :2] * anchor_sides + anchor_center
        half = 0.5 * (deltas[..., 2:].clamp(max=LARGEST).exp() * anchor_sides)
        return torch.cat([center - half, center + half], -1)


def _center_and_sides(boxes: Tensor) -> tuple[Tensor, Tensor]:
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * sides, sides

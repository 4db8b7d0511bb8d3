"""A custom loss over pairs of boxes, for detectors:

uv run experiments/train.py task=detection box_loss=custom box_loss.target=examples/my_box_loss.py:corner_iou
"""

import triton
import triton.language as tl

from lossforge.losses import boxes


@boxes(hyper={"eps": 1e-7})
@triton.jit
def corner_iou(x1, y1, x2, y2, u1, v1, u2, v2, eps):
    """L = 1 - I/U + (d₁² + d₂²)/(2 c²), d the distances of the upper left and of the lower right corners, c the diagonal of the hull."""
    width, height = tl.minimum(x2, u2) - tl.maximum(x1, u1), tl.minimum(y2, v2) - tl.maximum(y1, v1)
    shared = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
    across, down = tl.maximum(x2, u2) - tl.minimum(x1, u1), tl.maximum(y2, v2) - tl.minimum(y1, v1)
    distance = (x1 - u1) * (x1 - u1) + (y1 - v1) * (y1 - v1) + (x2 - u2) * (x2 - u2) + (y2 - v2) * (y2 - v2)
    return 1.0 - shared / (union + eps) + 0.5 * distance / (across * across + down * down + eps)

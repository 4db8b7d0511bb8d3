"""The numbers of what assigns boxes: to anchors, and to queries. They need no Triton."""

from typing import NamedTuple


class Numbers(NamedTuple):
    """How to assign; lossforge.losses.task_aligned_assign says what each means. topk2: 0 for None."""

    topk: int
    topk2: int
    alpha: float
    beta: float
    eps: float
    margin: float
    min_side: float
    iou: str
    tood: bool
    logits: bool
    dense: bool


class Weights(NamedTuple):
    """Factors of the three costs, and the numbers of the focal one."""

    classes: float
    corners: float
    overlap: float
    alpha: float
    gamma: float

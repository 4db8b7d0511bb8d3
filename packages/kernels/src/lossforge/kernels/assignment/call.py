"""The numbers of a task-aligned assignment."""

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

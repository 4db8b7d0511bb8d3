"""Settings that do not go together are refused as the words are read, whichever the task."""

import pytest

from lab.base.errors import UserError
from lab.config.loss_schema import LOSSES
from lab.config.settings import load
from lab.registry import TASKS

OF_TASKS = sorted(set(TASKS) - {"custom"})
NEEDED = {"distillation": ["task.teacher=x.pt"]}


@pytest.mark.parametrize("task", OF_TASKS)
def test_a_loss_of_another_task_is_refused(task):
    name = min(set(LOSSES) - set(TASKS[task].losses) - {"custom", "auto"})
    with pytest.raises(UserError, match=rf"loss={name}: is a loss of (task=\w+(?:, | and ))*task=\w+; task={task} takes "):
        load([f"task={task}", f"loss={name}", *NEEDED.get(task, [])])


@pytest.mark.parametrize("task", OF_TASKS)
def test_data_of_another_task_is_refused(task):
    data = "digit_pairs" if task != "preference" else "digits"
    with pytest.raises(UserError, match=f"data={data}: task={task} takes "):
        load([f"task={task}", f"data={data}", *NEEDED.get(task, [])])


NO_FUSED_FORM = "loss.fused_head=true: "
PLAIN = [
    ("task=preference loss.implementation=torch", "Choices: lossforge"),
    ("task=preference data.mixup=0.2", "mixup"),
    ("task=multilabel model=fcos_tiny", "task=multilabel takes a classifier"),
    ("task=multilabel box_loss=giou", "it is for task=detection and task=instances"),
    ("task=distillation", "task.teacher: must be given"),
    ("task=distillation task.teacher=x.pt task.temperature=0", "task.temperature"),
    ("task=contrastive loss.scale=0", r"loss.scale=0.* out of range"),
    ("task=contrastive loss.implementation=jax", r"Choices: lossforge, torch"),
    ("task=contrastive loss.fused_head=true", f"{NO_FUSED_FORM}task=contrastive does not have one loss"),
    (
        "task=detection loss.fused_head=true",
        f"{NO_FUSED_FORM}task=detection does not have one loss .*; classification, dist.* have",
    ),
    ("loss=mae loss.fused_head=true", f"{NO_FUSED_FORM}loss=mae is computed from the softmax of all logits"),
    ("loss=seesaw loss.fused_head=true", f"{NO_FUSED_FORM}loss=seesaw has no fused form"),
    ("loss=arcface loss.fused_head=true", f"{NO_FUSED_FORM}loss=arcface has no fused form"),
    ("loss.implementation=torch loss.fused_head=true", f"{NO_FUSED_FORM}loss.implementation=torch has no fused losses"),
    ("task=oriented box_loss=giou", "task=oriented takes one of auto, probiou, .*; it is for task=detection and task=instances"),
    ("task=detection box_loss=gwd", r"box_loss=gwd: task=detection takes one of auto, iou, .*; it is for task=oriented\."),
    ("task=segmentation loss=auto", "loss=auto: task=segmentation needs the name of a loss"),
    ("task=detection data.label_noise=0.1", "label_noise"),
    ("data=folder data.imbalance=10", "imbalance of data="),
    ("task=detection data.batch_scale=[1.5,0.5]", "data.batch_scale=.*: the smallest and the largest value are expected"),
    ("task=detection data.digit_pixels=[20,10]", "data.digit_pixels=.*: the smallest and the largest value are expected"),
    ("task=detection data.scale=[1.0]", "data.scale=.*: the smallest and the largest value are expected"),
    ("task=detection data.digits=[9]", "data.digits=.*: the smallest and the largest value are expected"),
]


@pytest.mark.parametrize(("words", "said"), PLAIN)
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        load(words.split())

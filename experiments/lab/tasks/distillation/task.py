"""The distillation task: a classifier that learns from labels and from another classifier's logits.

The loss is (1 - w) · loss= + w · T² KL(teacher ‖ student), both softmaxes at temperature T (Hinton et al., Distilling the Knowledge in a
Neural Network, arXiv 1503.02531). In place of KL stands another divergence of logits, or dkd_loss or dist_loss with their default weights.
An evaluation's loss uses only the labels, so that it compares with a run without a teacher.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.base.paths import ROOT, absolute
from lab.config.loss_schema import LOSSES
from lab.config.schema import ImagesConfig, TrainConfig
from lab.config.settings import Settings, flat
from lab.data.batch import Batch
from lab.data.load import load_data
from lab.data.sets import Data, Norm
from lab.data.specs import SOURCES
from lab.run.machine import autocast
from lab.run.saved import file_of, load_checkpoint, load_weights, refuse_changed, reload_file
from lab.run.trust import checked, is_trusted
from lab.tasks.classification.task import Classification
from lab.tasks.distillation import DistillationConfig
from lab.tasks.heads import HeadInput
from lab.tasks.losses import computed
from lab.tasks.models import build_classifier, model_norm, placed

DIVERGENCES = {
    "kl": ("kl_div_with_logits", "linear_kl_div"),
    "js": ("js_div_with_logits", "linear_js_div"),
    "total_variation": ("total_variation_with_logits", "linear_total_variation"),
    "cosine_distance": ("cosine_distance_with_logits", "linear_cosine_distance"),
}
"""The functions of logits, and of a head's input, by `task.divergence`."""


class Distillation(Classification):
    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        super().__init__(config, data, device)
        self.distillation = cast(DistillationConfig, config.task)
        if self.criterion.class_weight is not None:
            raise UserError("loss.class_weight: task=distillation has no such weights, as the teacher's part is a mean of all samples.")
        _refuse_unfit(config)
        self.teacher = load_teacher(config, data, device)

    def prepare(self, batch: Batch, *, training: bool) -> Batch:
        """Mix the batch, and add the teacher's logits of the mixed images in training."""
        batch = super().prepare(batch, training=training)
        if training:
            with torch.no_grad(), autocast(self.device, self.config.trainer.amp):
                batch.teacher = self.teacher(batch.images)
        return batch

    def loss(self, output: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        labels = super().loss(output, batch, normalizer)
        if batch.teacher is None:
            return labels
        share, name = self.distillation.weight, self.distillation.divergence
        of_labels = name in ("dkd", "dist")
        known = self.dkd_or_dist(name, output, batch, normalizer) if of_labels else self.divergence(output, batch.teacher, normalizer)
        return (1 - share) * labels + share * known

    def dkd_or_dist(self, name: str, output: Any, batch: Batch, normalizer: Tensor) -> Tensor:
        """Return DKD's sum over the rows, or DIST of the batch times its rows, divided by `normalizer`."""
        from lossforge.losses import dist_loss, dkd_loss

        temperature, teacher, loss = self.distillation.temperature, cast(Tensor, batch.teacher), self.config.loss
        if name == "dkd":
            return computed(loss, dkd_loss)(output, teacher, batch.target, temperature=temperature, reduction="sum") / normalizer
        return computed(loss, dist_loss)(output, teacher, temperature=temperature) * len(output) / normalizer

    def divergence(self, output: Tensor | HeadInput, teacher: Tensor, normalizer: Tensor) -> Tensor:
        """Return T² Σ KL(teacher ‖ student) / normalizer, summed over the rows; or another divergence in place of T² KL."""
        from lossforge import losses

        temperature, name = self.distillation.temperature, self.distillation.divergence
        if name == "kl" and isinstance(output, Tensor) and not self.criterion.lossforge:
            student, known = (F.log_softmax(logits.float() / temperature, -1) for logits in (output, teacher))
            return temperature**2 * F.kl_div(student, known, reduction="sum", log_target=True) / normalizer
        options: dict[str, Any] = {"reduction": "sum", "normalizer": normalizer}
        if name != "cosine_distance":
            options |= {"temperature": temperature, "temperature_squared": True}
        of_logits, of_head = (getattr(losses, each) for each in DIVERGENCES[name])
        if isinstance(output, HeadInput):
            return cast(Tensor, of_head(output.features, output.weight, teacher, output.bias, **options))
        return computed(self.config.loss, of_logits)(output, teacher, **options)


def _refuse_unfit(config: TrainConfig) -> None:
    """Raise UserError for settings that do not fit the divergence."""
    name, data = cast(DistillationConfig, config.task).divergence, cast(ImagesConfig, config.data)
    if name in ("dkd", "dist") and config.loss.fused_head:
        raise UserError(f"task.divergence={name}: takes all logits, which loss.fused_head=true does not keep. Use loss.fused_head=false.")
    if name == "dkd" and (data.mixup or data.cutmix):
        raise UserError("task.divergence=dkd: needs one label an image, which mixup and cutmix blend. Use data.mixup=0 data.cutmix=0.")


def load_teacher(config: TrainConfig, data: Data, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from the run's normalised images to the teacher's logits, by its averaged weights if it has them.

    Raises:
        UserError: the checkpoint does not exist, or is not of a classifier of the same data and held-out images.
    """
    given = cast(DistillationConfig, config.task).teacher
    path, what = file_of(absolute(given, ROOT), "task.teacher"), f"task.teacher={given}"
    state = load_checkpoint(path, "task.teacher")
    _refuse_other_data(given, state, config, data)
    ours, tree = Settings(config).flat(), of_model(state["config"])
    same = {name for name, value in flat(tree).items() if ours.get(name) == value}
    tree = checked(what, tree, same, is_trusted(config.trust, path), state["origin"])
    known = reload_file(what, tree, []).config
    size = cast(ImagesConfig, known.data).image_size
    with torch.random.fork_rng(devices=[]):  # the student starts with the same weights as without a teacher
        model = build_classifier(known, channels=data.channels, classes=len(data.classes), image_size=size)
    load_weights(model, state, f"task.teacher={given}")
    model = placed(model, device, channels_last=config.trainer.channels_last).eval().requires_grad_(False)
    return _renormalised(model, data.norm, Norm(**state["norm"]), device)


def of_model(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that define a classifier; to run it, another person's code, such as a loss or callbacks, is not needed."""
    loss = LOSSES.get(tree["loss"].get("name"))
    of_head = loss is not None and loss.takes == "cosines"  # the last layer has no bias, and the loss's scale
    rest = {"task": {"name": "classification"}, "loss": tree["loss"] if of_head else {"name": "ce"}, "box_loss": {"name": "auto"}}
    return tree | rest | {"optim": {}, "trainer": {}, "tracking": {}}


def _renormalised(model: nn.Module, given: Norm, wanted: Norm, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that changes the normalisation of images and calls the model."""
    mean, std, own_mean, own_std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (given.mean, given.std, wanted.mean, wanted.std)
    )
    return lambda images: model(images * (std / own_std) + (mean - own_mean) / own_std)


def _refuse_other_data(given: str, state: dict[str, Any], config: TrainConfig, data: Data) -> None:
    """Raise UserError unless the teacher has the same data, because images it learned from must not be held out here."""
    theirs, task = state["config"]["data"], state["config"]["task"].get("name")
    if task not in ("classification", "distillation"):
        raise UserError(f"task.teacher={given}: is a checkpoint of task={task}; a classifier's is expected.")
    for name in SOURCES[config.data.name].identity:
        ours = getattr(config.data, name, None)
        if theirs.get(name) != ours:
            was, now = ("null" if value is None else value for value in (theirs.get(name), ours))
            raise UserError(f"task.teacher={given}: was trained with data.{name}={was}; this run has data.{name}={now}.")
    if state["classes"] != data.classes:
        raise UserError(f"task.teacher={given}: knows other classes than data={config.data.name}.")
    refuse_changed(state, config, data)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Distillation:
    data = load_data(cast(ImagesConfig, config.data), model_norm(config.model, saved), device, config.seed, saved)
    return Distillation(config, data, device)

"""Make a function of a model's output and a batch from a loss's settings."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.base.errors import UserError, unknown
from lab.config.loss_schema import (
    BceConfig,
    CrossEntropyConfig,
    CustomConfig,
    LogitAdjustedConfig,
    LossConfig,
    PreferenceConfig,
    SeesawConfig,
)
from lab.config.objects import find
from lab.config.schema import DataConfig, ImagesConfig
from lab.data.batch import Batch
from lab.tasks.heads import HeadInput
from lab.tasks.plain_loss import PlainLoss, plain_loss


class Criterion:
    """Sum a loss over a batch's samples (and, if element-wise, their classes), divided by `normalizer`.

    `normalizer(batch)` is a batch's part of the divisor: the number of its samples, or with class weights the sum of their weights, as in
    `torch.nn.functional.cross_entropy`. So the loss of a large batch equals the sum of its parts' losses.
    """

    def __init__(
        self,
        config: LossConfig,
        data: DataConfig,
        classes: int,
        groups: int,
        device: torch.device,
        counts: Tensor | None = None,
        samples: int | None = None,
    ) -> None:
        """Check the settings; `counts`: the training samples of each class, of all `samples`, for losses that use them."""
        from lossforge.losses import fuse_linear

        self.config, self.name, self.classes = config, config.name, classes
        self.lossforge = config.implementation == "lossforge"
        self.loss: Any
        self.loss, self.hyper = by_rows(config, counts, device) or loss_of(config, device)
        self.activation = activation_of(config)
        self.class_weight = self.pos_weight = self.group_weight = None
        self.rowwise = self.loss.template.name == "rowwise"
        if isinstance(self.loss, PlainLoss):
            if config.fused_head:
                raise UserError(f"loss.fused_head=true: {self.loss.setting} is not a loss of lossforge, and cannot be fused.")
            return
        self.fused = fuse_linear(self.loss.function)
        self.tensors: dict[str, Tensor] = {}
        if isinstance(config, LogitAdjustedConfig) and counts is not None:
            self.tensors["log_prior"] = (counts.clamp(min=1) / counts.sum()).log().to(device)
        if config.name == "distribution_balanced" and counts is not None:
            self.tensors["class_counts"] = counts.to(device)
            self.hyper["num_samples"] = int(counts.sum()) if samples is None else samples
        if isinstance(config, CrossEntropyConfig):
            self.class_weight = per_class("loss.class_weight", config.class_weight, classes, device)
            for name in ("z_loss", "softcap", "scale"):
                if not self.lossforge and self.hyper[name] != self.loss.hyper[name]:
                    raise UserError(f"loss.implementation=torch has no loss.{name}; only lossforge does.")
        if isinstance(config, BceConfig):
            self.pos_weight = per_class("loss.pos_weight", config.pos_weight, classes, device)
        if isinstance(config, PreferenceConfig):
            self.group_weight = _group_weight(config.group_weight, groups, data, device)

    def normalizer(self, batch: Batch) -> Tensor:
        if self.class_weight is None:
            return torch.full((), float(len(batch)), device=batch.images.device)
        first = self.class_weight[batch.target].sum()
        if batch.target_b is None or batch.lam is None:
            return first
        return batch.lam * first + (1 - batch.lam) * self.class_weight[batch.target_b].sum()

    def __call__(self, output: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        """Return the loss of a batch.

        Args:
            output: logits (N, C), or a HeadInput.
            batch: has targets (N,), a mixup pair of them, or for element-wise losses (N, C); weights (N,) and groups (N,) if the data has
                them.
            normalizer: the divisor of the sum, a 0-d tensor.
        """
        if isinstance(self.loss, PlainLoss):
            return self.loss(cast(Tensor, output).float(), batch, normalizer)
        if isinstance(output, Tensor) and self.config.takes != "logits":
            output = probabilities(output.float(), self.config.takes)
        if self.rowwise:
            return self._rows(output, batch, normalizer)
        if isinstance(output, Tensor) and not self.lossforge:
            return self._plain_elements(output, batch, normalizer)
        return self._elements(output, batch, normalizer)

    def _computed(self, given: Tensor | HeadInput, target: Tensor, **options: Any) -> Tensor:
        """Compute the library's loss of logits, or its fused loss of a HeadInput."""
        if isinstance(given, Tensor):
            return cast(Tensor, self.loss.function(given, target, **options))
        named = {"loss_weight" if name == "weight" else name: value for name, value in options.items()}  # there "weight" is the head's
        return cast(Tensor, self.fused(given.features, given.weight, target, bias=given.bias, **named))

    def _elements(self, given: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        tensors: dict[str, Tensor | None] = {"weight": _of_elements(batch.weight, batch)}
        if isinstance(self.config, PreferenceConfig):
            group = None if self.group_weight is None else _column(batch.group)
            tensors = {"preference": _of_elements(batch.weight, batch), "group": group, "group_weight": self.group_weight}
        if self.pos_weight is not None:
            tensors["pos_weight"] = self.pos_weight
        options = {**self.hyper, **self.tensors, **tensors, **_pair_options(batch)}
        return self._computed(given, batch.target, **options, reduction="sum", normalizer=normalizer)

    def _plain_elements(self, given: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        """Compute the loss from dense targets by another library that has it, else by our reference."""
        options = {**self.hyper, **self.tensors} | ({} if self.pos_weight is None else {"pos_weight": self.pos_weight})
        # timm smooths class indices and dense targets differently; the oracle of distribution_balanced knows no counts
        function = None if self.name in ("bce_smoothed", "distribution_balanced") else self.loss.oracle()
        if self.name == "multilabel_soft_margin" and batch.known is not None:
            options["weight"] = batch.known.float()  # it has a value for each sample alone; its weight is of elements
        with torch.autocast(given.device.type, enabled=False):
            if function is not None:
                dense = batch.target if batch.target.is_floating_point() else _pair(lambda t: F.one_hot(t, self.classes).float(), batch)
                elements = function(given.float(), dense, **options, reduction="none")
            else:
                elements = self.loss.reference(given.float(), batch.target, **options, **_pair_options(batch), reduction="none")
        weight = self._sample_weight(batch)
        weight = weight if elements.ndim == 1 else _of_elements(weight, batch)
        weighted = elements if weight is None else elements * weight
        return cast(Tensor, weighted.sum() / normalizer)

    def _rows(self, given: Tensor | HeadInput, batch: Batch, normalizer: Tensor) -> Tensor:
        options: dict[str, Any] = {**self.hyper, **self.tensors}
        if self.class_weight is not None:
            options["weight"] = self.class_weight
        if self.name == "ce" and not self.lossforge and isinstance(given, Tensor):
            plain = {name: options[name] for name in ("label_smoothing", "weight") if name in options}
            rows = _pair(lambda target: F.cross_entropy(given.float(), target, reduction="none", **plain), batch)
        else:
            function = self._computed if self.lossforge else self.loss.reference
            options |= _pair_options(batch)
            if batch.weight is None:
                return cast(Tensor, function(given, batch.target, **options, reduction="sum", normalizer=normalizer))
            rows = function(given, batch.target, **options, reduction="none")
        return (rows if batch.weight is None else rows * batch.weight).sum() / normalizer

    def _sample_weight(self, batch: Batch) -> Tensor | None:
        if self.group_weight is None or batch.group is None:
            return batch.weight
        weight = self.group_weight[batch.group]
        return weight if batch.weight is None else batch.weight * weight

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the classes' probabilities under the trained model."""
        return probabilities(logits, self.activation)


def activation_of(config: LossConfig) -> str:
    """Return softmax or sigmoid, the function from logits to probabilities for which the loss trains a model."""
    if isinstance(config, CustomConfig):
        if config.probabilities != "auto":
            return config.probabilities
        return "sigmoid" if custom_loss("loss", config.target, config.hyper).template.name == "elementwise" else "softmax"
    return config.activation


def probabilities(logits: Tensor, kind: str) -> Tensor:
    """Return probabilities (N, C) of logits (N, C); kind: softmax or sigmoid."""
    return logits.softmax(-1) if kind == "softmax" else logits.sigmoid()


def has_kernels(config: LossConfig) -> bool:
    """Return whether lossforge has kernels for the loss; other losses are plain torch."""
    if isinstance(config, CustomConfig):
        return not isinstance(custom_loss("loss", config.target, config.hyper), PlainLoss)
    return config.kernels


def by_rows(config: LossConfig, counts: Tensor | None, device: torch.device) -> tuple[PlainLoss, dict[str, Any]] | None:
    """Return a loss that has a value a row, or one for all, and no mixup pairs or divisor of its own; None for other losses.

    Raises:
        UserError: it needs the counts of classes, and the data has none.
    """
    from lossforge.losses import LDAMLoss, two_way_loss, zlpr_loss

    if isinstance(config, SeesawConfig):
        return seesaw(config, counts, device)
    if config.name == "zlpr":
        function: Any = partial(zlpr_loss, reduction="none")
    elif config.name == "two_way":
        function = two_way_loss
    elif config.name == "multi_margin" or config.takes == "cosines":
        function = partial(loss_of(config, device)[0].function, reduction="none")
    else:
        return None
    options = hyper_of(config)
    if config.name == "ldam":
        if counts is None:
            raise UserError("loss=ldam: needs the number of training samples of each class.")
        options["margin"] = cast(Tensor, LDAMLoss(counts.clamp(min=1)).margin).to(device)
    scale = options.get("scale", 1.0) if config.takes == "cosines" else 1.0  # the model's last layer gives cosines times the scale
    return PlainLoss(computed(config, lambda logits, target: function(logits / scale, target, **options)), f"loss={config.name}"), {}


def hyper_of(config: LossConfig) -> dict[str, Any]:
    """Return the settings of a loss beyond those that every loss has."""
    return {item.name: getattr(config, item.name) for item in fields(config) if item.name not in COMMON}


COMMON = {item.name for item in fields(LossConfig)}


def computed(config: LossConfig, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of the library as `loss.implementation` has it computed."""
    from lossforge.losses import plain_torch

    def called(*args: Any, **options: Any) -> Tensor:
        with nullcontext() if config.implementation == "lossforge" else plain_torch():
            return function(*args, **options)

    return called


def loss_of(config: LossConfig, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the loss of the settings as a registry entry, or a PlainLoss if it has no kernels; and its hyper-parameters."""
    from lossforge.losses.registry import LOSSES

    if isinstance(config, CustomConfig):
        return custom_loss("loss", config.target, config.hyper, device), dict(config.hyper)
    loss = LOSSES[config.name]
    return loss, {item.name: getattr(config, item.name) for item in fields(config) if item.name in loss.hyper}


def seesaw(config: SeesawConfig, counts: Tensor | None, device: torch.device) -> tuple[PlainLoss, dict[str, Any]]:
    """Return the seesaw loss of training data with `counts` samples of each class (C,), a value for each row, and no more settings.

    Raises:
        UserError: the data has no count of its classes.
    """
    from lossforge.losses import seesaw_loss

    if counts is None:
        raise UserError("loss=seesaw: needs the number of training samples of each class.")
    rows = partial(seesaw_loss, class_counts=counts.to(device), p=config.p, q=config.q, eps=config.eps, reduction="none")
    return PlainLoss(rows, "loss=seesaw"), {}


def custom_loss(group: str, target: str, hyper: Mapping[str, float], device: torch.device | None = None) -> Any:
    """Return a custom loss, named by the settings of `group`, as a registry entry; a PlainLoss if it has no kernels.

    Raises:
        UserError: it cannot be found, or is not a loss.
    """
    from lossforge.losses.custom import CustomLoss

    found = find(f"{group}.target", target)
    if not isinstance(found, CustomLoss):
        return plain_loss(f"{group}.target={target}", found, hyper, device or torch.device("cpu"))
    loss = found.loss
    for name in hyper:
        if name not in loss.hyper:
            raise unknown(f"{group}.hyper.{name}", name, loss.hyper)
    return loss


def _pair(function: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    if batch.target_b is None or batch.lam is None:
        return function(batch.target)
    return batch.lam * function(batch.target) + (1 - batch.lam) * function(batch.target_b)


def _pair_options(batch: Batch) -> dict[str, Any]:
    return {} if batch.target_b is None else {"target_b": batch.target_b, "lam": batch.lam}


def _column(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[:, None]


def _of_elements(weight: Tensor | None, batch: Batch) -> Tensor | None:
    """Return the weights of elements, (N, 1) or (N, C), from those of samples (N,): 0 for samples without a label; None if all are 1."""
    weight = _column(weight)
    if batch.known is None:
        return weight
    return batch.known.float() if weight is None else weight * batch.known


def per_class(setting: str, given: list[float] | None, classes: int, device: torch.device) -> Tensor | None:
    """Return a factor for each class (C,); raise UserError unless there is one for each."""
    if given is None:
        return None
    if len(given) != classes:
        raise UserError(f"{setting}: has {len(given)} numbers; the data has {classes} classes and each needs one.")
    return torch.tensor(given, device=device)


def _group_weight(given: list[float] | None, groups: int, data: DataConfig, device: torch.device) -> Tensor | None:
    if given is None:
        return None
    if not groups:
        raise UserError("loss.group_weight: the data has no groups; give them by data.class_group or a column group in data.csv.")
    if len(given) != groups:
        raise UserError(f"loss.group_weight: has {len(given)} numbers; the data has {groups} groups and each needs one.")
    if isinstance(data, ImagesConfig) and (data.mixup or data.cutmix):
        raise UserError("loss.group_weight: mixup and cutmix blend samples of different groups; use data.mixup=0 data.cutmix=0.")
    return torch.tensor(given, device=device)

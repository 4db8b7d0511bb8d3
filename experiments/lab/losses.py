"""From a loss's settings to a function of logits and a batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.batch import Batch
from lab.errors import UserError
from lab.schema import (
    AsymmetricConfig,
    BceConfig,
    CrossEntropyConfig,
    DataConfig,
    FocalConfig,
    HuberConfig,
    LossConfig,
    PolyBceConfig,
    PreferenceConfig,
    SmoothL1Config,
)

SOFTMAX = {"ce", "mae", "mse", "huber", "smooth_l1"}


class Criterion:
    """Sum over a batch's samples (and, element-wise, their classes), divided by `normalizer`.

    `share(batch)` is what a batch adds to the divisor: the number of its samples, or with class weights the sum of their
    weights, as `torch.nn.functional.cross_entropy` has it. So the loss of a large batch equals the sum of its parts' losses.
    """

    def __init__(self, config: LossConfig, data: DataConfig, classes: int, groups: int, device: torch.device) -> None:
        self.config, self.name, self.classes = config, config.name, classes
        self.lossforge = config.implementation == "lossforge"
        self.class_weight = self.pos_weight = self.group_weight = None
        if isinstance(config, CrossEntropyConfig):
            self.class_weight = _per_class("loss.class_weight", config.class_weight, classes, device)
            if not self.lossforge and (config.z_loss or config.softcap):
                raise UserError("loss.implementation=torch has no loss.z_loss and no loss.softcap; only lossforge does.")
        if isinstance(config, BceConfig):
            self.pos_weight = _per_class("loss.pos_weight", config.pos_weight, classes, device)
        if isinstance(config, PreferenceConfig):
            self.group_weight = _group_weight(config.group_weight, groups, data, device)
        self.call = cast(Callable[..., Tensor], getattr(self, f"_{config.name}"))

    def share(self, batch: Batch) -> Tensor:
        if self.class_weight is None:
            return torch.full((), float(len(batch)), device=batch.images.device)
        first = self.class_weight[batch.target].sum()
        if batch.target_b is None or batch.lam is None:
            return first
        return batch.lam * first + (1 - batch.lam) * self.class_weight[batch.target_b].sum()

    def __call__(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        """Loss of a batch.

        Args:
            logits: (N, C).
            batch: with targets (N,), a mixup pair of them, and weights (N,) and groups (N,) where the data has them.
            normalizer: divisor of the sum, a 0-d tensor.
        """
        return self.call(logits, batch, normalizer)

    def _ce(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        config = cast(CrossEntropyConfig, self.config)
        options: dict[str, Any] = {"weight": self.class_weight, "label_smoothing": config.label_smoothing}
        if not self.lossforge:
            rows = _pair(lambda target: F.cross_entropy(logits.float(), target, reduction="none", **options), batch)
        else:
            from lossforge.losses import cross_entropy

            options |= {"z_loss": config.z_loss, "softcap": config.softcap, "target_b": batch.target_b, "lam": batch.lam}
            if batch.weight is None:
                return cast(Tensor, cross_entropy(logits, batch.target, normalizer=normalizer, **options))
            rows = cast(Tensor, cross_entropy(logits, batch.target, reduction="none", **options))
        return (rows if batch.weight is None else rows * batch.weight).sum() / normalizer

    def _mae(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self._difference("l1_loss", logits, batch, normalizer)

    def _mse(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self._difference("mse_loss", logits, batch, normalizer)

    def _huber(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self._difference("huber_loss", logits, batch, normalizer, delta=cast(HuberConfig, self.config).delta)

    def _smooth_l1(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self._difference("smooth_l1_loss", logits, batch, normalizer, beta=cast(SmoothL1Config, self.config).beta)

    def _difference(self, function: str, logits: Tensor, batch: Batch, normalizer: Tensor, **shape: float) -> Tensor:
        """A loss of the softmax probabilities' difference from the target's."""
        probability = logits.float().softmax(-1)
        if self.lossforge:
            import lossforge.losses

            options: dict[str, Any] = {"weight": _column(batch.weight), "normalizer": normalizer}
            return cast(Tensor, getattr(lossforge.losses, function)(probability, batch.target, **shape, **_pair_options(batch), **options))
        return self._reduce(getattr(F, function)(probability, self._dense(batch), reduction="none", **shape), batch, normalizer)

    def _focal(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        config = cast(FocalConfig, self.config)
        shape: dict[str, Any] = {"alpha": config.alpha, "gamma": config.gamma}
        if self.lossforge:
            from lossforge.losses import sigmoid_focal_loss

            options: dict[str, Any] = {"reduction": "mean", "weight": _column(batch.weight), "normalizer": normalizer}
            return sigmoid_focal_loss(logits, batch.target, **shape, **_pair_options(batch), **options)
        from torchvision.ops import sigmoid_focal_loss as reference

        return self._reduce(reference(logits.float(), self._dense(batch), **shape, reduction="none"), batch, normalizer)

    def _asymmetric(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        config = cast(AsymmetricConfig, self.config)
        shape: dict[str, Any] = {"gamma_neg": config.gamma_neg, "gamma_pos": config.gamma_pos, "clip": config.clip}
        if self.lossforge:
            from lossforge.losses import asymmetric_loss_multi_label

            options: dict[str, Any] = {"weight": _column(batch.weight), "normalizer": normalizer}
            return asymmetric_loss_multi_label(logits, batch.target, **shape, **_pair_options(batch), **options)
        from timm.loss import AsymmetricLossMultiLabel

        return self._reduce(AsymmetricLossMultiLabel(**shape, reduction="none")(logits, self._dense(batch)), batch, normalizer)

    def _poly_bce(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        config = cast(PolyBceConfig, self.config)
        shape: dict[str, Any] = {"epsilon": config.epsilon, "gamma": config.gamma, "alpha": config.alpha}
        if self.lossforge:
            from lossforge.losses import poly_binary_cross_entropy

            options: dict[str, Any] = {"weight": _column(batch.weight), "normalizer": normalizer}
            return poly_binary_cross_entropy(logits, batch.target, **shape, **_pair_options(batch), **options)
        from timm.loss import PolyBinaryCrossEntropy

        return self._reduce(PolyBinaryCrossEntropy(**shape, reduction="none")(logits, self._dense(batch)), batch, normalizer)

    def _bce(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        if self.lossforge:
            from lossforge.losses import binary_cross_entropy_with_logits

            options: dict[str, Any] = {"weight": _column(batch.weight), "pos_weight": self.pos_weight, "normalizer": normalizer}
            return binary_cross_entropy_with_logits(logits, batch.target, **options, **_pair_options(batch))
        rows = F.binary_cross_entropy_with_logits(logits.float(), self._dense(batch), pos_weight=self.pos_weight, reduction="none")
        return self._reduce(rows, batch, normalizer)

    def _preference_bce(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        if self.lossforge:
            from lossforge.losses import preference_bce_with_logits

            return preference_bce_with_logits(
                logits, batch.target, **self._preferences(batch), **_pair_options(batch), normalizer=normalizer
            )
        rows = F.binary_cross_entropy_with_logits(logits.float(), self._dense(batch), reduction="none")
        return self._reduce(rows, self._grouped(batch), normalizer)

    def _preference_bce_probability(self, logits: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        probability = logits.float().sigmoid()
        if self.lossforge:
            from lossforge.losses import preference_bce

            return preference_bce(probability, batch.target, **self._preferences(batch), **_pair_options(batch), normalizer=normalizer)
        with torch.autocast(logits.device.type, enabled=False):
            rows = F.binary_cross_entropy(probability, self._dense(batch), reduction="none")
        return self._reduce(rows, self._grouped(batch), normalizer)

    def _preferences(self, batch: Batch) -> dict[str, Any]:
        group = None if self.group_weight is None else _column(batch.group)
        return {"preference": _column(batch.weight), "group": group, "group_weight": self.group_weight}

    def _grouped(self, batch: Batch) -> Batch:
        if self.group_weight is None or batch.group is None:
            return batch
        weight = self.group_weight[batch.group]
        return replace(batch, weight=weight if batch.weight is None else batch.weight * weight)

    def _dense(self, batch: Batch) -> Tensor:
        return _pair(lambda target: F.one_hot(target, self.classes).float(), batch)

    def _reduce(self, elements: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return (elements if batch.weight is None else elements * batch.weight[:, None]).sum() / normalizer

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the trained model says a class's probability is: softmax or sigmoid, as the loss taught it."""
        return logits.softmax(-1) if self.name in SOFTMAX else logits.sigmoid()


def _pair(function: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    if batch.target_b is None or batch.lam is None:
        return function(batch.target)
    return batch.lam * function(batch.target) + (1 - batch.lam) * function(batch.target_b)


def _pair_options(batch: Batch) -> dict[str, Any]:
    return {} if batch.target_b is None else {"target_b": batch.target_b, "lam": batch.lam}


def _column(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[:, None]


def _per_class(setting: str, given: list[float] | None, classes: int, device: torch.device) -> Tensor | None:
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
    if data.mixup or data.cutmix:
        raise UserError("loss.group_weight: mixup and cutmix blend samples of different groups; use data.mixup=0 data.cutmix=0.")
    return torch.tensor(given, device=device)

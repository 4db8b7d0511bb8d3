"""timm: the losses of `timm.loss` and of its training tasks, computed by ours.

    from lossforge.integrations import timm

    timm.patch()                       # then timm.loss and timm.task as before

The `forward` of timm's classes is replaced, so objects keep their class, their attributes and their buffers, and those that were made
before compute with ours, too.

Tested with timm 1.0.20 and 1.0.31.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lossforge.losses import (
    asymmetric_loss_multi_label,
    asymmetric_loss_single_label,
    cross_entropy,
    jsd_cross_entropy,
    kl_div,
    mse_loss,
    poly_binary_cross_entropy,
    poly_cross_entropy,
    smoothed_binary_cross_entropy,
    two_way_loss,
    zlpr_loss,
)
from lossforge.patch.patching import Names, Patch, Replacement, or_theirs, version_of
from lossforge.patch.patching import patch as patch_names

TESTED = "1.0.20, 1.0.31"
NOT_ROWS = "the logits are not (N, C)"
NOT_DENSE = "the targets are not of the logits' shape"
TRAINED_TARGET = "the targets require grad"


def _dense(x: Tensor, target: Tensor) -> str:
    """Return why dense targets are left to timm; "" if ours takes them."""
    return NOT_DENSE if target.shape != x.shape else TRAINED_TARGET if target.requires_grad else ""


def _label_smoothing(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    if x.ndim != 2 or target.is_floating_point():
        return NOT_ROWS if x.ndim != 2 else "the targets are not class indices"
    if abs(self.confidence + self.smoothing - 1) > 1e-12 or not 0 <= self.smoothing < 1:
        return "confidence and smoothing do not sum to 1, or smoothing is outside [0, 1)"
    return _scalar(cross_entropy(x, target, label_smoothing=self.smoothing))


def _soft_target(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    if x.ndim != 2 or target.shape != x.shape or not target.is_floating_point():
        return NOT_ROWS if x.ndim != 2 else "the targets are not one probability a logit"
    return _scalar(cross_entropy(x, target))


def _binary(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    if x.ndim != 2:
        return NOT_ROWS
    if target.shape != x.shape:
        target = target.long().view(-1)
    elif target.requires_grad:
        return TRAINED_TARGET
    return smoothed_binary_cross_entropy(
        x,
        target,
        self.smoothing,
        self.target_threshold,
        self.weight,
        "mean" if self.sum_classes else self.reduction,
        self.sum_classes,
        self.pos_weight,
        getattr(self, "smooth_dense", False),
    )


def _asymmetric_multi(self: Any, x: Tensor, y: Tensor) -> Tensor | str:
    return _dense(x, y) or asymmetric_loss_multi_label(
        x,
        y.float(),
        self.gamma_neg,
        self.gamma_pos,
        self.clip,
        self.eps,
        self.disable_torch_grad_focal_loss,
        getattr(self, "smoothing", 0.0),
        getattr(self, "reduction", "sum"),  # of versions without the option
        getattr(self, "weight", None),
        getattr(self, "pos_weight", None),
    )


def _asymmetric_single(self: Any, inputs: Tensor, target: Tensor, reduction: Any = None) -> Tensor | str:
    if inputs.ndim != 2 or target.ndim != 1:
        return NOT_ROWS
    reduction = "mean" if self.reduction == "mean" else "none"  # theirs sums nothing, and ignores the argument
    return asymmetric_loss_single_label(inputs, target.long(), self.gamma_pos, self.gamma_neg, self.eps, reduction)


def _jsd(self: Any, output: Tensor, target: Tensor) -> Tensor | str:
    if output.ndim != 2 or target.is_floating_point():
        return NOT_ROWS if output.ndim != 2 else "the targets are not class indices"
    smoothing = getattr(self.cross_entropy_loss, "smoothing", 0.0)
    return jsd_cross_entropy(output, target, self.num_splits, self.alpha, smoothing)


def _poly(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    if x.ndim != 2:
        return NOT_ROWS
    if target.shape == x.shape:
        return "the targets are probabilities"
    return poly_cross_entropy(x, target.long(), self.epsilon, reduction=self.reduction, label_smoothing=self.smoothing)


def _poly_binary(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    return _dense(x, target) or poly_binary_cross_entropy(
        x, target.float(), self.epsilon, self.gamma, self.alpha, self.smoothing, self.reduction
    )


def _two_way(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    return NOT_ROWS if x.ndim != 2 else _dense(x, target) or two_way_loss(x, target, self.tp, self.tn)


def _zlpr(self: Any, x: Tensor, target: Tensor) -> Tensor | str:
    return _dense(x, target) or zlpr_loss(x, target)


def _scalar(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's cross entropy, computed by ours."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("weight", "ignore_index", "reduction", "label_smoothing")}
        if target.is_floating_point() and self.ignore_index < 0:  # which torch does not read, and ours refuses
            del given["ignore_index"]
        return _scalar(cross_entropy(input, target, **given))


def _factory(own: Any) -> Any:
    """Return timm's maker of losses, whose plain cross entropy is ours, too."""

    @functools.wraps(own)
    def create_classification_loss(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        if type(made) is nn.CrossEntropyLoss:
            made.__class__ = CrossEntropyLoss
        return made

    return create_classification_loss


def _functional(own: Any) -> Any:
    return Names(own, {"kl_div": kl_div, "cross_entropy": cross_entropy, "mse_loss": mse_loss})


CALLED = "(self, x, target)"
FORWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "cross_entropy:LabelSmoothingCrossEntropy.forward": (_label_smoothing, CALLED),
    "cross_entropy:SoftTargetCrossEntropy.forward": (_soft_target, CALLED),
    "binary_cross_entropy:BinaryCrossEntropy.forward": (_binary, CALLED),
    "asymmetric_loss:AsymmetricLossMultiLabel.forward": (_asymmetric_multi, "(self, x, y)"),
    "asymmetric_loss:AsymmetricLossSingleLabel.forward": (_asymmetric_single, "(self, inputs, target, reduction=None)"),
    "jsd:JsdCrossEntropy.__call__": (_jsd, "(self, output, target)"),
}
NEWER: dict[str, tuple[Callable[..., Any], str]] = {  # not in all versions
    "poly_loss:PolyCrossEntropy.forward": (_poly, CALLED),
    "poly_loss:PolyBinaryCrossEntropy.forward": (_poly_binary, CALLED),
    "two_way_loss:TwoWayLoss.forward": (_two_way, CALLED),
    "zlpr_loss:ZlprLoss.forward": (_zlpr, CALLED),
}


def _has(name: str) -> bool:
    return importlib.util.find_spec(f"timm.{name}") is not None


def patch(force: bool = False) -> Patch:
    """Replace timm's losses by ours, in `timm.loss` and in the tasks that distil.

    Args:
        force: go on where timm is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: timm is not installed.
        IntegrationError: timm's names or parameters are not those that were tested. Nothing was replaced.
    """
    version_of("timm")
    newer = {name: ours for name, ours in NEWER.items() if _has(f"loss.{name.partition(':')[0]}")}
    forwards = FORWARDS | newer
    replacements = [Replacement(f"timm.loss.{name}", or_theirs("timm", ours), signature) for name, (ours, signature) in forwards.items()]
    if _has("loss._loss_factory"):
        replacements.append(Replacement("timm.loss._loss_factory:create_classification_loss", _factory))
    if _has("task"):
        replacements += [Replacement(f"timm.task.{name}:F", _functional, here_only=True) for name in ("distillation", "token_distillation")]
    return patch_names("timm", TESTED, replacements, force=force)

"""Every loss by name. Tests, benchmarks and configs follow from this table."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lossforge.losses import functional, modules
from lossforge.losses.formulas import FORMULAS, Formula
from lossforge.losses.operators.library import plain_torch


@dataclass(frozen=True)
class Loss:
    """A loss: its parts, the hyper-parameters a config may set, and what its tests need to know.

    template: "elementwise" or "rowwise". domain: "logits" or "probabilities". options: argument sets beside the defaults that tests and
    benchmarks try. judge: "module:function" of an independent implementation with the same first two arguments, or of a module class whose
    options are the function's, where there is one.
    """

    name: str
    template: str
    formula: str
    function: Callable[..., Any]
    module: type[nn.Module]
    hyper: dict[str, float | None] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    domain: str = "logits"
    judge: str | None = None
    paper: str = ""

    @property
    def kernel(self) -> Formula:
        return FORMULAS[self.formula]

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The function computed by its plain-torch reference, on any device."""
        with plain_torch():
            return self.function(*args, **kwargs)

    def judged(self) -> Callable[..., Any] | None:
        if self.judge is None:
            return None
        module, name = self.judge.split(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type):
            return lambda x, target, **options: found(**options)(x, target)
        return found


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("mae", "elementwise", "l1", functional.l1_loss, modules.L1Loss, judge="torch.nn.functional:l1_loss"),
        Loss("mse", "elementwise", "mse", functional.mse_loss, modules.MSELoss, judge="torch.nn.functional:mse_loss"),
        Loss(
            "huber",
            "elementwise",
            "huber",
            functional.huber_loss,
            modules.HuberLoss,
            hyper={"delta": 1.0},
            options=({"delta": 0.3}, {"delta": 5.0}),
            judge="torch.nn.functional:huber_loss",
        ),
        Loss(
            "smooth_l1",
            "elementwise",
            "smooth_l1",
            functional.smooth_l1_loss,
            modules.SmoothL1Loss,
            hyper={"beta": 1.0},
            options=({"beta": 0.3}, {"beta": 5.0}),
            judge="torch.nn.functional:smooth_l1_loss",
        ),
        Loss(
            "bce",
            "elementwise",
            "bce_with_logits",
            functional.binary_cross_entropy_with_logits,
            modules.BCEWithLogitsLoss,
            judge="torch.nn.functional:binary_cross_entropy_with_logits",
        ),
        Loss(
            "preference_bce",
            "elementwise",
            "bce_with_logits",
            functional.preference_bce_with_logits,
            modules.PreferenceBCEWithLogitsLoss,
            judge="torch.nn.functional:binary_cross_entropy_with_logits",
        ),
        Loss(
            "preference_bce_probability",
            "elementwise",
            "bce",
            functional.preference_bce,
            modules.PreferenceBCELoss,
            domain="probabilities",
            judge="torch.nn.functional:binary_cross_entropy",
        ),
        Loss(
            "ce",
            "rowwise",
            "cross_entropy",
            functional.cross_entropy,
            modules.CrossEntropyLoss,
            hyper={"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "scale": 1.0},
            options=({"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"softcap": 5.0, "scale": 0.7}),
            judge="torch.nn.functional:cross_entropy",
        ),
        Loss(
            "focal",
            "elementwise",
            "focal",
            functional.sigmoid_focal_loss,
            modules.SigmoidFocalLoss,
            hyper={"alpha": 0.25, "gamma": 2.0},
            options=({"gamma": 0.5}, {"gamma": 0.0, "alpha": -1.0}, {"gamma": 1.0}, {"gamma": 3.5, "alpha": 0.6}),
            judge="torchvision.ops:sigmoid_focal_loss",
            paper="arXiv 1708.02002",
        ),
        Loss(
            "asymmetric",
            "elementwise",
            "asymmetric",
            functional.asymmetric_loss_multi_label,
            modules.AsymmetricLossMultiLabel,
            hyper={"gamma_neg": 4.0, "gamma_pos": 1.0, "clip": 0.05},
            options=(
                {"clip": None},
                {"gamma_neg": 0.0, "gamma_pos": 0.0, "clip": 0.2},
                {"gamma_neg": 2.5, "gamma_pos": 0.5, "clip": 0.1, "pos_weight": 3.0},
            ),
            judge="timm.loss:AsymmetricLossMultiLabel",
            paper="arXiv 2009.14119",
        ),
        Loss(
            "poly_bce",
            "elementwise",
            "poly_bce",
            functional.poly_binary_cross_entropy,
            modules.PolyBinaryCrossEntropy,
            hyper={"epsilon": 2.0, "gamma": 0.0, "alpha": None},
            options=({"epsilon": -1.0, "gamma": 2.0, "alpha": 0.25}, {"epsilon": 0.5, "gamma": 0.5}, {"alpha": 0.6}),
            judge="timm.loss:PolyBinaryCrossEntropy",
            paper="arXiv 2204.12511",
        ),
    )
}

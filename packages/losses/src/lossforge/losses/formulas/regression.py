"""Losses of a difference x - y."""

import torch.nn.functional as F
from torch import Tensor

from lossforge.losses.formulas.common import Inlined, family


def l1_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


def mse_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y, reduction="none")


def huber_twin(x: Tensor, y: Tensor, delta: float) -> Tensor:
    return F.huber_loss(x, y, reduction="none", delta=delta)


def smooth_l1_twin(x: Tensor, y: Tensor, beta: float) -> Tensor:
    return F.smooth_l1_loss(x, y, reduction="none", beta=beta)


TWINS = {
    "l1": l1_twin,
    "mse": mse_twin,
    "huber": huber_twin,
    "smooth_l1": smooth_l1_twin,
}


def _kernels() -> dict[str, Inlined]:
    from lossforge.kernels.formulas import l1, regression

    return {
        "l1": Inlined(l1.l1),
        "mse": Inlined(regression.mse),
        "huber": Inlined(regression.huber),
        "smooth_l1": Inlined(regression.smooth_l1),
    }


FORMULAS = family(TWINS, _kernels)

"""Losses of a difference x - y."""

import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.formulas import l1, regression
from lossforge.losses.formulas.common import Formula


def l1_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


def mse_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y, reduction="none")


def huber_twin(x: Tensor, y: Tensor, delta: float) -> Tensor:
    return F.huber_loss(x, y, reduction="none", delta=delta)


def smooth_l1_twin(x: Tensor, y: Tensor, beta: float) -> Tensor:
    return F.smooth_l1_loss(x, y, reduction="none", beta=beta)


FORMULAS = {
    "l1": Formula(l1.l1, l1_twin),
    "mse": Formula(regression.mse, mse_twin),
    "huber": Formula(regression.huber, huber_twin),
    "smooth_l1": Formula(regression.smooth_l1, smooth_l1_twin),
}

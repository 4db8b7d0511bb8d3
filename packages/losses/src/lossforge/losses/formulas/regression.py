"""Losses of a difference x - y."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family


def l1_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(x, y, reduction="none")


def mse_twin(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x, y, reduction="none")


def huber_twin(x: Tensor, y: Tensor, delta: float) -> Tensor:
    if not isinstance(delta, Tensor):
        return F.huber_loss(x, y, reduction="none", delta=delta)
    d = (x - y).abs()
    return torch.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))


def smooth_l1_twin(x: Tensor, y: Tensor, beta: float) -> Tensor:
    if not isinstance(beta, Tensor):
        return F.smooth_l1_loss(x, y, reduction="none", beta=beta)
    d = (x - y).abs()
    return torch.where(d < beta, 0.5 * d * d / beta.clamp(min=torch.finfo(x.dtype).tiny), d - 0.5 * beta)


TWINS = {
    "l1": l1_twin,
    "mse": mse_twin,
    "huber": huber_twin,
    "smooth_l1": smooth_l1_twin,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import l1, regression

    return {
        "l1": Formulas(l1.l1),
        "mse": Formulas(regression.mse),
        "huber": Formulas(regression.huber),
        "smooth_l1": Formulas(regression.smooth_l1),
    }


FORMULAS = family(TWINS, _kernels)

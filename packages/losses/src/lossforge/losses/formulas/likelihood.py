"""Losses of log-probabilities."""

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family


def nll_twin(x: Tensor, y: Tensor) -> Tensor:
    return -y * torch.where((y == 0) & ~x.isfinite(), 0.0, x)


def kl_div_twin(x: Tensor, y: Tensor, log_target: float) -> Tensor:
    p = y.exp() if log_target else y
    log_p = y if log_target else torch.where(y == 0, 1.0, y).log()
    return p * torch.where(p == 0, 0.0, log_p - x)


TWINS = {"nll": nll_twin, "kl_div": kl_div_twin}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import likelihood

    return {
        "nll": Formulas(likelihood.nll),
        "kl_div": Formulas(likelihood.kl_div, likelihood.kl_div_log, likelihood.is_log),
    }


FORMULAS = family(TWINS, _kernels)

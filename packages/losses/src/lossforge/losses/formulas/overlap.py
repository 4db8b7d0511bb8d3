"""Losses of the overlap of predicted and true regions: twins take (I, P, Y, *hyper), each a tensor of a number a region."""

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family


def dice_twin(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (2 * i + smooth_nr) / (p + y + smooth_dr)


def jaccard_twin(i: Tensor, p: Tensor, y: Tensor, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (p + y - i + smooth_dr)


def tversky_twin(i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, smooth_nr: float, smooth_dr: float) -> Tensor:
    return 1 - (i + smooth_nr) / (i + alpha * (p - i) + beta * (y - i) + smooth_dr)


def focal_tversky_twin(
    i: Tensor, p: Tensor, y: Tensor, alpha: float, beta: float, gamma: float, smooth_nr: float, smooth_dr: float
) -> Tensor:
    rest = tversky_twin(i, p, y, alpha, beta, smooth_nr, smooth_dr)
    tiny = torch.finfo(rest.dtype).tiny
    return torch.where(rest <= tiny, 0.0, rest.clamp(min=tiny) ** gamma)


TWINS = {
    "dice": dice_twin,
    "jaccard": jaccard_twin,
    "tversky": tversky_twin,
    "focal_tversky": focal_tversky_twin,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import overlap

    return {
        "dice": Formulas(overlap.dice),
        "jaccard": Formulas(overlap.jaccard),
        "tversky": Formulas(overlap.tversky),
        "focal_tversky": Formulas(overlap.focal_tversky),
    }


FORMULAS = family(TWINS, _kernels)

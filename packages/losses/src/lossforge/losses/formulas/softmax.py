"""Losses of rows of classes under a softmax."""

import torch
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.losses.formulas.common import family

FAR = 50.0
"""z from which e^-z no longer changes 1 - e^-z, in float64 either."""


def focal(z: Tensor, gamma: float) -> Tensor:
    near = z.clamp(max=FAR)
    u = -torch.expm1(-near)
    some = u > 0
    least = torch.where(gamma == 0, 1.0, 0.0) if isinstance(gamma, Tensor) else float(gamma == 0)
    power = torch.where(some, torch.where(some, u, 1.0) ** gamma, least)  # the derivative at u = 0 is the limit, 0
    return torch.where(z > FAR, z, torch.where(u.isnan(), u, power) * near)


def generalized(z: Tensor, q: float) -> Tensor:
    if isinstance(q, Tensor):
        q = q.clamp(min=1e-30)
    elif q <= 1e-30:
        return z
    t = q * z  # torch's derivative of expm1 is its value plus 1, which loses e^-t where t is large
    return torch.where(t < 0.5, -torch.expm1(-t.clamp(max=0.5)), 1 - torch.exp(-t)) / q


def focused(z: Tensor, gamma: float) -> Tensor:
    """p^γ z, 0 where p is; z itself at γ = 0."""
    if not isinstance(gamma, Tensor) and gamma == 0:
        return z
    near = z.clamp(max=1e30)
    return torch.exp(-gamma * near) * near


def asymmetric(z: Tensor, gamma_pos: float, gamma_neg: float, own: float, spread: float) -> Tensor:
    return own * focal(z, gamma_pos) - spread * focused(z.clamp(max=1e30), gamma_neg)


TWINS = {
    "cross_entropy": lambda z: z,
    "softmax_focal": focal,
    "poly_ce": lambda z, epsilon, offset: z - epsilon * torch.expm1(-z) + offset,
    "asymmetric_single_label": asymmetric,
    "generalized_ce": generalized,
}


def _kernels() -> dict[str, Formulas]:
    from lossforge.kernels.formulas import softmax

    return {
        "cross_entropy": Formulas(softmax.cross_entropy),
        "softmax_focal": Formulas(softmax.focal),
        "poly_ce": Formulas(softmax.poly),
        "asymmetric_single_label": Formulas(softmax.asymmetric),
        "generalized_ce": Formulas(softmax.generalized),
    }


FORMULAS = family(TWINS, _kernels)

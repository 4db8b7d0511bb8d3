"""Estimates of KL(π ‖ π_ref) from the log-probabilities of sampled tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.definitions.preference.objectives import EXPONENT, limited

__all__ = ["KLPenalty"]

ON_POLICY = "on_policy"
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda q: -q,
    "k2": lambda q: 0.5 * q.square(),
    "k3": lambda q: torch.expm1(q) - q,
    "abs": lambda q: q.abs(),
}
"""Estimates by q = log π_ref - log π (http://joschu.net/blog/kl-approx.html)."""
NAMES = (*ESTIMATORS, "k1+", "k3+", "abs+")


class KLPenalty(NamedTuple):
    """The `beta` of `grpo_loss`, with how KL(π ‖ π_ref) is estimated.

    Attributes:
        beta: β of at least 0.
        clamp: above 0, the largest size of q in the estimate, whose gradient is 0 beyond it, that of the factor r included. None: no bound,
            as TRL; verl's k3 and NeMo RL have 20.
        bias_correction: True multiplies the estimate by r (DeepSeek-V3.2), so that it is unbiased off the policy. TRL's
            use_bias_correction_kl. "on_policy" multiplies it by π / sg(π), which is 1 and has a gradient, as NeMo RL does by default.
        estimator: with q = log π_ref - log π: "k1", -q; "k2", q² / 2; "k3", e^q - q - 1; "abs", |q|. "k1+", "k3+" and "abs+" have the
            gradient of q² / 2, without a bound, as in verl.
        clamp_estimate: above 0, the largest size of the estimate, r included, whose gradient is 0 beyond it. None: no bound, as TRL. verl's
            k3, slime's low_var_kl and NeMo RL have 10.
    """

    beta: float
    clamp: float | None = None
    bias_correction: bool | str = False
    estimator: str = "k3"
    clamp_estimate: float | None = None

    def checked(self) -> "KLPenalty":
        checks.one_of("KLPenalty.estimator", self.estimator, NAMES)
        corrected = self.bias_correction
        if isinstance(corrected, str):
            checks.one_of("KLPenalty.bias_correction", corrected, (True, False, ON_POLICY))
        else:
            corrected = checks.flag("KLPenalty.bias_correction", corrected)
        if corrected and self.estimator.endswith("+"):
            raise ValueError(f"KLPenalty.bias_correction needs an estimator without +, got {self.estimator!r}")
        return KLPenalty(
            beta=checks.number("beta", self.beta, 0.0),
            clamp=_bound("KLPenalty.clamp", self.clamp),
            bias_correction=corrected,
            estimator=self.estimator,
            clamp_estimate=_bound("KLPenalty.clamp_estimate", self.clamp_estimate),
        )

    def changes_estimate(self) -> bool:
        """Return whether another number than beta is given."""
        return self != KLPenalty(self.beta)


def _bound(name: str, value: float | None) -> float | None:
    return None if value is None else checks.number(name, value, 0.0, exclusive=True)


def estimated(penalty: KLPenalty, policy: Tensor, reference: Tensor, level: Tensor) -> Tensor:
    """Return the estimate of each token, (N, T). level: ln r, (N, T) or (N, 1)."""
    gap = reference - policy
    q = gap if penalty.clamp is None else limited(gap, -penalty.clamp, penalty.clamp)
    name = penalty.estimator.removesuffix("+")
    # a bound of the estimate has a gradient of 0 · e^q, which must not be 0 · inf
    kl = ESTIMATORS[name](limited(q, -math.inf, EXPONENT) if penalty.clamp_estimate is not None and name == "k3" else q)
    if penalty.bias_correction:
        level = policy - policy.detach() if penalty.bias_correction == ON_POLICY else level
        ratio = level.clamp(max=EXPONENT).exp()
        kl = kl * torch.where(q == gap, ratio, ratio.detach())
    if penalty.clamp_estimate is not None:
        kl = limited(kl, -penalty.clamp_estimate, penalty.clamp_estimate)
    if penalty.estimator == name:
        return kl
    square = ESTIMATORS["k2"](torch.where(gap.isinf(), 0.0, gap))
    return square - square.detach() + kl.detach()

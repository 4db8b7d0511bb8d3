"""Correction of a policy's loss for tokens that an inference engine sampled, whose probabilities differ from the trainer's."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.definitions.preference.objectives import Tokens, limited

__all__ = ["SamplerCorrection"]

MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


class SamplerCorrection(NamedTuple):
    """The `importance_sampling_ratio` of `grpo_loss`, from the log-probabilities that a sampler gave to its tokens.

    w = π_old / π_sampler, of a token, or the product over a sequence's tokens. A token whose log-probability is nan has w = 1, as in TRL.

    Attributes:
        per_token_logps: log π_sampler, (N, T), without gradient.
        mode: "token_truncate", w of a token, held within the bounds (TIS); "token_mask", 0 outside of them (IcePop);
            "sequence_truncate" and "sequence_mask", likewise by w of the sequence; "geometric_mask", w of a token, 0 in sequences whose
            geometric mean of w is outside (NeMo RL's seq-mask-tis); "none", 1. The default is TRL's.
        low: least w, of at least 0. None: no bound.
        high: largest w, above 0. None: no bound. 3 as in TRL; verl has 2.
        off_policy: largest mean of log π_sampler - log π over the tokens of a sequence: beyond it ℓ is 0 where A < 0 (DeepSeek-V3.2).
            TRL's off_policy_mask_threshold, slime's opsm_delta. None: no bound.
    """

    per_token_logps: Tensor
    mode: str = "sequence_mask"
    low: float | None = None
    high: float | None = 3.0
    off_policy: float | None = None

    def checked(self, x: Tensor) -> "SamplerCorrection":
        name = "SamplerCorrection.per_token_logps"
        checks.floating_beside(name, self.per_token_logps, x, "per_token_logps")
        checks.without_gradient(name, self.per_token_logps)
        checks.fits(name, self.per_token_logps, self.per_token_logps.shape == x.shape, "have the shape of per_token_logps, {}", x.shape)
        checks.one_of("SamplerCorrection.mode", self.mode, MODES)
        low, high, most = self.low, self.high, self.off_policy
        return SamplerCorrection(
            per_token_logps=self.per_token_logps,
            mode=self.mode,
            low=None if low is None else checks.number("SamplerCorrection.low", low, 0.0),
            high=None if high is None else checks.number("SamplerCorrection.high", high, 0.0, exclusive=True),
            off_policy=None if most is None else checks.number("SamplerCorrection.off_policy", most),
        )


@torch.no_grad()
def weights(correction: SamplerCorrection, t: Tokens, old: Tensor) -> Tensor:
    """Return the factor of ℓ, (N, T) or (N, 1). old: log π_old, (N, T)."""
    sampler, mode = correction.per_token_logps.to(t.policy.dtype), correction.mode
    known = t.keep & ~sampler.isnan()
    log_ratio, drift = (torch.where(known, gap, 0.0) for gap in (old - sampler, sampler - t.policy))
    ratio = torch.ones_like(drift)
    if mode != "none":
        of_sequence = mode.startswith("sequence")
        ratio = (t.weighted(log_ratio).sum(1, keepdim=True) if of_sequence else log_ratio).exp()
        judged = t.mean(log_ratio).exp() if mode == "geometric_mask" else ratio
        low = 0.0 if correction.low is None else correction.low
        high = math.inf if correction.high is None else correction.high
        bounded = limited(judged, low, high)
        ratio = bounded if mode.endswith("truncate") else torch.where(judged == bounded, ratio, 0.0)
    if correction.off_policy is not None:
        ratio = torch.where((t.advantages >= 0) | (t.mean(drift) <= correction.off_policy), ratio, 0.0)
    return ratio

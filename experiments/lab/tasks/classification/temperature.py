"""The calibration error that is left after temperature scaling."""

import math

import torch
from torch import Tensor

from lab.processes import distributed

TEMPERATURES = tuple(1.08**step for step in range(-30, 31))
"""The temperatures that are tried, from 0.1 to 10. A fit between two of them would lower the likelihood by less than its noise."""
LEAST = 1e-30  # a probability whose logarithm is finite in float32
ELEMENTS = 2**22  # most elements that are computed at once


class ScaledCounts:
    """Sum each temperature's likelihood and calibration over the even and over the odd samples, without keeping a sample.

    Each half's temperature is the one under which the other half is the likeliest, so that no sample is scored by a temperature that it
    had a part in. Source: Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599, section 4.2.
    """

    def __init__(self, bins: int, device: torch.device, activation: str) -> None:
        """Make empty sums; bins: of confidence. activation: softmax or sigmoid, from which the logits are found again."""
        self.bins, self.activation = bins, activation
        self.temperature = torch.tensor(TEMPERATURES, device=device)
        self.nll = torch.zeros(len(TEMPERATURES), 2, dtype=torch.float64, device=device)
        # samples, correct, sum of confidence
        self.calibration = torch.zeros(2, len(TEMPERATURES), bins, 3, dtype=torch.float64, device=device)

    def add(self, probability: Tensor, target: Tensor, index: Tensor) -> None:
        """Count one batch: probability (N, C), target (N,), index (N,)."""
        samples, classes = probability.shape
        if not samples:
            return
        logits = probability.clamp(min=LEAST).log()
        if self.activation == "sigmoid":
            logits = logits - (1 - probability).clamp(min=torch.finfo(torch.float32).eps / 2).log()
        correct = (probability.argmax(-1) == target).double()
        halves = torch.stack([index % 2 == 0, index % 2 == 1], dim=1).double()
        place = torch.arange(self.bins, device=logits.device)
        together = max(1, ELEMENTS // (samples * max(classes, self.bins)))
        for start in range(0, len(self.temperature), together):
            some = slice(start, start + together)
            scaled = logits / self.temperature[some, None, None]  # (T, N, C)
            nll, confidence = self._likelihood(scaled, target)
            self.nll[some] += nll.double() @ halves
            chosen = ((confidence * self.bins).long().clamp(0, self.bins - 1)[..., None] == place).double()  # (T, N, bins)
            rows = torch.stack([torch.ones_like(confidence).double(), correct.expand_as(confidence), confidence.double()], dim=-1)
            for half in range(2):
                self.calibration[half, some] += (chosen * halves[:, half, None]).transpose(1, 2) @ rows

    def _likelihood(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the negative logarithm of the likelihood and the confidence of logits (T, N, C), both (T, N)."""
        of_target = logits.gather(-1, target.expand(logits.shape[:-1])[..., None])[..., 0]
        if self.activation == "sigmoid":
            return torch.nn.functional.softplus(logits).sum(-1) - of_target, logits.amax(-1).sigmoid()
        total = logits.logsumexp(-1)
        return total - of_target, (logits.amax(-1) - total).exp()

    def values(self) -> dict[str, float]:
        """Return the calibration error over all ranks' samples, and the geometric mean of both halves' temperatures."""
        distributed.total(self.nll)
        distributed.total(self.calibration)
        nll, calibration = self.nll.cpu(), self.calibration.cpu()
        chosen = nll.nan_to_num(nan=math.inf).argmin(0).tolist()  # of the even samples, of the odd ones
        one = TEMPERATURES.index(1.0)
        chosen = [best if calibration[half, 0, :, 0].sum() else one for half, best in enumerate(chosen)]
        samples, right, confidence = (calibration[0, chosen[1]] + calibration[1, chosen[0]]).unbind(1)
        error = (right - confidence).abs().sum().item() / max(samples.sum().item(), 1)
        return {"ece_temperature": error, "temperature": math.sqrt(TEMPERATURES[chosen[0]] * TEMPERATURES[chosen[1]])}

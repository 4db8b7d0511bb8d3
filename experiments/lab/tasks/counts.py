"""What the counts of evaluations share: the loss, tensors of all samples, and bins of probabilities."""

import torch
from torch import Tensor

from lab.processes import distributed


class Counts:
    """Sum the loss over the batches of an evaluation."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, divisor

    def add_loss(self, loss_sum: Tensor, divisor: Tensor) -> None:
        """Count a batch's loss before division, and its part of the divisor."""
        self.loss += torch.stack([loss_sum, divisor]).double()

    def mean_loss(self) -> float:
        """Return the loss over all ranks."""
        total, divisor = distributed.total(self.loss).tolist()
        return total / divisor if divisor else float("nan")


class Kept:
    """Keep tensors (N, ...) of all samples of an evaluation."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, ...]] = []

    def add(self, *tensors: Tensor) -> None:
        self.batches.append(tensors)

    def gathered(self) -> list[Tensor]:
        """Return the samples of all ranks, on the CPU."""
        own = [torch.cat(each).cpu() for each in zip(*self.batches, strict=True)]
        return [torch.cat(each) for each in zip(*distributed.gathered(own), strict=True)]


def binned(probability: Tensor, bins: int, *rows: Tensor) -> Tensor:
    """Return sums (bins, len(rows)) of rows (N,) by bins of their samples' probability (N,); float64."""
    place = (probability * bins).long().clamp(0, bins - 1)
    chosen = (place[:, None] == torch.arange(bins, device=place.device)).double()
    return chosen.T @ torch.stack(rows, dim=1).double()

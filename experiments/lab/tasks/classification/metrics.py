"""Counts of an evaluation, kept on the device until they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.processes import distributed
from lab.tasks.classification.temperature import ScaledCounts
from lab.tasks.metrics import AllSamples, Counts, CustomMetrics, binned


class ClassificationCounts(Counts):
    """Sum over batches; every sample counts once, for any batch sizes."""

    def __init__(
        self,
        classes: int,
        bins: int,
        groups: int,
        device: torch.device,
        own: Mapping[str, str] | None = None,
        activation: str = "softmax",
    ) -> None:
        """Make empty counts; own: the targets of custom metrics, by name; activation: what made the probabilities, softmax or sigmoid."""
        super().__init__(device)
        self.own, self.samples = CustomMetrics(own or {}), AllSamples()
        self.scaled = ScaledCounts(bins, device, activation)
        self.classes, self.bins, self.groups = classes, bins, groups
        self.confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
        self.calibration = torch.zeros(bins, 3, dtype=torch.float64, device=device)  # samples, correct, sum of confidence
        self.by_group = torch.zeros(max(groups, 1), 2, dtype=torch.int64, device=device)  # samples, correct
        self.top5 = torch.zeros((), dtype=torch.int64, device=device)

    def add(
        self, probability: Tensor, target: Tensor, group: Tensor | None, loss_sum: Tensor, share: Tensor, index: Tensor | None = None
    ) -> None:
        """Count one batch.

        Args:
            probability: (N, C).
            target: (N,).
            group: (N,) or None.
            loss_sum: the batch's loss before division.
            share: the batch's part of the divisor.
            index: (N,), positions in the data, whose even and odd ones are the halves of `ece_temperature`; None: those in the batch.
        """
        if self.own.metrics:
            self.samples.add(probability.float().cpu(), target.cpu())
        self.scaled.add(probability.float(), target, torch.arange(len(target), device=target.device) if index is None else index)
        confidence, guess = probability.float().max(-1)
        correct = guess == target
        self.confusion.index_add_(0, target * self.classes + guess, torch.ones_like(target))
        self.top5 += (probability.topk(min(5, self.classes)).indices == target[:, None]).any(-1).sum()
        self.calibration += binned(confidence, self.bins, torch.ones_like(confidence), correct.float(), confidence)
        if group is not None and self.groups:
            self.by_group.index_add_(0, group, torch.stack([torch.ones_like(group), correct.long()], dim=1))
        self.add_loss(loss_sum, share)

    def result(self) -> "ClassificationResult":
        """Return the result over all ranks' batches."""
        for counts in (self.confusion, self.calibration, self.by_group, self.top5):
            distributed.total(counts)
        confusion = self.confusion.view(self.classes, self.classes).cpu()
        calibration = self.calibration.cpu()
        total = max(int(confusion.sum()), 1)
        _, right, confidence = calibration.unbind(1)
        there = confusion.sum(1) > 0
        recall = confusion.diagonal()[there] / confusion.sum(1)[there]
        values = {
            "top1": confusion.diagonal().sum().item() / total,
            **({"top5": self.top5.item() / total} if self.classes > 5 else {}),
            "balanced_accuracy": recall.double().mean().item(),
            "loss": self.mean_loss(),
            "ece": (right - confidence).abs().sum().item() / total,
            **self.scaled.values(),
            "samples": float(confusion.sum()),
        }
        if self.groups:
            for number, (samples, correct) in enumerate(self.by_group.tolist()):
                values[f"top1_group_{number}"] = correct / samples if samples else float("nan")
        if self.own.metrics:
            values |= self.own.values(*self.samples.gathered())
        return ClassificationResult(values, confusion.tolist(), calibration.tolist())


@dataclass
class ClassificationResult:
    values: dict[str, float]
    confusion: list[list[int]]  # rows: true classes, columns: guesses
    calibration: list[list[float]]  # a bin each: samples, correct, sum of confidence

    def tree(self) -> dict[str, Any]:
        return {"confusion": self.confusion, "calibration": self.calibration}

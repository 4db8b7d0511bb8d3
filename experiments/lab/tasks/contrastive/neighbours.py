"""How often the image that is the most similar is of the same class."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.tasks.contrastive.metrics import ROWS
from lab.tasks.counts import Counts, Kept


@dataclass
class NeighbourResult:
    values: dict[str, float]
    confusion: list[list[int]]  # rows: an image's class, columns: that of the image most similar to it
    recall: Tensor  # (C,) recall@1 of each class, nan of one without two images
    images: Tensor  # (C,)

    def tree(self) -> dict[str, Any]:
        return {"neighbours": self.confusion}


class NeighbourCounts(Counts):
    """Keep every image's features, because each is compared with all."""

    def __init__(self, classes: int, device: torch.device) -> None:
        super().__init__(device)
        self.classes, self.kept = classes, Kept()

    def add(self, features: Tensor, target: Tensor, loss_sum: Tensor, divisor: Tensor) -> None:
        """Count a batch: features (N, D), classes (N,), its loss before division, and its part of the divisor."""
        self.kept.add(F.normalize(features.float(), dim=1), target)
        self.add_loss(loss_sum, divisor)

    def result(self) -> NeighbourResult:
        """Return the result among the images of all ranks. A class's only image has nothing to find, and does not count."""
        features, target = self.kept.gathered()
        rank, nearest = neighbours(features, target)
        images = torch.bincount(target, minlength=self.classes)
        counted = images[target] > 1
        found = {f"recall{most}": (rank[counted] < most).double().mean().item() for most in (1, 5)}
        hits = torch.bincount(target[counted & (rank < 1)], minlength=self.classes)
        confusion = torch.bincount(target * self.classes + nearest, minlength=self.classes**2).view(self.classes, -1)
        values = found | {"loss": self.mean_loss(), "samples": float(len(target))}
        return NeighbourResult(values, confusion.tolist(), torch.where(images > 1, hits / images, torch.nan), images)


def neighbours(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of unit features (N, D) how many of other classes are at least as similar to it as the best of its own, and the class
    of the most similar, (N,) each.
    """
    ranks, nearest = [], []
    for start in range(0, len(features), ROWS):
        similarity = features[start : start + ROWS] @ features.T
        similarity.diagonal(start).fill_(-torch.inf)
        same = target[start : start + ROWS, None] == target
        own = similarity.where(same, -torch.inf).amax(1, keepdim=True)
        ranks.append(((similarity >= own) & ~same).sum(1))
        nearest.append(target[similarity.argmax(1)])
    return torch.cat(ranks), torch.cat(nearest)

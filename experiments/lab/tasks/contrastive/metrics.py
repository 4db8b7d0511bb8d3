"""How often the pair of an image or a text, or an image of the same class, is among the most similar."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.base.files import save_figure
from lab.data.sets import Norm
from lab.tasks.contrastive.data import text_of
from lab.tasks.metrics import AllSamples, Counts

ROWS = 1024  # of the matrix of similarities, computed at once
SHOWN, NEAREST = 6, 3  # images of the picture, and captions of each


@dataclass
class RetrievalResult:
    values: dict[str, float]
    images: Tensor  # (K, C, H, W), the first ones
    captions: Tensor  # (K, L), their tokens
    nearest: Tensor  # (K, NEAREST, L), the tokens of the captions that are most similar to each, the most similar first

    def tree(self) -> dict[str, Any]:
        return {"retrieval": {name: value for name, value in self.values.items() if "recall" in name}}


class RetrievalCounts(Counts):
    """Keep every pair's features, because each is compared with all."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.samples = AllSamples()  # features of images and of texts, tokens
        self.images: list[Tensor] = []

    def add(self, images: Tensor, tokens: Tensor, features: tuple[Tensor, Tensor], loss_sum: Tensor, divisor: Tensor) -> None:
        """Count a batch.

        Args:
            images: (N, C, H, W).
            tokens: (N, L) of their captions.
            features: (N, D) unit features of the images, and of the captions.
            loss_sum: the batch's loss before division.
            divisor: the batch's part of the divisor.
        """
        self.images.append(images[: max(SHOWN - sum(map(len, self.images)), 0)])
        self.samples.add(*(each.float() for each in features), tokens)
        self.add_loss(loss_sum, divisor)

    def result(self) -> RetrievalResult:
        """Return the result among the pairs of all ranks; the pictured images are those of the first rank."""
        images, texts, tokens = self.samples.gathered()
        values = recalls(images, texts) | {"loss": self.mean_loss(), "samples": float(len(images))}
        shown = torch.cat(self.images).cpu()
        nearest = (images[: len(shown)] @ texts.T).topk(min(NEAREST, len(texts))).indices
        return RetrievalResult(values, shown, tokens[: len(shown)], tokens[nearest])


def recalls(images: Tensor, texts: Tensor) -> dict[str, float]:
    """Return recall@1 and @5 in both directions, and `recall1`, the mean of the two at 1; row i of images and of texts are a pair.

    A text that is exactly as similar as the right one counts as more similar, so that equal features recall nothing.
    """
    text_rank, image_rank = ranks(images, texts), ranks(texts, images)
    found = {
        f"{name}_recall{most}": (rank < most).double().mean().item()
        for name, rank in (("text", text_rank), ("image", image_rank))
        for most in (1, 5)
    }
    return {"recall1": (found["text_recall1"] + found["image_recall1"]) / 2} | found


def ranks(queries: Tensor, found: Tensor) -> Tensor:
    """Return for each query (N, D) how many of the others in `found` (N, D) are at least as similar to it as its own, (N,)."""
    counted = []
    for start in range(0, len(queries), ROWS):
        similarity = queries[start : start + ROWS] @ found.T
        own = similarity.diagonal(start)[:, None]
        counted.append((similarity >= own).sum(1) - 1)
    return torch.cat(counted)


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
        self.classes, self.samples = classes, AllSamples()

    def add(self, features: Tensor, target: Tensor, loss_sum: Tensor, divisor: Tensor) -> None:
        """Count a batch: features (N, D), classes (N,), its loss before division, and its part of the divisor."""
        self.samples.add(F.normalize(features.float(), dim=1), target)
        self.add_loss(loss_sum, divisor)

    def result(self) -> NeighbourResult:
        """Return the result among the images of all ranks. A class's only image has nothing to find, and does not count."""
        features, target = self.samples.gathered()
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


def retrieval_picture(result: RetrievalResult, words: list[str], norm: Norm, path: Path) -> None:
    """Draw held-out images, each with the captions most similar to it; its own is bold, and below the others if it is not among them."""
    import torch
    from matplotlib.figure import Figure

    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (norm.mean, norm.std))
    figure = Figure(figsize=(7, 1.5 * len(result.images) + 0.4), layout="constrained")
    rows = figure.subplots(len(result.images), 2, squeeze=False, width_ratios=(1, 4))
    for (left, right), image, tokens, nearest in zip(rows, result.images, result.captions, result.nearest, strict=True):
        left.imshow((image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
        own, found = text_of(tokens.tolist(), words), [text_of(each, words) for each in nearest.tolist()]
        lines = [(f"{number}. {text}", text == own) for number, text in enumerate(found, 1)]
        lines += [] if own in found else [(f"its own: {own}", True)]
        for number, (line, bold) in enumerate(lines):
            right.text(0, 0.85 - 0.24 * number, line, fontsize=11, weight="bold" if bold else "normal", va="center")
        for axes in (left, right):
            axes.set_axis_off()
    values = result.values
    figure.suptitle(f"the most similar of {values['samples']:.0f} captions · recall@1 {values['text_recall1']:.2%}", fontsize=11)
    save_figure(figure, path, dpi=110)

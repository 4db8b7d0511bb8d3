"""Retrieval: how often the pair of an image or a text is among the most similar."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.tasks.counts import Counts, Kept

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
        self.kept = Kept()  # features of images and of texts, tokens
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
        self.kept.add(*(each.float() for each in features), tokens)
        self.add_loss(loss_sum, divisor)

    def result(self) -> RetrievalResult:
        """Return the result among the pairs of all ranks; the pictured images are those of the first rank."""
        images, texts, tokens = self.kept.gathered()
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

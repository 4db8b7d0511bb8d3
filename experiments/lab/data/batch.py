"""Batches, as data sets give them to tasks."""

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


class Tensors(Protocol):
    """A batch of any task."""

    images: Tensor  # (N, C, H, W)

    def __len__(self) -> int: ...

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the batch has, by name."""


@dataclass
class Batch:
    """Images with their classes; mixup adds each sample's second class and the share of its first, a teacher its logits."""

    images: Tensor  # (N, C, H, W)
    target: Tensor  # (N,) class indices, or (N, C) from 0 to 1, and -1 where the data has no label
    index: Tensor  # (N,) positions in the data set
    weight: Tensor | None = None  # (N,) preference weights
    group: Tensor | None = None  # (N,) group ids
    target_b: Tensor | None = None  # (N,)
    lam: float | None = None
    teacher: Tensor | None = None  # (N, C) logits
    view: Tensor | None = None  # (N, C, H, W) another view of each image
    known: Tensor | None = None  # (N, C) bool: which targets are labels; None: all. `target` is 0 elsewhere

    def __len__(self) -> int:
        return self.images.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        tensors = {item.name: value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)}
        return tensors if self.lam is None else tensors | {"lam": torch.full((), self.lam, device=self.images.device)}

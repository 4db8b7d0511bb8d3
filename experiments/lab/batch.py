"""What travels from the data to the task."""

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass
class Batch:
    """Images with their classes; a mixup pair adds the second class of each sample and the first one's share."""

    images: Tensor  # (N, C, H, W)
    target: Tensor  # (N,) class indices
    index: Tensor  # (N,) positions in the data set
    weight: Tensor | None = None  # (N,) preference weights
    group: Tensor | None = None  # (N,) group ids
    target_b: Tensor | None = None  # (N,)
    lam: float | None = None

    def __len__(self) -> int:
        return self.images.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {item.name: value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)}

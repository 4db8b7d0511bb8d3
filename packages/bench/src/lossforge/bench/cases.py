"""What is measured: a loss on realistic shapes, by ours and by those that people use today, on the same tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.losses import binary_cross_entropy_with_logits, cross_entropy, l1_loss, sigmoid_focal_loss

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """contenders: (x, target) → scalar loss, by name. tensors: how often x's bytes must cross memory in one launch, reads and writes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    target: Callable[[Tensor], Tensor]
    contenders: dict[str, Call]
    tensors: int

    def floor_bytes(self) -> int:
        return self.tensors * torch.Size(self.shape).numel() * self.dtype.itemsize


def focal_eager(x: Tensor, y: Tensor) -> Tensor:
    """torchvision.ops.sigmoid_focal_loss's arithmetic (γ = 2, α = 0.25, sum), so that measuring needs no torchvision."""
    p = torch.sigmoid(x)
    entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    return ((0.25 * y + 0.75 * (1 - y)) * entropy * (1 - p_t) ** 2).sum()


def focal_eager_from_classes(x: Tensor, target: Tensor) -> Tensor:
    return focal_eager(x, (target.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)).to(x.dtype))


def _classes(x: Tensor) -> Tensor:
    rows = (x.shape[0], *x.shape[2:])
    return torch.randint(0, x.shape[1], rows, device=x.device)


def _anchors(x: Tensor) -> Tensor:
    """One row in a hundred is an object, the others background."""
    index = torch.randint(0, x.shape[-1], x.shape[:-1], device=x.device)
    return torch.where(torch.rand(x.shape[:-1], device=x.device) < 0.01, index, -1)


SOFTMAX: dict[str, Call] = {
    "lossforge": cross_entropy,
    "lossforge, backward": lambda x, t: cross_entropy(x, t, gradient="backward"),
    "torch": F.cross_entropy,
}
FOCAL: dict[str, Call] = {"lossforge": lambda x, t: sigmoid_focal_loss(x, t, reduction="sum"), "torch": focal_eager}
FOCAL_INDEX: dict[str, Call] = {"lossforge": FOCAL["lossforge"], "torch": focal_eager_from_classes}
MAE: dict[str, Call] = {"lossforge": l1_loss, "torch": F.l1_loss}
BCE: dict[str, Call] = {"lossforge": binary_cross_entropy_with_logits, "torch": F.binary_cross_entropy_with_logits}
LARGE = (2**28,)


def cases() -> Iterator[Case]:
    half = torch.bfloat16
    yield Case("cross entropy, timm head", (16384, 1000), torch.float32, _classes, SOFTMAX, 2)
    yield Case("cross entropy, vocabulary", (8192, 32000), half, _classes, SOFTMAX, 2)
    yield Case("cross entropy, vocabulary", (8192, 50304), torch.float32, _classes, SOFTMAX, 2)
    yield Case("cross entropy, vocabulary", (8192, 128256), half, _classes, SOFTMAX, 2)
    yield Case("cross entropy, segmentation", (8, 21, 512, 512), torch.float32, _classes, SOFTMAX, 2)
    for dtype in (torch.float32, half):
        yield Case("focal, class indices, RetinaNet 800×1344", (16, 120087, 80), dtype, _anchors, FOCAL_INDEX, 2)
        yield Case("focal, dense targets, RetinaNet 800×1344", (16, 120087, 80), dtype, torch.rand_like, FOCAL, 3)
        yield Case("mean absolute error", LARGE, dtype, torch.rand_like, MAE, 3)
        yield Case("binary cross entropy on logits", LARGE, dtype, torch.rand_like, BCE, 3)


def small_cases() -> Iterator[Case]:
    """Work so small that the host's time is what counts."""
    yield Case("cross entropy", (256, 1000), torch.float32, _classes, SOFTMAX, 2)
    yield Case("cross entropy", (64, 10), torch.float32, _classes, SOFTMAX, 2)
    yield Case("focal, dense targets, DETR", (8, 900, 256), torch.float32, torch.rand_like, FOCAL, 3)

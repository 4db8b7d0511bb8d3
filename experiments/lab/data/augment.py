"""Augmentation of batches, on the batch's device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.data.batch import Batch


def random_affine(images: Tensor, generator: torch.Generator, *, turn: float = 0.2, scale: float = 0.1, shift: float = 0.125) -> Tensor:
    """Rotate, scale and shift each image by its own small random amount.

    Args:
        images: (N, C, H, W)
        generator: a generator on the images' device.
        turn: largest angle in radians.
        scale: largest relative change of size.
        shift: largest move, as a share of the image's side.
    """
    angle, size, x, y = (torch.rand(4, len(images), generator=generator, device=images.device) * 2 - 1).unbind()
    size = 1 + scale * size
    cos, sin = torch.cos(turn * angle) * size, torch.sin(turn * angle) * size
    matrix = torch.stack([cos, -sin, 2 * shift * x, sin, cos, 2 * shift * y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def crop_and_flip(images: Tensor, generator: torch.Generator, *, pad: int = 4) -> Tensor:
    """Shift each image by whole pixels within a reflected border and mirror every second one."""
    count, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, (pad, pad, pad, pad), mode="reflect")
    top, left = torch.randint(0, 2 * pad + 1, (2, count), generator=generator, device=device).unbind()
    mirror = torch.rand(count, generator=generator, device=device) < 0.5
    columns = torch.arange(width, device=device).expand(count, width)
    columns = torch.where(mirror[:, None], width - 1 - columns, columns) + left[:, None]
    rows = torch.arange(height, device=device) + top[:, None]
    samples = torch.arange(count, device=device)
    return padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Mix:
    """Mixup and cutmix: blend each sample with another sample of its batch, or paste a box of that sample into it.

    The loss gets both classes and the first one's share; no one-hot target is built.
    """

    def __init__(self, mixup: float, cutmix: float, probability: float, device: torch.device, seed: int) -> None:
        self.mixup, self.cutmix, self.probability = mixup, cutmix, probability
        self.host_generator = torch.Generator().manual_seed(seed)
        self.device_generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, batch: Batch) -> Batch:
        if not (self.mixup or self.cutmix) or self._draw() >= self.probability:
            return batch
        boxed = bool(self.cutmix) and (not self.mixup or self._draw() < 0.5)
        lam = self._beta(self.cutmix if boxed else self.mixup)
        order = torch.randperm(len(batch), generator=self.device_generator, device=batch.images.device)
        other = batch.images[order]
        if boxed:
            height, width = batch.images.shape[-2:]
            top, bottom = self._span(height, lam)
            left, right = self._span(width, lam)
            images = batch.images.clone()
            images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
            lam = 1 - (bottom - top) * (right - left) / (height * width)
        else:
            images = batch.images.lerp(other, 1 - lam)
        weight = None if batch.weight is None else batch.weight.lerp(batch.weight[order], 1 - lam)
        return Batch(images, batch.target, batch.index, weight, batch.group, batch.target[order], lam)

    def state(self) -> dict[str, Tensor]:
        return {"host": self.host_generator.get_state(), "device": self.device_generator.get_state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.host_generator.set_state(state["host"])
        if state["device"].shape == self.device_generator.get_state().shape:  # the states of GPU and CPU generators differ
            self.device_generator.set_state(state["device"])

    def _draw(self) -> float:
        return float(torch.rand((), generator=self.host_generator))

    def _beta(self, alpha: float) -> float:
        """Draw from Beta(alpha, alpha), as a ratio of gamma variates."""
        one, two = (torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=self.host_generator) + 1e-300).tolist()
        return one / (one + two)

    def _span(self, side: int, lam: float) -> tuple[int, int]:
        half = side * (1 - lam) ** 0.5 / 2
        centre = self._draw() * side
        return max(0, round(centre - half)), min(side, round(centre + half))

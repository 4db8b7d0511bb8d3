"""How many boxes each image has: numbers of the host, or a tensor on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossforge.losses.base import checks


def counts_on_host(counts: Sequence[int] | Tensor, images: int | None, total: int) -> list[int]:
    """Return the counts as numbers, which waits for the device of a tensor. images: how many; None for any number."""
    if isinstance(counts, Tensor):
        _check(counts, images)
        checks.with_values("counts", counts)
        counts = counts.tolist()
    numbers = [checks.whole_number("counts", n) for n in checks.several("counts", counts)]
    images = len(numbers) if images is None else images
    if len(numbers) != images or sum(numbers) != total or min(numbers, default=0) < 0:
        raise ValueError(f"counts must hold {images} numbers of at least 0 with the sum {total}, got {numbers}")
    return numbers


def counts_on_device(counts: Sequence[int] | Tensor, images: int | None, total: int, x: Tensor, of: str) -> Tensor:
    """Return the counts on the device of x, the argument `of`, without a wait for it. The sum of a tensor is not checked."""
    if isinstance(counts, Tensor):
        _check(counts, images)
        checks.beside("counts", counts, x, of)
        return counts
    return to_device(torch.tensor(counts_on_host(counts, images, total), dtype=torch.int32, device="cpu"), x.device)


def _check(counts: Tensor, images: int | None) -> None:
    checks.integer("counts", counts)
    right = counts.ndim == 1 and (images is None or len(counts) == images)
    checks.fits("counts", counts, right, "have shape ({},)", "B" if images is None else images)


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without a wait for it."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

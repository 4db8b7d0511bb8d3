"""How many boxes each image has: numbers of the host, or a tensor on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossforge.losses import checks


def counts_on_host(counts: Sequence[int] | Tensor, images: int, total: int) -> list[int]:
    """Return the counts as numbers, which waits for the device of a tensor."""
    numbers = [checks.whole_number("counts", n) for n in (counts.tolist() if isinstance(counts, Tensor) else counts)]
    if len(numbers) != images or sum(numbers) != total or min(numbers, default=0) < 0:
        raise ValueError(f"counts must hold {images} numbers of at least 0 with the sum {total}, got {numbers}")
    return numbers


def counts_on_device(counts: Sequence[int] | Tensor, images: int, total: int, x: Tensor, of: str) -> Tensor:
    """Return the counts on the device of x, the argument `of`, without a wait for it. The sum of a tensor is not checked."""
    if isinstance(counts, Tensor):
        checks.integer("counts", counts)
        checks.beside("counts", counts, x, of)
        checks.fits("counts", counts, counts.shape == (images,), "have shape ({},)", images)
        return counts
    return to_device(torch.tensor(counts_on_host(counts, images, total), dtype=torch.int32, device="cpu"), x.device)


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without a wait for it."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

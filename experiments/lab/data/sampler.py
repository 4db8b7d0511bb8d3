"""Which training samples an epoch has: each one once, or as many drawn with chances of their own."""

from typing import Any

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.config.objects import find
from lab.config.schema import SAMPLERS, ImagesConfig


def order_of(samples: int, chances: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return the positions of an epoch in their order: shuffled, or with chances (N,) drawn with replacement in proportion to them."""
    if chances is None:
        return torch.randperm(samples, generator=generator)
    limits = chances.double().cumsum(0)
    drawn = torch.rand(samples, dtype=torch.float64, generator=generator) * limits[-1]
    return torch.searchsorted(limits, drawn, right=True).clamp_(max=samples - 1)


def chances_of(config: ImagesConfig, targets: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return each training sample's chance to be drawn (N,), not normalised; None for each once.

    Args:
        config: has data.sampler.
        targets: class indices (N,), several labels (N, C) of 0 and 1, or numbers (N, K).
        weight: the samples' weights (N,), if the data has some.

    Raises:
        UserError: the data has no classes or weights, or the user's function fails or returns something else.
    """
    sampler = config.sampler
    if sampler is None:
        return None
    if sampler == "balanced":
        return _balanced(targets)
    if sampler == "weighted":
        if weight is None:
            raise UserError("data.sampler=weighted: the images have no weights; give data.weight, data.csv, data.class_weight or another.")
        return _checked(f"data.sampler={sampler}", weight, len(targets))
    if ":" not in sampler:
        raise UserError(f"data.sampler={sampler}: {', '.join(SAMPLERS)}, or a function as module:name or path/to/file.py:name is expected.")
    try:
        return _checked(f"data.sampler={sampler}", find("data.sampler", sampler)(targets), len(targets))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data.sampler={sampler}: fails: {type(error).__name__}: {error}") from error


def _balanced(targets: Tensor) -> Tensor:
    """Let every class be drawn as often; of several labels each counts by the inverse of its number of images."""
    if targets.ndim == 1:
        return (1 / torch.bincount(targets).double())[targets]
    if not bool(((targets == 0) | (targets == 1)).all()):
        raise UserError("data.sampler=balanced: balances classes, and the labels are numbers; name a function that returns their chances.")
    chances = (targets / targets.sum(0).clamp(min=1)).double().sum(1)
    return torch.where(chances > 0, chances, chances[chances > 0].min())


def _checked(setting: str, given: Any, samples: int) -> Tensor:
    chances = torch.as_tensor(given).double()
    expected = f"finite numbers of at least 0, one for each of the {samples} training images, not all 0, are expected"
    if tuple(chances.shape) != (samples,):
        raise UserError(f"{setting}: gives numbers of shape {tuple(chances.shape)}; {expected}.")
    if bool((wrong := ~(chances.isfinite() & (chances >= 0))).any()) or not chances.sum() > 0:
        came = f"the number {chances[wrong][0]:g}" if wrong.any() else "only 0"
        raise UserError(f"{setting}: gives {came}; {expected}.")
    return chances

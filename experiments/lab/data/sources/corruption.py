"""Training data made harder on purpose: few images, a long tail of classes, wrong labels."""

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.config.schema import MemoryConfig


def corrupted(config: MemoryConfig, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Choose the training samples that are kept; return their positions, in order, and their labels.

    Raises:
        UserError: settings contradict each other.
    """
    if config.label_noise and config.csv:
        raise UserError(f"data.label_noise={config.label_noise}: cannot go with data.csv, which belongs to the right labels.")
    generator = torch.Generator().manual_seed(config.corruption_seed)
    available = torch.bincount(targets, minlength=classes)
    fewer = (available * config.train_share).round().long().clamp(min=1).minimum(available)
    kept = sample_per_class(targets, tail_counts(fewer, config.imbalance), generator)
    return kept, with_wrong_labels(targets[kept], classes, config.label_noise, generator)


def tail_counts(available: Tensor, imbalance: float) -> Tensor:
    """Count the samples to keep of each class (C,): n μ^(-c / (C - 1)) for class c, μ the imbalance and n the smallest class's samples.

    Source: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, arXiv 1901.05555, section 5.1.
    """
    if imbalance == 1:
        return available
    falls = torch.linspace(0, 1, len(available), dtype=torch.float64)
    return (available.min() * imbalance**-falls).round().long().clamp(min=1)


def sample_per_class(targets: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `counts` (C,) samples of each class; return their positions, sorted."""
    order = torch.randperm(len(targets), generator=generator)
    positions = [order[targets[order] == label][:count] for label, count in enumerate(counts.tolist())]
    return torch.cat(positions).sort().values


def with_wrong_labels(targets: Tensor, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """Replace this share of the labels, at random positions, by another class; all classes are equally likely (symmetric noise)."""
    wrong = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    step = torch.randint(1, classes, (len(wrong),), generator=generator)
    replaced = targets.clone()
    replaced[wrong] = (targets[wrong] + step) % classes
    return replaced

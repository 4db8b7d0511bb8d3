"""Losses of the Lovász extension as the authors' paper writes them: algorithm 1, one region after the other."""

import torch
from torch import Tensor


def _of_region(errors: Tensor, own: Tensor) -> Tensor:
    errors, order = errors.sort(descending=True)
    own = own[order].to(errors.dtype)
    jaccard = 1 - (own.sum() - own.cumsum(0)) / (own.sum() + (1 - own).cumsum(0))
    return errors.relu() @ torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


def _reduced(images: list[list[Tensor | None]], per_image: bool, reduction: str, x: Tensor) -> Tensor:
    """Reduce the losses of the classes that count in each image, None for the others."""
    if reduction == "none":
        values = torch.stack([torch.stack([x.new_zeros(()) if v is None else v for v in each]) for each in images])
        return values if per_image else values[0]
    counted = [torch.stack(found) if (found := [v for v in each if v is not None]) else x.new_zeros(1) for each in images]
    return (
        torch.stack([each.sum() for each in counted]).sum() if reduction == "sum" else torch.stack([each.mean() for each in counted]).mean()
    )


def lovasz_softmax(x, target, classes="present", per_image=False, ignore_index=-100, reduction="mean"):
    """Compute as the authors' lovasz_softmax does. Of reduction "none", a class that is listed twice has twice its loss."""
    p = x.softmax(1).movedim(1, -1)
    parts = [(a.flatten(0, -2), b.flatten()) for a, b in (zip(p, target, strict=True) if per_image else [(p, target)])]
    images = []
    for rows, labels in parts:
        rows, labels = rows[labels != ignore_index], labels[labels != ignore_index]
        which = range(x.shape[1]) if isinstance(classes, str) else classes
        found = {c: _of_region((rows[:, c] - (labels == c).to(x.dtype)).abs(), labels == c) for c in which}
        if reduction == "none":
            often = {c: list(which).count(c) for c in found}
            images.append(
                [found[c] * often[c] if c in found and (classes != "present" or (labels == c).any()) else None for c in range(x.shape[1])]
            )
        else:
            images.append([found[c] for c in which if classes != "present" or (labels == c).any()])
    return _reduced(images, per_image, reduction, x)


def lovasz_hinge(x, target, per_image=False, ignore_index=-100, reduction="mean"):
    """Compute as the authors' lovasz_hinge does."""
    parts = [(a.flatten(), b.flatten()) for a, b in (zip(x, target, strict=True) if per_image else [(x, target)])]
    images: list[list[Tensor | None]] = []
    for logits, labels in parts:
        logits, labels = logits[labels != ignore_index], labels[labels != ignore_index]
        images.append([_of_region(1 - logits * (2 * labels.to(x.dtype) - 1), labels == 1)])
    value = _reduced(images, per_image, reduction, x)
    return value.squeeze(-1) if reduction == "none" else value

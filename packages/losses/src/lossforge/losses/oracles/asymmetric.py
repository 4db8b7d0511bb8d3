"""timm's asymmetric loss of one class, extended to targets of any shape, ignored rows and class weights."""

import torch


def asymmetric_single_label(x, target, reduction="mean", weight=None, ignore_index=-100, **options):
    """Compute timm.loss.AsymmetricLossSingleLabel of each row, and reduce here, because timm has no sum."""
    from timm.loss import AsymmetricLossSingleLabel

    keep = target != ignore_index
    index = torch.where(keep, target.long(), 0)
    w = torch.where(keep, 1.0 if weight is None else weight[index], 0.0)
    rows = AsymmetricLossSingleLabel(**options, reduction="none")(x.movedim(1, -1).flatten(0, -2), index.flatten())
    loss = torch.where(keep, rows.view(target.shape), 0.0) * w
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / w.sum()

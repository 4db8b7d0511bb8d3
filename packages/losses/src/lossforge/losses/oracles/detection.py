"""Losses of detectors from the references' formulas, without any code of ours."""


def gaussian_focal(x, target, alpha=2.0, gamma=4.0, pos_weight=1.0, neg_weight=1.0, reduction="mean", weight=None):
    """Compute as CornerNet's equation 1 and mmdetection do, on probabilities."""
    p = x.sigmoid()
    peaks = (target == 1).to(x.dtype)
    positive = -(p.log() * (1 - p) ** alpha * peaks)
    negative = -((1 - p).log() * p**alpha * (1 - target) ** gamma * (1 - peaks))
    loss = pos_weight * positive + neg_weight * negative
    loss = loss if weight is None else loss * weight
    return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]

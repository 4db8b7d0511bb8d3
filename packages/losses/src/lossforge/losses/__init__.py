"""Loss functions as fused Triton kernels: drop-in functions and modules.

CUDA tensors go through the kernels; others, float64, and whatever the kernels do not differentiate through the plain-torch reference.
"""

from lossforge.losses.functional import (
    CrossEntropyOutput,
    binary_cross_entropy_with_logits,
    cross_entropy,
    l1_loss,
    preference_bce,
    preference_bce_with_logits,
    sigmoid_focal_loss,
)
from lossforge.losses.modules import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    L1Loss,
    PreferenceBCELoss,
    PreferenceBCEWithLogitsLoss,
    SigmoidFocalLoss,
)
from lossforge.losses.operators.library import backend, plain_torch

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "L1Loss",
    "PreferenceBCELoss",
    "PreferenceBCEWithLogitsLoss",
    "SigmoidFocalLoss",
    "backend",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "l1_loss",
    "plain_torch",
    "preference_bce",
    "preference_bce_with_logits",
    "sigmoid_focal_loss",
]

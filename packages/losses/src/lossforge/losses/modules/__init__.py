"""The losses as modules: the functions of lossforge.losses.functional with their options kept, class-wise tensors as buffers.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, weight, preference, group, normalizer).
"""

from lossforge.losses.modules.binary import (
    AsymmetricLossMultiLabel,
    BCEWithLogitsLoss,
    PolyBinaryCrossEntropy,
    PreferenceBCELoss,
    PreferenceBCEWithLogitsLoss,
    SigmoidFocalLoss,
)
from lossforge.losses.modules.divergence import (
    JSDivWithLogitsLoss,
    KLDivWithLogitsLoss,
    TopKKLDivWithLogitsLoss,
    TotalVariationWithLogitsLoss,
)
from lossforge.losses.modules.regression import HuberLoss, L1Loss, MSELoss, SmoothL1Loss
from lossforge.losses.modules.softmax import CrossEntropyLoss

__all__ = [
    "AsymmetricLossMultiLabel",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "JSDivWithLogitsLoss",
    "KLDivWithLogitsLoss",
    "L1Loss",
    "MSELoss",
    "PolyBinaryCrossEntropy",
    "PreferenceBCELoss",
    "PreferenceBCEWithLogitsLoss",
    "SigmoidFocalLoss",
    "SmoothL1Loss",
    "TopKKLDivWithLogitsLoss",
    "TotalVariationWithLogitsLoss",
]

"""The losses as modules: the functions of lossforge.losses.functional with their options kept, class-wise tensors as buffers.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, weight, preference, group, normalizer).
Those of boxes take empty and gradient, and `forward` weight and normalizer.
"""

from lossforge.losses.modules.binary import (
    AsymmetricLossMultiLabel,
    BCEWithLogitsLoss,
    PolyBinaryCrossEntropy,
    PreferenceBCELoss,
    PreferenceBCEWithLogitsLoss,
    SigmoidFocalLoss,
)
from lossforge.losses.modules.box import (
    BoxIoULoss,
    BoxL1Loss,
    BoxSmoothL1Loss,
    CompleteBoxIoULoss,
    DistanceBoxIoULoss,
    EfficientBoxIoULoss,
    GeneralizedBoxIoULoss,
)
from lossforge.losses.modules.regression import HuberLoss, L1Loss, MSELoss, SmoothL1Loss
from lossforge.losses.modules.softmax import CrossEntropyLoss

__all__ = [
    "AsymmetricLossMultiLabel",
    "BCEWithLogitsLoss",
    "BoxIoULoss",
    "BoxL1Loss",
    "BoxSmoothL1Loss",
    "CompleteBoxIoULoss",
    "CrossEntropyLoss",
    "DistanceBoxIoULoss",
    "EfficientBoxIoULoss",
    "GeneralizedBoxIoULoss",
    "HuberLoss",
    "L1Loss",
    "MSELoss",
    "PolyBinaryCrossEntropy",
    "PreferenceBCELoss",
    "PreferenceBCEWithLogitsLoss",
    "SigmoidFocalLoss",
    "SmoothL1Loss",
]

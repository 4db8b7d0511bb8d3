"""The losses as modules: the functions of lossforge.losses.functional with their options kept, class-wise tensors as buffers.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, score, weight, preference, group, normalizer).
Those of boxes take empty and gradient, and `forward` weight and normalizer.
"""

from lossforge.losses.modules.asymmetric import AsymmetricLossSingleLabel
from lossforge.losses.modules.binary import (
    AsymmetricLossMultiLabel,
    BCEWithLogitsLoss,
    BinaryCrossEntropy,
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
from lossforge.losses.modules.classification import (
    GeneralizedCrossEntropyLoss,
    LogitAdjustedCrossEntropyLoss,
    PolyCrossEntropyLoss,
    SoftmaxFocalLoss,
)
from lossforge.losses.modules.contrastive import ClipLoss
from lossforge.losses.modules.detection import QualityFocalLoss, VarifocalLoss
from lossforge.losses.modules.divergence import (
    JSDivWithLogitsLoss,
    KLDivWithLogitsLoss,
    TopKKLDivWithLogitsLoss,
    TotalVariationWithLogitsLoss,
)
from lossforge.losses.modules.overlap import DiceCELoss, DiceLoss, FocalTverskyLoss, JaccardLoss, TverskyLoss
from lossforge.losses.modules.regression import HuberLoss, L1Loss, MSELoss, SmoothL1Loss
from lossforge.losses.modules.siglip import SigLIPLoss
from lossforge.losses.modules.softmax import CrossEntropyLoss

__all__ = [
    "AsymmetricLossMultiLabel",
    "AsymmetricLossSingleLabel",
    "BCEWithLogitsLoss",
    "BinaryCrossEntropy",
    "BoxIoULoss",
    "BoxL1Loss",
    "BoxSmoothL1Loss",
    "ClipLoss",
    "CompleteBoxIoULoss",
    "CrossEntropyLoss",
    "DiceCELoss",
    "DiceLoss",
    "DistanceBoxIoULoss",
    "EfficientBoxIoULoss",
    "FocalTverskyLoss",
    "GeneralizedBoxIoULoss",
    "GeneralizedCrossEntropyLoss",
    "HuberLoss",
    "JSDivWithLogitsLoss",
    "JaccardLoss",
    "KLDivWithLogitsLoss",
    "L1Loss",
    "LogitAdjustedCrossEntropyLoss",
    "MSELoss",
    "PolyBinaryCrossEntropy",
    "PolyCrossEntropyLoss",
    "PreferenceBCELoss",
    "PreferenceBCEWithLogitsLoss",
    "QualityFocalLoss",
    "SigLIPLoss",
    "SigmoidFocalLoss",
    "SmoothL1Loss",
    "SoftmaxFocalLoss",
    "TopKKLDivWithLogitsLoss",
    "TotalVariationWithLogitsLoss",
    "TverskyLoss",
    "VarifocalLoss",
]

"""The losses as modules: the functions of lossforge.losses.functional with their options kept, tensors among them as buffers.

Options are attributes that each call reads: `criterion.label_smoothing = 0.0` changes the next call, and a tensor may take a number's
place.

Every module takes, keyword-only, the options that every function has (empty, gradient, inplace, validate, and dim where targets may be
class indices along a chosen dimension), and `forward` the per-call tensors (target_b, lam, score, preference, group, normalizer) and any
option for that call alone.
Those of boxes take empty and gradient, and `forward` weight and normalizer.
"""

from lossforge.losses.modules.asymmetric import AsymmetricLossSingleLabel
from lossforge.losses.modules.binary import (
    AsymmetricLossMultiLabel,
    BCELoss,
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
from lossforge.losses.modules.likelihood import KLDivLoss, NLLLoss
from lossforge.losses.modules.overlap import DiceCELoss, DiceLoss, FocalTverskyLoss, JaccardLoss, TverskyLoss
from lossforge.losses.modules.regression import HuberLoss, L1Loss, MSELoss, SmoothL1Loss
from lossforge.losses.modules.siglip import SigLIPLoss
from lossforge.losses.modules.softmax import CrossEntropyLoss

__all__ = [
    "AsymmetricLossMultiLabel",
    "AsymmetricLossSingleLabel",
    "BCELoss",
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
    "KLDivLoss",
    "KLDivWithLogitsLoss",
    "L1Loss",
    "LogitAdjustedCrossEntropyLoss",
    "MSELoss",
    "NLLLoss",
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

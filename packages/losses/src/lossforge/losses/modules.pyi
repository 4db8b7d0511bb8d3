"""Written by tools/module_stubs.py from the signatures of the functions."""
# fmt: off
# ruff: noqa

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, overload

from torch import Tensor, nn
from typing_extensions import TypeVar

from lossforge.losses.functional.cross_entropy import CrossEntropyOutput
from lossforge.losses.types import Activation, BatchReduction, BoxFormat, Empty, Gradient, Reduction, ScalarReduction

Result = TypeVar("Result", default=Tensor, covariant=True)

class LossModule(nn.Module):
    function: Callable[..., Any]
    option_names: tuple[str, ...]
    shared: Mapping[str, Any]

class AsymmetricLossMultiLabel(LossModule):
    """Asymmetric loss as timm.loss.AsymmetricLossMultiLabel: see asymmetric_loss_multi_label. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    gamma_neg: float
    gamma_pos: float
    clip: float | None
    eps: float
    disable_torch_grad_focal_loss: bool
    smoothing: float
    pos_weight: float | Tensor | None
    def __init__(self, gamma_neg: float = 4.0, gamma_pos: float = 1.0, clip: float | None = 0.05, eps: float = 1e-08, disable_torch_grad_focal_loss: bool = False, smoothing: float = 0.0, reduction: BatchReduction = 'batchmean', weight: Tensor | None = None, pos_weight: float | Tensor | None = None, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class AsymmetricLossSingleLabel(LossModule):
    """Asymmetric loss as timm.loss.AsymmetricLossSingleLabel: see asymmetric_loss_single_label. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    gamma_pos: float
    gamma_neg: float
    eps: float
    weight: Tensor | None
    ignore_index: int
    def __init__(self, gamma_pos: float = 1.0, gamma_neg: float = 4.0, eps: float = 0.1, reduction: Reduction = 'mean', *, weight: Tensor | None = None, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class BCELoss(LossModule):
    """Binary cross entropy on probabilities as torch.nn.BCELoss: see binary_cross_entropy. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    def __init__(self, weight: Tensor | None = None, size_average: bool | None = None, reduce: bool | None = None, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class BCEWithLogitsLoss(LossModule):
    """Binary cross entropy on logits as torch.nn.BCEWithLogitsLoss: see binary_cross_entropy_with_logits. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    pos_weight: Tensor | None
    label_smoothing: float
    target_threshold: float | None
    def __init__(self, weight: Tensor | None = None, size_average: bool | None = None, reduce: bool | None = None, reduction: Reduction = 'mean', pos_weight: Tensor | None = None, *, label_smoothing: float = 0.0, target_threshold: float | None = None, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class BinaryCrossEntropy(LossModule):
    """Binary cross entropy of smoothed labels as timm.loss.BinaryCrossEntropy: see smoothed_binary_cross_entropy. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    smoothing: float
    target_threshold: float | None
    sum_classes: bool
    pos_weight: float | Tensor | None
    smooth_dense: bool
    def __init__(self, smoothing: float = 0.1, target_threshold: float | None = None, weight: Tensor | None = None, reduction: Reduction = 'mean', sum_classes: bool = False, pos_weight: float | Tensor | None = None, smooth_dense: bool = False, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class BoxIoULoss(LossModule):
    """IoU loss of two boxes: see box_iou_loss. As there and in torchvision, the default reduction is "none". `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class BoxL1Loss(LossModule):
    """Absolute error of boxes, summed over their coordinates: see box_l1_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    def __init__(self, reduction: Reduction = 'none', *, empty: Empty = 'zero', gradient: Gradient | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class BoxSmoothL1Loss(LossModule):
    """Smooth L1 loss of boxes, summed over their coordinates: see box_smooth_l1_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    beta: float
    def __init__(self, reduction: Reduction = 'none', beta: float = 1.0, *, empty: Empty = 'zero', gradient: Gradient | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class BradleyTerryLoss(LossModule):
    """Bradley-Terry loss of a reward model: see bradley_terry_loss. The margin is given per call. `forward` takes that function's tensors."""

    reduction: Reduction
    label_smoothing: float
    center_rewards_coefficient: float
    empty: Empty
    def __init__(self, label_smoothing: float = 0.0, center_rewards_coefficient: float = 0.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class CPOLoss(LossModule):
    """Contrastive preference optimisation: see cpo_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    beta: float
    label_smoothing: float
    loss_type: str
    cpo_alpha: float
    empty: Empty
    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = 'sigmoid', cpo_alpha: float = 1.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class ClipLoss(LossModule):
    """Symmetric InfoNCE over one similarity matrix: see clip_loss. Its input is the matrix, open_clip's are the features. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    scale: float
    def __init__(self, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, scale: float = 1.0) -> None: ...
    def forward(self, similarity: Tensor, offset: int = 0, **per_call: Any) -> Tensor: ...
    def __call__(self, similarity: Tensor, offset: int = 0, **per_call: Any) -> Tensor: ...

class CompleteBoxIoULoss(LossModule):
    """Complete IoU loss: see complete_box_iou_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class CrossEntropyLoss(LossModule, Generic[Result]):
    """Cross entropy as torch.nn.CrossEntropyLoss, with more options: see cross_entropy. For type checkers a call gives a Tensor, or with a return_… CrossEntropyOutput. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    return_z_loss: bool
    return_lse: bool
    return_entropy: bool
    return_correct: bool
    @overload
    def __init__(self: "CrossEntropyLoss[Tensor]", weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[CrossEntropyOutput]", weight: Tensor | None = None, *, return_z_loss: Literal[True], return_lse: bool = False, return_entropy: bool = False, return_correct: bool = False, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[CrossEntropyOutput]", weight: Tensor | None = None, *, return_lse: Literal[True], return_z_loss: bool = False, return_entropy: bool = False, return_correct: bool = False, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[CrossEntropyOutput]", weight: Tensor | None = None, *, return_entropy: Literal[True], return_z_loss: bool = False, return_lse: bool = False, return_correct: bool = False, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[CrossEntropyOutput]", weight: Tensor | None = None, *, return_correct: Literal[True], return_z_loss: bool = False, return_lse: bool = False, return_entropy: bool = False, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[Tensor | CrossEntropyOutput]", weight: Tensor | None = None, *, return_z_loss: bool = False, return_lse: bool = False, return_entropy: bool = False, return_correct: bool = False, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Result: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Result: ...

class DPOLoss(LossModule):
    """Direct preference optimisation: see dpo_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    beta: float
    label_smoothing: float
    loss_type: str
    empty: Empty
    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = 'sigmoid', reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class DiceCELoss(LossModule):
    """Dice loss plus cross entropy as monai.losses.DiceCELoss: see dice_ce_loss. `forward` takes that function's tensors."""

    reduction: ScalarReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    squared_pred: bool
    lambda_dice: float
    lambda_ce: float
    def __init__(self, *, squared_pred: bool = False, reduction: ScalarReduction = 'mean', lambda_dice: float = 1.0, lambda_ce: float = 1.0, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, include_background: bool = True, activation: Activation | None = 'softmax', smooth_nr: float = 1e-05, smooth_dr: float = 1e-05, batch: bool = False, weight: Tensor | None = None, ignore_index: int = -100, present_only: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class DiceLoss(LossModule):
    """Soft Dice loss as monai.losses.DiceLoss: see dice_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    squared_pred: bool
    def __init__(self, *, squared_pred: bool = False, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, include_background: bool = True, activation: Activation | None = 'softmax', smooth_nr: float = 1e-05, smooth_dr: float = 1e-05, batch: bool = False, weight: Tensor | None = None, ignore_index: int = -100, present_only: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class DistanceBoxIoULoss(LossModule):
    """Distance IoU loss: see distance_box_iou_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class DistributionFocalLoss(LossModule):
    """Distribution focal loss as mmdetection's: see distribution_focal_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    def __init__(self, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class EfficientBoxIoULoss(LossModule):
    """Efficient IoU loss: see efficient_box_iou_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class FocalTverskyLoss(LossModule):
    """Focal Tversky loss; gamma is the exponent: see focal_tversky_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    alpha: float
    beta: float
    gamma: float
    def __init__(self, *, alpha: float = 0.3, beta: float = 0.7, gamma: float = 0.75, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, include_background: bool = True, activation: Activation | None = 'softmax', smooth_nr: float = 1e-05, smooth_dr: float = 1e-05, batch: bool = False, weight: Tensor | None = None, ignore_index: int = -100, present_only: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class GRPOLoss(LossModule):
    """Group-relative policy optimisation: see grpo_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    epsilon: float
    epsilon_high: float | None
    beta: float
    importance_sampling_level: str
    loss_type: str
    delta: float | None
    max_completion_length: int | None
    empty: Empty
    def __init__(self, epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, importance_sampling_level: str = 'token', loss_type: str = 'grpo', delta: float | None = None, max_completion_length: int | None = None, reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class GeneralizedBoxIoULoss(LossModule):
    """Generalized IoU loss: see generalized_box_iou_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class GeneralizedCrossEntropyLoss(LossModule):
    """Generalised cross entropy for noisy labels: see generalized_cross_entropy. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    q: float
    weight: Tensor | None
    ignore_index: int
    def __init__(self, q: float = 0.7, weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class HuberLoss(LossModule):
    """Huber loss as torch.nn.HuberLoss: see huber_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    delta: float
    def __init__(self, reduction: Reduction = 'mean', delta: float = 1.0, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class JSDivWithLogitsLoss(LossModule):
    """Generalised Jensen-Shannon divergence from a teacher's logits: see js_div_with_logits. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    beta: float
    temperature: float
    temperature_squared: bool
    ignore_index: int
    def __init__(self, beta: float = 0.5, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', *, temperature_squared: bool = False, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class JaccardLoss(LossModule):
    """Soft Jaccard loss, 1 - IoU: see jaccard_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    squared_pred: bool
    def __init__(self, *, squared_pred: bool = False, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, include_background: bool = True, activation: Activation | None = 'softmax', smooth_nr: float = 1e-05, smooth_dr: float = 1e-05, batch: bool = False, weight: Tensor | None = None, ignore_index: int = -100, present_only: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class KLDivLoss(LossModule):
    """Kullback-Leibler divergence of log-probabilities as torch.nn.KLDivLoss: see kl_div. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    log_target: bool
    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: BatchReduction = 'mean', log_target: bool = False, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class KLDivWithLogitsLoss(LossModule):
    """Kullback-Leibler divergence from a teacher's logits: see kl_div_with_logits. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    temperature: float
    reverse: bool
    temperature_squared: bool
    ignore_index: int
    def __init__(self, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', *, reverse: bool = False, temperature_squared: bool = True, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class KTOLoss(LossModule):
    """Kahneman-Tversky optimisation: see kto_loss. Weights per completion are given per call, as is the baseline kl. `forward` takes that function's tensors."""

    reduction: Reduction
    beta: float
    desirable_weight: float | Tensor
    undesirable_weight: float | Tensor
    empty: Empty
    def __init__(self, beta: float = 0.1, desirable_weight: float | Tensor = 1.0, undesirable_weight: float | Tensor = 1.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class L1Loss(LossModule):
    """Mean absolute error as torch.nn.L1Loss: see l1_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class LinearCrossEntropyLoss(LossModule, Generic[Result]):
    """Cross entropy of a linear layer's output: see linear_cross_entropy. The layer's tensors belong to the call. `forward` takes that function's tensors."""

    reduction: Reduction
    chunk: int | None
    accumulate: Literal['float32', 'weight'] | None
    skip_ignored: bool
    scale: float
    softcap: float | None
    z_loss: float
    empty: Empty
    gradient: Gradient | None
    validate: bool | None
    loss_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    return_z_loss: bool
    return_lse: bool
    return_entropy: bool
    return_correct: bool
    @overload
    def __init__(self: "LinearCrossEntropyLoss[Tensor]", *, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[CrossEntropyOutput]", *, return_z_loss: Literal[True], return_lse: bool = False, return_entropy: bool = False, return_correct: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[CrossEntropyOutput]", *, return_lse: Literal[True], return_z_loss: bool = False, return_entropy: bool = False, return_correct: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[CrossEntropyOutput]", *, return_entropy: Literal[True], return_z_loss: bool = False, return_lse: bool = False, return_correct: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[CrossEntropyOutput]", *, return_correct: Literal[True], return_z_loss: bool = False, return_lse: bool = False, return_entropy: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[Tensor | CrossEntropyOutput]", *, return_z_loss: bool = False, return_lse: bool = False, return_entropy: bool = False, return_correct: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, empty: Empty = 'nan', gradient: Gradient | None = None, validate: bool | None = None, loss_weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0) -> None: ...
    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Result: ...
    def __call__(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Result: ...

class LinearJSDivLoss(LossModule):
    """Generalised Jensen-Shannon divergence of a linear layer's output: see linear_js_div. The layer's tensors belong to the call. `forward` takes that function's tensors."""

    reduction: BatchReduction
    chunk: int | None
    accumulate: Literal['float32', 'weight'] | None
    skip_ignored: bool
    ignore_index: int
    empty: Empty
    gradient: Gradient | None
    beta: float
    temperature: float
    temperature_squared: bool
    def __init__(self, *, beta: float = 0.5, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', temperature_squared: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None) -> None: ...
    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...

class LinearKLDivLoss(LossModule):
    """Kullback-Leibler divergence of a linear layer's output from a teacher's: see linear_kl_div. The layer's tensors belong to the call. `forward` takes that function's tensors."""

    reduction: BatchReduction
    chunk: int | None
    accumulate: Literal['float32', 'weight'] | None
    skip_ignored: bool
    ignore_index: int
    empty: Empty
    gradient: Gradient | None
    temperature: float
    reverse: bool
    temperature_squared: bool
    renormalize: bool
    tail: bool
    def __init__(self, *, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', reverse: bool = False, temperature_squared: bool = True, renormalize: bool = False, tail: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None) -> None: ...
    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...

class LinearTotalVariationLoss(LossModule):
    """Total variation distance of a linear layer's output: see linear_total_variation. The layer's tensors belong to the call. `forward` takes that function's tensors."""

    reduction: BatchReduction
    chunk: int | None
    accumulate: Literal['float32', 'weight'] | None
    skip_ignored: bool
    ignore_index: int
    empty: Empty
    gradient: Gradient | None
    temperature: float
    temperature_squared: bool
    def __init__(self, *, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', temperature_squared: bool = False, chunk: int | None = None, accumulate: Literal['float32', 'weight'] | None = None, skip_ignored: bool = False, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None) -> None: ...
    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Tensor: ...

class LogCoshLoss(LossModule):
    """Log-cosh loss: see log_cosh_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    def __init__(self, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class LogitAdjustedCrossEntropyLoss(LossModule):
    """Logit-adjusted cross entropy for long-tailed classes: see logit_adjusted_cross_entropy."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    log_prior: Tensor | None
    tau: float
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    def __init__(self, class_counts: Tensor | None = None, tau: float = 1.0, weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class MSELoss(LossModule):
    """Mean squared error as torch.nn.MSELoss: see mse_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class NLLLoss(LossModule):
    """Negative log-likelihood of log-probabilities as torch.nn.NLLLoss: see nll_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    weight: Tensor | None
    ignore_index: int
    def __init__(self, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class ORPOLoss(LossModule):
    """Odds-ratio preference optimisation: see orpo_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    beta: float
    alpha: float
    empty: Empty
    def __init__(self, beta: float = 0.1, alpha: float = 1.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class PolyBinaryCrossEntropy(LossModule):
    """Poly-1 binary cross entropy as timm.loss.PolyBinaryCrossEntropy: see poly_binary_cross_entropy. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    epsilon: float
    gamma: float
    alpha: float | Tensor | None
    smoothing: float
    def __init__(self, epsilon: float = 2.0, gamma: float = 0.0, alpha: float | Tensor | None = None, smoothing: float = 0.0, reduction: BatchReduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class PolyCrossEntropyLoss(LossModule):
    """Poly-1 cross entropy as timm.loss.PolyCrossEntropy: see poly_cross_entropy. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    epsilon: float
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    smoothing: float | None
    def __init__(self, epsilon: float = 2.0, weight: Tensor | None = None, ignore_index: int = -100, reduction: Reduction = 'mean', label_smoothing: float = 0.0, *, smoothing: float | None = None, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class PreferenceBCELoss(LossModule):
    """Preference-weighted binary cross entropy on probabilities, with a weight per group: see preference_bce. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    group_weight: Tensor | None
    def __init__(self, group_weight: Tensor | None = None, *, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class PreferenceBCEWithLogitsLoss(LossModule):
    """Preference-weighted binary cross entropy on logits, with a weight per group: see preference_bce_with_logits. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    group_weight: Tensor | None
    def __init__(self, group_weight: Tensor | None = None, *, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class QualityFocalLoss(LossModule):
    """Quality focal loss as mmdetection's: see quality_focal_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    beta: float
    def __init__(self, beta: float = 2.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class ScyllaBoxIoULoss(LossModule):
    """SCYLLA IoU loss: see scylla_box_iou_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    format: BoxFormat
    validate: bool | None
    eps: float
    def __init__(self, reduction: Reduction = 'none', eps: float = 1e-07, *, empty: Empty = 'zero', gradient: Gradient | None = None, format: BoxFormat = 'xyxy', validate: bool | None = None) -> None: ...
    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Tensor: ...

class SigLIPLoss(LossModule):
    """Pairwise sigmoid loss of similarities: see siglip_loss. `forward` takes offset and negative_only as well. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    def __init__(self, *, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor | None = None, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor | None = None, **per_call: Any) -> Tensor: ...

class SigmoidFocalLoss(LossModule):
    """Sigmoid focal loss: see sigmoid_focal_loss. As there, the default reduction is torchvision's "none". `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    alpha: float | Tensor
    gamma: float
    def __init__(self, alpha: float | Tensor = 0.25, gamma: float = 2.0, reduction: Reduction = 'none', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class SimPOLoss(LossModule):
    """Simple preference optimisation: see simpo_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    beta: float
    gamma: float
    label_smoothing: float
    loss_type: str
    empty: Empty
    def __init__(self, beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0, loss_type: str = 'sigmoid', reduction: Reduction = 'mean', *, empty: Empty = 'nan') -> None: ...
    def forward(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...
    def __call__(self, *logps: Tensor | None, **per_call: Any) -> Tensor: ...

class SmoothL1Loss(LossModule):
    """Smooth L1 loss as torch.nn.SmoothL1Loss: see smooth_l1_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    beta: float
    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: Reduction = 'mean', beta: float = 1.0, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class SoftmaxFocalLoss(LossModule):
    """Focal loss under a softmax: see softmax_focal_loss. As there, the default reduction is kornia's "none". `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    alpha: float | Tensor | None
    gamma: float
    weight: Tensor | None
    ignore_index: int
    def __init__(self, alpha: float | Tensor | None = None, gamma: float = 2.0, reduction: Reduction = 'none', weight: Tensor | None = None, ignore_index: int = -100, *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class TaylorCrossEntropyLoss(LossModule):
    """Taylor cross entropy for noisy labels: see taylor_cross_entropy. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    scale: float
    softcap: float | None
    z_loss: float
    weight: Tensor | None
    ignore_index: int
    order: float
    def __init__(self, order: float = 2.0, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, scale: float = 1.0, softcap: float | None = None, z_loss: float = 0.0, weight: Tensor | None = None, ignore_index: int = -100) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class TopKKLDivWithLogitsLoss(LossModule):
    """Kullback-Leibler divergence from a teacher's K likeliest classes: see topk_kl_div_with_logits."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    temperature: float
    renormalize: bool
    tail: bool
    temperature_squared: bool
    ignore_index: int
    def __init__(self, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', *, renormalize: bool = False, tail: bool = False, temperature_squared: bool = True, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None) -> None: ...
    def forward(self, input: Tensor, *teacher: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, *teacher: Tensor, **per_call: Any) -> Tensor: ...

class TotalVariationWithLogitsLoss(LossModule):
    """Total variation distance from a teacher's logits: see total_variation_with_logits. `forward` takes that function's tensors."""

    reduction: BatchReduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    temperature: float
    temperature_squared: bool
    ignore_index: int
    def __init__(self, temperature: float = 1.0, reduction: BatchReduction = 'batchmean', *, temperature_squared: bool = False, ignore_index: int = -100, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class TverskyLoss(LossModule):
    """Tversky loss as monai.losses.TverskyLoss: see tversky_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    include_background: bool
    activation: Activation | None
    smooth_nr: float
    smooth_dr: float
    batch: bool
    weight: Tensor | None
    ignore_index: int
    present_only: bool
    alpha: float
    beta: float
    def __init__(self, *, alpha: float = 0.5, beta: float = 0.5, reduction: Reduction = 'mean', empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, include_background: bool = True, activation: Activation | None = 'softmax', smooth_nr: float = 1e-05, smooth_dr: float = 1e-05, batch: bool = False, weight: Tensor | None = None, ignore_index: int = -100, present_only: bool = False) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

class VarifocalLoss(LossModule):
    """Varifocal loss as mmdetection's: see varifocal_loss. `forward` takes that function's tensors."""

    reduction: Reduction
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    validate: bool | None
    dim: int
    weight: Tensor | None
    alpha: float
    gamma: float
    iou_weighted: bool
    def __init__(self, alpha: float = 0.75, gamma: float = 2.0, iou_weighted: bool = True, reduction: Reduction = 'mean', *, empty: Empty = 'nan', gradient: Gradient | None = None, inplace: bool = False, validate: bool | None = None, dim: int = -1, weight: Tensor | None = None) -> None: ...
    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...
    def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Tensor: ...

__all__ = [
    'AsymmetricLossMultiLabel',
    'AsymmetricLossSingleLabel',
    'BCELoss',
    'BCEWithLogitsLoss',
    'BinaryCrossEntropy',
    'BoxIoULoss',
    'BoxL1Loss',
    'BoxSmoothL1Loss',
    'BradleyTerryLoss',
    'CPOLoss',
    'ClipLoss',
    'CompleteBoxIoULoss',
    'CrossEntropyLoss',
    'DPOLoss',
    'DiceCELoss',
    'DiceLoss',
    'DistanceBoxIoULoss',
    'DistributionFocalLoss',
    'EfficientBoxIoULoss',
    'FocalTverskyLoss',
    'GRPOLoss',
    'GeneralizedBoxIoULoss',
    'GeneralizedCrossEntropyLoss',
    'HuberLoss',
    'JSDivWithLogitsLoss',
    'JaccardLoss',
    'KLDivLoss',
    'KLDivWithLogitsLoss',
    'KTOLoss',
    'L1Loss',
    'LinearCrossEntropyLoss',
    'LinearJSDivLoss',
    'LinearKLDivLoss',
    'LinearTotalVariationLoss',
    'LogCoshLoss',
    'LogitAdjustedCrossEntropyLoss',
    'MSELoss',
    'NLLLoss',
    'ORPOLoss',
    'PolyBinaryCrossEntropy',
    'PolyCrossEntropyLoss',
    'PreferenceBCELoss',
    'PreferenceBCEWithLogitsLoss',
    'QualityFocalLoss',
    'ScyllaBoxIoULoss',
    'SigLIPLoss',
    'SigmoidFocalLoss',
    'SimPOLoss',
    'SmoothL1Loss',
    'SoftmaxFocalLoss',
    'TaylorCrossEntropyLoss',
    'TopKKLDivWithLogitsLoss',
    'TotalVariationWithLogitsLoss',
    'TverskyLoss',
    'VarifocalLoss',
]

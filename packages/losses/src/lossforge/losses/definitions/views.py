"""The loss of several augmented views of each sample."""

from typing import Any, TypedDict, Unpack, cast

from torch import Tensor

from lossforge.kernels.call import RowwiseCall, ViewsCall
from lossforge.losses import checks
from lossforge.losses.autograd import compute
from lossforge.losses.templates.declare import public
from lossforge.losses.templates.options import CallOptions, check_options
from lossforge.losses.templates.record import prepared
from lossforge.losses.templates.rowwise import RowOptions, rowwise_loss
from lossforge.losses.templates.views import VIEWS
from lossforge.losses.types import Gradient, NonNegative, UnitInterval

MOST_VIEWS = 64
"""More views do not fit in a tile."""


class ViewOptions(TypedDict, total=False):
    """As every loss has them."""

    gradient: Gradient | None
    validate: bool | None


@public(VIEWS.docs, repeats=True)
def jsd_cross_entropy(
    input: Tensor,  # (S N, C)
    target: Tensor,  # class indices (S N,) or (N,)
    num_splits: int = 3,
    alpha: NonNegative = 12.0,
    smoothing: UnitInterval = 0.1,
    **options: Unpack[ViewOptions],
) -> Tensor:
    """Cross entropy of clean samples and the Jensen-Shannon divergence of their views, as timm.loss.JsdCrossEntropy (AugMix, Hendrycks et
    al. 2019, arXiv 1912.02781).

    L = cross_entropy(x₁, t) + α JS(p₁, …, p_S), JS = 1 / (S N) Σ Σⱼ p (ln p - ln max(m, 1e-7)) with p = softmax(x), m = Σ p / S.

    When to use it: Take it with AugMix and other augmentations in several views, for a classifier that is robust to corrupted images.

    When not: Leave it where a sample has one view. Each further view costs another pass of the model.

    The first N rows are the clean samples, the next N their first augmented views in the same order, and so on. The divergence reads the
    views of a sample together, once for its value and once for its gradient; no probabilities are kept.

    Args:
        input: logits (S N, C) of S views of N samples, one view of all samples after the other.
        target: class indices of any integer dtype, of the clean samples (N,), or of all rows, of which the first N are used.
        num_splits: S in [2, 64], the number of views.
        alpha: α of at least 0, the weight of the divergence.
        smoothing: in [0, 1], the share of label smoothing of the cross entropy.

    Examples:
        >>> logits = torch.randn(3 * 8, 10, requires_grad=True)
        >>> jsd_cross_entropy(logits, torch.randint(10, (3 * 8,))).backward()
    """
    checks.whole("input", input)
    check_options(input, "mean", cast(CallOptions, options), ViewOptions)
    num_splits = checks.whole_number("num_splits", num_splits)
    if not 2 <= num_splits <= MOST_VIEWS:
        raise ValueError(f"num_splits must be at least 2 and at most {MOST_VIEWS}, got {num_splits}")
    if input.ndim != 2 or input.shape[0] % num_splits or input.shape[1] == 0:
        raise ValueError(f"input must have shape (S N, C) with S = num_splits = {num_splits}, got {tuple(input.shape)}")
    alpha = checks.number("alpha", alpha, 0.0)
    samples = input.shape[0] // num_splits
    if isinstance(target, Tensor) and target.shape == input.shape[:1]:
        target = target[:samples]
    call = RowwiseCall("cross_entropy", input[:samples], target, label_smoothing=smoothing, reduction="mean")
    clean = rowwise_loss(call, cast(RowOptions, options))
    divergence: Any = prepared(ViewsCall("jsd", input, splits=num_splits, loss_scale=1.0 * alpha), {"gradient": options.get("gradient")})
    total: Tensor = compute(clean) + compute(divergence)
    return total

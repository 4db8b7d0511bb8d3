"""Losses over similarities of two views, of which pairs belong together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.modules.common import LossModule
from lossforge.losses.types import Empty, Gradient, Reduction


class ClipSettings(TypedDict, total=False):
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    scale: float


class ClipLoss(LossModule):
    """Symmetric InfoNCE over one similarity matrix: see functional.clip_loss. Its input is the matrix, open_clip's are the features."""

    function = staticmethod(functional.clip_loss)
    shared: Mapping[str, Any] = {"empty": "nan", "gradient": None, "inplace": False, "scale": 1.0}
    empty: Empty
    gradient: Gradient | None
    inplace: bool
    scale: float

    def __init__(self, reduction: Reduction = "mean", **options: Unpack[ClipSettings]) -> None:
        super().__init__(options, reduction=reduction)

    def forward(self, similarity: Tensor, offset: int = 0, **per_call: Any) -> Tensor:
        return self.compute(similarity, offset, **per_call)

    if TYPE_CHECKING:

        def __call__(self, similarity: Tensor, offset: int = 0, **per_call: Any) -> Tensor: ...

"""The pairwise sigmoid loss of image and text embeddings."""

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.modules.common import ElementwiseModule, WeightedSettings
from lossforge.losses.types import Reduction


class SigLIPLoss(ElementwiseModule):
    """Pairwise sigmoid loss of similarities: see functional.siglip_loss. `forward` takes offset and negative_only as well."""

    function = staticmethod(functional.siglip_loss)

    def __init__(self, *, reduction: Reduction = "mean", **options: Unpack[WeightedSettings]) -> None:
        super().__init__(options, reduction=reduction)

    def forward(self, input: Tensor, target: Tensor | None = None, **per_call: Any) -> Tensor:
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor | None = None, **per_call: Any) -> Tensor: ...

"""The pairwise sigmoid loss of image and text embeddings."""

from typing import Any, Unpack

from torch import Tensor

from lossforge.losses import functional
from lossforge.losses.functional.common import ElementwiseSettings
from lossforge.losses.modules.common import LossModule


class SigLIPLoss(LossModule):
    """Pairwise sigmoid loss of similarities: see functional.siglip_loss. `forward` takes offset and negative_only as well."""

    function = staticmethod(functional.siglip_loss)

    def __init__(self, *, reduction: str = "mean", **options: Unpack[ElementwiseSettings]) -> None:
        super().__init__(reduction, {}, {}, options)

    def forward(self, input: Tensor, target: Tensor | None = None, **per_call: Any) -> Tensor:
        return super().forward(input, target, **per_call)

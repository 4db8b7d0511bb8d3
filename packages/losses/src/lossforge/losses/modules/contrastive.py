"""Losses over similarities of two views, of which pairs belong together."""

from typing import Any, Unpack

from torch import Tensor, nn

from lossforge.losses import checks, functional
from lossforge.losses.functional.common import Settings


class ClipSettings(Settings, total=False):
    scale: float


class ClipLoss(nn.Module):
    """Symmetric InfoNCE over one similarity matrix: see functional.clip_loss. Its input is the matrix, open_clip's are the features."""

    function = staticmethod(functional.clip_loss)

    def __init__(self, reduction: str = "mean", **options: Unpack[ClipSettings]) -> None:
        super().__init__()
        checks.one_of("reduction", reduction, checks.REDUCTIONS)
        for name in options:
            if name not in ClipSettings.__annotations__:
                raise checks.unexpected("ClipLoss", name, checks.keywords(ClipLoss.__init__, ClipSettings))
        self.reduction = reduction
        self.settings: dict[str, Any] = dict(options)

    def forward(self, similarity: Tensor, offset: int = 0, **per_call: Any) -> Tensor:
        return functional.clip_loss(similarity, offset, self.reduction, **{**self.settings, **per_call})

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in {"reduction": self.reduction, **self.settings}.items())

"""open_clip: its contrastive losses from features, without a matrix of similarities; of float32 features with one matrix, which is faster.

    from lossforge.integrations import open_clip

    open_clip.patch()                       # then ClipLoss and SigLipLoss as before, on one process or several

open_clip gathers and exchanges features as before. CoCaLoss takes its contrastive part from ours, because it calls ClipLoss.
DistillClipLoss needs the matrix and stays open_clip's.

Tested with open_clip 3.3.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses import clip_loss, clip_loss_from_features, cross_entropy, info_nce_loss, siglip_loss, siglip_loss_from_features
from lossforge.losses.base.state import autocast_dtype
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "3.3"
MATRIX = 2**28
"""Elements of the largest matrix of similarities that is made, 1 GiB. Without it the kernels compute each product twice, in float32 by
slower instructions than torch's. open_clip itself makes two such matrices, and further ones of their sizes."""
GATHERED = "(image_features, text_features, local_loss=False, gather_with_grad=False, rank=0, world_size=1, use_horovod=False)"


def _overridden(self: Any, library: type, *names: str) -> str:
    """Return why a subclass needs the matrix of similarities: it has methods of its own that make it. "" if it has none."""
    own = [name for name in names if getattr(type(self), name) is not getattr(library, name)]
    return f"{type(self).__qualname__} has its own {', '.join(own)}" if own else ""


def _clip(
    self: Any, image_features: Tensor, text_features: Tensor, logit_scale: Any, logit_bias: Any = None, output_dict: bool = False
) -> Any:
    """Return CLIP's loss. A bias on all logits cancels in both softmaxes."""
    from open_clip import loss as library

    if why := _overridden(self, library.ClipLoss, "get_logits", "get_ground_truth"):
        return why
    if self.use_horovod:
        return "it gathers with horovod"
    if isinstance(logit_bias, Tensor) and logit_bias.requires_grad:
        return "logit_bias requires grad, and ours has no gradient for it"
    if isinstance(logit_bias, Tensor) and logit_bias.numel() != 1:
        return "logit_bias is not one number"
    images, texts, scale = image_features, text_features, _number(logit_scale)
    if self.world_size > 1:
        how = self.local_loss, self.gather_with_grad, self.rank, self.world_size
        images, texts = library.gather_features(image_features, text_features, *how)
    if self.world_size > 1 and self.local_loss:
        first = self.rank * len(image_features)
        loss = (_one_way(image_features, texts, scale, first) + _one_way(text_features, images, scale, first)) / 2
    elif _by_matrix(images, texts):
        loss = clip_loss((scale * images) @ texts.T, inplace=True)
    else:
        loss = clip_loss_from_features(images, texts, scale)
    return {"contrastive_loss": loss} if output_dict else loss


def _one_way(rows: Tensor, columns: Tensor, scale: Any, first: int) -> Tensor:
    """Return the cross entropy of this process's rows against the columns of all. first: the column of the first row."""
    if _by_matrix(rows, columns):
        place = torch.arange(first, first + len(rows), device=rows.device)
        return cross_entropy((scale * rows) @ columns.T, place, inplace=True)
    return info_nce_loss(rows, columns, temperature=1 / scale, normalize=False, offset=first)


def _by_matrix(rows: Tensor, columns: Tensor) -> bool:
    """Return whether one matrix of similarities is made, whose gradient takes its place."""
    kinds = {rows.dtype, columns.dtype}
    return kinds == {torch.float32} and autocast_dtype(rows.device.type) is None and 0 < len(rows) * len(columns) <= MATRIX


def _siglip(
    self: Any, image_features: Tensor, text_features: Tensor, logit_scale: Any, logit_bias: Any = None, negative_only: bool = False
) -> Tensor | str:
    from open_clip import loss as library

    if why := _overridden(self, library.SigLipLoss, "get_logits", "get_ground_truth"):
        return why
    bias = 0.0 if logit_bias is None else _number(logit_bias)
    if _by_matrix(image_features, text_features):
        shift = torch.as_tensor(bias, dtype=torch.float32, device=image_features.device).reshape(1)
        similarities = torch.addmm(shift, _number(logit_scale) * image_features, text_features.T)
        return siglip_loss(similarities, negative_only=negative_only, inplace=True)
    return siglip_loss_from_features(image_features, text_features, _number(logit_scale), bias, negative_only=negative_only)


def _number(x: Any) -> Any:
    """Return a parameter of shape (1,), as open_clip has with nonscalar_logit_scale, without a dimension."""
    return x.reshape(()) if isinstance(x, Tensor) else x


def patch(force: bool = False) -> Patch:
    """Replace the contrastive losses of open_clip by ours.

    Args:
        force: go on where open_clip is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: open_clip_torch is not installed.
        IntegrationError: open_clip's names or parameters are not those that were tested. Nothing was replaced.
    """
    called = "(self, image_features, text_features, logit_scale, logit_bias=None, {})"
    clip, siglip = called.format("output_dict=False"), called.format("negative_only=False")
    replacements = [
        Replacement("open_clip.loss:ClipLoss.forward", or_theirs("open_clip", _clip), clip),
        Replacement("open_clip.loss:SigLipLoss._loss", or_theirs("open_clip", _siglip), siglip),
        Replacement("open_clip.loss:gather_features", None, GATHERED),
    ]
    return patch_names("open_clip_torch", TESTED, replacements, force=force)

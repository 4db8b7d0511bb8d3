"""Test-time augmentation: a model's mean prediction over several views of each image."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.base.errors import UserError, unknown

SIDE = 0.875  # of a crop, as a share of the image's


def flip(images: Tensor) -> list[Tensor]:
    """Return the images, and their mirror images."""
    return [images, images.flip(-1)]


def five_crop(images: Tensor) -> list[Tensor]:
    """Return the four corners and the centre of the images (N, C, H, W), each scaled to the whole size."""
    height, width = images.shape[-2:]
    h, w = round(SIDE * height), round(SIDE * width)
    places = [(0, 0), (0, width - w), (height - h, 0), (height - h, width - w), ((height - h) // 2, (width - w) // 2)]
    crops = [images[:, :, top : top + h, left : left + w] for top, left in places]
    return [F.interpolate(crop, size=(height, width), mode="bilinear", antialias=True) for crop in crops]


VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {"flip": flip, "five_crop": five_crop}


class SeveralViews(nn.Module):
    """Call a model on several views of the images, and merge its outputs."""

    def __init__(self, model: nn.Module, name: str, merged: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self.views, self.merged = model, VIEWS[name], merged

    def forward(self, images: Tensor) -> Tensor:
        return self.merged([self.model(view) for view in self.views(images)])


def several_views(model: nn.Module, name: str, task: object, task_name: str) -> nn.Module:
    """Return the model with the views of `tta=name`.

    Raises:
        UserError: there are no such views, or the task cannot merge outputs.
    """
    if name not in VIEWS:
        raise unknown(f"tta={name}", name, VIEWS)
    if (merged := getattr(task, "merged", None)) is None:
        raise UserError(f"tta={name}: task={task_name} has no mean of several views; tasks of one output an image have.")
    return SeveralViews(model, name, merged)


def mean_of_probabilities(outputs: list[Tensor], activation: str) -> Tensor:
    """Return logits whose probabilities are the mean of those of several logits (N, C); activation: softmax or sigmoid."""
    logits = torch.stack([output.float() for output in outputs])
    if activation == "softmax":
        return logits.log_softmax(-1).logsumexp(0)
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

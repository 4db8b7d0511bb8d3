"""A segmenter on any timm backbone that returns its levels.

Source: Kirillov et al., Panoptic Feature Pyramid Networks, 2019 (arXiv 1901.02446), whose semantic branch sums all levels; here each level
has one convolution.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.base.errors import UserError, first_line
from lab.config.model_view import timm_name
from lab.tasks.segmentation import SegmenterConfig


class Segmenter(nn.Module):
    """Map images (N, C, H, W) to logits (N, classes, H, W)."""

    def __init__(self, backbone: nn.Module, levels: list[int], channels: int, classes: int) -> None:
        """Make the layers; levels: channels of each of the backbone's levels, the finest first."""
        super().__init__()
        self.backbone = backbone
        self.reduce = nn.ModuleList(nn.Conv2d(count, channels, 1) for count in levels)
        self.mix = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [reduce(level) for reduce, level in zip(self.reduce, self.backbone(images), strict=True)]
        size = levels[0].shape[-2:]
        together = levels[0]
        for level in levels[1:]:
            together = together + F.interpolate(level, size=size, mode="bilinear", align_corners=False)
        logits = self.classifier(self.mix(together))
        return F.interpolate(logits, size=images.shape[-2:], mode="bilinear", align_corners=False)


def build_segmenter(config: SegmenterConfig, *, channels: int, classes: int, image_size: int) -> Segmenter:
    """Return a segmenter on a timm backbone.

    Raises:
        UserError: timm's model has no levels of (N, C, H, W).
    """
    import timm

    try:
        name = timm_name(config.name)
        backbone: Any = timm.create_model(name, pretrained=config.pretrained, features_only=True, in_chans=channels, **config.args)
        with torch.no_grad():
            shapes = [tuple(level.shape) for level in backbone.eval()(torch.zeros(2, channels, image_size, image_size))]
    except Exception as error:  # an argument that timm looks up or calculates with raises any error
        raise UserError(f"model.name={config.name} cannot be a segmenter's backbone: {first_line(error)}") from None
    levels = list(backbone.feature_info.channels())
    if [shape[1] for shape in shapes] != levels or any(len(shape) != 4 for shape in shapes):
        raise UserError(f"model.name={config.name}: its levels have the shapes {shapes}; (N, channels, height, width) is expected.")
    return Segmenter(backbone.train(), levels, config.channels, classes)

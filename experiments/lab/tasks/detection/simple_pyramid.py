"""A pyramid on the one level that a plain vision transformer has."""

from collections import OrderedDict

from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import LastLevelP6P7


class SimplePyramid(nn.Module):
    """Levels of strides 8, 16 and 32 made of that of stride 16 alone, with P6 and P7 as `blocks`.

    Source: Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, 2022 (arXiv 2203.16527).

    Args:
        channels: of the backbone.
        out_channels: of each level.
        blocks: makes the two coarsest levels.
    """

    def __init__(self, channels: int, out_channels: int, blocks: LastLevelP6P7) -> None:
        super().__init__()
        finer = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        resized = ((finer, channels // 2), (nn.Identity(), channels), (nn.MaxPool2d(2), channels))
        self.levels = nn.ModuleList(nn.Sequential(change, *_smoothed(width, out_channels)) for change, width in resized)
        self.blocks = blocks

    def forward(self, features: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        """The five levels, the finest first, of the one level (N, channels, H / 16, W / 16)."""
        (level,) = features.values()
        made = [make(level) for make in self.levels]
        made, names = self.blocks(made, made, [str(i) for i in range(len(made))])
        return OrderedDict(zip(names, made, strict=True))


def _smoothed(channels: int, out_channels: int) -> list[nn.Module]:
    one, three = nn.Conv2d(channels, out_channels, 1, bias=False), nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
    return [one, LayerNorm2d(out_channels), three, LayerNorm2d(out_channels)]

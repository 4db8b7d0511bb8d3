"""Feature pyramids on timm's backbones."""

from collections import OrderedDict
from typing import Any, cast

import torch
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from lab.base.errors import UserError, first_line
from lab.config.model_view import timm_name
from lab.tasks.models import check_model_name

STRIDES = (8, 16, 32)
PLAIN = 16  # the only stride of plain vision transformers, on which a simple pyramid is built
WORKING = "resnet50, convnext_tiny, swin_tiny_patch4_window7_224, efficientnet_b0, pvt_v2_b1, vit_tiny_patch16_224, tiny_resnet"


class Pyramid(nn.Module):
    """Levels with `out_channels` each, from a timm backbone's levels 8, 16 and 32 or a simple pyramid: strides 8 to 128, P6 and P7 from P5.

    With path aggregation the strides are 8, 16 and 32.

    Source: Lin et al., Feature Pyramid Networks for Object Detection, 2017 (arXiv 1612.03144).
    """

    def __init__(
        self,
        body: nn.Module,
        channels: list[int],
        out_channels: int,
        *,
        channels_last: bool,
        only_size: tuple[int, int] | None,
        aggregated: bool = False,
    ) -> None:
        """channels: of the body's levels. channels_last: whether these are (N, H, W, C). only_size: the only image size it takes."""
        super().__init__()
        self.body, self.channels_last, self.out_channels, self.only_size = body, channels_last, out_channels, only_size
        blocks = None if aggregated else LastLevelP6P7(out_channels, out_channels)
        self.fpn: nn.Module
        if len(channels) == 1:
            self.fpn = SimplePyramid(channels[0], out_channels, blocks)
        else:
            self.fpn = FeaturePyramidNetwork(channels, out_channels, blocks)
        if aggregated:
            self.fpn = PathAggregation(self.fpn, out_channels, len(STRIDES))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return levels (N, out_channels, H / stride, W / stride) of images (N, 3, H, W), the finest first."""
        if self.only_size and images.shape[-2:] != self.only_size:
            raise UserError(
                f"this backbone takes only images of {self.only_size[0]}×{self.only_size[1]}, got {images.shape[-2]}×{images.shape[-1]}.\n"
                f"Pad all batches to that size, or take a model that can: {WORKING}."
            )
        levels = [level.permute(0, 3, 1, 2) if self.channels_last else level for level in self.body(images)]
        return cast(dict[str, Tensor], self.fpn(OrderedDict((str(i), level) for i, level in enumerate(levels))))


class SimplePyramid(nn.Module):
    """Levels of strides 8, 16 and 32 from the level of stride 16, with P6 and P7 from `blocks`, if given.

    Source: Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, 2022 (arXiv 2203.16527).

    Args:
        channels: the backbone's channels.
        out_channels: channels of each level.
        blocks: makes the two coarsest levels; None for none.
    """

    def __init__(self, channels: int, out_channels: int, blocks: LastLevelP6P7 | None) -> None:
        super().__init__()
        finer = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        resized = ((finer, channels // 2), (nn.Identity(), channels), (nn.MaxPool2d(2), channels))
        self.levels = nn.ModuleList(nn.Sequential(change, *_smoothed(width, out_channels)) for change, width in resized)
        self.blocks = blocks

    def forward(self, features: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        """Return the levels, the finest first, from the one level (N, channels, H / 16, W / 16)."""
        (level,) = features.values()
        made = [make(level) for make in self.levels]
        names = [str(i) for i in range(len(made))]
        if self.blocks is not None:
            made, names = self.blocks(made, made, names)
        return OrderedDict(zip(names, made, strict=True))


def _smoothed(channels: int, out_channels: int) -> list[nn.Module]:
    one, three = nn.Conv2d(channels, out_channels, 1, bias=False), nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
    return [one, LayerNorm2d(out_channels), three, LayerNorm2d(out_channels)]


class PathAggregation(nn.Module):
    """Levels of another pyramid, to each of which the finer ones below it are added by strided convolutions.

    Source: Liu et al., Path Aggregation Network for Instance Segmentation, 2018 (arXiv 1803.01534).

    Args:
        pyramid: from the backbone's levels to levels of `channels` each, the finest first.
        channels: of each level.
        levels: how many there are.
    """

    def __init__(self, pyramid: nn.Module, channels: int, levels: int = 3) -> None:
        super().__init__()
        self.pyramid = pyramid
        made = [[_block(channels, stride) for stride in (2, 1)] for _ in range(levels - 1)]
        self.down, self.mix = (nn.ModuleList(each) for each in zip(*made, strict=True))

    def forward(self, features: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
        """Return the levels by the pyramid's names."""
        levels = cast(OrderedDict[str, Tensor], self.pyramid(features))
        (first, finer), *coarser = levels.items()
        found = OrderedDict([(first, finer)])
        for (name, level), down, mix in zip(coarser, self.down, self.mix, strict=True):
            finer = mix(level + down(finer))
            found[name] = finer
        return found


def _block(channels: int, stride: int = 1) -> nn.Module:
    """Return a convolution of 3 by 3 with batch norm and SiLU."""
    return Conv2dNormActivation(channels, channels, 3, stride, activation_layer=nn.SiLU)


def backbone(
    name: str,
    image_size: tuple[int, int],
    *,
    pretrained: bool = False,
    channels: int = 256,
    frozen_stride: int = 0,
    frozen_norm: bool = False,
    args: dict[str, Any] | None = None,
    aggregated: bool = False,
) -> Pyramid:
    """Return a pyramid on a timm backbone.

    Args:
        name: a timm model's name.
        image_size: height and width of the batches' images, for backbones of fixed size.
        pretrained: whether to load timm's weights.
        channels: channels of each level.
        frozen_stride: weights up to the stage of this stride are not trained; 0 trains all, torchvision's recipes have 4.
        frozen_norm: whether batch norms keep their statistics and weights.
        args: more arguments of timm.create_model.
        aggregated: whether the pyramid goes from the fine levels back to the coarse ones, without P6 and P7.

    Raises:
        UserError: timm does not know the model, or it has not the needed levels; the message says why, and names models that have.
    """
    import timm
    from timm.layers.norm_act import freeze_batch_norm_2d

    check_model_name(name)
    options = {"features_only": True} | (args or {})
    with torch.device("meta"):  # finds shapes without allocating the weights
        probe, options = _probe(name, image_size, options)
        channels_last = _levels_are_last(name, probe, image_size)
    try:
        body: Any = timm.create_model(timm_name(name), pretrained=pretrained, **options)
    except Exception as error:  # an argument that timm looks up or calculates with raises any error
        hint = " (model.pretrained=true needs the network once)" if pretrained else ""
        raise UserError(f"model.name={name} cannot be made: {first_line(error)}{hint}") from None
    if frozen_norm:
        body = freeze_batch_norm_2d(body)
    if frozen_stride:
        _freeze(name, body, frozen_stride)
    only_size = image_size if "img_size" in options and "strict_img_size" not in options else None
    widths = body.feature_info.channels()
    return Pyramid(body, widths, channels, channels_last=channels_last, only_size=only_size, aggregated=aggregated)


def _probe(name: str, image_size: tuple[int, int], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model with the levels of STRIDES, and the options that make it."""
    import timm

    known = timm.get_pretrained_cfg(timm_name(name))
    tries: list[dict[str, Any]] = [{}]
    if known and known.fixed_input_size:  # vision transformers and window models take other sizes only with an option
        tries = [{"dynamic_img_size": True}, {"img_size": image_size, "strict_img_size": False}, {"img_size": image_size}]
    reason = Exception()
    for sized in tries:
        try:
            model: Any = timm.create_model(timm_name(name), **(sized | options))
            info = model.feature_info
            found = dict(zip(info.reduction(), info.out_indices, strict=True))  # the last level of each stride
            chosen = (PLAIN,) if set(found) == {PLAIN} else STRIDES
            if any(stride not in found for stride in chosen):
                strides = ", ".join(map(str, info.reduction()))
                raise _refusal(name, f"its levels have the strides {strides}, and detectors need 8, 16 and 32, or 16 alone")
            options = sized | options | {"out_indices": tuple(found[stride] for stride in chosen)}
            return timm.create_model(timm_name(name), **options), options
        except UserError:
            raise
        except Exception as error:  # an argument that timm looks up or calculates with raises any error
            reason = error
    raise _refusal(name, first_line(reason))


def _levels_are_last(name: str, model: Any, image_size: tuple[int, int]) -> bool:
    """Return whether the levels have their channels last; raise UserError unless their sizes fit their strides."""
    height, width = image_size
    try:
        shapes = [tuple(level.shape[1:]) for level in model.eval()(torch.empty(1, 3, height, width))]
    except (ValueError, AssertionError, RuntimeError) as error:
        raise _refusal(name, f"it does not take images of {height}×{width}: {first_line(error)}") from None
    for order in (False, True):
        channels = model.feature_info.channels()
        strides = STRIDES if len(channels) > 1 else (PLAIN,)
        expected = [(-(-height // stride), -(-width // stride)) for stride in strides]
        if shapes == [(*size, count) if order else (count, *size) for size, count in zip(expected, channels, strict=True)]:
            return order
    raise _refusal(name, f"its levels have the shapes {', '.join(map(str, shapes))} for images of {height}×{width}")


def _freeze(name: str, body: Any, stride: int) -> None:
    """Freeze the parameters up to the last one of the stage of this stride."""
    parameters = list(body.named_parameters())
    ends: dict[int, int] = {}  # by stride, the end of its stage's parameters, if it has any
    for stage in body.feature_info.info:
        start = stage["module"].replace(".", "_") + "_"  # timm's wrappers write stages.0 as stages_0
        inside = [i for i, (key, _) in enumerate(parameters) if key.replace(".", "_").startswith(start)]
        ends |= {stage["reduction"]: inside[-1] + 1} if inside else {}
    if stride not in ends:
        raise UserError(f"model.frozen_stride={stride}: {name} has stages of the strides {', '.join(map(str, ends)) or 'none'}.")
    for _, parameter in parameters[: ends[stride]]:
        parameter.requires_grad_(False)


def _refusal(name: str, reason: str) -> UserError:
    return UserError(f"model.name={name} cannot be a detector's backbone: {reason}.\nModels that can: {WORKING}.")

"""Models by timm's names."""

import inspect
import math
from typing import Any, cast

import torch
from torch import nn

from lab.base.errors import UserError, first_line, nearest
from lab.config.model_view import model_view, timm_name
from lab.config.objects import find
from lab.config.schema import ClassifierConfig, CustomModelConfig, ModelConfig, TrainConfig
from lab.data.sets import Norm
from lab.tasks.heads import cosine_head

RAREST = 1e-6  # smallest share of images with a class that a bias begins with, and smallest share without it


def check_model(config: ModelConfig) -> None:
    """Raise UserError unless the model is the user's own or timm knows it."""
    if not isinstance(config, CustomModelConfig):
        check_model_name(config.name)


def check_model_name(name: str) -> None:
    """Raise UserError unless timm knows the architecture and its pretrained tag."""
    import timm

    if timm.is_model(timm_name(name)):
        architecture, _, tag = timm_name(name).partition(".")
        tags = [known.partition(".")[2] for known in timm.list_pretrained(architecture)]
        if tag and tag not in tags:
            raise UserError(
                f"model.name={name}: {name.partition('.')[0]} has the pretrained tags {', '.join(filter(None, tags)) or 'none'}."
            )
        return
    names = timm.list_models()
    close = nearest(name, names, 5)
    raise UserError(
        f"model.name={name}: timm has no such model.\n"
        + (f"Did you mean {' or '.join(repr(c) for c in close)}?\n" if close else "")
        + f"Choices: timm's {len(names)} models, listed by timm.list_models(), such as {', '.join(names[:: len(names) // 8][:8])}."
    )


def model_norm(config: ModelConfig, saved: Norm | None = None) -> Norm:
    """Return mean and standard deviation of pixels: a saved model's, or those that a pretrained model expects."""
    view = model_view(config)
    return saved or Norm(list(view["mean"]), list(view["std"]))


def build_model(config: ClassifierConfig, *, channels: int, classes: int, image_size: int) -> nn.Module:
    """Return the timm model, or the user's own, for images of this size and number of channels."""
    import timm

    if isinstance(config, CustomModelConfig):
        return own_model(config, {"num_classes": classes, "in_chans": channels, "img_size": image_size})

    options = timm_options(config, channels=channels, classes=classes, image_size=image_size)
    try:
        return timm.create_model(timm_name(config.name), pretrained=config.pretrained, **(options | config.args))
    except Exception as error:  # an argument that timm looks up or calculates with raises any error
        reason = first_line(error)
        if config.pretrained:
            reason += f" (model.pretrained=true needs the network once, for the weights of {config.name})"
        raise UserError(f"model.name={config.name} cannot be made with {options | config.args}: {reason}") from None


def build_classifier(config: TrainConfig, *, channels: int, classes: int, image_size: int) -> nn.Module:
    """Return the classifier of a run's settings; under a loss of cosines its last layer gives these, times the loss's scale."""
    model = build_model(cast(ClassifierConfig, config.model), channels=channels, classes=classes, image_size=image_size)
    if config.loss.takes == "cosines":
        cosine_head(model, (channels, image_size, image_size), config.loss.name, cast(Any, config.loss).scale)
    return model


def timm_options(config: ClassifierConfig, *, channels: int, classes: int, image_size: int) -> dict[str, Any]:
    """Return the arguments of timm.create_model that follow from the settings, without model.args."""
    import timm

    options: dict[str, Any] = {"in_chans": channels, "num_classes": classes, "drop_rate": config.drop_rate}
    if config.drop_path_rate is not None:
        options["drop_path_rate"] = config.drop_path_rate
    known = timm.get_pretrained_cfg(timm_name(config.name))
    if known and known.fixed_input_size:
        options["img_size"] = image_size
    return options


def own_model(config: CustomModelConfig, options: dict[str, int]) -> nn.Module:
    """Return the model that the callable `config.target` makes, called with those of `options` that it takes by name.

    Raises:
        UserError: it cannot be found or called, or its output does not have one logit a class.
    """
    given = f"model.target={config.target}"
    function = find("model.target", config.target)
    try:
        taken = inspect.signature(function).parameters
        model = function(**{name: value for name, value in options.items() if name in taken}, **config.args)
    except Exception as error:
        raise UserError(f"{given}: cannot be called: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{given}: returns a {type(model).__name__}; a torch.nn.Module is expected.")
    images = torch.zeros(2, options["in_chans"], options["img_size"], options["img_size"])
    try:
        with torch.no_grad():
            shape = tuple(model.eval()(images).shape)
    except Exception as error:
        raise UserError(f"{given}: fails on images of the shape {tuple(images.shape)}: {type(error).__name__}: {error}") from error
    if shape != (2, options["num_classes"]):
        raise UserError(f"{given}: makes {shape} of images {tuple(images.shape)}; logits (2, {options['num_classes']}) are expected.")
    return model.train()


def set_prior(model: nn.Module, probability: float) -> None:
    """Set the classifier's bias so that every class starts with this probability; otherwise the many negatives dominate the first steps.

    Source: Lin et al., Focal Loss for Dense Object Detection, 2017, section 3.3.
    """
    bias = getattr(getattr(model, "get_classifier", lambda: None)(), "bias", None)
    if isinstance(bias, nn.Parameter):
        share = min(max(probability, RAREST), 1 - RAREST)  # a class in all images, or in none, has no finite logit
        nn.init.constant_(bias, math.log(share / (1 - share)))


def placed(model: nn.Module, device: torch.device, *, channels_last: bool) -> nn.Module:
    """Move the model to the device, and its convolutions to the memory format."""
    layout = torch.channels_last if channels_last else torch.preserve_format
    return model.to(device).to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack memory_format without a device

"""How a timm model sees images: the size, crop, interpolation and normalisation that its weights were made for."""

from typing import Any

from lab.config.command import say_loading
from lab.config.schema import ModelConfig, PhotosConfig

TIMM_NAMES = {"tiny_resnet": "test_resnet", "tiny_vit": "test_vit"}
"""What timm calls the models that our options name otherwise."""


def timm_name(name: str) -> str:
    """Return timm's name of a model, with the pretrained tag that it may have."""
    architecture, dot, tag = name.partition(".")
    return TIMM_NAMES.get(architecture, architecture) + dot + tag


def model_view(config: ModelConfig) -> dict[str, Any]:
    """Return timm's `resolve_model_data_config` of a model without building it; timm's defaults for a model that timm does not know.

    Returns:
        input_size, crop_pct, crop_mode, interpolation, mean and std.
    """
    say_loading()
    import timm
    from timm.data import resolve_data_config

    try:
        known = timm.get_pretrained_cfg(timm_name(config.name))
    except RuntimeError:  # no such tag, which check_model_name refuses
        known = None
    settings = (known.to_dict() if known else {}) | dict(config.args.get("pretrained_cfg_overlay") or {})
    return dict(resolve_data_config(pretrained_cfg=settings or {"input_size": (3, 224, 224)}))


def fill_from_model(data: PhotosConfig, model: ModelConfig) -> None:
    """Replace the settings that are null by the model's own values."""
    names = ("image_size", "crop_pct", "crop_mode", "interpolation")
    if None not in (getattr(data, name) for name in names):
        return
    view = model_view(model)
    view["image_size"] = view["input_size"][-1]
    for name in names:
        if getattr(data, name) is None:
            setattr(data, name, view[name])

"""From the settings of images to a data set."""

from functools import partial
from typing import Any, cast

import torch

from lab.config.schema import DigitsConfig, DownloadedConfig, FolderConfig, ImagesConfig, MemoryConfig
from lab.data.augment import crop_and_flip, wobble
from lab.data.corruption import corrupted
from lab.data.folder import folder_data
from lab.data.samples import annotate
from lab.data.sets import Data, MemoryLoader, Norm, check_channels, count_groups, digits, downloaded, norm_of, resized


def load_data(config: ImagesConfig, model_norm: dict[str, Any], device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open the data set a config names.

    Args:
        config: one of the schemas of lab.config.schema.DATA.
        model_norm: mean, std and interpolation that a pretrained model expects (used by data=folder).
        device: where batches are wanted.
        seed: of the order and the augmentation.
        saved: what a saved model was trained with; None computes it from the training images where they are held in memory.

    Raises:
        UserError: a setting, a file or an image is wrong, or the images have other channels than a saved model takes.
    """
    if isinstance(config, FolderConfig):
        if saved:
            check_channels(saved, 3)
        return folder_data(config, model_norm, device, seed)
    if isinstance(config, DigitsConfig):
        classes, train, val = digits(config)
        augment: Any = wobble
    else:
        classes, train, val = downloaded(cast(DownloadedConfig, config))
        augment = wobble if config.name == "mnist" else crop_and_flip
    kept, train.targets = corrupted(cast(MemoryConfig, config), train.targets, len(classes))
    train.images, train.keys = train.images[kept], [train.keys[i] for i in kept.tolist()]
    for split in (train, val):
        split.images = resized(split.images, config.image_size)
    notes = annotate(config, train.targets, classes, train.keys, needed=True)
    val_notes = annotate(config, val.targets, classes, val.keys, needed=False)
    norm = norm_of(train.images, saved)
    make = partial(MemoryLoader, device=device, norm=norm)
    return Data(
        classes,
        train.images.shape[1],
        Norm(norm[0].tolist(), norm[1].tolist()),
        make(train, notes, config.batch_size).shuffled(seed, augment if config.augment else None),
        make(val, val_notes, config.eval_batch_size),
        count_groups(notes, val_notes),
        torch.bincount(train.targets, minlength=len(classes)),
    )

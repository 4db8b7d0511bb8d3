"""From the settings of images to a data set."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from lab.config.schema import CustomDataConfig, DigitsConfig, DownloadedConfig, FolderConfig, ImagesConfig, MemoryConfig, PhotosConfig
from lab.data.augment import crop_and_flip, random_affine
from lab.data.corruption import corrupted
from lab.data.folder import folder_data
from lab.data.own import own_data
from lab.data.samples import annotate
from lab.data.sets import Data, MemoryLoader, Norm, check_channels, count_groups, digits, downloaded, norm_of, resize_all


def load_data(config: ImagesConfig, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open the data set a config names.

    Args:
        config: one of the schemas of lab.config.schema.DATA.
        norm: what the pixels of files are normalised by.
        device: where batches are wanted.
        seed: of the order and the augmentation.
        saved: what a saved model was trained with; None computes it from the training images where they are held in memory.

    Raises:
        UserError: a setting, a file or an image is wrong, or the images have other channels than a saved model takes.
    """
    if isinstance(config, PhotosConfig):
        if saved:
            check_channels(saved, 3)
        if isinstance(config, CustomDataConfig):
            return own_data(config, norm, device, seed)
        return folder_data(cast(FolderConfig, config), norm, device, seed)
    if isinstance(config, DigitsConfig):
        sets = digits(config)
        augment: Any = random_affine
    else:
        sets = downloaded(cast(DownloadedConfig, config))
        augment = random_affine if config.name == "mnist" else crop_and_flip
    classes, train = sets.classes, sets.train
    kept, labels = corrupted(cast(MemoryConfig, config), train.targets, len(classes))
    train = replace(train.only(kept.tolist()), targets=labels)
    splits = [replace(split, images=resize_all(split.images, config.image_size)) for split in (train, sets.val, sets.test) if split]
    notes = [annotate(config, split.targets, classes, split.keys, needed=split is splits[0]) for split in splits]
    mean, std = norm_of(splits[0].images, saved)
    make = partial(MemoryLoader, device=device, norm=(mean, std))
    plain, val, *test = (partial(make, *pair, config.eval_batch_size) for pair in zip(splits, notes, strict=True))
    return Data(
        classes,
        splits[0].images.shape[1],
        Norm(mean.tolist(), std.tolist()),
        make(splits[0], notes[0], config.batch_size).shuffled(seed, augment if config.augment else None),
        val(),
        count_groups(*notes),
        torch.bincount(labels, minlength=len(classes)),
        test[0]() if test else None,
        sets.held_out,
        plain,
    )

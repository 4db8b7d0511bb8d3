"""Open a data set of images from its settings."""

from dataclasses import replace
from typing import Any, cast

import torch

from lab.base.errors import UserError
from lab.config import schema
from lab.data.augment import crop_and_flip, random_affine
from lab.data.sampler import chances_of
from lab.data.samples import Annotations, annotate, class_of
from lab.data.sets import Data, Norm, digits, downloaded, memory_data, norm_of
from lab.data.sources.corruption import corrupted
from lab.data.sources.folder import folder_data
from lab.data.sources.hub import hub_data
from lab.data.sources.own import own_data
from lab.data.sources.shards import shards_data
from lab.data.sources.table import table_data


def classes_kept(named: list[Any], classes: list[str]) -> list[int]:
    """Return the classes of `data.only_classes`, in the data's order.

    Raises:
        UserError: a class does not exist, or fewer than two are kept.
    """
    kept = sorted({class_of(str(each), classes, "data.only_classes") for each in named})
    if len(kept) < 2:
        raise UserError(f"data.only_classes={named}: at least two different classes are needed.")
    return kept


def load_data(config: schema.ImagesConfig, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open the data set that a config names.

    Args:
        config: one of the schemas of lab.config.schema.DATA.
        norm: mean and standard deviation that normalise images read from files.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        saved: mean and standard deviation of a saved model; None computes them from training images that are held in memory.

    Raises:
        UserError: a setting, a file or an image is wrong, or the images have another number of channels than a saved model takes.
    """
    if isinstance(config, schema.PhotosConfig):
        if isinstance(config, schema.TableConfig):
            return table_data(config, "class", norm, device, seed, saved)[0]
        opened = {schema.CustomDataConfig: own_data, schema.HubConfig: hub_data, schema.ShardsConfig: shards_data}
        open_data = opened.get(type(config), folder_data)
        return cast(Data, cast(Any, open_data)(config, norm, device, seed, saved))
    if isinstance(config, schema.DigitsConfig):
        sets = digits(config)
        augment: Any = random_affine
    else:
        sets = downloaded(cast(schema.DownloadedConfig, config))
        augment = random_affine if config.name == "mnist" else crop_and_flip
    memory = cast(schema.MemoryConfig, config)
    if memory.only_classes:
        sets = sets.of_classes(classes_kept(memory.only_classes, sets.classes))
    classes, train = sets.classes, sets.train
    kept, labels = corrupted(memory, train.targets, len(classes))
    sets = replace(sets, train=replace(train.only(kept.tolist()), targets=labels)).resized(config.image_size)
    sets = sets.mapped(lambda part, number: replace(part, notes=annotate(config, part.targets, classes, part.keys, needed=number == 0)))
    notes = sets.train.notes
    chances = chances_of(config, labels, notes.weight)
    if config.sampler == "weighted":
        sets.train.notes = Annotations(None, notes.group)
    counts = torch.bincount(labels, minlength=len(classes))
    norm = norm_of(sets.train.images, saved)
    return memory_data(sets, config, norm, device, seed, augment=augment, chances=chances, counts=counts)

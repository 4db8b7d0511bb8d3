"""Open a data set of images from its settings."""

from dataclasses import replace
from typing import Any, cast

import torch

from lab.base.errors import UserError
from lab.config import schema
from lab.config.objects import find_object
from lab.data.augment import crop_and_flip, random_affine
from lab.data.sampler import chances_of
from lab.data.samples import Annotations, annotate, class_of
from lab.data.sets import Data, Norm, Splits, digits, downloaded, memory_data, norm_of
from lab.data.sources.corruption import corrupted
from lab.data.specs import SOURCES


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
        config: the schema of one of lab.data.specs.SOURCES.
        norm: mean and standard deviation that normalise images read from files.
        device: the device of the batches.
        seed: the seed of order and augmentation.
        saved: mean and standard deviation of a saved model; None computes them from training images that are held in memory.

    Raises:
        UserError: a setting, a file or an image is wrong, or the images have another number of channels than a saved model takes.
    """
    opened = SOURCES[config.name].open
    if opened is None:
        raise UserError(f"data={config.name}: is not of images of one class each.")
    return cast(Data, find_object(opened)(config, norm, device, seed, saved))


def digits_data(config: schema.DigitsConfig, _norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open handwritten digits; arguments as `load_data`."""
    return _held(digits(config), random_affine, config, device, seed, saved)


def downloaded_data(config: schema.DownloadedConfig, _norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open MNIST or CIFAR; arguments as `load_data`."""
    return _held(downloaded(config), random_affine if config.name == "mnist" else crop_and_flip, config, device, seed, saved)


def _held(sets: Splits, augment: Any, memory: schema.MemoryConfig, device: torch.device, seed: int, saved: Norm | None) -> Data:
    """Return the data of sets held in memory, made harder to learn as the settings say, with their augmentation."""
    if memory.only_classes:
        sets = sets.of_classes(classes_kept(memory.only_classes, sets.classes))
    classes, train = sets.classes, sets.train
    kept, labels = corrupted(memory, train.targets, len(classes))
    sets = replace(sets, train=replace(train.only(kept.tolist()), targets=labels)).resized(memory.image_size)
    sets = sets.mapped(lambda part, number: replace(part, notes=annotate(memory, part.targets, classes, part.keys, needed=number == 0)))
    notes = sets.train.notes
    chances = chances_of(memory, labels, notes.weight)
    if memory.sampler == "weighted":
        sets.train.notes = Annotations(None, notes.group)
    counts = torch.bincount(labels, minlength=len(classes))
    norm = norm_of(sets.train.images, saved)
    return memory_data(sets, memory, norm, device, seed, augment=augment, chances=chances, counts=counts)

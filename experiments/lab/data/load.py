"""Open a data set of images from its settings: a reader lists its samples and reads one, and all sources share the rest."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.config import schema
from lab.config.objects import find_object
from lab.data.augment import crop_and_flip, random_affine
from lab.data.images.exif import SHOWN, note, take_both
from lab.data.images.files import cached
from lab.data.images.pixels import alpha_note, measured, small_note
from lab.data.loading import chances_of
from lab.data.photos import PhotoLoader, Photos, Pictures, Samples, untrained
from lab.data.samples import Annotations, annotate, class_of
from lab.data.sets import Data, Norm, Splits, check_channels, count_groups, memory_data, norm_of
from lab.data.specs import SOURCES
from lab.data.split import held_out_by, split, split_any
from lab.data.transforms import held_out_transform, train_transform


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
    read = SOURCES[config.name].read
    if read is None:
        raise UserError(f"data={config.name}: is not of images of one class each.")
    return opened(find_object(read)(config), config, norm, device, seed, saved)


def opened(found: Splits | Photos, config: Any, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Return the data of what a reader found; the other arguments and errors as of `load_data`."""
    if isinstance(found, Splits):
        return _held(found, config, device, seed, saved)
    held_out = found.of if "val" in found.parts else f"{found.of}, {held_out_by(config)}"
    if "val" in found.parts:
        _refuse_divided(found, config)
    parts = without_corrupt(found, config)
    if "val" not in parts:
        parts = parts | hold_out(found, parts["train"], config)
    train, norm = parts["train"], norm_of_files(parts["train"], config, norm, saved)
    seen = held_out_transform(config, norm)
    notes = {
        name: annotate(config, samples.targets, found.classes, samples.keys, needed=samples is train)
        if samples.notes is None
        else samples.notes.only(samples.positions)
        for name, samples in parts.items()
    }
    load = partial(PhotoLoader, config=config, norm=norm, device=device)
    evaluated = {name: load(parts[name], notes[name], seen) for name in parts if name != "train"}
    chances = chances_of(config, train.targets, notes["train"].weight)
    # drawn by their weights, not weighed again
    weighed = Annotations(None, notes["train"].group) if config.sampler == "weighted" else notes["train"]
    of_classes = train.targets.ndim == 1
    said = untrained(parts, found.classes) if of_classes else ""
    alpha = alpha_note(train) if config.channels is None and isinstance(train, Pictures) else []
    small = small_note(train, config.image_size) if isinstance(train, Pictures) else []
    return Data(
        classes=found.classes,
        channels=config.channels or 3,
        norm=norm,
        train=load(train, weighed, train_transform(config, norm), seed=seed, chances=chances),
        val=evaluated["val"],
        groups=count_groups(*notes.values()),
        counts=torch.bincount(train.targets, minlength=len(found.classes)) if of_classes else (train.targets > 0).sum(0),
        test=evaluated.get("test"),
        held_out=held_out,
        plain=partial(load, train, notes["train"], seen),
        notes=[said] * bool(said) + small + found.notes + alpha,
    )


def without_corrupt(found: Photos, config: Any) -> dict[str, Any]:
    """Return the usable samples of each part; the images of all parts are checked together, where the settings have a check.

    Raises:
        UserError: some cannot be used and are not to be skipped, or a part has none left.
    """
    check, exif = str(getattr(config, "check", "off")), str(getattr(config, "exif", SHOWN))
    pictures = [] if check == "off" else [each for each in found.parts.values() if isinstance(each, Pictures)]
    entries = dict(enumerate((samples, index) for samples in pictures for index in range(len(samples))))
    about = sorted(set().union(*(samples.about() for samples in pictures)))
    known = f"{check} {getattr(config, 'channels', None)} {len(found.classes)}"
    wrong = cached(lambda entry: entry[0].fault(entry[1], check), entries, about, known, lambda entry: entry[0].where(entry[1]))
    both, start = take_both(wrong), f"{found.faults.path}{os.sep}"
    for said in sorted(wrong.values()):
        found.faults.add(said.removeprefix(start))
    found.faults.raise_or_report(getattr(config, "skip_corrupt", False), usable=len(wrong) < sum(map(len, found.parts.values())))
    left_out = {(id(entries[number][0]), entries[number][1]) for number in wrong}
    parts = {name: each.only([i for i in range(len(each)) if (id(each), i) not in left_out]) for name, each in found.parts.items()}
    for each in parts.values():
        if not len(each):
            raise UserError(f"{each.source}: has no image to use.")
    turned = [entries[number][0].where(entries[number][1]).removeprefix(start) for number in both]
    found.notes += note(found.faults.path, turned, exif, "masks")
    return parts


def hold_out(found: Photos, train: Samples, config: schema.PhotosConfig) -> dict[str, Samples]:
    """Return the parts that training samples are divided into: held-out samples, and test samples where the settings ask for a share."""
    share = found.test[1]
    if train.targets.ndim == 1:
        divided = split(config, train.targets.tolist(), found.classes, share)
    else:
        divided = split_any(config, len(train), share)
    return {name: train.only(kept) for name, kept in zip(("train", "val", "test"), divided, strict=True) if kept}


def _refuse_divided(found: Photos, config: schema.PhotosConfig) -> None:
    """Raise UserError for a setting that divides the training images where others are held out."""
    for name, value in (("fold", config.fold), found.test):
        if value is not None:
            raise UserError(
                f"data.{name}={value}: divides the training images, but there are held-out images already, those {found.of}. "
                f"Leave data.{name} out."
            )


def norm_of_files(samples: Samples, config: schema.PhotosConfig, norm: Norm, saved: Norm | None) -> Norm:
    """Return the normalisation of images: a saved model's, the model's own, or that of the training samples.

    Raises:
        UserError: the saved model takes another number of channels, or the model knows none of these.
    """
    if saved:
        check_channels(saved, config.channels or 3)
        return saved
    if config.normalization == "measured" or (config.channels and config.normalization is None):
        return measured(samples)
    if len(norm.mean) != (config.channels or 3):
        raise UserError(
            f"data.normalization=model: the model knows {len(norm.mean)} channels; data.channels={config.channels} is measured."
        )
    return norm


def _held(sets: Splits, config: schema.MemoryConfig, device: torch.device, seed: int, saved: Norm | None) -> Data:
    """Return the data of sets held in memory, made harder to learn as the settings say, with their augmentation."""
    if config.only_classes:
        sets = sets.of_classes(classes_kept(config.only_classes, sets.classes))
    classes, train = sets.classes, sets.train
    kept, labels = corrupted(config, train.targets, len(classes))
    sets = replace(sets, train=replace(train.only(kept.tolist()), targets=labels)).resized(config.image_size)
    sets = sets.mapped(lambda part, number: replace(part, notes=annotate(config, part.targets, classes, part.keys, needed=number == 0)))
    notes = sets.train.notes
    chances = chances_of(config, labels, notes.weight)
    if config.sampler == "weighted":
        sets.train.notes = Annotations(None, notes.group)
    counts = torch.bincount(labels, minlength=len(classes))
    norm, augment = norm_of(sets.train.images, saved), crop_and_flip if config.name.startswith("cifar") else random_affine
    return memory_data(sets, config, norm, device, seed, augment=augment, chances=chances, counts=counts)


def classes_kept(named: list[Any], classes: list[str]) -> list[int]:
    """Return the classes of `data.only_classes`, in the data's order.

    Raises:
        UserError: a class does not exist, or fewer than two are kept.
    """
    kept = sorted({class_of(str(each), classes, "data.only_classes") for each in named})
    if len(kept) < 2:
        raise UserError(f"data.only_classes={named}: at least two different classes are needed.")
    return kept


def corrupted(config: schema.MemoryConfig, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Choose the training samples that are kept; return their positions, in order, and their labels.

    Raises:
        UserError: settings contradict each other.
    """
    if config.label_noise and config.csv:
        raise UserError(f"data.label_noise={config.label_noise}: cannot go with data.csv, which belongs to the right labels.")
    generator = torch.Generator().manual_seed(config.corruption_seed)
    available = torch.bincount(targets, minlength=classes)
    fewer = (available * config.train_share).round().long().clamp(min=1).minimum(available)
    kept = sample_per_class(targets, tail_counts(fewer, config.imbalance), generator)
    return kept, with_wrong_labels(targets[kept], classes, config.label_noise, generator)


def tail_counts(available: Tensor, imbalance: float) -> Tensor:
    """Count the samples to keep of each class (C,): n μ^(-c / (C - 1)) for class c, μ the imbalance and n the smallest class's samples.

    Source: Cui et al., Class-Balanced Loss Based on Effective Number of Samples, arXiv 1901.05555, section 5.1.
    """
    if imbalance == 1:
        return available
    falls = torch.linspace(0, 1, len(available), dtype=torch.float64)
    return (available.min() * imbalance**-falls).round().long().clamp(min=1)


def sample_per_class(targets: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw `counts` (C,) samples of each class; return their positions, sorted."""
    order = torch.randperm(len(targets), generator=generator)
    positions = [order[targets[order] == label][:count] for label, count in enumerate(counts.tolist())]
    return torch.cat(positions).sort().values


def with_wrong_labels(targets: Tensor, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """Replace this share of the labels, at random positions, by another class; all classes are equally likely (symmetric noise)."""
    wrong = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    step = torch.randint(1, classes, (len(wrong),), generator=generator)
    replaced = targets.clone()
    replaced[wrong] = (targets[wrong] + step) % classes
    return replaced

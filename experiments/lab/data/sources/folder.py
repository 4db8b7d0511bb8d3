"""Images in one folder a class, read and transformed by worker processes."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lab.base.errors import UserError, unknown
from lab.base.formats import visible
from lab.base.paths import ROOT, absolute
from lab.base.seeds import seeded
from lab.config.objects import find_object
from lab.config.schema import FoldConfig, FolderConfig, PhotosConfig, TableConfig
from lab.data.batch import Batch
from lab.data.images.files import SUFFIXES, UNREADABLE, Faults, find_corrupt, unreadable
from lab.data.images.pixels import ARRAY, PixelFault, alpha_note, measured, read_image
from lab.data.listing import ClassFolders, held_out_folder, passed_over, read_class_folders
from lab.data.loading import WorkerLoader
from lab.data.sampler import chances_of
from lab.data.samples import Annotations, annotate
from lab.data.sets import Data, Norm, check_channels, count_groups, existing_folder, normalised
from lab.data.specs import SOURCES
from lab.data.split import held_out_by, split
from lab.data.transforms import CustomTransform, Transform, held_out_transform, train_transform


@dataclass(kw_only=True)
class Samples:
    """Samples of a source of images, which are read one by one.

    Args:
        classes: names of the classes, or of the numbers.
        targets: classes (N,), several labels (N, C) or numbers (N, K).
        keys: name of each sample.
        positions: of the samples in the source; empty for all.
        channels: as data.channels.
    """

    classes: list[str]
    targets: Tensor
    keys: list[str]
    positions: list[int] = field(default_factory=list)
    channels: int | None = None

    def __post_init__(self) -> None:
        self.positions = self.positions or list(range(len(self.keys)))

    def __len__(self) -> int:
        return len(self.positions)

    def image(self, index: int) -> Image.Image | Tensor:
        """Return the image of a sample: in RGB of 8 bits, or with data.channels a tensor (C, H, W).

        Raises:
            UserError: it cannot be read.
        """
        raise NotImplementedError

    def only(self, kept: list[int]) -> Self:
        """Return the samples with these indices."""
        keys, positions = [self.keys[i] for i in kept], [self.positions[i] for i in kept]
        return replace(self, targets=self.targets[kept], keys=keys, positions=positions)


@dataclass(kw_only=True)
class Files(Samples):
    """Images in files.

    Args:
        folder: the folder of the files, for messages.
        files: the files of the source.
    """

    folder: Path
    files: list[str]

    @property
    def paths(self) -> list[str]:
        return [self.files[position] for position in self.positions]

    def image(self, index: int) -> Image.Image | Tensor:
        path = self.files[self.positions[index]]
        try:
            return read_image(path, self.channels)
        except UNREADABLE as error:
            raise unreadable(path, error) from None


Found = TypeVar("Found", bound=Samples)


def hold_out(found: dict[str, Found], config: FoldConfig, test: float | None = None) -> dict[str, Found]:
    """Take the held-out samples from those of train, and with `test` a share of test samples, too."""
    train = found["train"]
    parts = zip(("train", "val", "test"), split(config, train.targets.tolist(), train.classes, test), strict=True)
    return found | {name: train.only(kept) for name, kept in parts if kept}


class Images(Dataset[tuple[Tensor, Tensor, int]]):
    """Images by position and seed, so that augmentation does not depend on which process prepares the image."""

    def __init__(self, samples: Samples, transform: Transform) -> None:
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        index, seed = sample
        with seeded(seed):
            return self.transform(self.samples.image(index)), self.samples.targets[index], index


TRIED = 8  # images by which the user's own transform is tried


def refuse_unfit_transform(images: Images) -> None:
    """Call the user's own transform with a few images, evenly spaced, so that an unsuitable one is refused before the run.

    Raises:
        UserError: it fails, or returns something else than an image of the model's size.
    """
    if isinstance(images.transform, CustomTransform):
        for index in range(0, len(images), -(-len(images) // TRIED)):
            images[index, 0]


class FolderLoader(WorkerLoader):
    def __init__(
        self,
        samples: Samples,
        notes: Annotations,
        transform: Transform,
        config: PhotosConfig,
        norm: Norm,
        device: torch.device,
        seed: int | None = None,
        chances: Tensor | None = None,
    ) -> None:
        images = Images(samples, transform)
        refuse_unfit_transform(images)
        super().__init__(images, config, device, seed, chances=chances)
        self.keys, self.targets, self.notes = samples.keys, samples.targets, notes
        self.mean, self.std = norm.on(device)

    def __iter__(self) -> Iterator[Batch]:
        for images, target, index in self.epochs:
            weight = None if self.notes.weight is None else self._on_device(self.notes.weight[index])
            group = None if self.notes.group is None else self._on_device(self.notes.group[index])
            seen = self._on_device(images)
            if seen.dtype == torch.uint8:
                seen = normalised(seen, self.mean, self.std)
            yield Batch(seen, self._on_device(target), self._on_device(index), weight, group)

    def _on_device(self, value: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return value
        return (value if value.is_pinned() else value.pin_memory()).to(self.device, non_blocking=True)


def folder_data(config: FolderConfig, norm: Norm, device: torch.device, seed: int, saved: Norm | None = None) -> Data:
    """Open the folders of a data set; `norm` and `saved` as in lab.data.load.load_data.

    Raises:
        UserError: a folder, an image or a setting is wrong.
    """
    root = existing_folder("data.root", absolute(config.root, ROOT / "data"))
    try:
        found, seen = _found(root, config)
    except UserError as error:
        if said := next(filter(None, (find_object(spec.found_in)(root) for spec in SOURCES.values() if spec.found_in)), ""):
            remedy = "task=detection data=boxes reads them, while data=folder takes one folder of images per class"
            raise UserError(f"data.root={root}: holds boxes ({said}); {remedy}.\n{error}") from None
        raise
    found = dict(zip(found, without_corrupt(root, list(found.values()), config), strict=True))
    lacking = [note for files in found.values() for note in _lacking(files)]
    held_out = f"of {found['val'].folder.name}/" if "val" in found else f"of {found['train'].folder.name}/, {held_out_by(config)}"
    unused = "val" in found and config.held_out != FolderConfig.held_out
    if "val" not in found:
        found = hold_out(found, config)
    data = photos_data(found, held_out, config, norm, device, seed, saved)
    data.notes += [f"data.held_out={config.held_out}: has no effect, because {found['val'].folder} holds the held-out images"] * unused
    data.notes += [] if config.channels else alpha_note(found["train"].paths)
    data.notes += lacking + seen
    if config.test is None and found["train"].folder != root and (root / "test").is_dir():
        data.notes.append(f"{root / 'test'} is not used; data.test=test scores its images once at the end")
    if len(data.classes) == 1:
        data.notes.append(f"{found['train'].folder} holds one class, {data.classes[0]}, so that every prediction is right.")
    return data


def _found(root: Path, config: FolderConfig) -> tuple[dict[str, Files], list[str]]:
    """Return the images of each part, and messages about files, folders and links; raise as folder_data."""
    folders = _folders(root, config)
    for name, folder in folders.items():
        if name == "train" and not folder.is_dir():
            raise UserError(f"data.train={folder}: no such folder. Give data.train=. if the folders of the classes are in {root} itself.")
        existing_folder(f"data.{name}", folder)
    kinds = (*SUFFIXES, ARRAY) if config.channels else SUFFIXES
    listed = read_class_folders(folders, kinds)
    found: dict[str, Files] = {}
    for name, folder in folders.items():
        found[name] = _files(name, root, folder, listed, config, found["train"].classes if found else [])
    return found, _seen(root, folders, listed, config)


def _lacking(files: Files) -> list[str]:
    """Return a note on the classes that lack images."""
    counts = torch.bincount(files.targets, minlength=len(files.classes)).tolist()
    names = [name for name, count in zip(files.classes, counts, strict=True) if not count]
    more = f", … ({len(names)} classes)" if len(names) > 10 else ""
    return [f"{files.folder} has no image of {', '.join(names[:10])}{more}"] * bool(names)


def untrained(found: Mapping[str, Samples]) -> str:
    """Return that no training image is of some classes that held-out images have, in words; empty if there are none."""
    classes = found["train"].classes

    def there(samples: Samples) -> set[int]:
        targets = samples.targets
        return set((targets if targets.ndim == 1 else (targets > 0).any(0).nonzero()[:, 0]).tolist())

    held = set().union(*map(there, found.values()))
    names = [classes[number] for number in sorted(held - there(found["train"]))]
    more = f", … ({len(names)} classes)" if len(names) > 10 else ""
    return f"no training image is of {', '.join(names[:10])}{more}, which held-out images have" if names else ""


def norm_of_files(samples: Samples, config: PhotosConfig, norm: Norm, saved: Norm | None) -> Norm:
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


def photos_data(
    found: Mapping[str, Samples],
    held_out: str,
    config: PhotosConfig,
    norm: Norm,
    device: torch.device,
    seed: int,
    saved: Norm | None,
    known: Mapping[str, Annotations] | None = None,
) -> Data:
    """Return the data of samples that are read and transformed by workers.

    Args:
        found: samples of train, val and, if there are any, test.
        held_out: which images are held out, in words.
        config, norm, device, seed, saved: as in lab.data.load.load_data.
        known: weights and groups of the parts; None for those of the settings.
    """
    train = found["train"]
    norm = norm_of_files(train, config, norm, saved)
    seen = held_out_transform(config, norm)
    notes = known or {
        name: annotate(config, samples.targets, samples.classes, samples.keys, needed=samples is train) for name, samples in found.items()
    }
    evaluated = {name: FolderLoader(found[name], notes[name], seen, config, norm, device) for name in found if name != "train"}
    chances = chances_of(config, train.targets, notes["train"].weight)
    # drawn by their weights, not weighed again
    weighed = Annotations(None, notes["train"].group) if config.sampler == "weighted" else notes["train"]
    return Data(
        train.classes,
        config.channels or 3,
        norm,
        FolderLoader(train, weighed, train_transform(config, norm), config, norm, device, seed, chances),
        evaluated["val"],
        count_groups(*notes.values()),
        torch.bincount(train.targets, minlength=len(train.classes)) if train.targets.ndim == 1 else train.targets.sum(0).round().long(),
        evaluated.get("test"),
        held_out,
        lambda: FolderLoader(train, notes["train"], seen, config, norm, device),
        [said] if train.targets.ndim == 1 and (said := untrained(found)) else [],
    )


def _folders(root: Path, config: FolderConfig) -> dict[str, Path]:
    """Return the folder of each part; if val has none, its images are taken from the training images.

    Raises:
        UserError: two parts have the same folder, there are both held-out images and a fold, or data.test is a share.
    """
    val = config.val or held_out_folder(root)
    given = {"train": config.train, "val": val, "test": config.test}
    if config.fold is not None and val:
        raise UserError(f"data.fold={config.fold}: divides the images of data.train, but data.root={root} has held-out images in {val}/.")
    if config.test and config.test.replace(".", "", 1).isdecimal() and not (root / config.test).is_dir():
        raise UserError(f"data.test={config.test}: a folder in data.root is expected; only sets held in memory take a share.")
    folders = {name: root / folder for name, folder in given.items() if folder}
    for name, folder in folders.items():
        same = next(other for other in folders if folders[other].resolve() == folder.resolve())
        if same != name:
            raise UserError(f"data.{name}={given[name]}: is data.{same}, too; images that nothing else uses are expected.")
    return folders


def _files(part: str, root: Path, path: Path, listed: ClassFolders, config: FolderConfig, trained: list[str]) -> Files:
    """Return the images of a part.

    Args:
        part: train, val or test.
        root: what the images' names are relative to.
        path: the part's folder.
        listed: what the folders hold.
        config: names the classes, if the folders do not.
        trained: the classes of the training images; empty for these themselves.

    Raises:
        UserError: a class has files but no images, is unknown, or is in one part only; or the folder has no image.
    """
    setting, held, named = f"data.{part}={path}", listed.of(part), config.classes
    arrays = "" if config.channels else f" Files {ARRAY} are read with data.channels=NUMBER."
    images = f"Images are files {', '.join(listed.kinds)}.{arrays}"
    none = [name for name, files in held.items() if not files and listed.passed[part, name] and name not in (named or ())]
    if none:
        what = ", ".join(f"{name} ({passed_over(listed.passed[part, name])})" for name in none[:5])
        said = f"{setting}: one folder of images per class is expected. Found no image for the classes {what}."
        raise UserError(f"{said} Remove a folder that is not a class. {images}")
    there = [name for name, files in held.items() if files]
    if not there:
        raise UserError(f"{setting}: has no image of a class. {images}")
    if named and (strange := [name for name in there if name not in named]):
        raise unknown(f"{setting}: class", strange[0], named)
    if not named and trained:
        empty = {name for name in held if name in trained}
        if odd := sorted(set(trained) ^ (set(there) | empty)):
            said = f"data.train and data.{part} hold different classes: {', '.join(odd[:10])} in one of them only."
            raise UserError(f"{said} A folder may lack some if data.classes=[NAME,NAME,...] names them all.")
    classes = named or trained or there
    number = {name: each for each, name in enumerate(classes)}
    files = [file for name in there for file in held[name]]
    targets = torch.tensor([number[name] for name in there for _ in held[name]])
    keys = [os.path.relpath(file, root).replace(os.sep, "/") for file in files]
    return Files(classes=list(classes), targets=targets, keys=keys, channels=config.channels, folder=path, files=files)


def _seen(root: Path, folders: Mapping[str, Path], listed: ClassFolders, config: FolderConfig) -> list[str]:
    """Return messages about files that are passed over, empty folders and links."""
    notes = [visible(f"{folder}: {said}") for part, folder in folders.items() if (said := passed_over(listed.passed_in(part)))]
    empty = [
        os.path.relpath(folders[part] / name, root)
        for (part, name), files in listed.images.items()
        if not files and name not in (config.classes or ()) and not listed.passed[part, name]
    ]
    if empty:
        more = f", … ({len(empty)} folders)" if len(empty) > 10 else ""
        notes.append(visible(f"{root}: folders without a file are no classes of their own: {', '.join(empty[:10])}{more}"))
    return notes + listed.notes(root)


def without_corrupt(root: Path, parts: list[Files], config: FolderConfig | TableConfig) -> list[Files]:
    """Return the usable files of each part; the files of all parts are checked together.

    Raises:
        UserError: some files cannot be used and are not to be skipped, or a part has none left.
    """
    paths = [path for files in parts for path in files.paths]
    about = sorted({Path(path).parent for path in paths})
    fault = PixelFault(config.channels) if config.channels else None
    wrong = find_corrupt({number: (path, None) for number, path in enumerate(paths)}, about, config.check, fault)
    faults = Faults(root)
    for number, said in sorted(wrong.items(), key=lambda fault: paths[fault[0]]):
        hint = "; data.channels reads it as it is" if "8 bits a channel" in said else ""
        faults.add(f"{os.path.relpath(paths[number], root)}: {said}{hint}")
    faults.raise_or_report(config.skip_corrupt, usable=len(wrong) < len(paths))
    left_out = {paths[number] for number in wrong}
    kept = [files.only([i for i, path in enumerate(files.paths) if path not in left_out]) for files in parts]
    for files in kept:
        if not len(files):
            raise UserError(f"{files.folder}: has no image to use.")
    return kept

"""Divide images into those to train on, those held out to choose the best epoch, and those scored once at the end."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

from lab.base.errors import UserError
from lab.config.schema import FoldConfig, SplitConfig

Positions = list[int]


def split_any(config: SplitConfig, samples: int, test: float | None = None) -> list[Positions]:
    """Draw the positions of training, held-out and test samples without classes, at random by data.split_seed.

    Raises:
        UserError: a part would have no sample, or the fold does not exist.
    """
    return _drawn(config, samples, test, None)


def split(config: SplitConfig, targets: Sequence[int], classes: Sequence[str], test: float | None = None) -> list[Positions]:
    """Draw the positions of training, held-out and test samples: a share of each class, at random by data.split_seed.

    Test samples are drawn first, so that they are the same for every fold.

    Args:
        config: the share that is held out, or the fold.
        targets: the class of each sample.
        classes: their names.
        test: share of test samples; None for none.

    Raises:
        UserError: a part would have no sample of a class that has some, or the fold does not exist.
    """
    names = ["training", "held-out", "test"][: 2 if test is None else 3]
    _refuse_rare(config, targets, classes, len(names))
    if test is not None and fold_of(config) is None and test + config.held_out >= 1:
        raise UserError(f"data.test={test}: with data.held_out={config.held_out} no image is left to train on.")
    parts = _drawn(config, len(targets), test, targets)
    for name, part in zip(names, parts, strict=False):
        if lacking := set(targets) - {targets[i] for i in part}:
            label = min(lacking)
            share = f"data.test={test}" if part is parts[2] else held_out_by(config)
            has = f"class {classes[label]!r}, of {Counter(targets)[label]} images, has no {name} one"
            raise UserError(f"{share}: {has}; give it more images, or take a larger share.")
    return parts


def held_out_by(config: SplitConfig) -> str:
    """Name the setting that decides which images are held out."""
    fold = fold_of(config)
    return f"data.held_out={config.held_out}" if fold is None else f"data.fold={fold.fold} of data.folds={fold.folds}"


def fold_of(config: SplitConfig) -> FoldConfig | None:
    """Return the settings of the fold that is held out, if one is.

    Raises:
        UserError: the fold does not exist.
    """
    if not isinstance(config, FoldConfig) or config.fold is None:
        return None
    if config.fold >= config.folds:
        raise UserError(f"data.fold={config.fold}: 0 to {config.folds - 1} are expected with data.folds={config.folds}.")
    return config


def _refuse_rare(config: SplitConfig, targets: Sequence[int], classes: Sequence[str], parts: int) -> None:
    fold = fold_of(config)
    label, count = min(Counter(targets).items(), key=lambda each: (each[1], each[0]), default=(0, 0))
    least = parts if fold is None else fold.folds + parts - 2
    if count < least:
        raise UserError(
            f"{held_out_by(config)}: class {classes[label]!r} has too few images to divide: {count}; at least {least} are expected."
        )


def _drawn(config: SplitConfig, samples: int, test: float | None, targets: Sequence[int] | None) -> list[Positions]:
    """Draw training, held-out and test samples; with targets, equal shares of each class."""
    from sklearn.model_selection import KFold, StratifiedKFold

    rest: Positions = list(range(samples))
    tested: Positions = []
    if test is not None:
        rest, tested = _set_aside(config, targets, rest, ceil(test * samples), f"data.test={test}")
    if (fold := fold_of(config)) is None:
        train, val = _set_aside(config, targets, rest, ceil(config.held_out * samples), held_out_by(config))
        return [train, val, tested]
    folds = (KFold if targets is None else StratifiedKFold)(fold.folds, shuffle=True, random_state=config.split_seed)
    with _refused(held_out_by(config), len(rest)):
        divided = list(folds.split(rest, None if targets is None else [targets[i] for i in rest]))[fold.fold or 0]
    train, val = ([rest[i] for i in part] for part in divided)
    return [train, val, tested]


def _set_aside(
    config: SplitConfig, targets: Sequence[int] | None, among: Positions, count: int, setting: str
) -> tuple[Positions, Positions]:
    """Take `count` of the positions, with targets equal shares of each class; return (the rest, those taken)."""
    from sklearn.model_selection import train_test_split

    labels = None if targets is None else [targets[i] for i in among]
    if labels and not (classes := len(set(labels))) <= count <= len(among) - classes:
        raise UserError(f"{setting}: takes {count} of {len(among)} images of {classes} classes; each class needs one taken and one left.")
    with _refused(setting, len(among)):
        others, taken = train_test_split(among, test_size=count, stratify=labels, random_state=config.split_seed)
    return others, taken


@contextmanager
def _refused(setting: str, samples: int) -> Iterator[None]:
    """Name the setting in an error of scikit-learn's."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{setting}: {samples} samples cannot be divided so: {error}") from None

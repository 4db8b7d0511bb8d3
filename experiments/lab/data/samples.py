"""Preference weights and groups of samples: a map from classes in the config, or columns of a CSV file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.base.errors import UserError, unknown
from lab.base.formats import one_form
from lab.config.schema import ImagesConfig
from lab.data.cells import Where, numbers, read_cells, rows_of, texts

COLUMNS = ("path", "index", "label", "weight", "group")
DIGITS = 18  # of a number that names a class or a group; int refuses thousands


@dataclass
class Annotations:
    weight: Tensor | None = None  # (N,) float
    group: Tensor | None = None  # (N,) int64

    def only(self, positions: list[int]) -> "Annotations":
        return Annotations(*(None if each is None else each[positions] for each in (self.weight, self.group)))


def annotate(config: ImagesConfig, targets: Tensor, classes: Sequence[str], keys: Sequence[str], *, needed: bool) -> Annotations:
    """Find the weights and groups of samples with these targets.

    Args:
        config: data.class_weight or data.class_balance, and data.class_group; or data.csv.
        targets: (N,) classes.
        classes: names of the classes.
        keys: the name of each sample in the CSV file (its path, or its index).
        needed: True for training samples: data.class_balance weights them, and each must be in the CSV file. Other samples that the file
            lacks get weight 1 and group 0.
    """
    if config.csv and (config.class_weight or config.class_group):
        raise UserError("data.csv and data.class_weight / data.class_group both give weights; use one of them.")
    if config.class_balance is not None and (config.csv or config.class_weight):
        raise UserError(
            "data.class_balance gives every training image the weight of its class; data.csv and data.class_weight give others."
        )
    if config.csv:
        return _from_csv(Path(config.csv), targets, classes, keys, needed=needed)
    weight = _from_map("data.class_weight", config.class_weight, classes, 1.0)
    if config.class_balance is not None and needed:
        from lossforge.losses import class_balanced_weight

        weight = class_balanced_weight(torch.bincount(targets, minlength=len(classes)), config.class_balance).tolist()
    group = _from_map("data.class_group", config.class_group, classes, None)
    return Annotations(
        None if weight is None else torch.tensor(weight)[targets],
        None if group is None else torch.tensor(group, dtype=torch.int64)[targets],
    )


def _from_map(setting: str, given: dict[Any, Any], classes: Sequence[str], default: float | None) -> list[Any] | None:
    if not given:
        return None
    values: list[Any] = [default] * len(classes)
    for key, value in given.items():
        values[class_of(str(key), classes, setting)] = value
    if None in values:
        lacking = [classes[i] for i, value in enumerate(values) if value is None]
        raise UserError(f"{setting}: every class needs a group; none is given for {', '.join(lacking[:10])}.")
    return values


def class_of(label: str, classes: Sequence[str], where: str) -> int:
    """Return the index of a class given by its name or its number."""
    label = one_form(label)
    if label in classes:
        return list(classes).index(label)
    if label.isdecimal() and len(label) <= DIGITS and int(label) < len(classes):
        return int(label)
    raise unknown(f"{where}: class", label, classes)


def by_number(name: str) -> tuple[bool, int, str]:
    """Return a key that sorts names of classes: numbers by value, then texts; thousands of digits are a text, which int refuses."""
    number = name.isdecimal() and len(name) <= DIGITS
    return not number, int(name) if number else 0, name


def classes_in(labels: Iterable[str], setting: str) -> list[str]:
    """Return the classes of the labels of training images, sorted.

    Raises:
        UserError: there are fewer than two.
    """
    classes = sorted(set(labels), key=by_number)
    if len(classes) < 2:
        raise UserError(f"{setting}: has only the class {', '.join(classes) or 'of no name'}; two or more are expected.")
    return classes


def numbered(labels: Sequence[str], classes: Sequence[str], where: Where, *, by_index: bool) -> Tensor:
    """Return the index of each label's class (N,).

    Args:
        labels: names of classes.
        classes: all of them.
        where: names a label's place in messages.
        by_index: whether a label may be a class's index, too, as where data.classes names them; not where a number is a class's name.

    Raises:
        UserError: a label is of no class.
    """
    known = {name: number for number, name in enumerate(classes)}
    by_index = by_index and not any(map(str.isdecimal, classes))
    for number, label in enumerate(labels):
        if label not in known:
            if not by_index:
                raise unknown(f"{where(number)}: class", label, classes)
            known[label] = class_of(label, classes, where(number))
    return torch.tensor([known[label] for label in labels], dtype=torch.int64)


def _from_csv(path: Path, targets: Tensor, classes: Sequence[str], keys: Sequence[str], *, needed: bool) -> Annotations:
    table, where = read_cells(path, "data.csv"), rows_of(path)
    key = _key_column(path, list(table.columns))
    names = [one_form(text) for text in texts(table, key, where)]
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if first.setdefault(name, number) != number:
            raise UserError(f"{where(number)}, column {key}: {name!r} was already given in {where(first[name]).rpartition(', ')[2]}.")
    keys = [one_form(name) for name in keys]
    rows = [first.get(name, -1) for name in keys]  # -1 is the default after the last row
    if "label" in table:
        labels = [class_of(text, classes, f"{where(row)}, column label") for row, text in enumerate(texts(table, "label", where))]
        for row, target in zip(rows, targets.tolist(), strict=True):
            if row >= 0 and labels[row] != target:
                raise UserError(f"{where(row)}, column label: {classes[labels[row]]!r}, but the sample's class is {classes[target]!r}.")
    if needed and (lacking := [name for name in keys if name not in first]):
        has = f"such as {names[0]!r}" if names else "none"
        raise UserError(
            f"{path}: {len(lacking)} of {len(keys)} training samples have no row; the first is {lacking[0]!r}.\n"
            f"The file's column {key} has {len(names)} rows, {has}."
        )
    weight = group = None
    if "weight" in table:
        weight = torch.cat([numbers(table, "weight", where, 0.0), torch.ones(1)])[rows]
    if "group" in table:
        given = texts(table, "group", where)
        if odd := [row for row, text in enumerate(given) if not (text.isdecimal() and len(text) <= DIGITS)]:
            raise UserError(f"{where(odd[0])}, column group: {given[odd[0]]!r}; a whole number of at least 0 is expected.")
        group = torch.tensor([*map(int, given), 0])[rows]
    return Annotations(weight, group)


def _key_column(path: Path, header: list[str]) -> str:
    if strange := [name for name in header if name not in COLUMNS]:
        raise unknown(f"{path}, row 1: column", strange[0], COLUMNS)
    found = [name for name in ("path", "index") if name in header]
    if len(found) != 1 or not {"weight", "group"} & set(header):
        raise UserError(
            f"{path}, row 1: needs a column path or index, and a column weight or group or both; it has {', '.join(header) or 'none'}."
        )
    return found[0]

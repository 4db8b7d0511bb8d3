"""Preference weights and groups of samples: a map from classes in the config, or columns of a CSV file."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.config.errors import UserError, unknown
from lab.config.schema import ImagesConfig

COLUMNS = ("path", "index", "label", "weight", "group")


@dataclass
class Annotations:
    weight: Tensor | None = None  # (N,) float
    group: Tensor | None = None  # (N,) int64


def annotate(config: ImagesConfig, targets: Tensor, classes: Sequence[str], keys: Sequence[str], *, needed: bool) -> Annotations:
    """Find the weights and groups of samples with these targets.

    Args:
        config: data.class_weight or data.class_balance, and data.class_group; or data.csv.
        targets: (N,) classes.
        classes: names of the classes.
        keys: what the CSV file calls each sample (its path, or its index).
        needed: of training samples, which data.class_balance weighs; one that the CSV file lacks is an error. Of others it counts
            with weight 1 in group 0.
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
        values[_class(str(key), classes, setting)] = value
    if None in values:
        lacking = [classes[i] for i, value in enumerate(values) if value is None]
        raise UserError(f"{setting}: every class needs a group; none is given for {', '.join(lacking[:10])}.")
    return values


def _class(label: str, classes: Sequence[str], where: str) -> int:
    """Return the index of a class given by its name or its number."""
    if label in classes:
        return list(classes).index(label)
    if label.isdecimal() and int(label) < len(classes):
        return int(label)
    raise unknown(f"{where}: class", label, classes)


def _from_csv(path: Path, targets: Tensor, classes: Sequence[str], keys: Sequence[str], *, needed: bool) -> Annotations:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.csv={path}: cannot be read: {error}") from None
    key = _key_column(path, header)
    position = {name: i for i, name in enumerate(keys)}
    weight = torch.ones(len(keys))
    group = torch.zeros(len(keys), dtype=torch.int64)
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}, row {number}"
        name = _cell(row, key, where)
        if name in seen:
            raise UserError(f"{where}, column {key}: {name!r} was already given in row {seen[name]}.")
        seen[name] = number
        i = position.get(name)
        label = _class(_cell(row, "label", where), classes, f"{where}, column label") if "label" in header else None
        row_weight = _weight(_cell(row, "weight", where), where) if "weight" in header else 1.0
        row_group = _group(_cell(row, "group", where), where) if "group" in header else 0
        if i is None:
            continue
        if label is not None and label != int(targets[i]):
            raise UserError(f"{where}, column label: {classes[label]!r}, but the sample's class is {classes[int(targets[i])]!r}.")
        weight[i], group[i] = row_weight, row_group
    if needed and (lacking := [name for name in keys if name not in seen]):
        has = f"such as {rows[0][key]!r}" if rows else "none"
        raise UserError(
            f"{path}: {len(lacking)} of {len(keys)} training samples have no row; the first is {lacking[0]!r}.\n"
            f"The file's column {key} has {len(rows)} rows, {has}."
        )
    return Annotations(weight if "weight" in header else None, group if "group" in header else None)


def _key_column(path: Path, header: list[str]) -> str:
    if strange := [name for name in header if name not in COLUMNS]:
        raise unknown(f"{path}, row 1: column", strange[0], COLUMNS)
    found = [name for name in ("path", "index") if name in header]
    if len(found) != 1 or not {"weight", "group"} & set(header):
        raise UserError(
            f"{path}, row 1: needs a column path or index, and a column weight or group or both; it has {', '.join(header) or 'none'}."
        )
    return found[0]


def _cell(row: dict[str, str | None], column: str, where: str) -> str:
    value = (row.get(column) or "").strip()
    if not value:
        raise UserError(f"{where}, column {column}: is empty.")
    return value


def _weight(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{where}, column weight: {text!r}; a finite number of at least 0 is expected.")
    return value


def _group(text: str, where: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{where}, column group: {text!r}; a whole number of at least 0 is expected.")
    return int(text)

"""Images and their labels in a table: a class, several labels, or numbers for each."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab.base.errors import UserError, unknown
from lab.base.formats import one_form
from lab.base.paths import absolute
from lab.config.schema import TableConfig
from lab.data.cells import Where, as_text, numbers, read_cells, rows_of, texts
from lab.data.images.files import SUFFIXES, Faults, Names
from lab.data.listing import PARTS
from lab.data.photos import Files, Photos, untrained
from lab.data.samples import Annotations, by_number, classes_in, numbered
from lab.data.sets import existing_folder

if TYPE_CHECKING:
    import pandas

KINDS = {"class": "task=classification", "labels": "task=multilabel", "numbers": "task=regression"}
YES = {"1": 1.0, "true": 1.0, "yes": 1.0, "1.0": 1.0, "0": 0.0, "false": 0.0, "no": 0.0, "0.0": 0.0}
MASKED = -1.0
"""The target of a class that nobody labelled in an image: loss and metrics leave it out."""
MASKS = {"": MASKED, "-1": MASKED, "-1.0": MASKED}

OF_CLASSES = ("mixup", "cutmix", "class_weight", "class_group", "class_balance")
"""Settings that need one class an image."""


def read_classes(config: TableConfig) -> Photos:
    """Return images of one class each."""
    return read_images(config, "class")


def read_images(config: TableConfig, kind: str) -> Photos:
    """Return the images of a table.

    Args:
        config: the table and its columns.
        kind: what a label is: "class", "labels" (several of the classes) or "numbers".

    Raises:
        UserError: a column, a cell or a setting is wrong.
    """
    _refuse_unfit(config, kind)
    file = absolute(config.file, "")
    table = read_table(file, config.delimiter)
    root = existing_folder("data.root", absolute(config.root, file.parent))
    names = label_columns(config, kind)
    others = (("image", config.image), ("split", config.split), ("weight", config.weight), ("group", config.group))
    for setting, column in (*(("label", name) for name in names), *others):
        if column is not None and column not in table.columns:
            raise unknown(f"data.{setting}={column}: {file} has no such column", column, table.columns, show=len(table.columns))
    where = rows_of(file)
    there = Names(root)
    keys, ending = _with_ending(there, [there.spelled(key) for key in texts(table, config.image, where)])
    first: dict[str, int] = {}
    for number, key in enumerate(keys):
        if (other := first.setdefault(there.real(key), number)) != number:
            again = where(other).rpartition(", ")[2]
            raise UserError(f"{where(number)}, column {config.image}: {key!r} is given twice: {again} names this image, too.")
    if not config.images_outside and (outside := next((i for i, key in enumerate(keys) if there.leaves(key)), None)) is not None:
        raise UserError(
            f"{where(outside)}, column {config.image}: {keys[outside]!r} leads out of {root}; data.root= names the folder that holds all "
            "images, and data.images_outside=true takes such files."
        )
    classes, targets = _targets(config, kind, table, names, where)
    if not any(map(there.holds, keys)):
        raise UserError(
            f"data.root={root}: has none of the images that the column data.image={config.image} names, such as {keys[0]}; "
            "give the folder in which these paths begin."
        )
    files = [str(root / key) for key in keys]
    whole = Files(targets=targets, keys=keys, channels=config.channels, source=root, files=files, notes=_annotations(config, table, where))
    positions = _parts(config, table, where)
    notes = [f"data.image={config.image}: names no ending, and files {ending} are read"] * bool(ending)
    notes += _take_unlabelled(config, positions, targets) if kind == "labels" else []
    parts = {name: whole.only(rows) for name, rows in positions.items()}
    if kind != "numbers" and config.split and not config.classes and (said := untrained(parts, classes)):
        raise UserError(f"data.label={config.label}: {said}. Move rows of it to train, or name all classes by data.classes.")
    of = f"of {file.name}{f', data.split={config.split}' if config.split else ''}"
    return Photos(parts=parts, classes=classes, of=of, faults=Faults(root), test=("test", config.test), notes=notes)


def read_table(file: Path, delimiter: str | None = None) -> "pandas.DataFrame":
    """Read a table; a CSV file's cells are texts, divided by `delimiter` (None: found in its first line).

    Raises:
        UserError: it is not a table, cannot be read, or has no rows.
    """
    if file.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"data.file={file}: a file .csv, .tsv or .parquet is expected.")
    if delimiter is not None and len(delimiter) != 1:
        raise UserError(f"data.delimiter={delimiter!r}: one character is expected.")
    table = read_cells(file, "data.file", delimiter or ("\t" if file.suffix.lower() == ".tsv" else None))
    if not len(table):
        raise UserError(f"data.file={file}: {'has no rows.' if len(table.columns) else 'cannot be read: it is empty.'}")
    return table


def label_columns(config: TableConfig, kind: str) -> list[str]:
    """Return the columns of the label.

    Raises:
        UserError: data.label is neither a name nor a list of names, or names several columns for a class.
    """
    given = config.label
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names) or len(set(names)) < len(names):
        raise UserError(f"data.label={given}: a column's name, or a list of different ones such as [x,y], is expected.")
    if kind == "class" and len(names) > 1:
        raise UserError(f"data.label={given}: task=classification takes one column; several are for task=multilabel and task=regression.")
    return [str(each) for each in names]


def _refuse_unfit(config: TableConfig, kind: str) -> None:
    """Raise UserError for settings that have no effect on such labels, or that contradict each other."""
    defaults = {item.name: item.default for item in fields(config)}
    for name in OF_CLASSES if kind != "class" else ():
        if (value := getattr(config, name)) not in ({}, defaults[name]):
            raise UserError(f"data.{name}={value}: is for images of one class each; {KINDS[kind]} has none.")
    if config.csv or ((config.weight or config.group) and (config.class_weight or config.class_group or config.class_balance is not None)):
        raise UserError("data=table takes weights and groups by data.weight and data.group, or by class; not data.csv, and not both.")


def _with_ending(there: Names, keys: list[str]) -> tuple[list[str], str]:
    """Return the images' names with their ending, and the ending if the table names them without it, as Kaggle's do: the most frequent."""
    if not keys or any(map(there.holds, keys)):
        return keys, ""
    counts = {each: sum(there.holds(f"{key}{each}") for key in keys) for each in (*SUFFIXES, *map(str.upper, SUFFIXES))}
    most = max(counts, key=lambda each: counts[each])
    ending = most if counts[most] else ""
    return [f"{key}{ending}" for key in keys], ending


def _targets(config: TableConfig, kind: str, table: Any, names: list[str], where: Where) -> tuple[list[str], Tensor]:
    """Return the classes' or numbers' names, and the targets."""
    if kind == "numbers":
        return names, torch.stack([numbers(table, name, where) for name in names], dim=1)
    if kind == "class":
        cells = [[one_form(text)] for text in texts(table, names[0], where)]
    elif isinstance(config.label, str):
        cells = [_list(cell, config.separator) for cell in table[names[0]]]
        _refuse_unlike(config, table[names[0]], cells)
    else:
        hot = torch.stack([_yes(table[name], name, where) for name in names], dim=1)
        if config.classes not in (None, names):
            raise UserError(f"data.classes={config.classes}: with a column for each class, their names are the columns': {names}.")
        return names, hot
    rows, labels = [row for row, cell in enumerate(cells) for _ in cell], [each for cell in cells for each in cell]
    found = classes_in(labels, f"data.label={names[0]}") if kind == "class" and not config.classes else sorted(set(labels), key=by_number)
    classes = config.classes or found
    index = numbered(labels, classes, lambda number: f"{where(rows[number])}, column {names[0]}", by_index=config.classes is not None)
    if kind == "class" and not config.classes and not config.split and 2 * len(classes) > len(cells):
        raise UserError(
            f"data.label={names[0]}: has {len(classes)} different values in {len(cells)} rows; "
            "a column of classes, of several images each, is expected. Numbers are for task=regression."
        )
    if kind == "class":
        return classes, index
    hot = torch.zeros(len(cells), len(classes))
    hot[rows, index] = 1.0
    return classes, hot


def _refuse_unlike(config: TableConfig, column: Any, cells: list[list[str]]) -> None:
    """Raise UserError for a column that is of one class, or whose labels something else than data.separator divides."""
    if not config.classes and any(cells) and all(len(cell) < 2 and "".join(cell).lower() in YES | MASKS for cell in cells):
        said = f"write data.label=[{config.label}], or name the classes by data.classes."
        raise UserError(f"data.label={config.label}: holds yes or no, as a column of one class; {said}")
    given = [cell for cell in column if isinstance(cell, str)]
    if config.classes or any(config.separator in cell for cell in given):
        return
    for other in (each for each in ",;|" if each != config.separator):
        if count := sum(other in cell for cell in given):
            raise UserError(
                f"data.separator={config.separator}: divides no cell of the column {config.label}, but {count} of {len(given)} have "
                f"{other!r}. Write \"data.separator='{other}'\" in a shell, or name the classes by data.classes if these are names."
            )


def _list(cell: Any, separator: str) -> list[str]:
    """Return the labels of a cell: a list of Parquet, or a text."""
    if cell is None:
        return []
    parts = cell.split(separator) if isinstance(cell, str) else cell if hasattr(cell, "__iter__") else [cell]
    return [text for each in parts if each is not None and (text := one_form(as_text(each)))]


def _yes(column: Any, name: str, where: Where) -> Tensor:
    """Return a class's column of yes and no as 1 and 0, and MASKED for an empty cell or -1."""
    given = YES | MASKS
    found = [given.get("" if each is None else as_text(each).lower()) for each in column]
    if None in found:
        number = found.index(None)
        said = f"0 or 1 is expected, and -1 or nothing for a masked label, as the column is of one class; data.label={name} takes labels."
        raise UserError(f"{where(number)}, column {name}: {column.iloc[number]!r}; {said}")
    if all(each == MASKED for each in found):
        raise UserError(f"data.label: the column {name} has no label: each cell is empty or -1. Leave the column out.")
    return torch.tensor(found, dtype=torch.float32)


def _take_unlabelled(config: TableConfig, positions: dict[str, list[int]], targets: Tensor) -> list[str]:
    """Take out the rows whose labels are all masked; return a message about masked labels, if there are any.

    Raises:
        UserError: a part has no other row.
    """
    known = targets != MASKED
    if known.all():
        return []
    labelled = known.any(1).tolist()
    for name, rows in positions.items():
        positions[name] = [row for row in rows if labelled[row]]
        if rows and not positions[name]:
            raise UserError(f"data.label={config.label}: the images of {name} have no label: each cell is empty or -1.")
    said = f"{int((~known).sum()):,} of {known.numel():,} labels are masked (empty or -1): loss and metrics leave them out"
    alone = labelled.count(False)
    return [said + (f"; {alone:,} images without any label are left out" if alone else "")]


def _annotations(config: TableConfig, table: Any, where: Where) -> Annotations | None:
    """Return the weights and groups of the rows; None without columns of these."""
    weight = group = None
    if config.weight:
        weight = numbers(table, config.weight, where, 0.0)
    if config.group:
        given = [one_form(text) for text in texts(table, config.group, where)]
        names = {name: number for number, name in enumerate(sorted(set(given), key=by_number))}
        group = torch.tensor([names[each] for each in given])
    return Annotations(weight, group) if config.weight or config.group else None


def _parts(config: TableConfig, table: Any, where: Where) -> dict[str, list[int]]:
    """Return the rows of train, val and test as data.split says; all are of train without it."""
    if config.split is None:
        return {"train": list(range(len(table)))}
    given = texts(table, config.split, where)
    if strange := [number for number, text in enumerate(given) if text.lower() not in PARTS]:
        raise unknown(f"{where(strange[0])}, column {config.split}", given[strange[0]], PARTS)
    said = [PARTS[text.lower()] for text in given]
    parts = {name: [row for row, each in enumerate(said) if each == name] for name in ("train", "val", "test")}
    for name in ("train", "val"):
        if not parts[name]:
            raise UserError(f"data.split={config.split}: no row of {config.file} is of {name}; train and val, and test if you like.")
    return {name: rows for name, rows in parts.items() if rows}

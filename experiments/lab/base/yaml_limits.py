"""Limits of settings in a file from somebody else: plain values of few levels."""

from datetime import date
from types import NoneType
from typing import Any

import yaml

LEVELS, VALUES = 50, 1_000_000  # most levels and values of a file's settings


def are_plain(tree: Any) -> bool:
    """Return whether settings are groups, lists, texts, numbers and dates, of few levels: such as can be signed and written again."""
    left, seen = [(tree, 0)], 0
    while left:
        value, level = left.pop()
        seen += 1
        if isinstance(value, dict):
            if not all(isinstance(name, (str, int, float, NoneType)) for name in value):
                return False
            left += [(each, level + 1) for each in (*value, *value.values())]
        elif isinstance(value, (list, tuple)):
            left += [(each, level + 1) for each in value]
        elif isinstance(value, str):
            if "\0" in value:
                return False
        elif not isinstance(value, (int, float, date, NoneType)) or (isinstance(value, int) and value.bit_length() > 64):
            return False
        if level > LEVELS or seen + len(left) > VALUES:
            return False
    return True


def is_shallow(text: str, most: int = VALUES, *, references: bool = False) -> bool:
    """Return whether a YAML text has few levels and values: the loader crashes on a deep text, and does not finish a large one.

    Args:
        text: the text; nothing of it is loaded.
        most: the most values.
        references: whether the text may have some. Each counts as what it stands for, and may not stand in that itself.
    """
    inside: list[tuple[int, int, str | None]] = [(0, 0, None)]  # values, levels and anchor of each collection that is open
    known: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((1, 1, event.anchor))
        elif isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent, yaml.CollectionEndEvent)):
            values, levels, anchor = (1, 0, event.anchor) if isinstance(event, yaml.ScalarEvent) else (0, 0, None)
            if isinstance(event, yaml.CollectionEndEvent):
                values, levels, anchor = inside.pop()
            elif isinstance(event, yaml.AliasEvent):
                if not references or event.anchor not in known:
                    return False
                values, levels = known[event.anchor]
            if anchor:
                known[anchor] = values, levels
            before, deepest, name = inside[-1]
            inside[-1] = before + values, max(deepest, levels + 1), name
        if len(inside) - 2 + inside[-1][1] > LEVELS or inside[-1][0] > most:
            return False
    return True

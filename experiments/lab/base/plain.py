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


def is_shallow(text: str) -> bool:
    """Return whether a YAML text has few levels and no references, which may stand for billions of values; a deep one ends the loader."""
    level = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > LEVELS or isinstance(event, yaml.AliasEvent):
            return False
    return True

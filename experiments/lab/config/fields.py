"""Fields of settings with their meaning and limits, which lab.config.schema.check enforces."""

from collections.abc import Callable
from dataclasses import field
from typing import Any


def setting(
    default: Any,
    meaning: str,
    *,
    code: bool = False,
    address: bool = False,
    words: tuple[str, ...] = (),
    distinct: bool = False,
    path: str | None = None,
) -> Any:
    """Return a setting of any type.

    Args:
        default: the value if none is given.
        meaning: the setting's line in `--help` and in the documentation.
        code: whether the setting names Python code, which a stranger's file must not choose (lab.run.trust).
        address: whether the setting names what is fetched from a server; a stranger's file must not choose that, either.
        words: values of such a setting that name no code.
        distinct: whether it is a list of names in which nothing is named twice.
        path: whether it is a path in the current folder, "always" or "if there"; a run's settings then have it in full, so that they are
            right in another folder, too.
    """
    marks = {"code": code, "address": address, "words": words, "distinct": distinct, "path": path}
    return field(default=default, metadata={"meaning": meaning, **marks})


def number(
    default: Any,
    meaning: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    text: str | None = None,
) -> Any:
    """Return a number with its range: `above` and `below` are outside the range, `least` and `most` inside. `text` may stand for it."""
    limits = {"above": above, "least": least, "below": below, "most": most}
    return field(default=default, metadata={"meaning": meaning, "text": text, **limits})


def choice(default: Any, *choices: str, meaning: str = "") -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": choices})


def some(factory: Callable[[], Any], meaning: str = "", **limits: Any) -> Any:
    """Return a list or a map whose values lie in a range; `pair=True` for a list of the smallest and the largest value."""
    return field(default_factory=factory, metadata={"meaning": meaning, **limits})

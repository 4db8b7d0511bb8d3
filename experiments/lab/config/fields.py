"""Settings' fields with their meaning and their limits, which lab.config.schema.check enforces."""

from collections.abc import Callable
from dataclasses import field
from typing import Any


def setting(default: Any, meaning: str, *, code: bool = False) -> Any:
    """Return a setting of any type.

    Args:
        default: its value where none is given.
        meaning: its line in `--help` and in the documentation.
        code: whether it names Python code, which a stranger's file must not choose (lab.runs.origin).
    """
    return field(default=default, metadata={"meaning": meaning, "code": code})


def number(
    default: Any,
    meaning: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """A number with its range: `above` and `below` are outside the range, `least` and `most` inside."""
    return field(default=default, metadata={"meaning": meaning, "above": above, "least": least, "below": below, "most": most})


def choice(default: Any, *choices: str, meaning: str = "") -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": choices})


def some(factory: Callable[[], Any], meaning: str = "", **limits: Any) -> Any:
    """A list or a map whose values lie in a range."""
    return field(default_factory=factory, metadata={"meaning": meaning, **limits})

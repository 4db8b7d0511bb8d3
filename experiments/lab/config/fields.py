"""Settings' fields with their limits, which lab.config.schema.check enforces."""

from dataclasses import field
from typing import Any


def number(
    default: Any, *, above: float | None = None, least: float | None = None, below: float | None = None, most: float | None = None
) -> Any:
    """A number with its range: `above` and `below` are outside the range, `least` and `most` inside."""
    return field(default=default, metadata={"above": above, "least": least, "below": below, "most": most})


def choice(default: Any, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


def some(factory: Any, **limits: Any) -> Any:
    """A list or a map whose values lie in a range."""
    return field(default_factory=factory, metadata=limits)

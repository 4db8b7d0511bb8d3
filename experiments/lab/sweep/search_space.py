"""The settings that a sweep varies, and the values that they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.config.errors import UserError
from lab.config.settings import each_value, load
from lab.sweep.schema import SearchConfig


@dataclass
class Axis:
    """A setting and its values as text; or its `interval`, where a search chooses a number."""

    key: str
    values: list[str]
    interval: tuple[float, float] | None = None
    log: bool = False

    def overrides(self) -> list[str]:
        return [f"{self.key}={value}" for value in self.values]


def axis_of(override: Any, search: SearchConfig) -> Axis:
    """The axis of an override with several values.

    Raises:
        UserError: the search cannot choose among such values.
    """
    key = override.get_key_element().lstrip("+")
    if search.name == "grid" or not override.is_interval_sweep():
        if search.name != "grid" and key == "seed":
            raise UserError(f"{override.input_line}: the best seed says nothing; search={search.name} takes one seed.")
        return Axis(key, [word.partition("=")[2] for word in each_value(override)])
    interval = override.value()
    low, high, log = interval.start, interval.end, "log" in interval.tags
    if not low < high:
        raise UserError(f"{override.input_line}: the interval's first number must be below its second.")
    if log and low <= 0:
        raise UserError(f"{override.input_line}: a logarithmic interval lies above 0.")
    if unknown := interval.tags - {"log"}:
        raise UserError(f"{override.input_line}: tag {', '.join(unknown)} is not known; log is.")
    return Axis(key, [repr(low), repr(high)], (low, high), log)


def check_ends(axes: Sequence[Axis], fixed: Sequence[str]) -> None:
    """Check each value and each interval's ends, with the other settings at their first.

    Raises:
        UserError: as `lab.config.settings.load`.
    """
    for axis in axes:
        others = [other.overrides()[0] for other in axes if other is not axis]
        for word in axis.overrides():
            load([*fixed, *others, word])

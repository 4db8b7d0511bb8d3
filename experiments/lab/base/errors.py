"""Errors that several parts of the app know. Those of the user's input say what is accepted."""

import difflib
from collections.abc import Iterable

from lab.base.formats import masked, one_line


class UserError(Exception):
    """An error of the user's input: the run ends with status 1 and this message, without a traceback; passwords in addresses are masked."""

    def __init__(self, text: str = "") -> None:
        super().__init__("\n".join(map(one_line, masked(text).split("\n"))))


class NonFiniteError(Exception):
    """Too many updates in a row had a nan or infinite loss."""


class RankError(Exception):
    """Another rank failed and has reported why, or was killed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's kind if it has none; of a fault in YAML, its line and what it is."""
    if (mark := getattr(error, "problem_mark", None)) is not None:
        said = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        hint = "; YAML takes spaces, not tabs, before a value" if "cannot start any token" in said else ""
        return f"line {mark.line + 1}, column {mark.column + 1}: {said}{hint}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choice that is the initials of `word` (ce of cross_entropy), or up to `count` spelled most like it, the nearest first."""
    by_lower = {choice.lower(): choice for choice in choices}
    initials = "".join(part[:1] for part in word.lower().split("_"))
    if len(initials) > 1 and initials in by_lower:
        return [by_lower[initials]]
    found = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)
    return [by_lower[match] for match in found]


def unknown(what: str, got: str, choices: Iterable[str], *, show: int = 100) -> UserError:
    """Return the error for a name that is not among `choices`: it names the given name, the nearest spelling and the choices."""
    choices = sorted(choices)
    lines = [f"{what}: {got!r} is not known."]
    if close := nearest(got, choices):
        lines.append(f"Did you mean {' or '.join(repr(c) for c in close)}?")
    if len(choices) <= show:
        lines.append(f"Choices: {', '.join(choices)}")
    return UserError("\n".join(lines))

"""Fonts for class names in any script: the machine's own, where the usual one lacks a letter."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def font_for(texts: Iterable[str]) -> str:
    """The file of the first font that has every letter of the texts; where none has them all, of the one that lacks the fewest."""
    return _font_of(frozenset("".join(texts)))


def drawable(text: str, font: str) -> str:
    """The text, with the letters that the font lacks as their code points, such as U+732B."""
    known = _letters(font)
    return "".join(letter if ord(letter) in known else f"U+{ord(letter):04X}" for letter in text)


@contextmanager
def letters_of(texts: Iterable[str]) -> Iterator[None]:
    """Let matplotlib's figures inside have a font for the letters of the texts."""
    import matplotlib
    from matplotlib import font_manager

    known, families = _letters(_usual()), ["DejaVu Sans"]
    if lacking := [letter for text in texts for letter in text if ord(letter) not in known]:
        file = font_for(lacking)  # for these alone: each letter is taken from the first family that has it
        font_manager.fontManager.addfont(file)
        families.append(font_manager.FontProperties(fname=file).get_name())
    with matplotlib.rc_context({"font.family": families, "text.parse_math": False}):  # a class may be called "$"
        yield


@cache
def _font_of(letters: frozenset[str]) -> str:
    wanted = {ord(letter) for letter in letters}
    best, lacking = _usual(), len(wanted - _letters(_usual()))
    if lacking:
        for file in _others():
            if (missing := len(wanted - _letters(file))) < lacking:
                best, lacking = file, missing
            if not lacking:
                break
    return best


def _usual() -> str:
    from matplotlib import get_data_path

    return str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))


@cache
def _others() -> list[str]:
    from matplotlib.font_manager import findSystemFonts

    return sorted(findSystemFonts())


@cache
def _letters(file: str) -> frozenset[int]:
    """The code points that a font has glyphs of; none where it cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()

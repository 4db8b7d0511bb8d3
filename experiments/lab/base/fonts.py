"""Fonts for class names in any script: the machine's fonts are used for letters that matplotlib's font lacks."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def font_for(texts: Iterable[str]) -> str:
    """Return the file of the first font that has every letter of the texts; if none has, of the font that lacks the fewest."""
    return _font_of(frozenset("".join(texts)))


def drawable(text: str, font: str) -> str:
    """Replace the letters that the font lacks by their code points, such as U+732B."""
    known = _letters(font)
    return "".join(letter if ord(letter) in known else f"U+{ord(letter):04X}" for letter in text)


@contextmanager
def letters_of(texts: Iterable[str]) -> Iterator[None]:
    """Let matplotlib's figures inside the block use a font that has the texts' letters."""
    import matplotlib
    from matplotlib import font_manager

    known, families = _letters(_usual()), ["DejaVu Sans"]
    if lacking := [letter for text in texts for letter in text if ord(letter) not in known]:
        file = font_for(lacking)  # for these letters only, because each letter is taken from the first family that has it
        font_manager.fontManager.addfont(file)
        families.append(font_manager.FontProperties(fname=file).get_name())
        known = known | _letters(file)
    boxes = "|".join(str(ord(letter)) for text in texts for letter in text if ord(letter) not in known)  # which no font here has
    with matplotlib.rc_context({"font.family": families, "text.parse_math": False}), warnings.catch_warnings():  # a class may be called "$"
        if boxes:
            warnings.filterwarnings("ignore", rf"Glyph ({boxes}) ")
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
    """Return the code points of a font's glyphs; none if the font cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()

"""The captions of drawn pairs, and their words as numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

RELATIONS = ("left of", "above")  # their opposites would be second captions of the same images
SIZES = ("small", "large")
COLORS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.8, 0.1),
    "blue": (0.2, 0.3, 1.0),
    "yellow": (1.0, 0.9, 0.1),
    "cyan": (0.1, 0.9, 0.9),
    "pink": (1.0, 0.4, 0.8),
    "orange": (1.0, 0.5, 0.1),
    "white": (1.0, 1.0, 1.0),
}
PARTS = (len(RELATIONS), *(len(SIZES), len(COLORS), 10) * 2)
"""The choices of a caption: the relation, then size, colour and digit of both objects."""
CAPTIONS = 2 * (2 * 8 * 10) ** 2
LONGEST = 10
"""Words of the longest caption."""
WORDS = ["a", "left", "of", "above", *SIZES, *COLORS, *map(str, range(10))]


def choices(numbers: Tensor) -> Tensor:
    """Return the choices (N, 7) of captions, in the order of PARTS, by their numbers (N,) from 0 to CAPTIONS - 1."""
    return torch.stack(torch.unravel_index(numbers, PARTS), dim=1)


def caption(chosen: Sequence[int]) -> str:
    """Return the caption of these choices."""
    colors = list(COLORS)
    first, second = (f"a {SIZES[size]} {colors[color]} {digit}" for size, color, digit in (chosen[1:4], chosen[4:7]))
    return f"{first} {RELATIONS[chosen[0]]} {second}"


def tokens_of(captions: Sequence[str], words: Sequence[str]) -> Tensor:
    """Return the positions of each caption's words in `words`, counted from 1, filled up with 0: (N, length of the longest)."""
    place = {word: number for number, word in enumerate(words, 1)}
    rows = [torch.tensor([place[word] for word in text.split()]) for text in captions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def text_of(tokens: Sequence[int], words: Sequence[str]) -> str:
    """Return the caption of these tokens."""
    return " ".join(words[token - 1] for token in tokens if token)

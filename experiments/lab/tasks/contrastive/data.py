"""Drawn images of two coloured digits, each with its caption, whose words are numbers."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lab.base.errors import UserError
from lab.data.sets import Data, Norm, Split, digits, memory_data, norm_of, resize_all
from lab.tasks.contrastive import DigitCaptionsConfig

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


def digit_captions(config: DigitCaptionsConfig, device: torch.device, seed: int, saved: Norm | None) -> Data:
    """Draw the pairs of all parts; the targets are the tokens of the captions (N, L)."""
    known = digits(config)
    sizes = [config.train_pairs, config.val_pairs, config.test_pairs if config.test else 0]
    if sum(sizes) > CAPTIONS:
        raise UserError(
            f"data.train_pairs={config.train_pairs}: with held-out and test pairs {sum(sizes)} different captions are needed; "
            f"there are {CAPTIONS}."
        )
    order = torch.randperm(CAPTIONS, generator=torch.Generator().manual_seed(config.pair_seed))
    numbers = order[: sum(sizes)].split(sizes)
    pairs = replace(known.mapped(lambda split, part: drawn(split, numbers[part], config, part)), classes=WORDS)
    counts = torch.bincount(pairs.train.targets.flatten(), minlength=len(WORDS) + 1)[1:]
    return memory_data(pairs, config, norm_of(pairs.train.images, saved), device, seed, counts=counts)


def drawn(known: Split, numbers: Tensor, config: DigitCaptionsConfig, part: int) -> Split:
    """Draw an image for each caption, from the digits of one part; which image of a digit and where it stands is random.

    Args:
        known: the part's digits, images from 0 to 1.
        numbers: (N,) the captions.
        config: image size and seed.
        part: 0 for training, 1 for held-out and 2 for test pairs, which are drawn from different random numbers.
    """
    random = torch.Generator().manual_seed(3 * config.pair_seed + part)
    side, half = config.image_size, config.image_size // 2
    sides = side // 4 + 1, half - 1  # of small and large digits; the latter nearly fill their half
    scaled = [resize_all(known.images, each)[:, 0] for each in sides]
    of_digit = [(known.targets == digit).nonzero()[:, 0].tolist() for digit in range(10)]
    colors, chosen = torch.tensor(list(COLORS.values())), choices(numbers)
    images = torch.zeros(len(chosen), side, side, 3)
    for second, object_of in enumerate((chosen[:, 1:4], chosen[:, 4:7])):
        which, along, across = torch.rand(len(chosen), 3, generator=random).unbind(1)
        for size, pixels in enumerate(sides):
            rows = (object_of[:, 0] == size).nonzero()[:, 0]
            _, color, digit = object_of[rows].unbind(1)
            among = [of_digit[each] for each in digit.tolist()]
            places = [each[int(share * len(each))] for each, share in zip(among, which[rows].tolist(), strict=True)]
            start = second * half + (along[rows] * (half - pixels + 1)).long()
            # both digits stay near the middle across the line between them, so that only one relation is true
            middle = ((side - pixels) / 2 + (across[rows] - 0.5) * (half / 2)).round().long()
            left_of = chosen[rows, 0] == 0
            top, left = torch.where(left_of, middle, start), torch.where(left_of, start, middle)
            down, right = (place[:, None] + torch.arange(pixels) for place in (top, left))
            ink = scaled[size][torch.tensor(places, dtype=torch.int64)]
            images[rows[:, None, None], down[:, :, None], right[:, None, :]] = ink[..., None] * colors[color][:, None, None]
    tokens = tokens_of([caption(row) for row in chosen.tolist()], WORDS)
    return Split(images.permute(0, 3, 1, 2).contiguous(), tokens, [str(number) for number in numbers.tolist()])

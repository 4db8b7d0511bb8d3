"""The settings of pairs' data."""

from dataclasses import dataclass

from lab.config.fields import number, some
from lab.config.schema import DataConfig


@dataclass
class DigitPairsConfig(DataConfig):
    """Pairs of different handwritten digits, and which of the two simulated annotators call the larger.

    votes: annotators who judge a pair; the majority's word is its preference, |2 s - 1| its weight, s the share of their votes.
    rationality: of each group of annotators, β in the chance σ(β · difference of the digits) of a right vote; a pair is one group's.
    """

    name: str = "digit_pairs"
    image_size: int = number(32, least=8)
    train_pairs: int = number(2000, least=1)
    val_pairs: int = number(1000, least=1)
    votes: int = number(1, least=1)
    rationality: list[float] = some(lambda: [1.0], least=0)
    pair_seed: int = number(0, least=0)
    held_out: float = number(0.2, above=0, below=1)
    split_seed: int = number(0, least=0)

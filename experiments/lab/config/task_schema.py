"""The settings of pairs' data."""

from dataclasses import dataclass

from lab.config.fields import number, some
from lab.config.schema import DataConfig, FoldConfig


@dataclass
class DigitPairsConfig(FoldConfig, DataConfig):
    """Pairs of different handwritten digits, and which of the two simulated annotators call the larger.

    The majority of an annotator's votes is a pair's preference; |2 s - 1| is its weight, s the share of the votes.
    """

    name: str = "digit_pairs"
    image_size: int = number(32, "pixels a side that the model sees", least=8)
    train_pairs: int = number(2000, "pairs to train on", least=1)
    val_pairs: int = number(1000, "held-out pairs, of held-out digits", least=1)
    test_pairs: int = number(1000, "test pairs, where data.test is set", least=1)
    votes: int = number(1, "annotators who judge a pair; odd", least=1)
    rationality: list[float] = some(lambda: [1.0], "β of each group: a vote is right with σ(β · difference)", least=0)
    pair_seed: int = number(0, "decides the pairs and the votes", least=0)
    test: float | None = number(None, "share of the digits kept apart, scored once at the end", above=0, below=1)

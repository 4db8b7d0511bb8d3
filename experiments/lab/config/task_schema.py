"""The settings of data of pairs."""

from dataclasses import dataclass

from lab.config.fields import number, some
from lab.config.schema import DataConfig, FoldConfig


@dataclass
class DigitPairsConfig(FoldConfig, DataConfig):
    """Pairs of different handwritten digits; simulated annotators vote which digit is larger.

    The majority of a pair's votes is its preference; its weight is |2 s - 1|, where s is the share of the votes.
    """

    name: str = "digit_pairs"
    image_size: int = number(32, "pixels a side that the model sees", least=8)
    train_pairs: int = number(2000, "pairs to train on", least=1)
    val_pairs: int = number(1000, "held-out pairs, of held-out digits", least=1)
    test_pairs: int = number(1000, "test pairs, where data.test is set", least=1)
    votes: int = number(1, "annotators who vote on each pair; odd", least=1)
    rationality: list[float] = some(lambda: [1.0], "β of each group: a vote is right with σ(β · difference)", least=0)
    pair_seed: int = number(0, "seed of the pairs and the votes", least=0)
    test: float | None = number(None, "share of the digits in test pairs, scored once at the end", above=0, below=1)

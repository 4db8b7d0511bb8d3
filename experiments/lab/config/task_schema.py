"""The settings of the tasks beside classification and detection, and of pairs' data."""

# ruff: noqa: RUF009 (number and some return dataclass fields)

from dataclasses import dataclass

from lab.config.fields import number, some
from lab.config.schema import ClassificationConfig, DataConfig, TaskConfig


@dataclass
class MultilabelConfig(TaskConfig):
    """threshold: the probability above which a class counts as present, in F1 and in the share of right labels.

    in_memory: all images are held on the device, for small sets: no worker reads them, and they are augmented there, by small turns,
    moves and changes of size in place of data.scale, horizontal_flip and photometric.
    """

    name: str = "multilabel"
    threshold: float = number(0.5, above=0, below=1)
    in_memory: bool = False


@dataclass
class DistillationConfig(ClassificationConfig):
    """teacher: a classifier's checkpoint. The loss is (1 - weight) · loss= + weight · T² KL(teacher ‖ student), T the temperature."""

    name: str = "distillation"
    teacher: str = "???"
    temperature: float = number(4.0, above=0)
    weight: float = number(0.9, least=0, most=1)


@dataclass
class PreferenceTaskConfig(TaskConfig):
    name: str = "preference"
    calibration_bins: int = number(15, least=2, most=1000)


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

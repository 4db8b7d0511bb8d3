"""Preference: a reward model of images, trained on pairs with one preferred image."""

from dataclasses import dataclass

from lab.config.fields import number, setting, some
from lab.config.schema import DataConfig, FoldConfig, TaskConfig
from lab.data.spec import DataSpec
from lab.tasks.spec import TaskSpec


@dataclass
class PreferenceTaskConfig(TaskConfig):
    name: str = setting("preference", "the task")
    calibration_bins: int = number(15, "bins of predicted probability in the calibration error", least=2, most=1000)


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


SPEC = TaskSpec(
    config=PreferenceTaskConfig,
    data=DigitPairsConfig,
    losses=("bradley_terry", "preference_bce", "preference_bce_probability"),
    build="lab.tasks.preference.task:build",
    predict="lab.tasks.preference.task:predict",
    read=(),
    export="lab.tasks.preference.task:export",
    data_sources=(DataSpec(name="digit_pairs", schema=DigitPairsConfig),),
)

"""Regression: one or more numbers for each image, such as an age, a count or the coordinates of points."""

from dataclasses import dataclass

from lab.config.fields import number, setting, some
from lab.config.loss_schema import LOSSES
from lab.config.schema import DataConfig, SplitConfig, TableConfig, TaskConfig
from lab.data.spec import DataSpec
from lab.tasks.spec import TaskSpec


@dataclass
class RegressionConfig(TaskConfig):
    """The loss is the mean over samples and targets, as in torch."""

    name: str = setting("regression", "the task")
    standardize: bool = setting(True, "let the loss see differences in standard deviations of the training samples' targets")
    metrics: dict[str, str] = some(dict, "custom metrics of (prediction, target), by name: module:name or path/to/file.py:name", code=True)


@dataclass
class DigitTurnsConfig(SplitConfig, DataConfig):
    """Handwritten digits, each turned and scaled at random; the targets are its turn in degrees and its size as a factor."""

    name: str = setting("digit_turns", "the data set")
    augment: bool = setting(False, "no effect: every change of these images would change their targets")
    image_size: int = number(32, "pixels a side that the model sees", least=8)
    turn: float = number(45.0, "largest turn in degrees, in either direction", above=0, most=180)
    sizes: list[float] = some(lambda: [0.5, 1.0], "smallest and largest size, as a factor", above=0, most=1, pair=True)
    turn_seed: int = number(0, "seed of what is drawn", least=0)
    test: float | None = number(None, "share of test images, scored once at the end", above=0, below=1)


# losses of a difference, which a classifier gives its softmax, take numbers as they are; one of probabilities does not
SPEC = TaskSpec(
    config=RegressionConfig,
    data=(DigitTurnsConfig, TableConfig),
    losses=(*(name for name, schema in LOSSES.items() if schema.takes == "softmax" and "probability" not in name), "custom"),
    build="lab.tasks.regression.task:build",
    predict="lab.tasks.regression.task:predict",
    read=(),
    export="lab.tasks.regression.task:export",
    data_sources=(DataSpec(name="digit_turns", schema=DigitTurnsConfig),),
)

"""Preference: a reward model of images, trained on pairs with one preferred image."""

from dataclasses import dataclass

from lab.config.fields import number, setting
from lab.config.schema import TaskConfig
from lab.config.task_schema import DigitPairsConfig
from lab.tasks.spec import TaskSpec


@dataclass
class PreferenceTaskConfig(TaskConfig):
    name: str = setting("preference", "the task")
    calibration_bins: int = number(15, "bins of predicted probability in the calibration error", least=2, most=1000)


SPEC = TaskSpec(
    config=PreferenceTaskConfig,
    data=DigitPairsConfig,
    losses=("bradley_terry", "preference_bce", "preference_bce_probability"),
    build="lab.tasks.preference.task:build",
    predict="lab.tasks.preference.task:predict",
    export="lab.tasks.preference.task:export",
    data_schemas={"digit_pairs": DigitPairsConfig},
)

"""From checked settings to a trainer that is ready to start."""

from dataclasses import asdict
from typing import cast

import torch
from torch import nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.detector_schema import DetectionConfig, DetectorConfig
from lab.config.schema import ImagesConfig, TrainConfig
from lab.config.settings import Settings
from lab.config.task_schema import DigitPairsConfig, DistillationConfig, MultilabelConfig, PreferenceTaskConfig
from lab.data.load import load_data
from lab.data.sets import Norm
from lab.runs.machine import pick_device, seed_all, seed_rank
from lab.tasks.models import check_model_name, model_norm
from lab.tasks.task import Classification, Task
from lab.train import distributed
from lab.train.optim import check_optimizer_name
from lab.train.trainer import Trainer


def assemble(settings: Settings[TrainConfig], model: nn.Module | None = None, norm: Norm | None = None) -> Trainer:
    """Open the data, make the task, its model (unless one is given) and the trainer; nothing is written.

    Args:
        settings: of the run.
        model: in place of one that the settings describe.
        norm: what a saved model was trained with; None for what the data or a pretrained model says.

    Raises:
        UserError: a name or a value that only the libraries or the data could judge is wrong.
    """
    config = settings.config
    check_model_name(config.model.name)
    check_optimizer_name(config.optim.name)
    device = pick_device(config.trainer.device)
    distributed.start(device)
    seed_all(config)
    with distributed.in_turn():
        task = _task(config, device, norm)
    trainer = Trainer(config, task, task.data, model or task.model(), device, settings.tree())
    seed_rank(config)
    return trainer


def _task(config: TrainConfig, device: torch.device, saved: Norm | None) -> Task:
    """The task with its data."""
    norm, seed = model_norm(config.model) | (asdict(saved) if saved else {}), config.seed
    if isinstance(config.task, (DetectionConfig, MultilabelConfig)):
        from lab.tasks.detection.data import load_detection_data, size_of
        from lab.tasks.detection.task import Detection
        from lab.tasks.multilabel import Multilabel, load_label_sets

        scenes = cast(DetectionDataConfig, config.data)
        if isinstance(config.task, MultilabelConfig):
            size = size_of(scenes, None)
            sets = load_label_sets(scenes, list(size), norm, device, seed, in_memory=config.task.in_memory)
            return Multilabel(config, sets, size[0], device)
        fixed = cast(DetectorConfig, config.model).fixed_size
        return Detection(config, load_detection_data(scenes, fixed, norm, device, seed), size_of(scenes, fixed), device)
    if isinstance(config.task, PreferenceTaskConfig):
        from lab.data.pairs import load_pairs
        from lab.tasks.preference import Preference

        return Preference(config, load_pairs(cast(DigitPairsConfig, config.data), device, seed, saved), device)
    data = load_data(cast(ImagesConfig, config.data), norm, device, seed, saved)
    if isinstance(config.task, DistillationConfig):
        from lab.tasks.distillation import Distillation

        return Distillation(config, data, device)
    return Classification(config, data, device)

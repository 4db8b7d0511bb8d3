"""From checked settings to a trainer that is ready to start."""

from typing import cast

import torch
from torch import nn

from lab import distributed
from lab.data import Sets, load_data
from lab.detection_schema import DetectionDataConfig
from lab.detector_schema import DetectionConfig, DetectorConfig
from lab.machine import pick_device, seed_all, seed_rank
from lab.models import check_model_name, model_norm
from lab.optim import check_optimizer_name
from lab.schema import ImagesConfig, TrainConfig
from lab.settings import Settings
from lab.tasks import Classification, Task
from lab.trainer import Trainer


def assemble(settings: Settings[TrainConfig], model: nn.Module | None = None) -> Trainer:
    """Open the data, make the task, its model (unless one is given) and the trainer; nothing is written.

    Raises:
        UserError: a name or a value that only the libraries or the data could judge is wrong.
    """
    config = settings.config
    check_model_name(config.model.name)
    check_optimizer_name(config.optim.name)
    device = pick_device(config.trainer.device)
    distributed.start(device)
    seed_all(config.trainer)
    if isinstance(config.task, DetectionConfig):
        return _detection(settings, model, device)
    with distributed.in_turn():
        data = load_data(cast(ImagesConfig, config.data), model_norm(config.model), device, config.trainer.seed)
    task = Classification(config, data, device)
    return _trainer(settings, task, data, model or task.model(), device)


def _detection(settings: Settings[TrainConfig], model: nn.Module | None, device: torch.device) -> Trainer:
    from lab.detection import Detection
    from lab.detection_data import load_detection_data, size_of

    config = settings.config
    scenes, fixed = cast(DetectionDataConfig, config.data), cast(DetectorConfig, config.model).fixed_size
    with distributed.in_turn():
        data = load_detection_data(scenes, fixed, model_norm(config.model), device, config.trainer.seed)
    task = Detection(config, data, size_of(scenes, fixed), device)
    return _trainer(settings, task, data, model or task.model(), device)


def _trainer(settings: Settings[TrainConfig], task: Task, data: Sets, model: nn.Module, device: torch.device) -> Trainer:
    trainer = Trainer(settings.config, task, data, model, device, settings.tree())
    seed_rank(settings.config.trainer)
    return trainer

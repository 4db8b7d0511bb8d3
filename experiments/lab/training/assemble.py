"""Make a trainer that is ready to start from checked settings."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from lab.config.choices import spec_of
from lab.config.objects import find_object
from lab.config.schema import TrainConfig
from lab.config.settings import Settings
from lab.data.sets import Norm
from lab.optim.updater import check_optimizer
from lab.processes import distributed
from lab.run.export import exports
from lab.run.machine import pick_device, seed_all, seed_rank
from lab.tasks.finetuning import freeze, load_own_weights
from lab.tasks.models import check_model
from lab.training.activations import checkpoint_blocks
from lab.training.callbacks import Callbacks
from lab.training.trainer import Trainer


def assemble(
    settings: Settings[TrainConfig],
    model: nn.Module | None = None,
    norm: Norm | None = None,
    callbacks: Sequence[Any] = (),
    *,
    resumed: bool = False,
) -> Trainer:
    """Open the data, make the task, its model (unless one is given) and the trainer; nothing is written.

    Args:
        settings: the run's settings.
        model: used instead of a model from the settings.
        callbacks: objects in addition to those of trainer.callbacks.
        resumed: whether a checkpoint will give the weights, so that model.weights is not read; the first rank's value counts.
        norm: mean and standard deviation of a saved model's images; None for those of the data or of a pretrained model.

    Raises:
        UserError: a name or a value is wrong that only the libraries or the data can check.
    """
    config = settings.config
    check_model(config.model)
    check_optimizer(config.optim)
    called = Callbacks(config.trainer.callbacks, callbacks)
    device = pick_device(config.trainer.device)
    distributed.start(device)
    seed_all(config)
    with distributed.in_turn():
        task = find_object(spec_of(config.task).build)(config, device, norm)
    model, notes = model or task.model(), list(getattr(task, "notes", ()))
    if config.model.weights and not distributed.broadcast(resumed):
        notes.append(load_own_weights(model, config.model.weights))
    if config.model.freeze:
        notes.append(freeze(model, config.model.freeze))
    if config.model.checkpoint_activations:
        checkpoint_blocks(model, f"model.checkpoint_activations=true with model.name={config.model.name}")
    if config.tracking.model and not exports(config):
        notes.append(f"task={config.task.name} has no export (TaskSpec.export): its best model is saved as a checkpoint alone")
    trainer = Trainer(config, task, task.data, model, device, settings.tree())
    trainer.callbacks, trainer.notes = called, notes
    if config.trainer.monitor:
        trainer.monitor.check(trainer.evaluate(trainer.model, trainer.data.val, batches=1).values)
    seed_rank(config)
    return trainer

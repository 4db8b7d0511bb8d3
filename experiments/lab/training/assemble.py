"""Make a trainer that is ready to start from checked settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lab.base.errors import UserError
from lab.config.objects import find_object
from lab.config.schema import TrainConfig
from lab.config.settings import Settings
from lab.data.sets import Norm
from lab.optim.updater import check_optimizer
from lab.processes import distributed
from lab.processes.parallel import blocks
from lab.registry import spec_of
from lab.run.export import exports
from lab.run.machine import pick_device, seed_all, seed_rank
from lab.tasks.finetuning import freeze, load_own_weights
from lab.tasks.models import check_model
from lab.training.callbacks import Callbacks
from lab.training.trainer import Trainer


class Checkpointed(nn.Module):
    """Mixin before a block's class, so that parameters keep their names and copies are real copies."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        # a compiled model itself runs the block's side effects once
        contexts: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": lambda: (nullcontext(), statistics_kept(self))}
        return checkpoint(super().forward, *args, use_reentrant=False, **contexts, **kwargs)


def checkpoint_blocks(model: nn.Module, setting: str) -> None:
    """Compute the model's innermost blocks again in backward, as `setting` asks.

    timm's own switch is not used, because with it batch norms count each batch twice in their running statistics.

    Raises:
        UserError: the model has no repeated blocks.
    """
    found = blocks(model)
    outer = {id(module) for block in found for module in found if block is not module and any(block is each for each in module.modules())}
    inner: list[Any] = [block for block in found if id(block) not in outer]
    if not inner:
        raise UserError(f"{setting}: {type(model).__name__} has no blocks in an nn.Sequential or nn.ModuleList; leave it at false.")
    made: dict[type, type] = {}
    for block in inner:
        kind = type(block)
        block.__class__ = made.setdefault(kind, type(f"Checkpointed{kind.__name__}", (Checkpointed, kind), {}))


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keep batch norms' running statistics unchanged while a block is computed again, because they already include this batch."""
    norms: list[Any] = [module for module in block.modules() if getattr(module, "num_batches_tracked", None) is not None]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked


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

"""What a training needs to go on as if it had never stopped."""

from typing import TYPE_CHECKING, Any

import torch

from lab.config.errors import UserError
from lab.data.seeds import host_state, set_host_state
from lab.train import distributed
from lab.train.monitor import Best

if TYPE_CHECKING:
    from lab.train.trainer import Trainer


def state_of(trainer: "Trainer") -> dict[str, Any]:
    """Return all of it but the weights, as tensors and plain values; waits for the device.

    The order and the augmentation of data follow from `epoch` and `batch`.
    """
    cuda = trainer.device.type == "cuda"
    return {
        **trainer.updater.state(),
        "epoch_ended": trainer.epoch_ended,
        "batch": trainer.batch,
        "window": trainer.window,
        "values": trainer.values,
        "skipped": trainer.skipped,
        "nonfinite": trainer.guard.state(),
        "clock": trainer.clock.state(),
        "launches": trainer.kernels.state(),
        "rng": distributed.gathered(
            {
                **host_state(),
                "cuda": torch.cuda.get_rng_state(trainer.device) if cuda else None,
                "mix": trainer.task.state(),
            }
        ),
    }


def restore(trainer: "Trainer", state: dict[str, Any]) -> None:
    """Put a trainer of the same settings where the one was that saved this.

    Raises:
        UserError: the training data is not what it was, or the number of processes.
    """
    data = trainer.data
    if (data.classes, data.train.samples) != (state["classes"], state["samples"]):
        raise UserError(
            f"the training data has changed: it has {data.train.samples} samples of {len(data.classes)} classes, "
            f"while the run has seen {state['samples']} of {len(state['classes'])}."
        )
    if len(state["rng"]) != distributed.ranks():
        raise UserError(
            f"the run was one of {len(state['rng'])} processes, each with its part of every batch; this is one of {distributed.ranks()}. "
            f"Go on with as many: torchrun's --nproc-per-node times --nnodes, or no torchrun for one."
        )
    trainer.parallel.load_model_state(state["model"])
    if trainer.ema is not None:
        trainer.ema.module.load_state_dict(state["ema"])
    trainer.updater.load_state(state)
    trainer.epoch, trainer.batch, trainer.epoch_ended = state["epoch"], state["batch"], state["epoch_ended"]
    trainer.done, trainer.skipped, trainer.values = state["updates"], state["skipped"], dict(state["values"])
    trainer.window.copy_(state["window"])
    trainer.guard.load_state(state["nonfinite"])
    trainer.clock.load_state(state["clock"])
    trainer.kernels.load_state(state["launches"])
    trainer.monitor.best = Best(**state["best"])
    rng = state["rng"][distributed.rank()]
    trainer.task.load_state(rng["mix"])
    if rng["cuda"] is not None and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"], trainer.device)
    set_host_state(rng)

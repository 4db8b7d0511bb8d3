"""Messages for exhausted memory or too small batches, with settings that would work.

torch's own messages say how much memory was asked for, but name neither the part of the run nor a setting of it, and a killed worker's
names no memory at all.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lab.base.errors import UserError, first_line
from lab.base.files import write_text
from lab.config.schema import ImagesConfig, TrainConfig
from lab.data.loading import number_of_workers

TOO_FEW = "Expected more than 1 value per channel when training"  # message of torch's batch norms
SHARED_SAYS = ("insufficient shared memory", "unable to allocate shared memory", "unable to write to file </torch_")
HOST_SAYS = ("can't allocate memory", "unable to mmap", "Cannot allocate memory")


def out_of_memory(error: BaseException) -> str | None:
    """Return which memory was exhausted: 'gpu', 'host' or 'shared'; None for another error."""
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "gpu"
    if any(phrase in text for phrase in SHARED_SAYS):
        return "shared"
    if isinstance(error, MemoryError):
        return "host"
    killed = "DataLoader worker" in text and "Killed" in text
    if isinstance(error, (RuntimeError, OSError)) and (killed or any(phrase in text for phrase in HOST_SAYS)):
        return "host"
    return None


class OutOfMemoryError(UserError):
    """Memory ran out; the message says where, and holds settings that need less."""


@contextmanager
def explained(config: TrainConfig, device: torch.device | None = None, folder: Any = None) -> Iterator[None]:
    """Explain errors from too little memory or too few samples, and how to avoid them; other errors pass unchanged.

    Args:
        config: the run's settings.
        device: where the run trains, if it has begun.
        folder: the run folder, if it exists already; torch's table of the GPU's memory is written there.

    Raises:
        OutOfMemoryError: the block ran out of memory.
        UserError: a batch of one sample has no deviation by which batch norm could normalise.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(TOO_FEW):
            raise UserError(
                f"data.batch_size={config.data.batch_size}: model.name={config.model.name} normalises by a batch's mean and deviation "
                f"(batch norm), which one sample does not have ({error}).\n"
                "Give each process two samples a batch or more, larger images, or a model without batch norm, such as model=tiny_vit."
            ) from error
        where = out_of_memory(error)
        if where is None:
            raise
        if folder is not None and where == "gpu":
            path = folder.path / "memory_summary.txt"
            write_text(path, torch.cuda.memory_summary(device))
            folder.artifact(path)
        raise OutOfMemoryError(memory_report(error, where, config)) from error


def memory_report(error: BaseException, where: str, config: TrainConfig) -> str:
    """Return the part of the run, what torch says of the memory, and settings that need less, in several lines."""
    title = {"gpu": "the GPU's memory is exhausted", "host": "the machine's memory is exhausted", "shared": "shared memory is exhausted"}
    part = _part(error)
    text = str(error).strip()
    said = text.splitlines()[-1] if text.startswith("Caught ") else first_line(error)  # a worker's error begins with its traceback
    lines = [f"{title[where]} ({part}).", said, "", "Settings that take less:"]
    return "\n".join(lines + [f"  {setting:<46} {effect}" for setting, effect in remedies(config, where, part)])


def remedies(config: TrainConfig, where: str, part: str) -> list[tuple[str, str]]:
    """Return (setting, effect) of changes that this run can still make."""
    data, trainer = config.data, config.trainer
    workers = number_of_workers(getattr(data, "workers", 0))
    if where == "shared":
        fewer = [(f"data.workers={workers // 2}", "fewer batches wait in shared memory")] if workers > 1 else []
        return [
            *fewer,
            ("data.workers=0", "the run's own process reads, and no batch needs shared memory"),
            ("docker run --shm-size=8g", "a container has 64 MB by default"),
        ]
    found: list[tuple[str, str]] = []
    if part == "evaluation" and data.eval_batch_size > 1:
        return [
            (f"data.eval_batch_size={max(data.eval_batch_size // 2, 1)}", "half the images at once; the figures stay"),
            *_images(config),
        ]
    if data.batch_size > 1:
        half = f"data.batch_size={-(-data.batch_size // 2)} trainer.accumulate={trainer.accumulate * 2}"
        found.append((half, "half the activations; an update still sees as many images"))
    if where == "gpu" and trainer.amp == "off":
        found.append(("trainer.amp=bf16", "activations of half the size"))
    if config.loss.implementation == "torch":
        found.append(("loss.implementation=lossforge", "the loss keeps one tensor of the logits' size, or none"))
    found += _images(config)
    if where == "host" and workers:
        found.append((f"data.workers={workers // 2}", "fewer processes hold batches"))
    if trainer.ema is not None:
        found.append(("trainer.ema=null", "no second copy of the weights"))
    if config.optim.name != "sgd":
        found.append(("optim=sgd", f"one value a weight instead of {config.optim.name}'s; it needs another optim.lr"))
    found.append(("model=...", "a smaller model"))
    return found


def _images(config: TrainConfig) -> list[tuple[str, str]]:
    if isinstance(config.data, ImagesConfig) and config.data.image_size >= 64:
        return [(f"data.image_size={config.data.image_size // 2}", "a quarter of the pixels; it changes what is learned")]
    if fixed := getattr(config.model, "fixed_size", None):
        return [(f'"model.fixed_size=[{fixed[0] // 2},{fixed[1] // 2}]"', "a quarter of the pixels; it changes what is learned")]
    return []


def _part(error: BaseException) -> str:
    """Return the part of the run in which the error happened, from the functions in its traceback."""
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    parts = {"evaluate": "evaluation", "train_epoch": "training", "assemble": "before the first update", "finish": "after training"}
    return next((said for name, said in parts.items() if name in names), "outside of training")

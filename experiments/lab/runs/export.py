"""The best model as a file that plain torch loads: from uint8 images to what predict.py says of them."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.config.choices import spec_of
from lab.config.errors import UserError
from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.runs.files import write_whole
from lab.runs.folder import RunFolder
from lab.runs.saved import load_checkpoint, load_weights
from lab.tasks.spec import find_object


@dataclass
class Exported:
    """shape: of an image. says: what a row of the output is. step: the update whose weights these are."""

    path: Path
    shape: list[int]
    output: list[int]
    says: str
    classes: list[str]
    step: int

    def record(self) -> dict[str, Any]:
        """What a run's record says of it."""
        return {"shape": self.shape, "output": self.output, "says": self.says, "classes": self.classes, "step": self.step}


@dataclass
class Exportable:
    """What a task's `export` returns.

    Args:
        module: from images (N, channels, height, width) of uint8 to what it says of each.
        model: the part of it that a checkpoint has the weights of.
        shape: channels, height and width of an image.
        says: what a row of the output is, in words.
    """

    module: nn.Module
    model: nn.Module
    shape: list[int]
    says: str


class Images(nn.Module):
    """From images (N, C, H, W) of uint8 to what `said` makes of the model's output; by default that is the output itself."""

    def __init__(self, model: nn.Module, norm: Norm, said: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.said = model, said or nn.Identity()
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(norm.mean).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(norm.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.said(self.model(self.normalised(images)).float())

    def normalised(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.deviation


def exports(config: TrainConfig) -> bool:
    """Whether the run's best model is to be exported: it is wanted, and the task says how."""
    return config.tracking.model and spec_of(config.task).export is not None


def export_best(folder: RunFolder, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Export a run's best model and record it for MLflow. A model that cannot be exported is reported, and the run goes on.

    Raises:
        UserError: the file cannot be written.
    """
    best = folder.path / "checkpoints" / "best.pt"
    if not exports(config) or not best.is_file():
        return
    try:
        program, exported = export(config, best)
    except Exception as error:  # torch.export fails in many ways, and so do models of a user's own
        reason = (str(error).strip().splitlines() or [""])[0]
        reason = reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
        folder.record("tags", values={"model.export": f"failed: {reason}"})
        say(f"the best model was not exported, and MLflow gets its checkpoint alone: {reason}")
        return
    write_whole(exported.path, lambda file: torch.export.save(program, file))
    params = {"task": config.task.name, "model": config.model.title, "loss": config.loss.title, "data": config.data.name}
    folder.record(
        "model",
        path=str(exported.path.relative_to(folder.path)),
        name=re.sub(r"[^\w\- ]", "_", f"{config.loss.title}-{config.model.title}-{config.data.name}"),
        type=config.task.name,
        params=params,
        register=config.tracking.register,
        **exported.record(),
    )


def export(config: TrainConfig, checkpoint: Path) -> tuple[Any, Exported]:
    """Return the model of a checkpoint as an exported program, and what it is; its place is beside the checkpoint.

    `torch.export.load(path).module()` reads the file that the program is to be written to.

    Args:
        config: of the run.
        checkpoint: with its best weights.

    Raises:
        Exception: torch.export cannot follow the model, or the task cannot make it.
    """
    if threading.current_thread() is not threading.main_thread() and not torch.cuda.is_available():
        # with torch 2.11 the next torch.export in any thread ends the process by a segmentation fault
        raise RuntimeError("without a GPU torch.export is safe in a program's main thread alone")
    state = load_checkpoint(checkpoint)
    norm, classes = Norm(**state["norm"]), state["classes"]
    spec = spec_of(config.task)
    assert spec.export is not None
    made = find_object(spec.export)(config, classes, norm)
    load_weights(made.model, state)
    module = made.module.eval()
    images = torch.zeros(2, *made.shape, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},), strict=False)
        output = list(module(images[:1]).shape[1:])
    return program, Exported(checkpoint.with_suffix(".pt2"), made.shape, output, made.says, classes, state["updates"])

"""Export the best model as a file that plain torch loads: from uint8 images to the predictions of predict.py."""

import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.config.choices import spec_of
from lab.config.errors import UserError
from lab.config.schema import DataConfig, TrainConfig
from lab.data.sets import Norm
from lab.runs.exported import Exported
from lab.runs.files import write_whole
from lab.runs.folder import RunFolder
from lab.runs.saved import load_checkpoint, load_weights
from lab.tasks.spec import find_object


@dataclass
class Exportable:
    """A model that can be exported, as a task's `export` returns it.

    Args:
        module: computes a prediction for each of the images (N, channels, height, width): uint8, or float32 with data.channels.
        model: the part of the module whose weights a checkpoint holds.
        shape: channels, height and width of an image.
        says: the meaning of an output row, in words.
    """

    module: nn.Module
    model: nn.Module
    shape: list[int]
    says: str

    @property
    def pixels(self) -> str:
        """Return the dtype of the images."""
        return getattr(self.module, "pixels", "uint8")


class Images(nn.Module):
    """Normalise images (N, C, H, W), call the model, and apply `said` to its output; by default return the output."""

    def __init__(
        self, model: nn.Module, norm: Norm, said: Callable[[Tensor], Tensor] | None = None, data: DataConfig | None = None
    ) -> None:
        """Make the module; data: the run's, whose images are float32 with data.channels, else uint8."""
        super().__init__()
        self.model, self.said = model, said or nn.Identity()
        self.pixels = "float32" if getattr(data, "channels", None) else "uint8"
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(norm.mean).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(norm.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.said(self.model(self.normalised(images)).float())

    def normalised(self, images: Tensor) -> Tensor:
        return ((images.float() / 255 if self.pixels == "uint8" else images) - self.mean) / self.deviation


def exports(config: TrainConfig) -> bool:
    """Return whether to export the run's best model: the settings ask for it, and the task supports it."""
    return (config.tracking.model or config.export.format == "onnx") and spec_of(config.task).export is not None


def check_export(config: TrainConfig) -> None:
    """Raise UserError if the model cannot be exported as export.format says: the task has no export, or a package is missing."""
    if config.export.format == "onnx":
        if spec_of(config.task).export is None:
            raise UserError(f"export.format=onnx: task={config.task.name} has no export (TaskSpec.export).")
        if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
            raise UserError(f"export.format=onnx: {', '.join(missing)}: not installed; install by: uv sync --extra onnx")


def export_best(folder: RunFolder, config: TrainConfig, images: Callable[[], Tensor], say: Callable[[str], None]) -> None:
    """Export a run's best model and record it for MLflow. If it cannot be exported, report this and continue.

    Args:
        folder: the run's folder.
        config: the run's settings.
        images: returns a batch of held-out images, normalised, by which an ONNX file is checked.
        say: prints a message for the user.

    Raises:
        UserError: the file cannot be written.
    """
    best = folder.path / "checkpoints" / "best.pt"
    if not exports(config) or not best.is_file():
        return
    exported = None
    with _reported(folder, "model.export", "the best model was not exported, and MLflow gets its checkpoint alone", say):
        exported = export(config, load_checkpoint(best))
    if exported is None:
        return
    if config.tracking.model:
        path, program = best.with_suffix(".pt2"), exported.program
        write_whole(path, lambda file: torch.export.save(program, file))
        folder.record(
            "model",
            path=str(path.relative_to(folder.path)),
            name=re.sub(r"[^\w\- ]", "_", f"{config.loss.title}-{config.model.title}-{config.data.name}"),
            type=config.task.name,
            params=_params(config),
            register=config.tracking.register,
            **exported.record,
        )
    if config.export.format == "onnx":
        with _reported(folder, "onnx.export", "the best model was not exported as ONNX", say):
            say(export_onnx(folder, config, exported, images(), best.with_suffix(".onnx")))


def export_onnx(folder: RunFolder, config: TrainConfig, exported: Exported, images: Tensor, path: Path) -> str:
    """Write a model as a checked .onnx file, an artifact of the run; return what to tell the user. Raise as `write_onnx`."""
    from lab.runs.onnx import write_onnx

    said = write_onnx(exported, images, path, _params(config))
    folder.artifact(path, "checkpoints", digest=True)
    return f"{os.path.relpath(path)}: {said}"


@contextmanager
def _reported(folder: RunFolder, tag: str, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report an error of the block and continue after it; torch and a user's own models raise many kinds."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        reason = reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
        folder.record("tags", values={tag: f"failed: {reason}"})
        say(f"{what}: {reason}")


def _params(config: TrainConfig) -> dict[str, str]:
    return {"task": config.task.name, "model": config.model.title, "loss": config.loss.title, "data": config.data.name}


def export(config: TrainConfig, state: dict[str, Any]) -> Exported:
    """Return a checkpoint's model as a program, which torch.export.save writes and `torch.export.load(path).module()` reads.

    Args:
        config: the run's settings.
        state: the checkpoint.

    Raises:
        Exception: torch.export cannot trace the model, or the task cannot make it.
    """
    if threading.current_thread() is not threading.main_thread() and not torch.cuda.is_available():
        # with torch 2.11 the next torch.export in any thread would end the process by a segmentation fault
        raise RuntimeError("without a GPU torch.export is safe in a program's main thread alone")
    norm, classes = Norm(**state["norm"]), state["classes"]
    spec = spec_of(config.task)
    assert spec.export is not None
    made = find_object(spec.export)(config, classes, norm)
    load_weights(made.model, state)
    module = made.module.eval()
    images = torch.zeros(2, *made.shape, dtype=getattr(torch, made.pixels))
    with torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},), strict=False)
        output = list(module(images[:1]).shape[1:])
    record = {"shape": made.shape, "output": output, "pixels": made.pixels, "says": made.says, "classes": classes, "step": state["updates"]}
    return Exported(program, module, norm, record)

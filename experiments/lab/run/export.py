"""Export the best model as a file that plain torch loads: from uint8 images to the predictions of predict.py."""

import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.base.errors import UserError, first_line
from lab.base.files import write_whole
from lab.config.objects import find_object
from lab.config.schema import DataConfig, TrainConfig
from lab.data.sets import Norm
from lab.registry import spec_of
from lab.run import checkpoint
from lab.run.exported import ABOUT, Exported, difference, pixels_of, refuse_different
from lab.run.folder import RunFolder
from lab.run.machine import AMP
from lab.run.onnx import write_onnx
from lab.run.saved import load_checkpoint, load_weights

STEP = 32
"""With export.any_size, heights and widths are multiples of it: the stride of the coarsest level of usual backbones."""


@dataclass
class Exportable:
    """A model that can be exported, as a task's `export` returns it.

    Args:
        module: computes a prediction for each of the images (N, channels, height, width): uint8, or float32 with data.channels.
        model: the part of the module whose weights a checkpoint holds.
        shape: channels, height and width of an image.
        says: the meaning of an output row, in words.
        multiple: if not 0, height and width are free multiples of it, and `shape` has usual ones.
        prepare: how an image of a file becomes one of `images`: resize, interpolation, antialias, crop and pad.
        timm: the arguments of timm.create_model by which others make `model`; empty if it is not such a model.
    """

    module: nn.Module
    model: nn.Module
    shape: list[int]
    says: str
    multiple: int = 0
    prepare: dict[str, Any] = field(default_factory=dict)
    timm: dict[str, Any] = field(default_factory=dict)

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
        """Return normalised images in the model's dtype."""
        normalised = ((images.float() / 255 if self.pixels == "uint8" else images) - self.mean) / self.deviation
        return normalised.to(next(self.model.parameters(), self.mean).dtype)


def exports(config: TrainConfig) -> bool:
    """Return whether to export the run's best model: the settings ask for it, and the task supports it."""
    return (config.tracking.model or config.export.format == "onnx") and spec_of(config.task).export is not None


def check_export(config: TrainConfig) -> None:
    """Raise UserError if the model cannot be exported as the settings say: the task has no export, or a package is missing."""
    if config.export.format == "onnx":
        if config.export.precision == "bf16":
            raise UserError(
                "export.precision=bf16: ONNX Runtime does not compute in bfloat16 on CPUs, so the file cannot be checked. Use fp16."
            )
        if spec_of(config.task).export is None:
            raise UserError(f"export.format=onnx: task={config.task.name} has no export (TaskSpec.export).")
        if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
            raise UserError(f"export.format=onnx: {', '.join(missing)}: not installed; install by: uv sync --extra onnx")


FAILED = 4
"""The exit status of a process whose work is finished, but whose model could not be exported."""


def export_best(folder: RunFolder, config: TrainConfig, images: Callable[[], Tensor], say: Callable[[str], None]) -> dict[str, str]:
    """Export a run's best model, describe it in its safetensors file, and record it for MLflow. Report a failure, and continue.

    Args:
        folder: the run's folder.
        config: the run's settings.
        images: returns a batch of held-out images, normalised, by which half precision and an ONNX file are checked.
        say: prints a message for the user.

    Returns:
        Rows for the run's table: what could not be exported, and why.

    Raises:
        UserError: the file cannot be written.
    """
    best = folder.path / "checkpoints" / "best.pt"
    failed: dict[str, str] = {}
    if not exports(config) or not best.is_file():
        return failed
    exported = None
    with reported(folder, "model", "the best model was not exported, and MLflow gets its checkpoint alone", say, failed):
        exported = export(config, state := load_checkpoint(best), images)
    if exported is None:
        return failed
    about = {name: state[name] for name in checkpoint.DESCRIBED} | {ABOUT: exported.weights_about()}
    checkpoint.save_weights(state["ema"] or state["model"], best.with_suffix(".safetensors"), about)
    for note in exported.notes:
        say(note)
    if config.tracking.model:
        path = write_program(exported, best.with_suffix(".pt2"))
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
        with reported(folder, "onnx", "the best model was not exported as ONNX", say, failed):
            say(export_onnx(folder, exported, images(), best.with_suffix(".onnx")))
    return failed


def export_again(
    folder: RunFolder, config: TrainConfig, state: dict[str, Any], images: Callable[[], Tensor], say: Callable[[str], None]
) -> None:
    """Write a checkpoint's model into a run's folder as model.pt2 or model.onnx, as export.format says.

    Raises:
        Exception: as `export` and `write_onnx`.
    """
    exported, path = export(config, state, images), folder.path / f"model.{config.export.format}"
    for note in exported.notes:
        say(note)
    if config.export.format == "onnx":
        say(export_onnx(folder, exported, images(), path))
    else:
        folder.artifact(write_program(exported, path), "checkpoints", digest=True)
        say(f"{os.path.relpath(path)}: written")


def write_program(exported: Exported, path: Path) -> Path:
    """Write the program with its description as .pt2, and return the path; raise UserError if the file cannot be written."""
    about = {ABOUT: json.dumps(exported.about(), ensure_ascii=False)}
    write_whole(path, lambda file: torch.export.save(exported.program, file, extra_files=about))
    return path


def export_onnx(folder: RunFolder, exported: Exported, images: Tensor, path: Path) -> str:
    """Write a model as a checked .onnx file, an artifact of the run; return what to tell the user. Raise as `write_onnx`."""
    said = write_onnx(exported, images, path)
    folder.artifact(path, "checkpoints", digest=True)
    return f"{os.path.relpath(path)}: {said}"


@contextmanager
def reported(folder: RunFolder, name: str, what: str, say: Callable[[str], None], failed: dict[str, str]) -> Iterator[None]:
    """Report an error of the block, add it to `failed` and continue after it; torch and a user's own models raise many kinds."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        reason = reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"
        folder.record("tags", values={f"{name}.export": f"failed: {reason}"})
        failed[f"{name} export"] = f"failed: {reason}"
        say(f"{what}: {reason}")


def _params(config: TrainConfig) -> dict[str, str]:
    return {"task": config.task.name, "model": config.model.title, "loss": config.loss.title, "data": config.data.name}


def export(config: TrainConfig, state: dict[str, Any], images: Callable[[], Tensor]) -> Exported:
    """Return a checkpoint's model as a program, which torch.export.save writes and `torch.export.load(path).module()` reads.

    Args:
        config: the run's settings.
        state: the checkpoint.
        images: returns a batch of real images, normalised, on which half precision is compared with float32.

    Raises:
        ValueError: the output in half precision is not finite.
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
    notes: list[str] = []
    empty = torch.zeros(2, *made.shape, dtype=getattr(torch, made.pixels))
    multiple = made.multiple or (STEP if config.export.any_size else 0)
    how = {"mean": norm.mean, "std": norm.std, "normalization": "in the graph", "pixels": made.pixels}
    record = {
        "shape": made.shape,
        "pixels": made.pixels,
        "says": made.says,
        "classes": classes,
        "input": made.prepare | how,
        "step": state["updates"],
    }
    with torch.no_grad():
        if config.export.precision in AMP:
            pixels = pixels_of(images(), made.shape, norm, made.pixels, multiple)
            notes.append(f"{config.export.precision}: {_lowered(made, AMP[config.export.precision], pixels)}")
        try:
            program = _of_any_size(module, empty, multiple, config.export.precision) if multiple else _traced(module, empty)
        except Exception as error:  # torch and backbones raise many kinds; some can be traced for one size alone
            if not multiple:
                raise
            multiple = 0
            height, width = made.shape[1:]
            reason = f"{type(error).__name__}: {first_line(error)}"
            notes.append(f"the exported model takes only images of {height} × {width} pixels, because {reason}")
            program = _traced(module, empty)
        output = list(module(empty[:1]).shape[1:])
        if multiple:  # -1 for what depends on the image's size
            sides = [(3 if side == 2 * STEP else 2) * STEP for side in made.shape[1:]]
            others = module(empty.new_zeros(1, made.shape[0], *sides)).shape[1:]
            output = [count if count == other else -1 for count, other in zip(output, others, strict=True)]
    record |= {"multiple": multiple, "output": output, "precision": config.export.precision}
    return Exported(program, module, norm, record, _params(config), made.timm, notes)


def _lowered(made: Exportable, dtype: torch.dtype, pixels: Tensor) -> str:
    """Let the model compute in `dtype`; return in words by how much its output changes.

    Raises:
        ValueError: its output is not finite.
    """
    expected = made.module(pixels)
    made.model.to(dtype)
    found = made.module(pixels)
    if not found.isfinite().all():
        raise ValueError(f"in {dtype} the output is not finite: the model's values leave the range of its numbers")
    share = difference(expected, found)
    return f"the output differs from float32's by at most {share:.1e} of its largest number on {len(pixels)} held-out images"


def _traced(module: nn.Module, images: Tensor, sides: dict[int, Any] | None = None) -> Any:
    dims = {0: torch.export.Dim("images", min=1)} | (sides or {})
    program = torch.export.export(module, (images,), dynamic_shapes=(dims,), strict=False)
    # A view holds for the layouts of this device alone: attention on a GPU gives another one, of which a reshape makes a copy
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    return program


def _of_any_size(module: nn.Module, images: Tensor, multiple: int, precision: str) -> Any:
    """Return a program whose images have any height and width that are multiples of `multiple`.

    Raises:
        ValueError: its output differs from the module's by more than arithmetic of this precision explains.
    """
    sides = {dim: multiple * torch.export.Dim(name, min=1) for dim, name in ((2, "height"), (3, "width"))}
    # sides so large that no level has a single cell, which torch would take as a constant
    program = _traced(module, images.new_zeros(2, images.shape[1], 8 * multiple, 10 * multiple), sides)
    # torch notes what it assumed in tracing, such as two cells a level or more. The operations hold for one, as is checked below.
    if hasattr(program, "_guards_code"):
        program._guards_code = []
    called = program.module()
    for height, width in ((1, 1), (2, 3), (4, 3)):
        pixels = (torch.rand(2, images.shape[1], height * multiple, width * multiple) * 255).to(images.dtype)
        refuse_different("the exported program", module(pixels), called(pixels), precision)
    return program

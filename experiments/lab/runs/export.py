"""The best model as a file that plain torch loads: from uint8 images to what predict.py says of them."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.schema import ClassifierConfig, ImagesConfig, TrainConfig
from lab.config.task_schema import DigitPairsConfig
from lab.data.sets import Norm
from lab.runs.files import write_whole
from lab.runs.folder import RunFolder
from lab.runs.saved import load_checkpoint, load_weights
from lab.tasks.detection.spec import DetectorConfig
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.preference.spec import PreferenceTaskConfig


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


class Images(nn.Module):
    """From images (N, C, H, W) of uint8 to the model's rewards or probabilities (N, classes)."""

    def __init__(self, model: nn.Module, norm: Norm, activation: str | None) -> None:
        super().__init__()
        self.model, self.activation = model, activation
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(norm.mean).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(norm.std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        from lab.tasks.losses import probabilities

        said = self.model(self.normalised(images)).float()
        return probabilities(said, self.activation) if self.activation else said

    def normalised(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.deviation


class Scenes(Images):
    """From images (N, 3, H, W) of uint8 to detections (N, D, 6): corners in pixels, score, class; rows that found nothing are 0.

    It is torchvision's post-processing for a batch of any size: what is suppressed is of the same image and class.
    """

    def __init__(self, model: Any, norm: Norm, size: tuple[int, int]) -> None:
        super().__init__(model, norm, None)
        self.size = size
        levels = model.anchors(*size, torch.device("cpu"))
        self.counts = [len(level) for level in levels]
        self.anchors: Tensor
        self.corner: Tensor
        self.register_buffer("anchors", torch.cat(levels))
        self.register_buffer("corner", torch.tensor([size[1], size[0]] * 2, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        from torchvision.ops import nms

        model = cast(Any, self.model)
        output = model(self.normalised(images))
        score = output.logits.float().sigmoid()
        if output.centerness is not None:
            score = (score * output.centerness.float().sigmoid()[..., None]).sqrt()
        classes = score.shape[-1]
        levels = zip(*(each.split(self.counts, -2) for each in (score, output.regression, self.anchors)), strict=True)
        parts = [self._candidates(*level) for level in levels]
        score, label, boxes = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        sure = (score > model.score_thresh).flatten().nonzero()[:, 0]
        image = torch.ones_like(label[:, :1]).cumsum(0)  # a range on whatever device the file is loaded to
        apart = (image * classes + label).double()[..., None] * (max(self.size) + 1)  # no two images' or classes' boxes overlap
        kept = sure[nms((boxes.double() + apart).flatten(0, 1)[sure], score.flatten()[sure].double(), model.nms_thresh)]
        score = score * torch.zeros_like(score).flatten().index_fill(0, kept, 1.0).view_as(score)
        best, place = score.topk(min(model.detections_per_img, score.shape[1]))
        found = torch.cat([boxes, score[..., None], label[..., None].float()], dim=-1)
        return found.gather(1, place[..., None].expand(-1, -1, 6)) * (best > 0)[..., None]

    def _candidates(self, score: Tensor, regression: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best of a level: score (N, K), class (N, K), boxes (N, K, 4)."""
        model = cast(Any, self.model)
        classes = score.shape[-1]
        best, index = score.flatten(1).topk(min(model.topk_candidates, score.shape[1] * classes))
        place = index // classes
        deltas = regression.float().gather(1, place[..., None].expand(-1, -1, 4))
        boxes = model.coder.decode(deltas.flatten(0, 1), anchors[place].flatten(0, 1)).view_as(deltas)
        return best, index % classes, boxes.clamp(min=0).minimum(self.corner)


def export_best(folder: RunFolder, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Export a run's best model and record it for MLflow. A model that cannot be exported is reported, and the run goes on.

    Raises:
        UserError: the file cannot be written.
    """
    best = folder.path / "checkpoints" / "best.pt"
    if not config.tracking.model or not best.is_file():
        return
    try:
        program, exported = export(config, best)
    except Exception as error:  # torch.export fails in many ways, and so do models of a user's own
        reason = (str(error).strip().splitlines() or [""])[0]
        folder.record("tags", values={"model.export": f"failed: {type(error).__name__}: {reason}"})
        say(f"the best model was not exported, and MLflow gets its checkpoint alone: {type(error).__name__}: {reason}")
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
        Exception: torch.export cannot follow the model, or what the task's models take and say is not known here.
    """
    if threading.current_thread() is not threading.main_thread() and not torch.cuda.is_available():
        # with torch 2.11 the next torch.export in any thread ends the process by a segmentation fault
        raise RuntimeError("without a GPU torch.export is safe in a program's main thread alone")
    state = load_checkpoint(checkpoint)
    norm, classes = Norm(**state["norm"]), state["classes"]
    module, (height, width), says = _module(config, classes, norm)
    load_weights(module.model, state)
    module.eval()
    shape = [len(norm.mean), height, width]
    images = torch.zeros(2, *shape, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},), strict=False)
        output = list(module(images[:1]).shape[1:])
    return program, Exported(checkpoint.with_suffix(".pt2"), shape, output, says, classes, state["updates"])


def _module(config: TrainConfig, classes: list[str], norm: Norm) -> tuple[Images, tuple[int, int], str]:
    """The model without its weights, height and width of its images, and what it says."""
    from lab.tasks.detection.data import size_of
    from lab.tasks.losses import activation_of
    from lab.tasks.models import build_model

    if isinstance(config.model, DetectorConfig):
        from lab.tasks.detection.task import build_detector, criterion

        size = size_of(cast(DetectionDataConfig, config.data), config.model.fixed_size)
        detector = build_detector(config.model, criterion(config.loss, config.box_loss, config.model), len(classes), size)
        return Scenes(detector, norm, size), size, "detections: x1, y1, x2, y2 in pixels, score, class"
    rewards = isinstance(config.task, PreferenceTaskConfig)
    if isinstance(config.task, MultilabelConfig):
        size = size_of(cast(DetectionDataConfig, config.data), None)
    elif isinstance(config.data, (ImagesConfig, DigitPairsConfig)):
        size = (config.data.image_size,) * 2
    else:
        raise NotImplementedError(f"task={config.task.name}: what its model takes and says is not known")
    model = build_model(cast(ClassifierConfig, config.model), channels=len(norm.mean), classes=len(classes), image_size=size[0])
    activation = None if rewards else activation_of(config.loss)
    return Images(model, norm, activation), size, "reward" if rewards else "probabilities of the classes"

"""The multi-label task: which classes are in an image, under losses of independent yes-or-no decisions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.base.fonts import letters_of
from lab.config.detection_schema import DetectionDataConfig
from lab.config.schema import TableConfig, TrainConfig
from lab.data.annotations.coco_file import CocoFile
from lab.data.augment import random_affine
from lab.data.batch import Batch
from lab.data.samples import Annotations
from lab.data.sets import Data, Loader, MemoryLoader, Norm, Split
from lab.data.sources.table import MASKED, table_data
from lab.run.export import Exportable
from lab.run.predict import Asked, Predictor
from lab.tasks.counts import Counts, Kept
from lab.tasks.custom_metrics import CustomMetrics
from lab.tasks.detection.data import DetectionLoader, load_detection_data, size_of
from lab.tasks.detection.inference import batches
from lab.tasks.detection.inference import prepared_as as boxes_prepared_as
from lab.tasks.heads import HeadInput, sum_of_rows
from lab.tasks.inference import classifier, image_size, likeliest, of_probabilities, reader
from lab.tasks.losses import Criterion
from lab.tasks.models import model_norm
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.plots import average_precision_picture
from lab.tasks.task import ClassifierTask, table_of


class LabelSetLoader(DetectionLoader):
    """Images with the set of their boxes' classes, without boxes that a crop removed."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield Batch(batch.images, multi_hot(batch.labels, len(self.file.classes)), batch.index)


class HeldLabelSets(MemoryLoader):
    """Like `LabelSetLoader`, but all images are held on the device, and rotated, scaled and shifted a little there."""

    def __init__(
        self,
        file: CocoFile,
        config: DetectionDataConfig,
        fixed_size: list[int] | None,
        norm: Norm,
        device: torch.device,
        seed: int | None,
    ) -> None:
        self.file = file
        read = list(DetectionLoader(file, config, fixed_size, norm, torch.device("cpu"), None).read())
        targets = torch.cat([multi_hot(batch.labels, len(file.classes)) for batch in read])
        split = Split(torch.cat([batch.images for batch in read]), targets, file.files)
        super().__init__(split, Annotations(), config.eval_batch_size if seed is None else config.batch_size, device, norm)
        if seed is not None:
            self.shuffled(seed, random_affine if config.augment else None)


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Return (N, C) of 0 and 1 from labels (N, K), which are -1 where there are none."""
    present = torch.zeros(len(labels), classes + 1, device=labels.device)
    return present.scatter_(1, labels.where(labels >= 0, classes), 1.0)[:, :classes]


@dataclass
class MultilabelResult:
    values: dict[str, float]
    per_class: dict[str, float]  # average precision; nan of a class that is in no image
    probability: Tensor  # (N, C)
    target: Tensor  # (N, C) of 0 and 1, and MASKED

    def tree(self) -> dict[str, Any]:
        return {"per_class": self.per_class}


class MultilabelCounts(Counts):
    """Keep every sample's probabilities, because average precision ranks them."""

    def __init__(self, classes: list[str], threshold: float, device: torch.device, own: Mapping[str, str] | None = None) -> None:
        """Make empty counts; own: the targets of custom metrics, by name."""
        super().__init__(device)
        self.own, self.kept = CustomMetrics(own or {}), Kept()
        self.classes, self.threshold = classes, threshold

    def add(self, probability: Tensor, target: Tensor, loss_sum: Tensor, share: Tensor) -> None:
        """Count a batch; target: (N, C) of 0 and 1, and MASKED for what no metric but the user's own sees."""
        self.kept.add(probability, target)
        self.add_loss(loss_sum, share)

    def result(self) -> MultilabelResult:
        """Return the result over all ranks. mAP is the mean over classes that occur in an image."""
        from torchmetrics.functional.classification import binary_average_precision, binary_f1_score

        probability, given = self.kept.gathered()
        target, known = given.long(), given != MASKED
        each = torch.full((len(self.classes),), torch.nan, dtype=torch.float64)
        for label in (target > 0).any(0).nonzero()[:, 0].tolist():
            rows = known[:, label]
            each[label] = binary_average_precision(probability[rows, label], target[rows, label])
        values = {
            "map": each.nanmean().item(),
            "f1": binary_f1_score(probability[known], target[known], self.threshold).item(),
            "loss": self.mean_loss(),
            "samples": float(len(target)),
        }
        values |= self.own.values(probability.float(), given)
        return MultilabelResult(values, dict(zip(self.classes, each.tolist(), strict=True)), probability, target)


class Multilabel(ClassifierTask):
    monitor = "map"
    score_names: tuple[str, ...] = ("right_labels",)
    line = "held-out mAP {map:.4f} · F1 {f1:.4f} · loss {loss:.4f}"
    table: Mapping[str, str] = {"held-out mAP": "{map:.4f}", "held-out F1": "{f1:.4f}"}

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        image_size: int,
        device: torch.device,
        labelled: Tensor,
        images: int,
        masked: int | None = None,
    ) -> None:
        """Make the task.

        Args:
            labelled: (C,) how many of the training images have each class, of all `images`.
            masked: the number of masked labels of the training images; None if those of no part are masked.
        """
        criterion = Criterion(config.loss, config.data, len(data.classes), 0, device, labelled, images)
        if criterion.rowwise:
            raise UserError(
                f"loss={config.loss.title}: task=multilabel takes element-wise losses; this one has a softmax over the classes."
            )
        super().__init__(config, data, criterion, image_size, device)
        self.masked = masked is not None
        self.share = labelled.sum().item() / (images * len(data.classes) - (masked or 0))
        self.counts(data.val)  # checks the metrics before training starts

    def prior(self) -> float:
        return self.share

    def prepare(self, batch: Batch, *, training: bool) -> Batch:
        """Return the batch with 0 for masked labels, and which labels are known."""
        if not self.masked:
            return batch
        return replace(batch, target=batch.target.clamp(min=0), known=batch.target != MASKED)

    def truth(self, batch: Batch) -> Tensor:
        """Return the targets (N, C) of a prepared batch: 0, 1 or MASKED."""
        return batch.target if batch.known is None else batch.target.where(batch.known, MASKED)

    def scores(self, output: Tensor | HeadInput, batch: Batch) -> Tensor:
        """Sum each image's share of right labels, without masked ones."""

        def right(logits: Tensor, target: Tensor) -> Tensor:
            said, known = self.criterion.probabilities(logits.float()) > self.settings.threshold, target != MASKED
            return ((said == (target > 0)) & known).float().sum(1).div(known.sum(1)).sum()[None]

        return sum_of_rows(right, output, self.truth(batch))

    def counts(self, loader: Loader) -> MultilabelCounts:
        return MultilabelCounts(self.data.classes, self.settings.threshold, self.device, self.settings.metrics)

    def count(self, counts: MultilabelCounts, output: Tensor, batch: Batch) -> None:
        counts.add(self.criterion.probabilities(output.float()), self.truth(batch), *self.whole_loss(output, batch))

    def samples(self, output: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Return the rows; names of several classes are separated by semicolons. "masked" lists the classes that `correct` leaves out."""
        probability = self.criterion.probabilities(output.float())
        said, truth, unknown = probability > self.settings.threshold, batch.target.bool(), self.truth(batch) == MASKED
        names = self.data.classes

        def listed(row: Tensor, values: list[Any]) -> str:
            return ";".join(str(values[i]) for i in row.nonzero()[:, 0].tolist())

        return [
            {
                "true": listed(t, names),
                "predicted": listed(s, names),
                "probability": listed(s, p.tolist()),
                "correct": int((s == t)[~u].all()),
            }
            | ({"masked": listed(u, names)} if self.masked else {})
            for t, s, p, u in zip(truth, said, probability, unknown, strict=True)
        ]

    def per_class(self, result: MultilabelResult) -> list[dict[str, Any]]:
        known, truth = result.target != MASKED, result.target > 0
        said = (result.probability > self.settings.threshold) & known
        right, there, found = (said & truth).sum(0), truth.sum(0), said.sum(0)
        average = torch.tensor(list(result.per_class.values()))
        figures = {"samples": there} | ({"labels": known.sum(0)} if self.masked else {})
        figures |= {"precision": right / found, "recall": right / there, "f1": 2 * right / (there + found), "ap": average}
        return table_of(self.data.classes, figures)

    def pictures(self, result: MultilabelResult, folder: Path) -> list[Path]:
        path = folder / "average_precision.png"
        with letters_of(self.data.classes):
            average_precision_picture(result.per_class, path)
        return [path]


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Multilabel:
    norm, settings = model_norm(config.model, saved), cast(MultilabelConfig, config.task)
    if isinstance(config.data, TableConfig):
        if settings.in_memory:
            raise UserError("task.in_memory=true: images of data=table are read from their files.")
        data, targets = table_data(config.data, "labels", norm, device, config.seed, saved)
        parts: list[Any] = [each for each in (data.train, data.val, data.test) if each is not None]
        masked = int((targets == MASKED).sum()) if any((each.targets == MASKED).any() for each in parts) else None
        return Multilabel(config, data, image_size(config), device, data.counts.float(), len(targets), masked)
    scenes = scenes_of(config)
    size = size_of(scenes, None)
    if settings.in_memory and scenes.augment:
        for name in ("horizontal_flip", "photometric"):
            if given := getattr(scenes, name):
                raise UserError(f"data.{name}={given}: 0 is expected with task.in_memory=true, which only turns, scales and shifts images.")
    loader = HeldLabelSets if settings.in_memory else LabelSetLoader
    boxes = load_detection_data(scenes, list(size), norm, device, config.seed, loader)
    return Multilabel(config, boxes, size[0], device, labelled_images(boxes.train.file), len(boxes.train.file))


def scenes_of(config: TrainConfig) -> DetectionDataConfig:
    """Return the settings of images with boxes.

    Raises:
        UserError: data.rect=true, which gives each batch another size and reads the images in another order.
    """
    scenes = cast(DetectionDataConfig, config.data)
    if scenes.rect:
        raise UserError("data.rect=true: task=multilabel takes images of one size. Use data.rect=false.")
    return scenes


def labelled_images(file: CocoFile) -> Tensor:
    """Return how many images have each class (C,), as float32."""
    present = [file.labels[file.rows(i)][~file.crowd[file.rows(i)]].unique() for i in range(len(file))]
    return torch.bincount(torch.cat(present), minlength=len(file.classes)).float()


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to the classes whose probability is at least `asked.score`."""
    if isinstance(config.data, TableConfig):
        side = image_size(config)
        read = reader(config.data, side, asked.norm)
    else:
        scenes = scenes_of(config)
        side, batch_of = size_of(scenes, None)[0], batches(scenes, list(size_of(scenes, None)), asked.norm)
        read = lambda image: batch_of(image).images  # noqa: E731
    model = classifier(config, classes, asked.norm, side)
    return model, lambda image: likeliest(model(read(image).to(asked.device)), config, classes, score=asked.score)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to the classes' probabilities, to export."""
    files = config.data
    size = image_size(config) if isinstance(files, TableConfig) else size_of(scenes_of(config), None)[0]
    made = of_probabilities(config, classes, norm, size)
    if not isinstance(files, TableConfig):
        made.prepare = boxes_prepared_as(scenes_of(config), [size, size], norm)
    return made

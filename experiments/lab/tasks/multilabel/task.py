"""The multi-label task: which classes are in an image, under losses of independent yes-or-no decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.base.fonts import letters_of
from lab.config.objects import find_object
from lab.config.schema import TableConfig, TrainConfig
from lab.data.batch import Batch
from lab.data.load import opened
from lab.data.sets import Data, Loader, Norm
from lab.data.sources.table import MASKED, read_images
from lab.data.specs import SOURCES
from lab.run.export import Exportable
from lab.run.predict import Asked, Predictor
from lab.tasks.heads import HeadInput, sum_of_rows
from lab.tasks.inference import Reader, classifier, image_size, likeliest, of_probabilities, prepared_as, reader
from lab.tasks.losses import Criterion
from lab.tasks.metrics import AllSamples, Counts, CustomMetrics
from lab.tasks.models import model_norm
from lab.tasks.multilabel import MultilabelConfig
from lab.tasks.plots import average_precision_picture
from lab.tasks.task import ClassifierTask, table_of


class LabelSets(Protocol):
    """Images with several labels each, by a run's settings. `side`: pixels a side that the model sees."""

    side: int

    def load(self, norm: Norm, device: torch.device, seed: int, saved: Norm | None) -> tuple[Data, Tensor, int, int | None]:
        """Open the data; arguments as of lab.data.load.load_data.

        Returns:
            The data, whose targets are (N, C) of 0, 1 and MASKED; how many of the training images have each class, (C,) float32; how many
            there are; and how many of their labels are masked, None if no label of any part is.
        """

    def reader(self, norm: Norm) -> Reader:
        """Return a function from an image to the model's input (1, C, H, W)."""

    def prepared_as(self, norm: Norm) -> dict[str, Any]:
        """Return how `reader` prepares an image, for the metadata of an exported model."""


class TableLabels:
    """The label sets of a table."""

    def __init__(self, config: TrainConfig) -> None:
        self.data, self.side = cast(TableConfig, config.data), image_size(config)
        self.in_memory = cast(MultilabelConfig, config.task).in_memory

    def load(self, norm: Norm, device: torch.device, seed: int, saved: Norm | None) -> tuple[Data, Tensor, int, int | None]:
        if self.in_memory:
            raise UserError("task.in_memory=true: images of data=table are read from their files.")
        data = opened(read_images(self.data, "labels"), self.data, norm, device, seed, saved)
        parts: list[Any] = [each for each in (data.train, data.val, data.test) if each is not None]
        masked = int((parts[0].targets == MASKED).sum()) if any((each.targets == MASKED).any() for each in parts) else None
        return data, data.counts.float(), data.train.samples, masked

    def reader(self, norm: Norm) -> Reader:
        return reader(self.data, self.side, norm)

    def prepared_as(self, norm: Norm) -> dict[str, Any]:
        return prepared_as(self.data, self.side, norm)


def label_sets(config: TrainConfig) -> LabelSets:
    """Return the label sets of the run's data."""
    return cast(LabelSets, find_object(SOURCES[config.data.name].label_sets or TableLabels)(config))


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
        self.own, self.samples = CustomMetrics(own or {}), AllSamples()
        self.classes, self.threshold = classes, threshold

    def add(self, probability: Tensor, target: Tensor, loss_sum: Tensor, share: Tensor) -> None:
        """Count a batch; target: (N, C) of 0 and 1, and MASKED for what no metric but the user's own sees."""
        self.samples.add(probability, target)
        self.add_loss(loss_sum, share)

    def result(self) -> MultilabelResult:
        """Return the result over all ranks. mAP is the mean over classes that occur in an image."""
        from torchmetrics.functional.classification import binary_average_precision, binary_f1_score

        probability, given = self.samples.gathered()
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
    sets = label_sets(config)
    data, labelled, images, masked = sets.load(model_norm(config.model, saved), device, config.seed, saved)
    return Multilabel(config, data, sets.side, device, labelled, images, masked)


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to the classes whose probability is at least `asked.score`."""
    sets = label_sets(config)
    model, read = classifier(config, classes, asked.norm, sets.side), sets.reader(asked.norm)
    return model, lambda image: likeliest(model(read(image).to(asked.device)), config, classes, score=asked.score)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to the classes' probabilities, to export."""
    sets = label_sets(config)
    made = of_probabilities(config, classes, norm, sets.side)
    made.prepare = sets.prepared_as(norm)
    return made

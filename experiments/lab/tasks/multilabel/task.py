"""The multi-label task: which classes are in an image, under losses of independent yes-or-no decisions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.config.detection_schema import DetectionDataConfig
from lab.config.errors import UserError
from lab.config.schema import TrainConfig
from lab.data.augment import random_affine
from lab.data.batch import Batch
from lab.data.coco_file import CocoFile
from lab.data.samples import Annotations
from lab.data.sets import Loader, MemoryLoader, Norm, Split
from lab.processes import distributed
from lab.runs.export import Exportable
from lab.runs.predict import Asked, Predictor
from lab.tasks.detection.data import DetectionData, DetectionLoader, enlarged, load_detection_data, size_of
from lab.tasks.detection.inference import batches
from lab.tasks.fonts import letters_of
from lab.tasks.heads import HeadInput, sum_of_rows
from lab.tasks.inference import classifier, likeliest, of_probabilities
from lab.tasks.losses import Criterion
from lab.tasks.models import model_norm
from lab.tasks.multilabel.spec import MultilabelConfig
from lab.tasks.own_metrics import OwnMetrics
from lab.tasks.plots import average_precision_picture
from lab.tasks.task import ClassifierTask, table_of


class LabelSetLoader(DetectionLoader):
    """Images with the set of their boxes' classes; what a crop has cut away is not in it."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield Batch(batch.images, multi_hot(batch.labels, len(self.file.classes)), batch.index)


class HeldLabelSets(MemoryLoader):
    """As `LabelSetLoader`, but all images are held on the device, and turned, scaled and shifted there by a little."""

    def __init__(
        self,
        file: CocoFile,
        config: DetectionDataConfig,
        fixed_size: list[int] | None,
        norm: tuple[Tensor, Tensor],
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


def load_label_sets(
    config: DetectionDataConfig, size: list[int], norm: Norm, device: torch.device, seed: int, *, in_memory: bool
) -> DetectionData:
    """COCO files whose images are labelled with the set of their boxes' classes.

    Raises:
        UserError: as `load_detection_data`; or what is held in memory would have to be augmented in a way that is only known for files.
    """
    if in_memory and config.augment:
        for name in ("horizontal_flip", "photometric"):
            if given := getattr(config, name):
                raise UserError(
                    f"data.{name}={given}: 0 is expected with task.in_memory=true, which turns, scales and shifts images alone."
                )
    return load_detection_data(config, size, norm, device, seed, HeldLabelSets if in_memory else LabelSetLoader)


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """(N, C) of 0 and 1 from labels (N, K), -1 where there is none."""
    present = torch.zeros(len(labels), classes + 1, device=labels.device)
    return present.scatter_(1, labels.where(labels >= 0, classes), 1.0)[:, :classes]


@dataclass
class MultilabelResult:
    values: dict[str, float]
    probability: Tensor  # (N, C)
    target: Tensor  # (N, C) of 0 and 1

    def tree(self) -> dict[str, Any]:
        return {}


class MultilabelCounts:
    """Keeps every sample's probabilities, which average precision ranks."""

    def __init__(self, classes: list[str], threshold: float, device: torch.device, own: Mapping[str, str] | None = None) -> None:
        """own: targets of the user's own metrics, by name."""
        self.own = OwnMetrics(own or {})
        self.classes, self.threshold = classes, threshold
        self.probability: list[Tensor] = []
        self.target: list[Tensor] = []
        self.loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, divisor

    def add(self, probability: Tensor, target: Tensor, loss_sum: Tensor, share: Tensor) -> None:
        self.own.add(probability, target)
        self.probability.append(probability)
        self.target.append(target)
        self.loss += torch.stack([loss_sum, share]).double()

    def result(self) -> MultilabelResult:
        """Of all ranks together. mAP is the mean over the classes that some image has."""
        from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score

        everyone = distributed.gathered([(p.cpu(), t.long().cpu()) for p, t in zip(self.probability, self.target, strict=True)])
        probability, target = (torch.cat([batch[part] for batches in everyone for batch in batches]) for part in (0, 1))
        distributed.total(self.loss)
        count, there = len(self.classes), target.any(0)
        precision = multilabel_average_precision(probability[:, there], target[:, there], int(there.sum()), average="none").double()
        each = dict(zip([name for name, known in zip(self.classes, there.tolist(), strict=True) if known], precision.tolist(), strict=True))
        total, divisor = self.loss.tolist()
        values = {
            "map": precision.mean().item(),
            "f1": multilabel_f1_score(probability, target, count, self.threshold, average="micro").item(),
            "loss": total / divisor if divisor else float("nan"),
            "samples": float(len(target)),
            **{f"ap/{name}": value for name, value in each.items()},
        }
        values |= self.own.values()
        return MultilabelResult(values, probability, target)


class Multilabel(ClassifierTask):
    monitor = "map"
    score_names: tuple[str, ...] = ("right_labels",)

    def __init__(self, config: TrainConfig, data: DetectionData, image_size: int, device: torch.device) -> None:
        criterion = Criterion(config.loss, config.data, len(data.classes), 0, device)
        if criterion.rowwise:
            raise UserError(
                f"loss={config.loss.title}: task=multilabel takes element-wise losses; this one has a softmax over the classes."
            )
        super().__init__(config, criterion, image_size, device)
        self.data, self.settings = data, cast(MultilabelConfig, config.task)
        scenes = cast(DetectionDataConfig, config.data)
        self.notes = enlarged(scenes, list(size_of(scenes, None)), data.train.file.sizes)
        self.counts(data.val)  # finds the metrics before anything starts

    def prior(self) -> float:
        """The mean share of the training images that a class is in."""
        file = self.data.train.file
        present = sum(len(file.labels[file.rows(i)][~file.crowd[file.rows(i)]].unique()) for i in range(len(file)))
        return present / (len(file) * len(self.data.classes))

    def scores(self, output: Tensor | HeadInput, batch: Batch) -> Tensor:
        """Each image's share of labels that are right."""

        def right(logits: Tensor, target: Tensor) -> Tensor:
            said = self.criterion.probabilities(logits.float()) > self.settings.threshold
            return (said == target.bool()).float().mean(1).sum()[None]

        return sum_of_rows(right, output, batch.target)

    def counts(self, loader: Loader) -> MultilabelCounts:
        return MultilabelCounts(self.data.classes, self.settings.threshold, self.device, self.settings.metrics)

    def count(self, counts: MultilabelCounts, output: Tensor, batch: Batch) -> None:
        loss = self.loss(output, batch, torch.ones((), device=output.device))
        counts.add(self.criterion.probabilities(output.float()), batch.target, loss.float(), self.normalizer(batch))

    def samples(self, output: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Names of several classes are separated by semicolons."""
        probability = self.criterion.probabilities(output.float())
        said, truth = probability > self.settings.threshold, batch.target.bool()
        names = self.data.classes

        def listed(row: Tensor, values: list[Any]) -> str:
            return ";".join(str(values[i]) for i in row.nonzero()[:, 0].tolist())

        return [
            {
                "true": listed(t, names),
                "predicted": listed(s, names),
                "probability": listed(s, p.tolist()),
                "correct": int(torch.equal(s, t)),
            }
            for t, s, p in zip(truth, said, probability, strict=True)
        ]

    def per_class(self, result: MultilabelResult) -> list[dict[str, Any]]:
        said, truth = result.probability > self.settings.threshold, result.target.bool()
        right, there, found = (said & truth).sum(0), truth.sum(0), said.sum(0)
        average = torch.tensor([result.values.get(f"ap/{name}", float("nan")) for name in self.data.classes])
        figures = {"samples": there, "precision": right / found, "recall": right / there, "f1": 2 * right / (there + found), "ap": average}
        return table_of(self.data.classes, figures)

    def pictures(self, result: MultilabelResult, folder: Path) -> list[Path]:
        path = folder / "average_precision.png"
        with letters_of(self.data.classes):
            average_precision_picture({name: result.values.get(f"ap/{name}", float("nan")) for name in self.data.classes}, path)
        return [path]

    def headline(self, result: MultilabelResult) -> str:
        values = result.values
        return f"held-out mAP {values['map']:.4f} · F1 {values['f1']:.4f} · loss {values['loss']:.4f}"

    def rows(self, best: dict[str, float]) -> dict[str, str]:
        own = {f"held-out {name}": f"{best[name]:.4f}" for name in self.settings.metrics}
        return {"held-out mAP": f"{best['map']:.4f}", "held-out F1": f"{best['f1']:.4f}"} | own


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Multilabel:
    scenes, norm = cast(DetectionDataConfig, config.data), model_norm(config.model, saved)
    size = size_of(scenes, None)
    data = load_label_sets(scenes, list(size), norm, device, config.seed, in_memory=cast(MultilabelConfig, config.task).in_memory)
    return Multilabel(config, data, size[0], device)


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Make the model, and a function from an image to the classes whose probability is at least `asked.score`."""
    scenes = cast(DetectionDataConfig, config.data)
    size = list(size_of(scenes, None))
    model, batch_of = classifier(config, classes, asked.norm, size[0]), batches(scenes, size, asked.norm)

    return model, lambda image: likeliest(model(batch_of(image).images.to(asked.device)), config, classes, score=asked.score)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Make the model, from images to the probabilities of the classes."""
    return of_probabilities(config, classes, norm, size_of(cast(DetectionDataConfig, config.data), None)[0])

"""The regression task: numbers for each image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.base.fonts import letters_of
from lab.config.schema import TableConfig, TrainConfig
from lab.data.batch import Batch
from lab.data.load import opened
from lab.data.sets import Data, Norm
from lab.data.sources.table import read_images
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor
from lab.tasks.finetuning import MEASURED
from lab.tasks.inference import classifier, image_size, prepared_as, reader
from lab.tasks.losses import loss_of
from lab.tasks.models import model_norm
from lab.tasks.plain_loss import PlainLoss
from lab.tasks.regression import DigitTurnsConfig
from lab.tasks.regression.data import digit_turns, spread
from lab.tasks.regression.metrics import RegressionCounts, RegressionResult, residual_picture
from lab.tasks.task import BaseTask, table_of


class Regression(BaseTask):
    monitor = "r2"
    score_names: tuple[str, ...] = ("mae",)
    line = "held-out R² {r2:.4f} · MAE {mae:.4g} · RMSE {rmse:.4g} · loss {loss:.4f}"
    table: Mapping[str, str] = {"held-out R²": "{r2:.4f}", "held-out MAE": "{mae:.4g}", "held-out RMSE": "{rmse:.4g}"}

    def __init__(self, config: TrainConfig, data: Data, targets: Tensor, device: torch.device) -> None:
        """Make the task; targets: those of the training samples, (N, K)."""
        super().__init__(config, data, device)
        self.mean, self.deviation = spread(targets)
        if not self.settings.standardize:
            self.mean, self.deviation = torch.zeros_like(self.mean), torch.ones_like(self.deviation)
        self.criterion = ValueLoss(config, self.deviation.to(device))
        self.counts(data.val)  # checks the metrics before training starts

    def model(self) -> nn.Module:
        return in_units(self.network(len(self.data.classes), image_size(self.config)), self.mean, self.deviation)

    def normalizer(self, batch: Batch) -> Tensor:
        return torch.full((), float(batch.target.numel()), device=batch.images.device)

    def loss(self, output: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, batch, normalizer)

    def merged(self, outputs: list[Tensor]) -> Tensor:
        """Return the mean of several views' numbers."""
        return torch.stack(outputs).mean(0)

    def scores(self, output: Tensor, batch: Batch) -> Tensor:
        """Sum each sample's absolute error, the mean over its targets."""
        return (output - batch.target).abs().mean(1).sum()[None]

    def counts(self, loader: Any) -> RegressionCounts:
        return RegressionCounts(self.device, self.settings.metrics)

    def count(self, counts: RegressionCounts, output: Tensor, batch: Batch) -> None:
        counts.add(output, batch.target, *self.whole_loss(output, batch))

    def samples(self, output: Tensor, batch: Batch) -> list[dict[str, Any]]:
        names = self.data.classes
        rows = zip(batch.target.tolist(), output.tolist(), strict=True)
        return [
            {column: value for name, t, p in zip(names, true, said, strict=True) for column, value in ((f"true {name}", t), (name, p))}
            for true, said in rows
        ]

    def per_class(self, result: RegressionResult) -> list[dict[str, Any]]:
        """Return the figures of each target."""
        return table_of(self.data.classes, result.figures, "target")

    def pictures(self, result: RegressionResult, folder: Path) -> list[Path]:
        path = folder / "residuals.png"
        with letters_of(self.data.classes):
            residual_picture(result, self.data.classes, path)
        return [path]


class ValueLoss:
    """Sum a loss over samples and targets, divided by `normalizer`; differences are in units of `deviation` (K,)."""

    def __init__(self, config: TrainConfig, deviation: Tensor) -> None:
        self.deviation, self.torch = deviation, config.loss.implementation == "torch"
        self.loss, self.hyper = loss_of(config.loss, deviation.device)

    def __call__(self, output: Tensor, batch: Batch, normalizer: Tensor) -> Tensor:
        prediction, target = output / self.deviation, batch.target / self.deviation
        weight = None if batch.weight is None else batch.weight[:, None]
        if not isinstance(self.loss, PlainLoss) and not self.torch:
            options = {**self.hyper, "weight": weight, "reduction": "sum", "normalizer": normalizer}
            return cast(Tensor, self.loss.function(prediction, target, **options))
        if isinstance(self.loss, PlainLoss):
            values = self.loss.of(prediction, target)
        else:
            values = (self.loss.oracle() or self.loss.reference)(prediction, target, **self.hyper, reduction="none")
        if batch.weight is None:
            return values.mean() * target.numel() / normalizer
        if values.ndim == 0:
            raise UserError(f"{self.loss.setting}: returns a mean, and the samples have weights; a value a sample is expected.")
        return (values.reshape(len(target), -1).mean(1) * batch.weight).sum() * target.shape[1] / normalizer


def in_units(model: nn.Module, mean: Tensor, deviation: Tensor) -> nn.Module:
    """Let a model of standardised numbers return them in the targets' units; `mean` and `deviation` (K,) become part of its weights."""
    for name, value in zip(MEASURED, (mean, deviation), strict=True):
        model.register_buffer(name, value.clone())
    model.register_forward_hook(_rescaled)
    return model


def _rescaled(model: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.float() * model.target_deviation + model.target_mean


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Regression:
    if isinstance(config.data, TableConfig):
        data = opened(read_images(config.data, "numbers"), config.data, model_norm(config.model, saved), device, config.seed, saved)
    else:
        data = digit_turns(cast(DigitTurnsConfig, config.data), device, config.seed, saved)
    return Regression(config, data, cast(Any, data.train).targets, device)


class Numbers(Prediction):
    """The numbers of one image, each with its name."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"target": name, "value": value} for name, value in zip(self.labels, self.scores, strict=True)]

    def parts(self) -> list[str]:
        return [f"{name} {value:.4g}" for name, value in zip(self.labels, self.scores, strict=True)]


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to its numbers."""
    model, read = _model(config, classes, asked.norm), reader(config.data, image_size(config), asked.norm)
    return model, lambda image: Numbers(classes, model(read(image).to(asked.device))[0].tolist())


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the model, from images to their numbers, to export."""
    size, model = image_size(config), _model(config, classes, norm)
    return Exportable(
        Images(model, norm, data=config.data),
        model,
        [len(norm.mean), size, size],
        "predicted numbers",
        prepare=prepared_as(config.data, size, norm),
    )


def _model(config: TrainConfig, names: list[str], norm: Norm) -> nn.Module:
    """Return a model whose weights a checkpoint will replace."""
    return in_units(classifier(config, names, norm, image_size(config)), torch.zeros(len(names)), torch.ones(len(names)))

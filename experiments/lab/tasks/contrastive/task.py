"""The contrastive task: an image encoder and a text encoder, trained on images with captions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.base.errors import UserError
from lab.config.loss_schema import ClipConfig
from lab.config.schema import ClassifierConfig, ImagesConfig, TrainConfig
from lab.data.batch import Batch
from lab.data.load import load_data
from lab.data.sets import Data, Norm
from lab.processes import distributed
from lab.run.export import Exportable, Images
from lab.run.predict import Asked, Prediction, Predictor
from lab.tasks.contrastive import OF_CAPTIONS, OF_IMAGES, ContrastiveConfig, DigitCaptionsConfig
from lab.tasks.contrastive.data import CAPTIONS, LONGEST, caption, choices, digit_captions, text_of, tokens_of
from lab.tasks.contrastive.labelled import Labelled, embedder
from lab.tasks.contrastive.metrics import RetrievalCounts, RetrievalResult, retrieval_picture
from lab.tasks.contrastive.model import DualEncoder, Features, TextEncoder
from lab.tasks.inference import image_size, prepared_as, reader
from lab.tasks.models import build_model, model_norm
from lab.tasks.task import BaseTask

AT_ONCE = 4096  # captions that predict.py encodes together


class Contrastive(BaseTask):
    monitor = "recall1"
    score_names: tuple[str, ...] = ("cosine",)
    line = (
        "among {samples:.0f} held-out pairs recall@1 {recall1:.2%} · text @5 {text_recall5:.2%} · image @5 {image_recall5:.2%} · "
        "loss {loss:.4f}"
    )
    table: Mapping[str, str] = {
        f"held-out recall@{most} of {what}s": f"{{{what}_recall{most}:.2%}}" for what in ("text", "image") for most in (1, 5)
    }

    def __init__(self, config: TrainConfig, data: Data, device: torch.device) -> None:
        super().__init__(config, data, device)
        self.criterion = pair_loss(cast(ClipConfig, config.loss))
        if config.trainer.accumulate > 1 or distributed.ranks() > 1:
            self.notes = [f"each image is compared with the captions of its own batch and process alone, {config.data.batch_size} at most"]

    def model(self) -> nn.Module:
        return dual_encoder(self.config, self.data.classes, self.data.channels)

    def other_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.target,)

    def normalizer(self, batch: Batch) -> Tensor:
        return torch.full((), float(len(batch)), device=batch.images.device)

    def loss(self, output: Features, batch: Batch, normalizer: Tensor) -> Tensor:
        return self.criterion(output, normalizer)

    def scores(self, output: Features, batch: Batch) -> Tensor:
        """Sum the cosines of the pairs; recall would need the matrix of all similarities, which the losses do not keep."""
        return (output.images * output.texts).sum()[None]

    def counts(self, loader: Any) -> RetrievalCounts:
        return RetrievalCounts(self.device)

    def count(self, counts: RetrievalCounts, output: Features, batch: Batch) -> None:
        counts.add(batch.images, batch.target, (output.images, output.texts), *self.whole_loss(output, batch))

    def samples(self, output: Features, batch: Batch) -> list[dict[str, Any]]:
        """Return each pair's caption, and the cosine of its features."""
        cosines = (output.images * output.texts).sum(1).tolist()
        texts = (text_of(tokens, self.data.classes) for tokens in batch.target.tolist())
        return [{"caption": text, "cosine": cosine} for text, cosine in zip(texts, cosines, strict=True)]

    def pictures(self, result: RetrievalResult, folder: Path) -> list[Path]:
        path = folder / "retrieval.png"
        retrieval_picture(result, self.data.classes, self.data.norm, path)
        return [path]


def pair_loss(config: ClipConfig) -> Callable[[Features, Tensor], Tensor]:
    """Return a function of features and the divisor: the sum over a batch's pairs, divided."""
    if config.implementation == "torch":
        return {"clip": plain_clip, "siglip": plain_siglip}[config.name]
    from lossforge.losses import clip_loss_from_features, siglip_loss_from_features

    def loss(output: Features, normalizer: Tensor) -> Tensor:
        images, texts, scale, bias = output
        if bias is None:
            return clip_loss_from_features(images, texts, scale, "sum", normalizer=normalizer)
        return siglip_loss_from_features(images, texts, scale, bias, "sum", normalizer=normalizer)

    return loss


def plain_clip(output: Features, normalizer: Tensor) -> Tensor:
    logits = output.scale * output.images @ output.texts.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.T, own, reduction="sum")) / (2 * normalizer)


def plain_siglip(output: Features, normalizer: Tensor) -> Tensor:
    logits = output.scale * output.images @ output.texts.T + cast(Tensor, output.bias)
    sign = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(sign * logits).sum() / normalizer


def dual_encoder(config: TrainConfig, words: list[str], channels: int) -> DualEncoder:
    """Return the model of these words."""
    task, model = cast(ContrastiveConfig, config.task), cast(ClassifierConfig, config.model)
    image = build_model(model, channels=channels, classes=task.width, image_size=image_size(config))
    return DualEncoder(image, TextEncoder(task, len(words), LONGEST), cast(ClipConfig, config.loss))


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Contrastive | Labelled:
    """Return the task of the data: images with captions, or images of one class each.

    Raises:
        UserError: the loss is one of the other.
    """
    captions = isinstance(config.data, DigitCaptionsConfig)
    losses = OF_CAPTIONS if captions else OF_IMAGES
    if config.loss.name not in losses:
        given = f"loss={config.loss.name}: data={config.data.name} has images {'with' if captions else 'without'} captions"
        raise UserError(f"{given}, which task=contrastive compares by one of loss={', '.join(losses)}.")
    if isinstance(config.data, ImagesConfig):
        data = load_data(config.data, model_norm(config.model, saved), device, config.seed, saved)
        return Labelled(config, data, device)
    return Contrastive(config, digit_captions(cast(DigitCaptionsConfig, config.data), device, config.seed, saved), device)


@dataclass
class Captions(Prediction):
    """The captions that are the most similar to one image, with their cosines."""

    def tree(self) -> list[dict[str, Any]]:
        return [{"caption": text, "cosine": cosine} for text, cosine in zip(self.labels, self.scores, strict=True)]

    def line(self) -> str:
        """Return the most similar caption; predictions.jsonl has more."""
        return f"{self.labels[0]} {self.scores[0]:.3f}"


def predict(config: TrainConfig, words: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the model, and a function from an image to the most similar of all captions that the data can have.

    Raises:
        UserError: the model was trained without captions.
    """
    if not isinstance(config.data, DigitCaptionsConfig):
        raise UserError(
            "checkpoint: it encodes images, and knows no captions to choose from; its exported model returns an image's features."
        )
    model, read = dual_encoder(config, words, len(asked.norm.mean)), reader(config.data, image_size(config), asked.norm)
    captions = [caption(chosen) for chosen in choices(torch.arange(CAPTIONS)).tolist()]
    tokens = tokens_of(captions, words)
    texts: list[Tensor] = []  # encoded with the first image, when the model has its weights

    def predicted(image: Any) -> Prediction:
        if not texts:
            texts.extend(model.of_texts(part.to(asked.device)) for part in tokens.split(AT_ONCE))
        cosines, places = (model.of_images(read(image).to(asked.device)) @ torch.cat(texts).T)[0].topk(min(asked.top, CAPTIONS))
        return Captions([captions[place] for place in places.tolist()], cosines.tolist())

    return model, predicted


def export(config: TrainConfig, words: list[str], norm: Norm) -> Exportable:
    """Return the image encoder, from images to unit features, to export."""
    size, channels = image_size(config), len(norm.mean)
    captioned = isinstance(config.data, DigitCaptionsConfig)
    model: Any = dual_encoder(config, words, channels) if captioned else embedder(config, len(words), channels)
    said = Images(model.image, norm, _unit, config.data)
    return Exportable(said, model, [channels, size, size], "unit features of the image", prepare=prepared_as(config.data, size, norm))


def _unit(features: Tensor) -> Tensor:
    return F.normalize(features, dim=1)

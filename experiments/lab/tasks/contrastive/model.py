"""Two encoders with a common space of features, and an encoder of images under losses of labels or of two views."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.config.loss_schema import ClipConfig, LossConfig, SiglipConfig
from lab.data.batch import Batch
from lab.tasks.contrastive import ContrastiveConfig
from lab.tasks.losses import computed, hyper_of


class Features(NamedTuple):
    """Unit features of images and texts (N, D), and what turns their cosines into logits: scale (1,) and bias (1,), None without one."""

    images: Tensor
    texts: Tensor
    scale: Tensor
    bias: Tensor | None


class TextEncoder(nn.Module):
    """Sum an embedding of each word at its place, and project the sum by a small network: enough for texts of one grammar."""

    def __init__(self, config: ContrastiveConfig, words: int, length: int) -> None:
        """Make the encoder of texts of at most `length` words, of `words` different ones."""
        super().__init__()
        width = config.text_width
        self.words = words + 1  # 0 is the place of no word
        self.embedding = nn.Embedding(length * self.words, width)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)  # as of a transformer's embeddings; torch's own has 1, and learns slowly
        self.project = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features (N, D) of tokens (N, L), which are 0 behind a text's end."""
        places = torch.arange(tokens.shape[1], device=tokens.device) * self.words
        return self.project(self.embedding(tokens + places).sum(1))


class DualEncoder(nn.Module):
    """Encode images and texts; the scale and the bias of their logits are learned.

    image: a classifier of D classes, whose logits are an image's features.
    """

    def __init__(self, image: nn.Module, text: TextEncoder, loss: ClipConfig) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.log_scale = nn.Parameter(torch.tensor([math.log(loss.scale)]))
        self.bias = nn.Parameter(torch.tensor([loss.bias])) if isinstance(loss, SiglipConfig) else None

    def forward(self, images: Tensor, tokens: Tensor) -> Features:
        bias = None if self.bias is None else self.bias.view_as(self.bias)  # a view, because FSDP adds a hook to each output
        return Features(self.of_images(images), self.of_texts(tokens), self.log_scale.exp(), bias)

    def of_images(self, images: Tensor) -> Tensor:
        """Return unit features (N, D) in float32."""
        return F.normalize(self.image(images).float(), dim=1)

    def of_texts(self, tokens: Tensor) -> Tensor:
        """Return unit features (N, D) in float32."""
        return F.normalize(self.text(tokens).float(), dim=1)


class Embedded(NamedTuple):
    """Features of images (N, D), of their other views (N, D), and the proxies of the classes (C, D); None without such."""

    features: Tensor
    others: Tensor | None
    proxies: Tensor | None


class Embedder(nn.Module):
    """Encode images. The loss's proxies of the classes are parameters here, so that optimiser and checkpoints have them.

    image: a classifier of D classes, whose logits are an image's features.
    """

    def __init__(self, image: nn.Module, width: int, proxies: int) -> None:
        """Make the encoder of `width` features; proxies: how many classes have a learned one, 0 for none."""
        super().__init__()
        self.image = image
        self.proxies = nn.Parameter(F.normalize(torch.randn(proxies, width), dim=1)) if proxies else None

    def forward(self, images: Tensor, views: Tensor | None = None) -> Embedded:
        """Return the features of images (N, C, H, W) and of their other views, in float32."""
        features = self.image(images if views is None else torch.cat([images, views])).float()
        one, *other = features.split(len(images))
        proxies = None if self.proxies is None else self.proxies.view_as(self.proxies)  # a view, because FSDP adds a hook to each output
        return Embedded(one, other[0] if other else None, proxies)


def batch_loss(config: LossConfig) -> Callable[[Embedded, Batch], Tensor]:
    """Return a function of a batch's features and the batch: its mean loss."""
    from lossforge import losses

    options = hyper_of(config)
    if config.takes == "cosines":
        of_cosines = computed(config, getattr(losses, f"{config.name}_loss"))

        def margins(output: Embedded, batch: Batch) -> Tensor:
            cosines = F.linear(F.normalize(output.features, dim=1), F.normalize(cast(Tensor, output.proxies).float(), dim=1))
            return of_cosines(cosines, batch.target, **options)

        return margins
    name = {"supcon": "supervised_contrastive"}.get(config.name, config.name)
    function: Any = partial(computed(config, getattr(losses, f"{name}_loss")), **options)
    if config.takes == "views":
        return lambda output, batch: function(output.features, output.others)
    if config.takes == "proxies":
        return lambda output, batch: function(output.features, output.proxies, batch.target)
    return lambda output, batch: function(output.features, batch.target)

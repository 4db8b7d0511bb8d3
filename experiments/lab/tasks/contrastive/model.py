"""Two encoders with a common space of features."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.config.loss_schema import ClipConfig, SiglipConfig
from lab.tasks.contrastive import ContrastiveConfig


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

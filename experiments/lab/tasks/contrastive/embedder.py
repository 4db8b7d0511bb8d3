"""An image encoder under losses of labelled images, or of two views of each image."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.config.loss_schema import LossConfig
from lab.data.batch import Batch
from lab.tasks.losses import computed, hyper_of


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

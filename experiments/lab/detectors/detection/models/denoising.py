"""Denoising queries: boxes with noise, from which a DETR's decoder learns to find the boxes, beside the queries that it matches."""

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert


class Denoising(nn.Module):
    """Make queries of an image's boxes with noise: of each group one query a box that must find it, and one that must find nothing.

    A corner moves by up to half of `box_noise` times the box's side; of the second query, whose noise is larger, by half of that to all
    of it. Queries of images with fewer boxes than others are padding, and must find nothing.

    Sources: Li et al., DN-DETR, 2022 (arXiv 2203.01305); Zhang et al., DINO, 2022 (arXiv 2203.03605), for the second query.

    Args:
        classes: the number of classes.
        channels: of a query.
        queries: how many an image has; at least one group is made.
        label_noise: share of the queries that are made of a class at random.
        box_noise: how far a corner moves, in sides of its box.
    """

    def __init__(self, classes: int, channels: int, queries: int, label_noise: float, box_noise: float) -> None:
        super().__init__()
        self.queries, self.label_noise, self.box_noise = queries, label_noise, box_noise
        self.content = nn.Embedding(classes + 1, channels)  # the last is padding's

    def groups(self, boxes: int) -> int:
        """Return the number of groups, where an image has so many rows of boxes."""
        return max(1, self.queries // (2 * boxes))

    def forward(self, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (N, D, channels) and their boxes (N, D, 4), D = groups · 2 K.

        Args:
            boxes: (N, K, 4), centre and sides in shares of the image.
            labels: (N, K), -1 in rows without a box.
        """
        groups = self.groups(labels.shape[1])
        padding = self.content.num_embeddings - 1
        label = torch.where(labels < 0, padding, labels).repeat(1, 2 * groups)
        other = torch.rand(label.shape, device=label.device) < self.label_noise
        at_random = torch.randint_like(label, max(padding, 1))
        label = torch.where(other & (label < padding), at_random, label)
        near, far = (torch.rand(len(boxes), groups, *boxes.shape[1:], device=boxes.device) for _ in range(2))
        share = torch.stack([near, 1 + far], 2)  # (N, groups, 2, K, 4)
        sign = torch.randint_like(share, 2) * 2 - 1
        corners, sides = box_convert(boxes, "cxcywh", "xyxy"), boxes[..., 2:].repeat(1, 1, 2)
        moved = corners[:, None, None] + sign * share * (0.5 * self.box_noise) * sides[:, None, None]
        noisy = box_convert(moved.clamp(0, 1), "xyxy", "cxcywh").flatten(1, 3)
        return self.content(label), noisy

    def places(self, place: Tensor) -> Tensor:
        """Return the box that each query must find (N, D), from the boxes' places (N, K); -1 for nothing."""
        return torch.cat([place, torch.full_like(place, -1)], 1).repeat(1, self.groups(place.shape[1]))

    def hidden(self, boxes: int, queries: int, device: torch.device) -> Tensor:
        """Return which of the D + `queries` queries (rows) must not see which (columns): no group is seen by others or by what follows."""
        groups = self.groups(boxes)
        group = torch.arange(2 * boxes * groups + queries, device=device).div(2 * boxes, rounding_mode="floor").clamp(max=groups)
        return (group != group[:, None]) & (group < groups)

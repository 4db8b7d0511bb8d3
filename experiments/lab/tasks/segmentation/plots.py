"""Pictures of a segmentation evaluation."""

import colorsys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lab.base.files import save_figure
from lab.data.sets import Norm
from lab.tasks.segmentation import OUTSIDE

WIDTH, TALLEST = 3.0, 6.0  # inches of a cell
NO_CLASS = (0.88, 0.88, 0.88)
LISTED = 24  # classes that the legend names


@dataclass
class Shown:
    """An image (C, H, W) as the model sees it, its mask and the predicted one (H, W), and its file's height and width."""

    image: Tensor
    mask: Tensor
    found: Tensor
    size: tuple[int, int]


def masks_picture(shown: list[Shown], classes: list[str], norm: Norm, path: Path) -> None:
    """Draw a row for each image, in its file's proportions: image, mask, predicted mask; below, the colours of their classes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    known = palette(len(classes))
    colors = torch.tensor([*known, NO_CLASS])
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (norm.mean, norm.std))
    heights = [min(WIDTH * each.size[0] / each.size[1], TALLEST) for each in shown]
    there = torch.cat([values.unique() for each in shown for values in (each.mask, each.found)]).unique().tolist()
    patches = [Patch(color=known[label], label=classes[label]) for label in there if label != OUTSIDE]
    hidden = len(patches) - LISTED
    patches = patches[:LISTED]
    if hidden > 0:
        patches.append(Patch(color="none", label=f"and {hidden} more"))
    if OUTSIDE in there:
        patches.append(Patch(facecolor=NO_CLASS, edgecolor="grey", label="no class"))
    figure = Figure(figsize=(3 * WIDTH, sum(heights) + 0.4 + 0.22 * -(-len(patches) // 4)), layout="constrained")
    cells = figure.subplots(len(shown), 3, squeeze=False, height_ratios=heights)
    for row, each in zip(cells, shown, strict=True):
        pixels = (each.image * std + mean).clamp(0, 1).permute(1, 2, 0)
        pictures = [pixels if pixels.shape[2] == 3 else pixels[..., 0]]
        pictures += [colors[values.where(values != OUTSIDE, len(classes))] for values in (each.mask, each.found)]
        for cell, picture in zip(row, pictures, strict=True):
            cell.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=(0, each.size[1], each.size[0], 0))
            cell.set_axis_off()
    for cell, title in zip(cells[0], ("image", "mask", "found"), strict=True):
        cell.set_title(title)
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, path, dpi=100)


def palette(count: int) -> list[tuple[float, float, float]]:
    """Return a colour for each class, different from its neighbours' colours."""
    from matplotlib.colors import TABLEAU_COLORS, to_rgb

    if count <= len(TABLEAU_COLORS):
        return [to_rgb(color) for color in list(TABLEAU_COLORS.values())[:count]]
    return [colorsys.hsv_to_rgb(i * 0.618034 % 1, (0.9, 0.55)[i % 2], (0.95, 0.7, 0.5)[i % 3]) for i in range(count)]

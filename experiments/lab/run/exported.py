"""What torch.export made of a model, how others are told what it takes and gives, and how two outputs are compared."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.data.sets import Norm

ABOUT = "model.json"
"""The name of `Exported.about()`, as JSON: a file within a .pt2, and an entry of the metadata of .onnx and .safetensors."""

CHECKED = 8  # images
LARGEST = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 2e-2}
"""The largest `difference` of the outputs of a model and of what it was exported as."""
DETECTION, ORIENTED = 6, 7
"""Columns of a detection and of an oriented one; behind those of a detection there may be its mask, of 64 cells or more."""

NEAREST = 4
"""The nearest rows, whose masks a row's mask is compared with. A mask has a 16th of the cells that the image has pixels."""


@dataclass
class Exported:
    """An exported model.

    Args:
        program: the program that torch.export made of the module.
        module: computes the same in Python.
        norm: mean and deviation by which the module normalises images.
        record: the fields of this model in a run's record: shape of an image, multiple (height and width are free multiples of it; 0: they
            are those of the shape), output (the shape of an image's output; -1 for what depends on the image's size), pixels (the dtype of
            images), says (the meaning of the output, in words), classes (names of the classes, or of the numbers that are predicted), input
            (how to prepare an image), precision (of weights and arithmetic), and step (the update that the weights are from).
        params: names of the task, model, loss and data.
        timm: the arguments of timm.create_model by which others make the model; empty if it is not such a model.
        notes: messages for the user.
    """

    program: Any
    module: nn.Module
    norm: Norm
    record: dict[str, Any]
    params: dict[str, str]
    timm: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def about(self) -> dict[str, Any]:
        """Return what a program needs to know that has only the file: what goes in, what comes out, and the classes."""
        record = self.record
        shape, pixels = record["shape"], record["pixels"]
        size = {"channels": shape[0], "height": shape[1], "width": shape[2], "multiple": record["multiple"]}
        colours = {1: "grey", 3: "RGB"}.get(shape[0], "as in the files")
        given = {"layout": "NCHW", "dtype": pixels, "range": [0, 255] if pixels == "uint8" else [0, 1], "colours": colours}
        output = {"meaning": record["says"], "shape": record["output"], "dtype": "float32"}
        about = {name: record[name] for name in ("classes", "precision", "step")}
        return self.params | about | {"input": size | given | record["input"], "output": output}

    def weights_about(self) -> dict[str, Any]:
        """Return the same of a file of weights alone, whose model takes normalised images and gives its head's output."""
        about = self.about()
        given = {"dtype": "float32", "range": [0, 1], "normalization": "(image - mean) / std, before the model"}
        output = {"meaning": "the output of the model itself; an exported file gives " + about["output"]["meaning"]}
        return about | {"precision": "fp32", "input": about["input"] | given, "output": output, "timm": self.timm}


def pixels_of(images: Tensor, shape: list[int], norm: Norm, pixels: str, multiple: int) -> Tensor:
    """Return at most CHECKED normalised images as an exported model takes them.

    Args:
        images: (N, C, H, W).
        shape: channels, height and width of the model's images.
        norm: by which they were normalised.
        pixels: the dtype of the model's images.
        multiple: of which the model's height and width are free multiples; 0: they are those of the shape.
    """
    images = images[:CHECKED].float().cpu()
    size = [-(-side // multiple) * multiple for side in images.shape[2:]] if multiple else shape[1:]
    if list(images.shape[2:]) != size:
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (norm.mean, norm.std))
    images = images * std + mean
    return images if pixels == "float32" else (images * 255).round().clamp(0, 255).to(torch.uint8)


def difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two outputs (N, ...), as a share of the largest expected number, or of 1 if that is smaller.

    Of detections (N, D, 6 or more) only corners are shares, so that scores and classes count as much. Detections of nearly equal scores may
    change places or drop out at the end, so that a row may be elsewhere, and 2 % may lack. Masks, from the 7th column on, are 0 outside of
    their boxes, and are compared where both are not: a corner that differs by a hundredth of a pixel moves a row of cells out of its box.
    """
    if expected.dim() == 3 and expected.shape[2] >= 6:
        own = expected.shape[2] if expected.shape[2] <= ORIENTED else DETECTION
        unit = torch.ones(own)
        unit[:4] = expected[..., :4].abs().max().clamp(min=1.0)
        distance = torch.cdist(expected[..., :own] / unit, found[..., :own] / unit, p=float("inf"))
        distance = distance.masked_fill(found[..., :own].isnan().any(-1).unsqueeze(1), torch.inf)  # cdist passes over a nan
        distance, place = distance.topk(min(NEAREST, found.shape[1]), largest=False)
        for image, (masks, others) in enumerate(zip(expected[..., own:], found[..., own:], strict=True)):
            for row, mask in enumerate(masks if masks.shape[1] else ()):
                distance[image, row] = torch.maximum(distance[image, row], _masks_apart(mask, others[place[image, row]]))
        nearest = distance.amin(-1).flatten().sort().values
        return float(nearest[: max(1, int(0.98 * len(nearest)))].max())
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def _masks_apart(mask: Tensor, others: Tensor) -> Tensor:
    """Return the largest difference of a mask (C,) from each of `others` (D, C) where neither is 0; 1 if that is less than half of them."""
    there, found = ~(mask <= 0), ~(others <= 0)  # so that a nan is there
    both = there & found
    distance = torch.where(both, (mask - others).abs(), 0.0).amax(-1)
    return torch.where(2 * both.sum(-1) < (there | found).sum(-1), 1.0, distance)


def refuse_different(what: str, expected: Tensor, found: Tensor, precision: str) -> float:
    """Return the `difference` of two outputs.

    Raises:
        ValueError: it is more than arithmetic of this precision explains, or the shapes differ; `what` gave the output `found`.
    """
    if found.shape != expected.shape:
        raise ValueError(f"{what} gives an output {tuple(found.shape)}, the model {tuple(expected.shape)}")
    share = difference(expected, found)
    if not share <= LARGEST[precision]:
        raise ValueError(f"{what}'s output differs from the model's by {share:.3g} of its largest number")
    return share

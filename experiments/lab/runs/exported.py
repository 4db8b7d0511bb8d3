"""What an export of a model made."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lab.data.sets import Norm


@dataclass
class Exported:
    """An exported model.

    Args:
        program: the program that torch.export made of the module.
        module: computes the same in Python.
        shape: of an image.
        output: shape of an image's output.
        says: the meaning of the output, in words.
        classes: names of the classes, or of the numbers that are predicted.
        norm: mean and deviation by which the module normalises images.
        step: the update that the weights are from.
        pixels: the dtype of images.
    """

    program: Any
    module: nn.Module
    shape: list[int]
    output: list[int]
    says: str
    classes: list[str]
    norm: Norm
    step: int
    pixels: str

    def record(self) -> dict[str, Any]:
        """Return the fields of this model in a run's record."""
        shapes = {"shape": self.shape, "output": self.output, "pixels": self.pixels}
        return shapes | {"says": self.says, "classes": self.classes, "step": self.step}

"""What torch.export made of a model."""

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
        norm: mean and deviation by which the module normalises images.
        record: the fields of this model in a run's record: shape of an image, multiple (height and width are free multiples of it; 0: they
            are those of the shape), output (the shape of an image's output), pixels (the dtype of images), says (the meaning of the output,
            in words), classes (names of the classes, or of the numbers that are predicted), input (how to prepare an image), and step (the
            update that the weights are from).
        fixed: which size alone it takes and why, where the task's models take any; else empty.
    """

    program: Any
    module: nn.Module
    norm: Norm
    record: dict[str, Any]
    fixed: str = ""

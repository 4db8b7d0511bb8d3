"""The values that options take, for annotations."""

from typing import Literal

Reduction = Literal["none", "mean", "sum"]
BatchReduction = Literal["none", "batchmean", "mean", "sum"]
ScalarReduction = Literal["mean", "sum"]
Gradient = Literal["forward", "backward"]
Empty = Literal["nan", "zero"]
Activation = Literal["softmax", "sigmoid"]
BoxFormat = Literal["xyxy", "cxcywh"]

"""Custom losses, each made from a formula."""

from lossforge.losses.custom.error import FormulaError
from lossforge.losses.custom.find import find, named
from lossforge.losses.custom.loss import CustomLoss, CustomModule, boxes, elementwise, rowwise

__all__ = ["CustomLoss", "CustomModule", "FormulaError", "boxes", "elementwise", "find", "named", "rowwise"]

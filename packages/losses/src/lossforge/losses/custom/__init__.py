"""Custom losses, each made from a formula."""

from lossforge.losses.custom.find import find, named
from lossforge.losses.custom.loss import CustomLoss, CustomModule, boxes, elementwise, rowwise
from lossforge.losses.formulas.error import FormulaError

__all__ = ["CustomLoss", "CustomModule", "FormulaError", "boxes", "elementwise", "find", "named", "rowwise"]

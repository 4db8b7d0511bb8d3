"""Losses of one's own, from a formula."""

from lossforge.losses.custom.find import find
from lossforge.losses.custom.loss import CustomLoss, CustomModule, boxes, elementwise, rowwise
from lossforge.losses.custom.source import FormulaError

__all__ = ["CustomLoss", "CustomModule", "FormulaError", "boxes", "elementwise", "find", "rowwise"]

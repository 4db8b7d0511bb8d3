"""Losses of rows of classes under a softmax."""

from lossforge.kernels.formulas import softmax
from lossforge.losses.formulas.common import Formula

FORMULAS = {
    "cross_entropy": Formula(softmax.cross_entropy, lambda z: z),
}

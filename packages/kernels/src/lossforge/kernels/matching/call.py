"""The weights of a cost of matching."""

from typing import NamedTuple


class Weights(NamedTuple):
    """Factors of the three costs, and the numbers of the focal one."""

    classes: float
    corners: float
    overlap: float
    alpha: float
    gamma: float

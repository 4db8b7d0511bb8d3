"""Each formula twice: as the kernels inline it, and as its plain-torch twin, which autograd differentiates.

The twins of element-wise formulas take (x, y, *hyper) and return the value per element; those of row-wise ones take (z, *hyper),
z = -ln p of a row's class; those of boxes (boxes1, boxes2, *hyper), and return one value a pair;
those of overlap losses (I, P, Y, *hyper), sums over a region; those of divergences (ln p, ln q, *hyper).
"""

from lossforge.losses.formulas import binary, box, divergence, likelihood, overlap, regression, softmax
from lossforge.losses.formulas.common import Formula

FAMILIES = (regression, binary, likelihood, softmax, box, overlap, divergence)
FORMULAS: dict[str, Formula] = {name: formula for family in FAMILIES for name, formula in family.FORMULAS.items()}

__all__ = ["FORMULAS", "Formula"]

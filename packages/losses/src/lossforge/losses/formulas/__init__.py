"""Each formula twice: as the kernels inline it, and as its plain-torch twin, which autograd differentiates.

The twins of element-wise formulas take (x, y, *hyper) and return the value per element; those of row-wise ones take (z, *hyper), z per row;
those of divergences (ln p, ln q, *hyper).
"""

from lossforge.losses.formulas import binary, divergence, regression, softmax
from lossforge.losses.formulas.common import Formula

FORMULAS: dict[str, Formula] = {**regression.FORMULAS, **binary.FORMULAS, **softmax.FORMULAS, **divergence.FORMULAS}

__all__ = ["FORMULAS", "Formula"]

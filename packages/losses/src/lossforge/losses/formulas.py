"""Every formula by name, twice: in plain torch, which autograd differentiates, and as the kernels inline it.

In plain torch, formulas of elements take (x, y, *hyper) and return the value per element; those of rows (z, *hyper), z = -ln p of a row's
class; those of boxes (boxes1, boxes2, *hyper), (..., 4), corners where the loss is one of overlap, and return one value a pair; those of
regions (I, P, Y, *hyper), a number a region each; those of divergences (ln p, ln q, *hyper), (N, C, d…), and return the terms of the sum
over classes, 0 where a class has probability 0 in what is multiplied by the probability.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Formulas

R = TypeVar("R", bound=Callable[..., Tensor])


class DeviceFunctions:
    """Where formulas are found as device functions, once a kernel needs them: they need Triton.

    An attribute is a file of lossforge.kernels.formulas. A call makes a device function of a plain one, which stands beside its reference
    and is written with device_names; one that returns its value alone is differentiated by the first `variables` of its arguments.
    """

    def __getattr__(self, file: str) -> Any:
        return importlib.import_module(f".formulas.{file}", kernels.__name__)

    def __call__(self, function: Callable[..., Any], variables: int = 1) -> Any:
        from lossforge.losses.custom.derive import differentiated
        from lossforge.losses.custom.source import device

        return differentiated(device(function), variables)


class Formula:
    """A formula twice.

    reference: in plain torch. load: gives it as device functions, and is called when a kernel needs them. saturates: of elements with
    class indices, whether a right answer at a logit of ±inf takes its limit, 0, as kernels for targets of 0 and 1 give it.
    """

    def __init__(self, reference: Callable[..., Tensor], load: Callable[[DeviceFunctions], Formulas], saturates: bool = False) -> None:
        self.reference, self.load, self.saturates = reference, load, saturates

    @functools.cached_property
    def kernels(self) -> Formulas:
        return self.load(DeviceFunctions())


FORMULAS: dict[str, Formula] = {}


def formula(name: str, load: Callable[[DeviceFunctions], Formulas], saturates: bool = False) -> Callable[[R], R]:
    """Enter a plain-torch reference, with its device functions: `lambda of: Formulas(of.focal.focal)`, or with a plain `of(function)`."""

    def enter(reference: R) -> R:
        FORMULAS[name] = Formula(reference, load, saturates)
        return reference

    return enter

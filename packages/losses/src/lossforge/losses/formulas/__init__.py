"""Every formula by name, twice: in plain torch, which autograd differentiates, and as the kernels inline it.

In plain torch, formulas of elements take (x, y, *hyper) and return the value per element; those of rows (z, *hyper), z = -ln p of a row's
class; those of boxes (boxes1, boxes2, *hyper), (..., 4), corners where the loss is one of overlap, and return one value a pair; those of
regions (I, P, Y, *hyper), a number a region each; those of divergences (ln p, ln q, *hyper), (N, C, d…), and return the terms of the sum
over classes, 0 where a class has probability 0 in what is multiplied by the probability. Those that are BLENDED take the teacher's
probability of these classes too, and return one term, (N, 1, d…).
"""

import functools
import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lossforge import kernels
from lossforge.kernels.call import Formulas

R = TypeVar("R", bound=Callable[..., Tensor])


Function = str | Callable[..., Any]
"""A device function, found when a kernel needs it, because it needs Triton.

"file.name" or "folder.file.name": the function of lossforge.kernels.formulas. A plain function, which stands beside its reference and is
written with device_names, becomes one; if it returns its value alone, its derivatives are added. A device function is taken as it is.
"""


class DeviceFormula(NamedTuple):
    """A loss's formula for the kernels: the fields of lossforge.kernels.call.Formulas, whose functions are not loaded yet.

    formula: None where the template's kernel has the formula itself. variables: by how many of its arguments, the first, a plain function
    is differentiated.
    """

    formula: Function | None
    special: Function | tuple[Function, ...] | None = None
    applies: Function | None = None
    binary: "DeviceFormula | None" = None
    heavy: bool = False
    averaged: Function | None = None
    terms: Function | None = None
    slopes: Function | None = None
    blend: Function | None = None
    variables: int = 1

    def load(self) -> Formulas:
        """Return the device functions."""
        return Formulas(*[self._loaded(value) for value in self[:-1]])

    def _loaded(self, value: Any) -> Any:
        if isinstance(value, str):
            file, _, name = value.rpartition(".")
            return getattr(importlib.import_module(f".formulas.{file}", kernels.__name__), name)
        if isinstance(value, DeviceFormula):
            return value.load()
        if isinstance(value, tuple):
            return tuple(map(self._loaded, value))
        if not isinstance(value, FunctionType):
            return value
        from lossforge.losses.formulas.derive import differentiated
        from lossforge.losses.formulas.source import device

        return differentiated(device(value), self.variables)


class Formula:
    """A formula twice.

    reference: in plain torch. device: for the kernels; None where plain torch computes it on every device. saturates: of elements with
    class indices, whether a right answer at a logit of ±inf takes its limit, 0, as kernels for targets of 0 and 1 give it.
    """

    def __init__(self, reference: Callable[..., Tensor], device: DeviceFormula | None, saturates: bool = False) -> None:
        self.reference, self.device, self.saturates = reference, device, saturates

    @functools.cached_property
    def kernels(self) -> Formulas:
        assert self.device is not None
        return self.device.load()


FORMULAS: dict[str, Formula] = {}


def has_kernel(name: str) -> bool:
    """Return whether kernels inline a formula, or have it themselves."""
    return name not in FORMULAS or FORMULAS[name].device is not None


def formula(name: str, device: DeviceFormula | None, saturates: bool = False) -> Callable[[R], R]:
    """Enter a plain-torch reference, with its device functions: `DeviceFormula("softmax.focal")`, or a plain `DeviceFormula(function)`.

    device: None where no kernel computes it.
    """

    def enter(reference: R) -> R:
        FORMULAS[name] = Formula(reference, device, saturates)
        return reference

    return enter

"""Loss functions as fused Triton kernels: drop-in functions and modules.

CUDA tensors go through the kernels; others, float64, and whatever the kernels do not differentiate through the plain-torch reference.
"""
# ruff: noqa: F403

import types as _types
import typing as _typing

from lossforge.losses.check import check as check
from lossforge.losses.custom import CustomLoss as CustomLoss
from lossforge.losses.custom import FormulaError as FormulaError
from lossforge.losses.custom import boxes as boxes
from lossforge.losses.custom import elementwise as elementwise
from lossforge.losses.custom import rowwise as rowwise
from lossforge.losses.functional import *
from lossforge.losses.modules import *
from lossforge.losses.preference import *
from lossforge.losses.state import backend as backend
from lossforge.losses.state import plain_torch as plain_torch

if not _typing.TYPE_CHECKING:  # checkers follow the imports
    __all__ = [name for name, value in globals().items() if not (name.startswith("_") or isinstance(value, _types.ModuleType))]

"""Losses whose rows are spread over processes: their option `group`, and what each public function does with it."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from lossforge.losses.base import checks
from lossforge.losses.base.option_types import DeviceMesh, ProcessGroup
from lossforge.losses.base.options import SharedOptions
from lossforge.losses.base.record import R
from lossforge.losses.engine.parallel.agreement import RefusedByAllError, tell_refusal

P = ParamSpec("P")


class SpreadOptions(SharedOptions, total=False):
    """group: processes over which the features are spread."""

    group: ProcessGroup | DeviceMesh | None


def over_processes(definition: Callable[P, R]) -> Callable[P, R]:
    """Where the rows are spread over processes, leave a graph of torch.compile, and tell the others of arguments that are refused."""

    @functools.wraps(definition)
    def called(*args: P.args, **options: P.kwargs) -> R:
        if (group := options.get("group")) is None:
            return definition(*args, **options)
        if torch.compiler.is_compiling():
            # not by torch's decorator, whose import of torch.compile takes long
            found: R = torch.compiler.disable(called)(*args, **options)
            return found
        try:
            return definition(*args, **options)
        except RefusedByAllError:
            raise
        except (TypeError, ValueError, IndexError):
            tell_refusal(group, [*args, *options.values()])
            raise

    return checks.with_own_code(called, definition.__name__)


def group_of(options: SpreadOptions, gathered: dict[str, bool], others: dict[str, bool] | None = None) -> Any:
    """Take the group out of the options.

    Args:
        gathered: by name, whether an argument says how features of other processes are laid out.
        others: whether one is given that is not served with group.
    """
    group = options.pop("group", None)
    if group is None:
        return None
    for name, given in gathered.items():
        if given:
            raise ValueError(f"{name} belongs to features that were gathered: with group each process gives its own rows alone")
    for name, given in (others or {}).items():
        if given:
            raise ValueError(f"{name} is not served with group: gather the features, and leave group out")
    return group

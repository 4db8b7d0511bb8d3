"""Calls on a part of the logits that a linear layer gives: some of the rows, or some of the classes."""

from typing import Any

from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.plans import narrowed
from lossforge.losses.base.record import Fusing


def of_rows(fusing: Fusing[Any], call: Any, start: int, end: int, x: Tensor | Head, target: Tensor | None) -> Any:
    """Return the template's call of the rows from start to end. x: their logits or layer. target: a teacher's, where that has a layer."""
    rows = call.x.shape[0]
    given: dict[str, Any] = {"x": x}
    for name in (*fusing.rows, *fusing.elements):
        t = getattr(call, name)
        if isinstance(t, Tensor) and (name in fusing.rows or (t.ndim == 2 and t.shape[0] == rows)):
            given[name] = narrowed(t, 0, start, end)
    if call.target is None:  # the diagonal
        given["offset"] = call.offset + start
    if target is not None:
        given["target"] = target
    return call._replace(**given)


def of_classes(fusing: Fusing[Any], call: Any, start: int, end: int, x: Tensor, target: Tensor | None) -> Any:
    """Return the call of the classes from start to end. Class indices and their weights count all classes."""
    given: dict[str, Any] = {"x": x}
    for name in fusing.classes:
        if (t := getattr(call, name)) is not None:
            given[name] = narrowed(t, 0, start, end)
    if target is not None:
        given["target"] = target
    elif call.target.ndim == 2:
        given["target"] = narrowed(call.target, 1, start, end)
    return call._replace(**given)

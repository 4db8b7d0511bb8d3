"""Calls on a part of the logits that a linear layer gives: some of the rows, or some of the classes."""

from typing import Any

from torch import Tensor

from lossforge.kernels.call import DivergenceCall, ElementwiseCall, RowwiseCall, TopKCall

ROWS = ("target", "target_b", "lam", "indices", "labels")
"""Fields with an entry a row, in dimension 0."""
EACH = ("weight", "group", "parameter")
"""Fields of an element-wise call that broadcast to the logits."""


def of_rows(call: Any, start: int, end: int, x: Tensor, target: Tensor | None) -> Any:
    """Return the template's call of the rows from start to end, on their logits. target: a teacher's, where that has a layer."""
    rows = call.x.shape[0]
    given: dict[str, Any] = {"x": x}
    for name in ROWS:
        t = getattr(call, name, None)
        if t is not None:
            given[name] = t[start:end]
    if isinstance(call, (DivergenceCall, TopKCall)):
        given["weight"] = None if call.weight is None else call.weight[start:end]
    elif isinstance(call, ElementwiseCall):
        for name in EACH:
            t = getattr(call, name)
            if t is not None and t.ndim == 2 and t.shape[0] == rows:
                given[name] = t[start:end]
        if call.target is None:
            given["offset"] = call.offset + start
    if target is not None:
        given["target"] = target
    return call._replace(**given)


def of_classes(call: Any, start: int, end: int, x: Tensor, target: Tensor | None) -> Any:
    """Return the call of the classes from start to end, of a loss of rows or a divergence. Class indices and weights count all classes."""
    given: dict[str, Any] = {"x": x}
    if target is not None:
        given["target"] = target
    elif call.target.ndim == 2:
        given["target"] = call.target[:, start:end]
    if isinstance(call, RowwiseCall) and call.bias is not None:
        given["bias"] = call.bias[start:end]
    return call._replace(**given)

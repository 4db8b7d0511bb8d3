"""Host side of the template of several views of a sample: tile sizes, and the launches."""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas, ViewsCall
from lossforge.kernels.engine.launch import Launch, Launcher, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors
from lossforge.kernels.views.kernel import Views, views_gradient_kernel, views_kernel

ELEMENTS = 2048
"""Of a tile, at most."""


def _views(t: Any) -> Views:
    row, column = t.stride()
    return Views(t, row, column)


def _constants(call: ViewsCall) -> dict[str, int]:
    views = triton.next_power_of_2(call.splits)
    classes = min(triton.next_power_of_2(call.x.shape[1]), max(1, ELEMENTS // views))
    return {"S": call.splits, "SP": views, "BC": classes, "num_warps": 4}


def _numbers(call: ViewsCall) -> tuple[float, int, int]:
    samples = call.x.shape[0] // call.splits
    return float(call.loss_scale / samples), samples, call.x.shape[1]


class Stats(NamedTuple):
    stats: Tensor | None


def _make(call: ViewsCall, kept: Stats) -> Launch:
    numbers = _numbers(call)
    return Launch(views_kernel, (numbers[1],), (_views(call.x), kept.stats, sum_slots(), *numbers), totals=1, **_constants(call))


class Gradient(NamedTuple):
    """What the second launch takes. grad_output: 0-d; None for 1."""

    stats: Tensor
    grad_output: Tensor | None
    gradient: Tensor


def _make_gradient(call: ViewsCall, g: Gradient) -> Launch:
    numbers, constants = _numbers(call), _constants(call)
    grid = (numbers[1], triton.cdiv(call.x.shape[1], constants["BC"]))
    return Launch(views_gradient_kernel, grid, (_views(call.x), _views(g.gradient), g.stats, g.grad_output, *numbers), **constants)


FORWARD, GRADIENT = Launcher(_make), Launcher(_make_gradient)


def forward(call: ViewsCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> tuple[Tensor | None, ...]:
    """As elementwise.launch.forward."""
    stats = new_like(call.x, call.shapes(keep)[1])
    (total,) = FORWARD.ready(call, Stats(stats)).start()
    if gradients[0] is not None and stats is not None:
        GRADIENT.ready(call, Gradient(stats, None, gradients[0])).start()
    return total, stats


def backward(call: ViewsCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """As elementwise.launch.backward."""
    (stats,), (grad_output,) = kept, grad_outputs
    if stats is None:
        _, stats = forward(call, formulas, [None], True)
    assert stats is not None
    assert gradients[0] is not None
    GRADIENT.ready(call, Gradient(stats, grad_output, gradients[0])).start()

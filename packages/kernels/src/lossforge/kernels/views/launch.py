"""Host side of the template of several views of a sample: tile sizes, and the launches."""

from collections.abc import Sequence

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Tensors, as_strided
from lossforge.kernels.views.call import ViewsCall
from lossforge.kernels.views.kernel import views_gradient_kernel, views_kernel

ELEMENTS = 2048
"""Of a tile, at most."""


def _constants(call: ViewsCall) -> dict[str, int]:
    views = triton.next_power_of_2(call.splits)
    classes = min(triton.next_power_of_2(call.x.shape[1]), max(1, ELEMENTS // views))
    return {"S": call.splits, "SP": views, "BC": classes, "num_warps": 4}


def _numbers(call: ViewsCall) -> tuple[float, int, int]:
    samples = call.x.shape[0] // call.splits
    return float(call.loss_scale / samples), samples, call.x.shape[1]


def _write_gradient(call: ViewsCall, stats: Tensor | None, grad_output: Tensor | None, gradient: Tensor) -> None:
    """Write the gradient. grad_output: 0-d; None for 1."""
    numbers, constants = _numbers(call), _constants(call)
    grid = (numbers[1], triton.cdiv(call.x.shape[1], constants["BC"]))
    arguments = (as_strided(call.x), as_strided(gradient), stats, grad_output, *numbers)
    Launch(views_gradient_kernel, grid, arguments, **constants).start()


def forward(call: ViewsCall, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """As elementwise.launch.forward."""
    stats, numbers = new_like(call.x, call.shapes(keep)[1]), _numbers(call)
    arguments = (as_strided(call.x), stats, sum_slots(), *numbers)
    (total,) = Launch(views_kernel, (numbers[1],), arguments, totals=1, **_constants(call)).start()
    if gradients[0] is not None:
        _write_gradient(call, stats, None, gradients[0])
    return total, stats


def backward(call: ViewsCall, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Sequence[Tensor]) -> None:
    """As elementwise.launch.backward."""
    stats = forward(call, formulas, [None], True)[1] if kept[0] is None else kept[0]
    _write_gradient(call, stats, grad_outputs[0], gradients[0])

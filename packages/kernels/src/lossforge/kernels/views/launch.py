"""Host side of the template of several views of a sample: tile sizes, and the launches."""

import triton
from torch import Tensor

from lossforge.kernels.engine.launch import Launch, new_like, sum_slots
from lossforge.kernels.engine.layout import Tensors, as_strided
from lossforge.kernels.engine.template import Launches, TwoLaunches
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


def _compute(call: ViewsCall, formulas: None, keep: bool) -> tuple[Tensors, Tensors]:
    stats, numbers = new_like(call.x, call.shapes(keep)[1]), _numbers(call)
    arguments = (as_strided(call.x), stats, sum_slots(), *numbers)
    return Launch(views_kernel, (numbers[1],), arguments, totals=1, **_constants(call)).start(), (stats,)


def _differentiate(call: ViewsCall, formulas: None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    numbers, constants = _numbers(call), _constants(call)
    grid = (numbers[1], triton.cdiv(call.x.shape[1], constants["BC"]))
    arguments = (as_strided(call.x), as_strided(gradients[0]), *kept, grad_output, *numbers)
    Launch(views_gradient_kernel, grid, arguments, **constants).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward

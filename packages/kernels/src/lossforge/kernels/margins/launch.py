"""Host side of the template of margins between a row's classes: tiles, and the launch."""

import triton

from lossforge.kernels.call import Formulas
from lossforge.kernels.elementwise.kernel import Formula
from lossforge.kernels.elementwise.launch import OneLaunch, Wanted
from lossforge.kernels.engine.launch import Launch, in_order, sum_slots
from lossforge.kernels.engine.layout import as_strided, constants
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.margins.call import MarginsCall
from lossforge.kernels.margins.kernel import Targets, Tile, margins_kernel, swept_row, whole_rows
from lossforge.kernels.tiles import PROGRAMS, margin_tiles


def _make(call: MarginsCall, wanted: Wanted, formulas: Formulas) -> Launch:
    (gradient,), (n, classes) = wanted.gradients, call.x.shape
    lists = call.target.ndim == 2
    tiles = margin_tiles(classes, lists)
    reach = max((tiles.columns + classes) * t.stride(1) for t in (call.x, gradient) if t is not None)
    arguments = (
        *[as_strided(t) for t in (call.x, gradient, wanted.upstream[0], wanted.out)],
        constants(Targets(call.target, call.weight, call.target.shape[1] if lists else 1, LISTS=lists)),
        tuple(call.hyper),
        wanted.scaling(call),
        sum_slots() if wanted.total else None,
        Formula(formulas.formula),
        constants(Tile(classes, ROWS=tiles.rows, CLASSES=tiles.columns, WIDE=reach >= 2**31)),
        n,
    )
    take = whole_rows if tiles.columns >= classes else swept_row
    grid = (min(triton.cdiv(n, tiles.rows), PROGRAMS),)
    return Launch(margins_kernel, grid, arguments, totals=int(wanted.total), take=take, num_warps=tiles.warps)


def _prepared(call: MarginsCall) -> MarginsCall:
    """Return the call with tensors that the kernel addresses, and the loss over the number of classes."""
    scale = call.loss_scale / call.x.shape[1]
    return call._replace(target=in_order(call.target), weight=in_order(call.weight), loss_scale=scale)


_LAUNCH: Launches = OneLaunch(_make, lambda call: call.x.shape[:1], _prepared)
forward, backward = _LAUNCH.forward, _LAUNCH.backward

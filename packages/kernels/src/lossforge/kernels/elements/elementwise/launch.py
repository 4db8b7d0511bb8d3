"""Host side of the element-wise template: how its tensors lie in memory, tile sizes, and the launch."""

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.elements.elementwise import targets
from lossforge.kernels.elements.elementwise.kernel import WARP, Formula, Inlined, Outputs, Space, Weights, elementwise_kernel
from lossforge.kernels.elements.layout import geometry
from lossforge.kernels.elements.mask import Counting, sum_of_mask
from lossforge.kernels.engine.launch import Launch, addressed, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Tensors, broadcast, constants, per_row, strided
from lossforge.kernels.engine.reduce import count, counts_itself
from lossforge.kernels.engine.template import Wanted
from lossforge.kernels.tiles import COUNTED, PROGRAMS, element_tiles, most_registers

GROUP = 8  # neighbouring elements of a row, of which the row's target is read once


def _loader(call: ElementwiseCall) -> Callable[..., Any]:
    if call.target is None:
        return targets.diagonal
    if not call.by_class():
        return targets.dense
    if call.target_b is not None:
        return targets.mixup
    return targets.class_index if call.lam is None else targets.scored


def _make(call: ElementwiseCall, wanted: Wanted, formulas: Formulas) -> Launch | None:
    """None where the dimensions of the tensors do not join into three."""
    x, target, group_weight = call.x, call.target, call.group_weight
    class_dim = call.dim % (x.ndim or 1)
    by_row = target is None or call.by_class()
    background = formulas.binary
    binary = background if by_row and call.target_b is None and call.lam is None else None
    formulas = binary or formulas
    rows = (target, call.target_b, call.lam) if call.by_class() else ()
    upstream, _ = wanted.upstream
    weights = call.weight, call.mask, call.group, call.parameter
    each = (x, target, call.target_b, call.lam, *weights, upstream, wanted.out, wanted.gradients[0])
    strides = [
        per_row(t.shape, t.stride(), x.shape, class_dim) if any(t is row for row in rows) else broadcast(t.shape, t.stride(), x.shape)
        for t in each
        if t is not None
    ]
    g = geometry(x.shape, strides, class_dim if by_row else None)
    if g is None:
        return None
    steps = iter(g.strides)
    x_, target_, target_b, lam, weight, mask, group, parameter, *outputs = [strided(t, steps) for t in each]
    n = x.numel()
    columns = None if g.flat and not by_row else g.columns
    read = 2 + sum(t is not None for t in (call.weight, call.mask, call.parameter, call.target_b, call.lam))
    grouped = by_row and columns is not None and columns % GROUP == 0
    special = formulas.special is not None
    tiles = element_tiles(n, x.itemsize, read, call.by_class(), target is None, grouped, special, formulas.heavy)
    told_apart = call.by_class() and call.target_b is None and columns is not None and tiles.block // columns + 2 <= WARP.value
    if not told_apart or (x.itemsize == 4 and columns is not None and columns <= tiles.block):
        background = None  # float32 of 80 classes was 2 % slower with both branches on an H200
    inlined = Inlined(
        general=Formula(formulas.formula, background=background and background.formula),
        special=Formula(formulas.special, background=background and background.special),
        applies=formulas.applies,
        load_target=_loader(call),
        BINARY=binary is not None,
    )
    flat, big = g.flat and not by_row, g.big(n, tiles.block)
    space = Space(g.n1, g.n2, COLUMNS=columns, FLAT=flat, BIG=big, BLOCK=tiles.block, G=GROUP if grouped else 1, STAGES=tiles.stages)
    arguments = (
        x_,
        targets.Targets(target_, target_b, lam, x.shape[class_dim] if by_row else 0, call.ignore_index),
        Weights(weight, mask, group, group_weight, group_weight.shape[0] if group_weight is not None else 0),
        parameter,
        Outputs(*outputs),
        tuple(call.hyper),
        wanted.scaling(call),
        sum_slots() if wanted.total else None,
        constants(inlined),
        constants(space),
        n,
        call.offset,
        target.numel() if wanted.counted and target is not None else 0,
    )
    meta = {"COUNT": COUNTED if wanted.counted else 0, "num_warps": tiles.warps, **most_registers(tiles.warps, tiles.programs)}
    return Launch(elementwise_kernel, (min(triton.cdiv(n, tiles.block), PROGRAMS),), arguments, totals=int(wanted.total), **meta)


def _start(call: ElementwiseCall, wanted: Wanted, formulas: Formulas) -> tuple[Tensor, ...]:
    expands = dict.fromkeys(("weight", "mask", "group", "parameter"), call.x.shape)
    if call.target is not None:
        expands |= dict.fromkeys(("target_b", "lam"), call.target.shape)
    return addressed(_make, call, wanted, formulas, expands=expands).start()


def _divisor(call: ElementwiseCall) -> Tensor | None:
    if not call.counted:
        return call.normalizer
    if call.mask is not None:
        counting = Counting(call.mask, call.target, call.target_b) if call.by_class() else Counting(call.mask)
        return sum_of_mask(counting, call.x.shape, call.dim % (call.x.ndim or 1), call.ignore_index)
    assert call.target is not None
    classes = call.x.shape[call.dim]
    return count(call.target, classes, call.ignore_index, target_b=call.target_b, scale=float(classes))


def _scale(call: ElementwiseCall) -> float:
    known = call.mean() and call.normalizer is None and not call.counted
    return float(call.factor() / call.x.numel() if known else call.factor())


def forward(call: ElementwiseCall, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
    """Compute the loss and its divisor as engine.template.Launches says."""
    itself = alone and call.counted and call.mask is None and call.target is not None and counts_itself(call.target, call.target_b)
    divisor = None if itself else _divisor(call)
    out = new_like(call.x, call.x) if call.reduction == "none" else None
    total = _start(call, Wanted(_scale(call), divisor, itself, out=out, gradients=tuple(gradients)), formulas)
    return total[0] if out is None else out, divisor if call.counted else None


def backward(call: ElementwiseCall, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
    """Write the gradient as engine.template.Launches says."""
    divisor = _divisor(call) if kept[0] is None else kept[0]
    _start(call, Wanted(_scale(call), divisor, grad_output=grad_outputs[0], gradients=tuple(gradients)), formulas)

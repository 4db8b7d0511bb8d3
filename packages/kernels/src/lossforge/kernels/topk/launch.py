"""Host side of topk.py: the launches."""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.divergence.backward import GradOutput
from lossforge.kernels.divergence.kernel import Outputs
from lossforge.kernels.divergence.rows import Marks
from lossforge.kernels.engine.launch import PLANS, Layout, Plan, Slot, layout, slots
from lossforge.kernels.engine.layout import Strided, broadcast, per_row
from lossforge.kernels.engine.reduce import NO_SUM, Sum, new_sum
from lossforge.kernels.row.layout import alignment, as_rows
from lossforge.kernels.row.rows import Logits
from lossforge.kernels.row.sweep import Config
from lossforge.kernels.tiles import forward_tiles, tried
from lossforge.kernels.topk.kernel import Entries, Softening, topk_kernel


class TopKSpec(NamedTuple):
    """A KL from top-k entries, but for the memory of the logits. indices, values: (N, K, d…); others: as of DivergenceSpec."""

    indices: Tensor
    values: Tensor
    labels: Tensor | None = None
    weight: Tensor | None = None
    renormalize: bool = False
    tail: bool = False
    temperature: float = 1.0
    ignore_index: int = -100
    scale: float = 1.0
    divisor: Tensor | None = None
    empty_is_zero: bool = False
    counted: bool = False


class Operands(NamedTuple):
    """Tensors of a launch, in the order of their Slots: a layout or a Slot each, None where absent."""

    x: Any
    indices: Any
    values: Any
    labels: Any
    weight: Any
    gradient: Any
    divisor: Any
    loss: Any
    stats: Any
    upstream: Any


@functools.lru_cache(maxsize=PLANS)
def _plan(kind: tuple[bool, bool, int, bool, bool], layouts: tuple[Layout | None, ...], total: bool, tried: object) -> Plan | None:
    """kind: renormalize, tail, ignore_index, empty_is_zero, counted. None where dimensions do not join. tried: tiles.tried()."""
    renormalize, tail, ignore_index, empty_is_zero, counts = kind
    given = Operands(*layouts)
    t = slots(Operands, [one is not None for one in layouts])
    present = sum(one is not None for one in layouts)
    shape, k = given.x[0], given.indices[0][1]
    entries = [shape[0], k, *shape[2:]]
    strides = [given.x[1], broadcast(given.indices[0], given.indices[1], entries), broadcast(given.values[0], given.values[1], entries)]
    for one in (given.labels, given.weight):
        if one is not None:
            strides.append(per_row(one[0], one[1], shape, 1))
    if given.gradient is not None:
        strides.append(given.gradient[1])
    rows = as_rows(shape, strides)
    if rows is None:
        return None
    own, *rest = rows.strides
    remaining = iter(rest)
    indices, values, labels, weight, gradient = (
        Strided() if one is None else Strided(slot, *next(remaining))
        for one, slot in zip(layouts[1:6], (t.indices, t.values, t.labels, t.weight, t.gradient), strict=True)
    )
    written = [] if given.gradient is None else [(given.gradient, rows.strides[-1])]
    align, _ = alignment([(given.x, own), *written], rows.classes)
    adjacent = own[1] == 1 and own[2] != 1 and rows.rows > 1
    tiles = forward_tiles(rows.classes, given.x[2].itemsize, adjacent, adjacent, True)
    blocks = triton.cdiv(rows.rows, tiles.rows)
    counted = math.prod(given.labels[0]) if counts else 0
    return Plan(
        topk_kernel,
        (rows.outer * blocks,),
        given.x[3],
        (
            Logits(t.x, *own, rows.classes),
            Entries(indices, values, k),
            Marks(labels, weight, ignore_index),
            gradient,
            Outputs(t.loss, t.stats),
            GradOutput(t.upstream, 1 if given.upstream is not None and given.upstream[0] else 0),
            slots(Sum, [True] * 3, present) if total else None,
            Softening(Slot(present + 3 * total), Slot(present + 3 * total + 1), t.divisor),
            rows.rows,
            blocks,
            counted,
        ),
        config=Config(
            BR=tiles.rows,
            BC=tiles.classes,
            VEC=tiles.vector,
            ONE_TILE=tiles.one,
            WIDE=max(s[2] for s in rows.strides) * (rows.classes + 65536) >= 2**31,  # a tile may reach beyond the row
            ALIGN=align,
            MULTIPLE=16 if adjacent and rows.rows % 16 == 0 else 1,
            COUNT=counted > 0,
            EMPTY_IS_ZERO=empty_is_zero,
            RENORMALIZE=renormalize,
            TAIL=tail,
            KP=triton.next_power_of_2(k),
        ),
        num_warps=tiles.warps,
    )


def _launch(
    spec: TopKSpec, x: Tensor, gradient: Tensor | None, loss: Tensor | None, stats: Tensor | None, upstream: Tensor | None
) -> Tensor | None:
    """Launch; the total where neither values per row nor a backward are asked for."""
    operands = (x, spec.indices, spec.values, spec.labels, spec.weight, gradient, spec.divisor, loss, stats, upstream)
    kind = (spec.renormalize, spec.tail, spec.ignore_index, spec.empty_is_zero, spec.counted)
    total = loss is None and upstream is None
    plan = _plan(kind, tuple([layout(t) for t in operands]), total, tried())
    if plan is None:
        names = ("indices", "values", "labels", "weight")
        copies = {name: t.contiguous() for name in names if (t := getattr(spec, name)) is not None}
        fresh = None if gradient is None else torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
        result = _launch(spec._replace(**copies), x.contiguous(), fresh, loss, stats, upstream)
        if gradient is not None and fresh is not None:
            gradient.copy_(fresh)
        return result
    sum = new_sum(plan.grid[0], x.device) if total else NO_SUM
    plan.launch((*operands, *sum), (1.0 / spec.temperature, spec.scale))
    return sum.total


def topk_divergence(
    spec: TopKSpec, x: Tensor, *, total: bool = True, stats: bool = False, gradient: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """One launch over logits x (N, C, d…): the loss as a total or per row, the statistics that backward needs, and the gradient."""
    loss = None if total else torch.empty((x.shape[0], *x.shape[2:]), dtype=torch.float32, device=x.device)
    kept = torch.empty((2, x.numel() // x.shape[1]), dtype=torch.float32, device=x.device) if stats else None
    found = _launch(spec, x, gradient, loss, kept, None)
    result = loss if found is None else found
    assert result is not None
    return result, kept


def topk_divergence_backward(spec: TopKSpec, x: Tensor, stats: Tensor, upstream: Tensor, gradient: Tensor) -> None:
    """Write the gradient for the gradient that arrives at a launch's result: 0-d for a total, else per row."""
    _launch(spec, x, gradient, None, stats, upstream.contiguous())

"""Host side of the template of boxes: how its tensors lie in memory, and the launch."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.box.kernel import Boxes, Pairs, boxes_kernel
from lossforge.kernels.element.kernel import Formula, Outputs, Space
from lossforge.kernels.element.launch import Geometry, geometry
from lossforge.kernels.engine.launch import PLANS, Layout, Plan, Slot, layout, slots
from lossforge.kernels.engine.layout import Strided, broadcast, constants
from lossforge.kernels.engine.reduce import NO_SUM, Scaling, Sum, new_sum
from lossforge.kernels.tiles import PROGRAMS, box_tiles, tried


class Tensors(NamedTuple):
    """What a launch reads and writes: a layout or a Slot each, None where absent."""

    boxes1: Any
    boxes2: Any
    gradient1: Any
    gradient2: Any
    weight: Any
    upstream: Any
    out: Any
    factor: Any
    divisor: Any
    parts: Any = None
    ticket: Any = None
    total: Any = None


BOXES, PAIRWISE = Tensors._fields[:4], Tensors._fields[4:7]


def arrange(given: Tensors) -> tuple[Geometry, dict[str, int | None]] | None:
    """The launch's pairs as (n0, n1, n2) with each tensor's strides there, and the coordinates' strides of boxes not in order.

    None where more than three dimensions remain.
    """
    shape = given.boxes1[0][:-1]
    strides: list[Sequence[int]] = []
    steps: dict[str, int | None] = {}
    for name in BOXES:
        if (one := getattr(given, name)) is not None:
            pair, step = one[1][:-1], one[1][-1]
            whole = step == 1 and all(n == 1 or s % 4 == 0 for n, s in zip(shape, pair, strict=True))
            strides.append([s // 4 for s in pair] if whole else pair)
            steps[name] = None if whole else step
    strides += [broadcast(one[0], one[1], shape) for name in PAIRWISE if (one := getattr(given, name)) is not None]
    g = geometry(shape, strides, None)
    if g is None:
        return None
    for i, (name, step) in enumerate(steps.items()):
        if step is None and g.strides[i]:  # boxes of four neighbours, in another order than the launch's
            g.strides[i] = tuple(4 * s for s in g.strides[i])
            steps[name] = 1
    return g._replace(columns=None), steps


@functools.lru_cache(maxsize=PLANS)
def _plan(
    formula: Callable[..., Any],
    layouts: tuple[Layout | None, ...],  # of Tensors but the sum's three
    centered: bool,
    hyper: int,  # how many
    total: bool,
    empty_is_zero: bool,
    tried: object,  # tiles.tried()
) -> Plan | None:
    """None where the dimensions of the tensors do not join into three."""
    given = Tensors(*layouts)
    arranged = arrange(given)
    if arranged is None:
        return None
    g, steps = arranged
    present = [*(one is not None for one in layouts), total, total, total]
    t = slots(Tensors, present)
    strides = iter(g.strides)
    seen: dict[str, Any] = {}
    for name in (*BOXES, *PAIRWISE):
        made = Boxes if name in BOXES else Strided
        seen[name] = made() if getattr(given, name) is None else made(getattr(t, name), *next(strides))
        if name in steps:
            seen[name] = seen[name]._replace(step=steps[name])
    _, _, dtype, device, _ = given.boxes1
    n = math.prod(given.boxes1[0][:-1])
    tiles = box_tiles(n, dtype.itemsize)
    scale, *hypers = (Slot(sum(present) + i) for i in range(1 + hyper))
    return Plan(
        boxes_kernel,
        (min(triton.cdiv(n, tiles.block), PROGRAMS),),
        device,
        (
            constants(Pairs(seen["boxes1"], seen["boxes2"], seen["gradient1"], seen["gradient2"], centered)),
            seen["weight"],
            Outputs(seen["upstream"], seen["out"], None),
            tuple(hypers),
            constants(Scaling(scale, t.divisor, t.factor, empty_is_zero)),
            Sum(t.parts, t.ticket, t.total) if total else None,
            Formula(formula),
            constants(Space(g.n1, g.n2, None, g.flat, g.big(n, tiles.block), tiles.block)),
            n,
        ),
        num_warps=tiles.warps,
    )


def boxes(
    formula: Callable[..., Any],
    boxes1: Tensor,  # (..., 4)
    boxes2: Tensor,
    hyper: Sequence[float],
    *,
    centered: bool = False,
    weight: Tensor | None = None,
    upstream: Tensor | None = None,
    scale: float = 1.0,
    divisor: Tensor | None = None,
    empty_is_zero: bool = False,
    value: str = "sum",
    gradient1: Tensor | None = None,
    gradient2: Tensor | None = None,
) -> Tensor | None:
    """One launch over pairs of boxes, any strides: value · scale / divisor, and its gradients into those tensors that are given.

    centered: boxes are (cx, cy, w, h), which become corners before the formula, and gradients again what they were.
    weight: broadcasts to the pairs. divisor: 0-d. upstream: 0-d, or one a pair.
    value: "sum" returns the total (0-d float32), "each" one value a pair, float32, "nothing" None.
    """
    pairs = boxes1.shape[:-1]
    out = boxes1.new_empty(pairs, dtype=torch.float32) if value == "each" else None
    whole, factor = (upstream, None) if upstream is not None and upstream.ndim > 0 else (None, upstream)
    tensors = (boxes1, boxes2, gradient1, gradient2, weight, whole, out, factor, divisor)
    layouts = tuple([layout(t) for t in tensors])
    plan = _plan(formula, layouts, centered, len(hyper), value == "sum", empty_is_zero, tried())
    if plan is None:
        written = [(g, g.new_empty(g.shape)) for g in (gradient1, gradient2) if g is not None]
        fresh = {id(g): new for g, new in written}
        result = boxes(
            formula,
            boxes1.contiguous(),
            boxes2.contiguous(),
            hyper,
            centered=centered,
            weight=None if weight is None else weight.expand(pairs).contiguous(),
            upstream=factor if whole is None else whole.contiguous(),
            scale=scale,
            divisor=divisor,
            empty_is_zero=empty_is_zero,
            value=value,
            gradient1=fresh.get(id(gradient1)),
            gradient2=fresh.get(id(gradient2)),
        )
        for g, new in written:
            g.copy_(new)
        return result
    sum = new_sum(plan.grid[0], boxes1.device) if value == "sum" else NO_SUM
    plan.launch((*tensors, *sum), (scale, *hyper))
    return out if value == "each" else sum.total


def planned_boxes(
    formula: Callable[..., Any],
    tensors: Sequence[Any],  # boxes1, boxes2, weight, …
    divisor: Tensor | None,
    gradient1: Tensor | None,
    hyper: Sequence[float],
    scale: float,
    centered: bool,
    empty_is_zero: bool,
) -> Callable[..., Tensor] | None:
    """`boxes` for nothing but total and gradient of boxes1: (tensors, divisor, gradient) → total.

    For tensors of these layouts and other arguments the same. None where copies would be needed.
    """

    def ordered(tensors: Sequence[Any], divisor: Tensor | None, gradient1: Tensor | None) -> tuple[Any, ...]:
        boxes1, boxes2, weight, *_ = tensors
        return boxes1, boxes2, gradient1, None, weight, None, None, None, divisor

    layouts = tuple([layout(t) for t in ordered(tensors, divisor, gradient1)])
    plan = _plan(formula, layouts, centered, len(hyper), True, empty_is_zero, tried())
    if plan is None:
        return None
    programs, device, floats = plan.grid[0], tensors[0].device, (scale, *hyper)

    def total(tensors: Sequence[Any], divisor: Tensor | None, gradient1: Tensor | None) -> Tensor:
        sum = new_sum(programs, device)
        plan.launch((*ordered(tensors, divisor, gradient1), *sum), floats)
        assert sum.total is not None
        return sum.total

    return total

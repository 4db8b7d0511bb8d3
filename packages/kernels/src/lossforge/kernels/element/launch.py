"""Host side of the element-wise template: how its tensors lie in memory, tile sizes, and the launch."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.element import targets
from lossforge.kernels.element.kernel import WARP, Formula, Outputs, Space, Weights, elementwise_kernel
from lossforge.kernels.element.kernel import Formulas as Inlined
from lossforge.kernels.engine.launch import PLANS, Layout, Plan, Slot, layout, slots
from lossforge.kernels.engine.layout import Strided, broadcast, collapse, constants, per_row
from lossforge.kernels.engine.reduce import NO_SUM, Scaling, Sum, new_sum
from lossforge.kernels.tiles import COUNTED, PROGRAMS, element_tiles, most_registers, tried


class Geometry(NamedTuple):
    """The launch's elements as (n0, n1, n2), and each tensor's strides there; none where it lies in the order of the elements."""

    n1: int
    n2: int
    columns: int | None
    strides: list[tuple[int, ...]]

    @property
    def flat(self) -> bool:
        return not any(self.strides)

    def big(self, n: int, block: int) -> bool:
        """Whether 32 bits do not hold the coordinates of a tile, or an offset that follows from them."""
        n0 = block // self.columns + 2 if self.columns is not None else n // (self.n1 * self.n2)
        reach = max((n0 * s[0] + self.n1 * s[1] + self.n2 * s[2] for s in self.strides if s), default=0)
        return max(reach, 0 if self.columns is not None else n) >= 2**31


def geometry(shape: Sequence[int], strides: Sequence[Sequence[int]], class_dim: int | None) -> Geometry | None:
    """Join the dimensions of tensors of one shape (some broadcast, with stride 0), the class dimension staying the middle one.

    None where more than three dimensions remain.
    """
    if class_dim is None:
        sizes, steps = collapse(shape, strides)
    else:
        before, outer = collapse(shape[:class_dim], [s[:class_dim] for s in strides])
        after, inner = collapse(shape[class_dim + 1 :], [s[class_dim + 1 :] for s in strides])
        if len(before) > 1 or len(after) > 1:
            return None
        sizes = [*(before or [1]), shape[class_dim], *(after or [1])]
        steps = [[*(o or [0]), s[class_dim], *(i or [0])] for o, s, i in zip(outer, strides, inner, strict=True)]
    if len(sizes) > 3:
        return None
    missing = 3 - len(sizes)
    _, n1, n2 = sizes = sizes + [1] * missing
    in_order = [n1 * n2, n2, 1]
    found: list[tuple[int, ...]] = []
    for s in steps:
        step = s + [0] * missing
        found.append(() if all(n == 1 or a == b for n, a, b in zip(sizes, step, in_order, strict=True)) else tuple(step))
    return Geometry(n1, n2, n1 if n2 == 1 and n1 <= 65536 else None, found)


class Tensors(NamedTuple):
    """What a launch reads and writes: a layout or a Slot each, None where absent."""

    x: Any
    target: Any
    target_b: Any
    lam: Any
    weight: Any
    group: Any
    parameter: Any
    upstream: Any
    out: Any
    gradient: Any
    factor: Any
    group_weight: Any
    divisor: Any
    parts: Any = None
    ticket: Any = None
    total: Any = None


GROUP = 8  # neighbouring elements of a row, of which the row's target is read once
STRIDED = Tensors._fields[:10]  # the others are 0-d or contiguous


class Formulas(NamedTuple):
    """What the kernel inlines: a formula, and a quicker one for the hyper-parameters of which `applies`, a device function, is true.

    hard: these for targets of 0 and 1, where fewer instructions do (elementwise.py says how). heavy: as of tiles.element_tiles.
    """

    formula: Callable[..., Any]
    special: Callable[..., Any] | None = None
    applies: Callable[..., Any] | None = None
    hard: "Formulas | None" = None
    heavy: bool = False


def _loader(given: Tensors, diagonal: bool, indices: bool) -> Callable[..., Any]:
    if diagonal:
        return targets.diagonal
    if not indices:
        return targets.dense
    if given.target_b is not None:
        return targets.mixup
    return targets.class_index if given.lam is None else targets.scored


@functools.lru_cache(maxsize=PLANS)
def _plan(
    formulas: Formulas,
    layouts: tuple[Layout | None, ...],  # of Tensors but the sum's three
    class_dim: int,
    ignore_index: int,
    offset: int,
    hyper: int,  # how many
    total: bool,
    empty_is_zero: bool,
    counted: bool,
    tried: object,  # tiles.tried()
) -> Plan | None:
    """None where the dimensions of the tensors do not join into three."""
    given = Tensors(*layouts)
    shape, _, _, device, _ = given.x
    diagonal = given.target is None
    indices = not diagonal and not given.target[2].is_floating_point
    by_row = diagonal or indices
    background = formulas.hard
    hard = background if by_row and given.target_b is None and given.lam is None else None
    formulas = hard or formulas
    names = [name for name in STRIDED if getattr(given, name) is not None]
    rows = ("target", "target_b", "lam") if indices else ()
    strides = []
    for name in names:
        sizes, steps, *_ = getattr(given, name)
        strides.append(per_row(sizes, steps, shape, class_dim) if name in rows else broadcast(sizes, steps, shape))
    g = geometry(shape, strides, class_dim if by_row else None)
    if g is None:
        return None
    present = [*(one is not None for one in layouts), total, total, total]
    t = slots(Tensors, present)
    strided = dict.fromkeys(STRIDED, Strided()) | {
        name: Strided(getattr(t, name), *steps) for name, steps in zip(names, g.strides, strict=True)
    }
    n = math.prod(shape)
    columns = None if g.flat and not by_row else g.columns
    read = 2 + sum(t is not None for t in (given.weight, given.parameter, given.target_b, given.lam))
    grouped = by_row and columns is not None and columns % GROUP == 0
    tiles = element_tiles(n, given.x[2].itemsize, read, indices, diagonal, grouped, formulas.special is not None, formulas.heavy)
    told_apart = indices and given.target_b is None and columns is not None and tiles.block // columns + 2 <= WARP.value
    if not told_apart or (given.x[2].itemsize == 4 and columns is not None and columns <= tiles.block):
        background = None  # float32 of 80 classes was 2 % slower with both branches on an H200
    scale, *hypers = (Slot(sum(present) + i) for i in range(1 + hyper))
    general = Formula(formulas.formula, background.formula if background is not None else None)
    special = Formula(formulas.special, background.special if background is not None else None)
    space = Space(
        n1=g.n1,
        n2=g.n2,
        COLUMNS=columns,
        FLAT=g.flat and not by_row,
        BIG=g.big(n, tiles.block),
        BLOCK=tiles.block,
        G=GROUP if grouped else 1,
        STAGES=tiles.stages,
    )
    return Plan(
        elementwise_kernel,
        (min(triton.cdiv(n, tiles.block), PROGRAMS),),
        device,
        (
            strided["x"],
            targets.Targets(
                target=strided["target"],
                target_b=strided["target_b"],
                lam=strided["lam"],
                classes=shape[class_dim] if by_row else 0,
                ignore=ignore_index,
            ),
            Weights(
                weight=strided["weight"],
                group=strided["group"],
                group_weight_ptr=t.group_weight,
                groups=given.group_weight[0][0] if given.group_weight is not None else 0,
            ),
            strided["parameter"],
            Outputs(strided["upstream"], strided["out"], strided["gradient"]),
            tuple(hypers),
            constants(Scaling(scale, t.divisor, t.factor, empty_is_zero)),
            Sum(t.parts, t.ticket, t.total) if total else None,
            constants(Inlined(general, special, formulas.applies, _loader(given, diagonal, indices), hard is not None)),
            constants(space),
            n,
            offset,
            math.prod(given.target[0]) if counted else 0,
        ),
        COUNT=COUNTED if counted else 0,
        num_warps=tiles.warps,
        **most_registers(tiles.warps, tiles.programs),
    )


def elementwise(
    formulas: Formulas,
    x: Tensor,
    target: Tensor | None,
    hyper: Sequence[float],
    *,
    target_b: Tensor | None = None,
    lam: Tensor | None = None,
    ignore_index: int = -2,
    offset: int = 0,
    class_dim: int = -1,
    weight: Tensor | None = None,
    group: Tensor | None = None,
    group_weight: Tensor | None = None,
    parameter: Tensor | None = None,
    upstream: Tensor | None = None,
    scale: float = 1.0,
    divisor: Tensor | None = None,
    counted: bool = False,
    empty_is_zero: bool = False,
    value: str = "sum",
    gradient: Tensor | None = None,
) -> Tensor | None:
    """One launch over x (any shape and strides): value · scale / divisor, and where `gradient` is given, dvalue/dx written into it.

    target: of the shape of x, or class indices along class_dim, of the shape of x without it; target_b and lam broadcast to that. lam
    without target_b is each row's score, the target in its class. None: the diagonal, column row + offset, of an x of two dimensions.
    weight, group and parameter: broadcast to x. divisor: 0-d. upstream: 0-d, or of the shape of x.
    counted: in place of a divisor, the launch counts the elements of rows not ignored itself (see counts_itself).
    value: "sum" returns the total (0-d float32), "each" the values in x's dtype, "nothing" None.
    """
    out = torch.empty_like(x) if value == "each" else None
    whole, factor = (upstream, None) if upstream is not None and upstream.ndim > 0 else (None, upstream)
    tensors = (x, target, target_b, lam, weight, group, parameter, whole, out, gradient, factor, group_weight, divisor)
    plan = _plan(
        formulas,
        tuple([layout(t) for t in tensors]),
        class_dim % (x.ndim or 1),
        ignore_index,
        offset,
        len(hyper),
        value == "sum",
        empty_is_zero,
        counted,
        tried(),
    )
    if plan is None:

        def copied(t: Tensor | None, like: Tensor | None = x) -> Tensor | None:
            return None if t is None or like is None else t.expand(like.shape).contiguous()

        fresh = None if gradient is None else torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
        result = elementwise(
            formulas,
            x.contiguous(),
            copied(target, target),
            hyper,
            target_b=copied(target_b, target),
            lam=copied(lam, target),
            ignore_index=ignore_index,
            offset=offset,
            class_dim=class_dim,
            weight=copied(weight),
            group=copied(group),
            group_weight=group_weight,
            parameter=copied(parameter),
            upstream=factor if whole is None else copied(whole),
            scale=scale,
            divisor=divisor,
            counted=counted,
            empty_is_zero=empty_is_zero,
            value=value,
            gradient=fresh,
        )
        if gradient is not None and fresh is not None:
            gradient.copy_(fresh)
        return result if out is None or result is None else out.copy_(result)
    sum = new_sum(plan.grid[0], x.device) if value == "sum" else NO_SUM
    plan.launch((*tensors, *sum), (scale, *hyper))
    return out if value == "each" else sum.total


def planned_elementwise(
    formulas: Formulas,
    tensors: Sequence[Any],  # x, target, target_b, lam, weight, group, group_weight, parameter, …
    divisor: Tensor | None,
    gradient: Tensor | None,
    hyper: Sequence[float],
    scale: float,
    ignore_index: int,
    offset: int,
    class_dim: int,
    empty_is_zero: bool,
    counted: bool,
) -> Callable[..., Tensor] | None:
    """`elementwise` for nothing but total and gradient: (tensors, divisor, gradient) → total.

    For tensors of these layouts and other arguments the same. None where copies would be needed.
    """

    def ordered(tensors: Sequence[Any], divisor: Tensor | None, gradient: Tensor | None) -> tuple[Any, ...]:
        x, target, target_b, lam, weight, group, group_weight, parameter, *_ = tensors
        return x, target, target_b, lam, weight, group, parameter, None, None, gradient, None, group_weight, divisor

    layouts = tuple([layout(t) for t in ordered(tensors, divisor, gradient)])
    x = tensors[0]
    plan = _plan(formulas, layouts, class_dim % (x.ndim or 1), ignore_index, offset, len(hyper), True, empty_is_zero, counted, tried())
    if plan is None:
        return None
    programs, device, floats = plan.grid[0], x.device, (scale, *hyper)

    def total(tensors: Sequence[Any], divisor: Tensor | None, gradient: Tensor | None) -> Tensor:
        sum = new_sum(programs, device)
        plan.launch((*ordered(tensors, divisor, gradient), *sum), floats)
        assert sum.total is not None
        return sum.total

    return total

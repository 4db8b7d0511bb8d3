"""Host side of the contrastive template: tile sizes, and the launches."""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import PLANS, PROGRAMS_A_GROUP, Layout, Plan, Slot, layout, slots
from lossforge.kernels.engine.layout import constants
from lossforge.kernels.engine.reduce import Sum, new_sum
from lossforge.kernels.pairs.kernel import Config, Matrix, Side, contrastive_backward_kernel, contrastive_kernel
from lossforge.kernels.tiles import contrastive_tiles, similarity_gradient_tiles, tried


class Pairs(NamedTuple):
    """A loss over similarities (N, M), but for their memory. divisor: 0-d, on the device; values are multiplied by scale / divisor."""

    offset: int
    logit_scale: float | None = None
    scale: float = 1.0
    divisor: Tensor | None = None
    empty_is_zero: bool = False


class Statistics(NamedTuple):
    """Σ or each of the losses, and ln Σ exp of the rows and columns, of which those of no pair are inf."""

    loss: Tensor
    row_lse: Tensor
    column_lse: Tensor


class _Forward(NamedTuple):
    x: Any
    row_parts: Any
    column_parts: Any
    row_lse: Any
    column_lse: Any
    row_loss: Any
    column_loss: Any
    divisor: Any
    parts: Any
    ticket: Any
    total: Any


class _Backward(NamedTuple):
    x: Any
    gradient: Any
    row_lse: Any
    column_lse: Any
    upstream: Any
    divisor: Any


def _strides(t: Layout) -> tuple[int, int]:
    """Of a dimension of size 1 the one that leaves elements next to each other along one dimension."""
    (rows, columns), (s0, s1) = t[:2]
    if rows == 1:
        s0 = 0
    return s0, s1 if columns > 1 else int(s0 != 1)


def _slot(place: int, given: bool) -> Any:
    return Slot(place) if given else None


def _wide(*layouts: Layout) -> bool:
    return any(max(t[1]) * 256 >= 2**31 for t in layouts)


@functools.lru_cache(maxsize=PLANS)
def _forward_plan(x: Layout, divisor: Layout | None, each: bool, scaled: bool, offset: int, empty_is_zero: bool, tried: object) -> Plan:
    rows, columns = x[0]
    tiles = contrastive_tiles(rows, columns)
    down, across = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    present = [True] * 5 + [each] * 2 + [divisor is not None] + [True] * 3
    t, f = slots(_Forward, present), sum(present)
    return Plan(
        contrastive_kernel,
        (down * across,),
        x[3],
        (
            Matrix(t.x, *_strides(x), _slot(f + 1, scaled)),
            Side(t.row_parts, t.row_lse, t.row_loss),
            Side(t.column_parts, t.column_lse, t.column_loss),
            Sum(t.parts, t.ticket, t.total),
            t.divisor,
            Slot(f),
            rows,
            columns,
            offset,
            across,
            down,
            constants(Config(tiles.rows, tiles.columns, _wide(x), empty_is_zero)),
        ),
        num_warps=tiles.warps,
    )


@functools.lru_cache(maxsize=PLANS)
def _backward_plan(
    x: Layout,
    gradient: Layout,
    upstream: Layout | None,
    divisor: Layout | None,
    scaled: bool,
    offset: int,
    empty_is_zero: bool,
    tried: object,
) -> Plan:
    rows, columns = x[0]
    tiles = similarity_gradient_tiles()
    down, across = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    present = [True] * 4 + [upstream is not None, divisor is not None]
    t, f = slots(_Backward, present), sum(present)
    each = upstream is not None and len(upstream[0]) == 1
    return Plan(
        contrastive_backward_kernel,
        (down * across,),
        x[3],
        (
            Matrix(t.x, *_strides(x), _slot(f + 1, scaled)),
            Matrix(t.gradient, *_strides(gradient)),
            t.row_lse,
            t.column_lse,
            t.upstream,
            t.divisor,
            Slot(f),
            rows,
            columns,
            offset,
            across,
            constants(Config(tiles.rows, tiles.columns, _wide(x, gradient), empty_is_zero, EACH=each)),
        ),
        num_warps=tiles.warps,
    )


def _floats(pairs: Pairs) -> tuple[float, ...]:
    return (pairs.scale,) if pairs.logit_scale is None else (pairs.scale, pairs.logit_scale)


def contrastive(pairs: Pairs, x: Tensor, *, each: bool = False) -> Statistics:
    """One launch over similarities x (N, M): the loss as a total or per pair, and what the gradient needs."""
    plan = _forward_plan(layout(x), layout(pairs.divisor), each, pairs.logit_scale is not None, pairs.offset, pairs.empty_is_zero, tried())
    rows, columns = x.shape
    tiles = contrastive_tiles(rows, columns)
    down, across = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    new = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    row_lse, column_lse = new(rows), new(columns)
    halves = new((2, rows)) if each else None
    total = new_sum(PROGRAMS_A_GROUP * (down + across), x.device)  # a ticket for each row and column of tiles
    own = halves if halves is not None else (None, None)
    tensors = (x, new((2, across, rows)), new((2, down, columns)), row_lse, column_lse, own[0], own[1], pairs.divisor, *total)
    plan.launch(tensors, _floats(pairs))
    assert total.total is not None
    return Statistics(total.total if halves is None else halves.sum(0), row_lse, column_lse)


def contrastive_backward(pairs: Pairs, x: Tensor, row_lse: Tensor, column_lse: Tensor, upstream: Tensor | None, gradient: Tensor) -> None:
    """Write the gradient for what arrives at the loss: 0-d for the total, (N,) for each; None for 1."""
    arriving = None if upstream is None else upstream.contiguous()
    plan = _backward_plan(
        layout(x),
        layout(gradient),
        layout(arriving),
        layout(pairs.divisor),
        pairs.logit_scale is not None,
        pairs.offset,
        pairs.empty_is_zero,
        tried(),
    )
    plan.launch((x, gradient, row_lse, column_lse, arriving, pairs.divisor), _floats(pairs))

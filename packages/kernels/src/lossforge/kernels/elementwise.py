"""The template of losses in which every element stands alone.

A loss adds a formula f(x, y, *hyper) → (value, dvalue/dx). Targets, weights, ignored elements, reduction, scaling and addressing
are the template's. One launch gives the value, the gradient, or both.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels import targets
from lossforge.kernels.launch import launch
from lossforge.kernels.layout import Strided, address, collapse
from lossforge.kernels.reduce import Sum, divided, finish, new_sum

PROGRAMS = 4096  # enough to fill any GPU many times over, few enough for one program to add up their parts


@triton.jit
def coordinates(start, lane, n1, n2, COLUMNS: tl.constexpr, FLAT: tl.constexpr, BIG: tl.constexpr):
    """`at` of layout.address for elements start + lane of an (n0, n1, n2) tensor, or (n0, COLUMNS) where that is given."""
    row, i0, i1, i2 = start, lane, lane, lane * 0
    if not FLAT:
        if COLUMNS is not None:
            row = start // COLUMNS
            local = (start - row * COLUMNS).to(tl.int32) + lane
            i0 = local // COLUMNS
            i1 = local - i0 * COLUMNS
            if BIG:
                i0, i1 = i0.to(tl.int64), i1.to(tl.int64)
        else:
            i = start + lane if BIG else start.to(tl.int32) + lane
            outer = i // n2
            row, i0, i1, i2 = start * 0, outer // n1, outer % n1, i - outer * n2
    return start, lane, row, i0, i1, i2


@triton.jit
def weight_tile(weight, group, group_weight_ptr, groups, at, mask):
    """Weight of each element: its own, its group's, or their product; nan where the group does not exist."""
    w = 1.0
    if weight.ptr is not None:
        w = tl.load(address(weight, at), mask=mask, other=0.0).to(tl.float32)
    if group.ptr is not None:
        member = tl.load(address(group, at), mask=mask, other=0)
        exists = (member >= 0) & (member < groups)
        share = tl.load(group_weight_ptr + member, mask=mask & exists, other=0.0).to(tl.float32)
        w = w * tl.where(exists, share, float("nan"))
    return w


@triton.jit
def elementwise_kernel(
    x,  # this and all without _ptr down to `gradient`: Strided
    target,
    target_b,
    lam,
    weight,
    group,
    parameter,  # a tensor that is the formula's last hyper-parameter
    upstream,  # per element
    out,
    gradient,
    factor_ptr,  # 0-d upstream
    group_weight_ptr,
    sum,
    divisor_ptr,
    hyper,
    scale,
    n,
    n1,
    n2,
    classes,
    groups,
    ignore,
    tiles,
    formula: tl.constexpr,
    load_target: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    factor = scale
    if factor_ptr is not None:
        factor *= tl.load(factor_ptr).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    part = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles
    for tile in range(tiles):
        start = (first + tile) * BLOCK
        mask = lane < tl.minimum(n - start, BLOCK).to(tl.int32)
        at = coordinates(start, lane, n1, n2, COLUMNS, FLAT, BIG)
        x_tile = tl.load(address(x, at), mask=mask, other=0.0).to(tl.float32)
        y, counts, valid = load_target(target, target_b, lam, classes, ignore, at, at[4], mask)
        if parameter.ptr is None:
            value, slope = formula(x_tile, y, *hyper)
        else:
            value, slope = formula(x_tile, y, *hyper, tl.load(address(parameter, at), mask=mask, other=1.0).to(tl.float32))
        w = weight_tile(weight, group, group_weight_ptr, groups, at, mask)
        if gradient.ptr is not None:
            slope = slope * w * factor
            if upstream.ptr is not None:
                slope *= tl.load(address(upstream, at), mask=mask, other=0.0).to(tl.float32)
            slope = tl.where(counts, tl.where(valid, slope, float("nan")), 0.0)
            tl.store(address(gradient, at), slope, mask=mask)
        value = tl.where(counts, tl.where(valid, value * w, float("nan")), 0.0)
        if out.ptr is not None:
            tl.store(address(out, at), value * scale, mask=mask)
        part += value
    if sum is not None:
        finish(tl.sum(part, 0), sum, scale)


class Geometry(NamedTuple):
    """The launch's elements as (n0, n1, n2), and how to find each tensor's."""

    n1: int
    n2: int
    columns: int | None
    strided: list[Strided]

    @property
    def flat(self) -> bool:
        return all(t.s0 is None for t in self.strided)

    def big(self, n: int, block: int) -> bool:
        """Whether 32 bits do not hold the coordinates of a tile, or an offset that follows from them."""
        n0 = block // self.columns + 2 if self.columns is not None else n // (self.n1 * self.n2)
        strides = [(t.s0, t.s1 or 0, t.s2 or 0) for t in self.strided if t.s0 is not None]
        reach = max((n0 * s0 + self.n1 * s1 + self.n2 * s2 for s0, s1, s2 in strides), default=0)
        return max(reach, 0 if self.columns is not None else n) >= 2**31


def geometry(tensors: Sequence[Tensor | None], class_dim: int | None) -> Geometry | None:
    """Join the dimensions of tensors of one shape (some broadcast, with stride 0), the class dimension staying the middle one.

    None where more than three dimensions remain.
    """
    given = [t for t in tensors if t is not None]
    shape = given[0].shape
    strides = [t.stride() for t in given]
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
    steps = [s + [0] * missing for s in steps]
    in_order = [n1 * n2, n2, 1]
    strided = [
        Strided(t) if all(n == 1 or s == o for n, s, o in zip(sizes, step, in_order, strict=True)) else Strided(t, *step)
        for t, step in zip(given, steps, strict=True)
    ]
    found = iter(strided)
    return Geometry(n1, n2, n1 if n2 == 1 and n1 <= 65536 else None, [Strided() if t is None else next(found) for t in tensors])


def elementwise(
    formula: Callable[..., Any],
    x: Tensor,
    target: Tensor,
    hyper: Sequence[float],
    *,
    target_b: Tensor | None = None,
    lam: Tensor | None = None,
    ignore_index: int = -2,
    class_dim: int = -1,
    weight: Tensor | None = None,
    group: Tensor | None = None,
    group_weight: Tensor | None = None,
    parameter: Tensor | None = None,
    upstream: Tensor | None = None,
    scale: float = 1.0,
    divisor: Tensor | None = None,
    empty_is_zero: bool = False,
    value: str = "sum",
    gradient: Tensor | None = None,
) -> Tensor | None:
    """One launch over x (any shape and strides): value · scale / divisor, and where `gradient` is given, dvalue/dx written into it.

    target, lam, weight, group and parameter: already expanded to the shape of x; an integer target is a class index along class_dim.
    value: "sum" returns the total (0-d float32), "each" the values in x's dtype, "nothing" None.
    upstream: 0-d, or of the shape of x.
    """
    indices = not target.is_floating_point()
    out = torch.empty_like(x) if value == "each" else None
    whole, factor = (upstream, None) if upstream is not None and upstream.ndim > 0 else (None, upstream)
    tensors = [x, gradient, out, target, target_b, lam, weight, group, parameter, whole]
    g = geometry(tensors, class_dim % x.ndim if indices else None)
    if g is None:
        copies = [None if t is None else t.contiguous() for t in tensors]
        g = geometry(copies, class_dim % x.ndim if indices else None)
        assert g is not None
    else:
        copies = tensors
    x_, gradient_, out_, target_, b_, lam_, weight_, group_, parameter_, upstream_ = g.strided
    load_target = targets.dense if not indices else targets.class_index if target_b is None else targets.mixup
    n = x.numel()
    block = 1024 if n < 2**20 else 2048
    tiles = triton.cdiv(n, block * PROGRAMS)
    programs = triton.cdiv(n, block * tiles)
    sum: Sum | None = new_sum(programs, x.device) if value == "sum" else None
    launch(
        elementwise_kernel,
        (programs,),
        x.device,
        x_,
        target_,
        b_,
        lam_,
        weight_,
        group_,
        parameter_,
        upstream_,
        out_,
        gradient_,
        factor,
        group_weight,
        sum,
        divisor,
        tuple(hyper),
        scale,
        n,
        g.n1,
        g.n2,
        x.shape[class_dim] if indices else 0,
        0 if group_weight is None else len(group_weight),
        ignore_index,
        tiles,
        formula=formula,
        load_target=load_target,
        COLUMNS=None if g.flat and not indices else g.columns,
        FLAT=g.flat and not indices,
        BIG=g.big(n, block),
        EMPTY_IS_ZERO=empty_is_zero,
        BLOCK=block,
        num_warps=4,
    )
    for kept, computed in zip(tensors[1:3], copies[1:3], strict=True):
        if kept is not None and computed is not None and computed is not kept:
            kept.copy_(computed)
    return out if sum is None else sum.total

"""The template of losses in which every element stands alone.

A loss adds a formula f(x, y, *hyper) → (value, dvalue/dx). Targets, weights, ignored elements, reduction, scaling and addressing
are the template's. One launch gives the value, the gradient, or both.

A formula for targets of 0 and 1 is f(x, whether y is 1, w, v, *hyper) → (w value, v dvalue/dx). It multiplies w and v by its own factor
of either class before it chooses between them: w and v mostly belong to the row, so that costs nothing an element.
Tiles that hold no element of their rows' classes, which most are in detection and among thousands of classes, take it with nothing to
choose.
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.layout import load, longer, store
from lossforge.kernels.engine.reduce import count_rows, divided, finish, over
from lossforge.kernels.math import widened

WARP = tl.constexpr(32)


@triton.jit
def coordinates(start, r, c, n1, n2, COLUMNS: tl.constexpr, FLAT: tl.constexpr, BIG: tl.constexpr, G: tl.constexpr):
    """`at` of layout.address for elements start + r · G + c of an (n0, n1, n2) tensor, or (n0, COLUMNS) where that is given.

    The G elements of a group lie in one row, so that what belongs to the row is found once a group. A tile of at most COLUMNS elements
    lies in two rows at most, which a comparison tells apart where others take a division.
    """
    lane = r * G + c
    row, i0, i1, i2 = start, lane, lane, lane * 0
    if not FLAT:
        if COLUMNS is not None:
            row = (start.to(tl.uint64) // COLUMNS).to(tl.int64)
            local = (start - row * COLUMNS).to(tl.int32) + r * G
            if r.shape[0] * G <= COLUMNS:
                i0 = (local >= COLUMNS).to(tl.int32)
            else:
                i0 = local // COLUMNS
            i1 = local - i0 * COLUMNS + c
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
        w = widened(load(weight, at, mask, 0.0))
    if group.ptr is not None:
        member = load(group, at, mask, 0)
        exists = (member >= 0) & (member < groups)
        share = tl.load(group_weight_ptr + member, mask=exists, other=0.0).to(tl.float32)
        w = w * tl.where(exists, share, float("nan"))
    return w


@triton.jit
def shared(w, share, INDEX: tl.constexpr):
    """w · share, 0 where the share is, whatever w is there."""
    if INDEX:
        w = tl.where(share == 0.0, 0.0, w * share)
    return w


@triton.jit
def mixed(
    start,
    n,
    mask,
    r,
    x_tile,
    target,
    target_b,
    lam,
    w,
    at,
    hyper,
    factor,
    n1,
    n2,
    classes,
    ignore,
    offset,
    formula: tl.constexpr,
    load_target: tl.constexpr,
    HARD: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    G: tl.constexpr,
):
    """Weighted values and slopes of a tile with any targets."""
    INDEX: tl.constexpr = target.ptr is not None and target.ptr.dtype.element_ty.is_int()
    at_row = coordinates(start, r, tl.zeros([1, 1], tl.int32), n1, n2, COLUMNS, FLAT, BIG, G)
    column = at_row[4], tl.arange(0, G)[None, :]
    if COLUMNS is not None and not FLAT:
        if r.shape[0] * G <= COLUMNS:  # see targets.of_rows
            last = (tl.minimum(start + r.shape[0] * G, n) - 1) // COLUMNS - at_row[2]
            at_row = (start, None, at_row[2], at_row[3], last, at_row[5])
    y, share = load_target(target, target_b, lam, classes, ignore, offset, at, at_row, column, mask)
    if INDEX:
        x_tile = tl.where(share == 0.0, 0.5, x_tile)  # an ignored row may hold nan; 0.5 is harmless as a logit and as a probability
    w, factor = shared(w, share, INDEX), shared(w * factor, share, INDEX)
    if HARD:
        value, slope = formula(x_tile, y > 0.5, w, factor, *hyper)
    else:
        value, slope = formula(x_tile, y, *hyper)
        value, slope = value * w, slope * factor
    return value, slope


@triton.jit
def read(start, x, target, r, n1, n2, COLUMNS: tl.constexpr, FLAT: tl.constexpr, BIG: tl.constexpr, G: tl.constexpr):
    """A full tile of x, and of each of its rows where it begins, counted from the tile's first element, and the class."""
    BLOCK: tl.constexpr = r.shape[0] * G
    at = coordinates(start, r, tl.arange(0, G)[None, :], n1, n2, COLUMNS, FLAT, BIG, G)
    row = (start.to(tl.uint64) // COLUMNS).to(tl.int64)
    i = tl.arange(0, WARP)  # every warp reads the rows, so that none waits for another
    begins = i * COLUMNS - (start - row * COLUMNS).to(tl.int32)
    return load(x, at, None, 0.0), begins, tl.load(target.ptr + (row + i) * target.s0, mask=begins < BLOCK, other=-1)


@triton.jit
def is_background(begins, index, classes, ignore, BLOCK: tl.constexpr):
    """Whether no element of a tile is in its row's class, and no row ignored."""
    elsewhere = (index >= 0) & (index < classes) & ((begins + index < 0) | (begins + index >= BLOCK))
    return tl.min(((index != ignore) & ((index == -1) | elsewhere)).to(tl.int32), 0) > 0


@triton.jit
def settled(part, value, slope, at, mask, upstream, out, gradient, scale):
    """part with the values of a tile, 0 where masked; gradient and values are stored where they are asked for."""
    if gradient.ptr is not None:
        if upstream.ptr is not None:
            slope *= widened(load(upstream, at, mask, 0.0))
        store(gradient, at, mask, slope)
    if mask is not None:
        value = tl.where(mask, value, 0.0)
    if out.ptr is not None:
        store(out, at, mask, value * scale)
    return part + value


@triton.jit
def one_tile(
    part,
    tile,
    start,
    n,
    mask,
    r,
    x,
    target,
    target_b,
    lam,
    weight,
    group,
    parameter,
    upstream,
    out,
    gradient,
    group_weight_ptr,
    hyper,
    scale,
    factor,
    n1,
    n2,
    classes,
    groups,
    ignore,
    offset,
    formula: tl.constexpr,
    background: tl.constexpr,
    load_target: tl.constexpr,
    HARD: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    G: tl.constexpr,
):
    """part with the values of one tile. tile: as from `read`, or None. A mask of None: all inside."""
    at = coordinates(start, r, tl.arange(0, G)[None, :], n1, n2, COLUMNS, FLAT, BIG, G)
    if tile is None:
        x_tile = widened(load(x, at, mask, 0.0))
    else:
        x_tile = widened(tile[0])
    if parameter.ptr is not None:
        hyper = longer(hyper, widened(load(parameter, at, mask, 1.0)))
    w = weight_tile(weight, group, group_weight_ptr, groups, at, mask)
    # settled in each branch: where they join, the same number of instructions, but 64 bytes of focal's registers spilled
    # fmt: off
    if tile is not None:
        if is_background(tile[1], tile[2], classes, ignore, r.shape[0] * G):
            value, slope = background(x_tile, False, w, w * factor, *hyper)
            part = settled(part, value, slope, at, mask, upstream, out, gradient, scale)
        else:
            value, slope = mixed(
                start, n, mask, r, x_tile, target, target_b, lam, w, at, hyper, factor, n1, n2, classes, ignore, offset,
                formula, load_target, HARD, COLUMNS, FLAT, BIG, G,
            )
            part = settled(part, value, slope, at, mask, upstream, out, gradient, scale)
    else:
        value, slope = mixed(
            start, n, mask, r, x_tile, target, target_b, lam, w, at, hyper, factor, n1, n2, classes, ignore, offset,
            formula, load_target, HARD, COLUMNS, FLAT, BIG, G,
        )
        part = settled(part, value, slope, at, mask, upstream, out, gradient, scale)
    # fmt: on
    return part


@triton.jit
def all_tiles(
    n,
    x,
    target,
    target_b,
    lam,
    weight,
    group,
    parameter,
    upstream,
    out,
    gradient,
    group_weight_ptr,
    hyper,
    scale,
    factor,
    n1,
    n2,
    classes,
    groups,
    ignore,
    offset,
    formula: tl.constexpr,
    background: tl.constexpr,
    load_target: tl.constexpr,
    HARD: tl.constexpr,
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    BLOCK: tl.constexpr,
    G: tl.constexpr,
    STAGES: tl.constexpr,
):
    """This program's tiles, `num_programs` apart: full ones without masks, and one program the rest. The sum of their values, by lane."""
    r = tl.arange(0, BLOCK // G)[:, None]
    part = tl.zeros([BLOCK // G, G], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    full = n // BLOCK + first * 0
    count = tl.cdiv(full - first, programs).to(tl.int32)
    # fmt: off
    if background is None:
        for k in tl.range(count, num_stages=STAGES):
            part = one_tile(
                part, None, (first + k * programs) * BLOCK, n, None, r, x, target, target_b, lam, weight, group, parameter, upstream, out,
                gradient, group_weight_ptr, hyper, scale, factor, n1, n2, classes, groups, ignore, offset, formula, background, load_target,
                HARD, COLUMNS, FLAT, BIG, G,
            )
    else:
        if count > 0:
            tile = read(first * BLOCK, x, target, r, n1, n2, COLUMNS, FLAT, BIG, G)
            for k in range(count):  # each is read before the last is computed, in registers: num_stages was 2 to 14 % slower in bf16
                following = tl.minimum(first + (k + 1) * programs, full - 1)
                next_tile = read(following * BLOCK, x, target, r, n1, n2, COLUMNS, FLAT, BIG, G)
                part = one_tile(
                    part, tile, (first + k * programs) * BLOCK, n, None, r, x, target, target_b, lam, weight, group, parameter, upstream,
                    out, gradient, group_weight_ptr, hyper, scale, factor, n1, n2, classes, groups, ignore, offset, formula, background,
                    load_target, HARD, COLUMNS, FLAT, BIG, G,
                )
                tile = next_tile
    rest = (n - full * BLOCK).to(tl.int32)
    if (rest > 0) & (full % programs == first):
        part = one_tile(
            part, None, full * BLOCK, n, r * G < rest, r, x, target, target_b, lam, weight, group, parameter, upstream, out, gradient,
            group_weight_ptr, hyper, scale, factor, n1, n2, classes, groups, ignore, offset, formula, background, load_target, HARD,
            COLUMNS, FLAT, BIG, G,
        )
    # fmt: on
    return part


@triton.jit(do_not_specialize=("n", "offset", "rows"))
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
    offset,  # of the diagonal that takes the place of a target
    rows,  # of a class-index target, counted here where COUNT
    formula: tl.constexpr,
    special: tl.constexpr,  # a quicker formula for hyper-parameters of which `applies` is true; None without one
    applies: tl.constexpr,
    background: tl.constexpr,  # of tiles of nothing but background, for targets of 0 and 1; None where these are not told apart
    special_background: tl.constexpr,
    load_target: tl.constexpr,
    HARD: tl.constexpr,  # formula and special are for targets of 0 and 1
    COLUMNS: tl.constexpr,
    FLAT: tl.constexpr,
    BIG: tl.constexpr,
    EMPTY_IS_ZERO: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    G: tl.constexpr,
    STAGES: tl.constexpr,  # tiles on their way at once, without a background
):
    if COUNT:
        counted = count_rows(target.ptr, None, None, None, tl.arange(0, COUNT), rows, classes, ignore)
        scale = over(scale, counted * classes, EMPTY_IS_ZERO)
    else:
        scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    factor = scale
    if factor_ptr is not None:
        factor *= tl.load(factor_ptr).to(tl.float32)
    # fmt: off
    if special is None:
        part = all_tiles(
            n, x, target, target_b, lam, weight, group, parameter, upstream, out, gradient, group_weight_ptr, hyper, scale, factor,
            n1, n2, classes, groups, ignore, offset, formula, background, load_target, HARD, COLUMNS, FLAT, BIG, BLOCK, G, STAGES,
        )
    else:
        if applies(*hyper):  # one branch a program: inside the loop it would cost registers and time
            part = all_tiles(
                n, x, target, target_b, lam, weight, group, parameter, upstream, out, gradient, group_weight_ptr, hyper, scale, factor,
                n1, n2, classes, groups, ignore, offset, special, special_background, load_target, HARD, COLUMNS, FLAT, BIG, BLOCK, G,
                STAGES,
            )
        else:
            part = all_tiles(
                n, x, target, target_b, lam, weight, group, parameter, upstream, out, gradient, group_weight_ptr, hyper, scale, factor,
                n1, n2, classes, groups, ignore, offset, formula, background, load_target, HARD, COLUMNS, FLAT, BIG, BLOCK, G, STAGES,
            )
    # fmt: on
    if sum is not None:
        finish(tl.sum(tl.sum(part, 1), 0), sum, scale)

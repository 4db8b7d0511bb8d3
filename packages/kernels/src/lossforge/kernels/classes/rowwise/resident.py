"""Value and gradient of long rows in one launch. Each logit is read from memory once, because rows stay on the chip between two sweeps.

The row-wise template sweeps a row twice and relies on the L2 cache for the second sweep. That fails if the rows in progress are larger than
the cache. Here a program processes its rows one after the other. A row is cut into chunks: the first P stay in registers, the others pass
through a ring of K chunks in shared memory, filled by asynchronous copies. After the first sweep a row's last K chunks are in the ring; the
second sweep starts with them. Each freed slot is refilled: first with the chunks of this row that did not fit (they are in the L2 cache),
then with those of the next row. So the next row is read while this one is written.
"""

from collections import namedtuple

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise.chunks import finish, following, positions, row_of, scale_of
from lossforge.kernels.classes.rowwise.rows import LOWEST, hard_loss, row_terms, shrunk
from lossforge.kernels.engine.gluon import async_load, barrier, commit_group, gl, gluon, wait_group
from lossforge.kernels.engine.layout import longer
from lossforge.kernels.math import LOG2E, exp2, log

Lanes = namedtuple("Lanes", "m s seen dot")
"""Sums of each lane relative to its maximum m: s = Σ exp(x - m), dot = Σ (x - m), seen = Σ 1."""

Line = namedtuple("Line", "base first end keep")
"""A row: where it is read from, the lanes of its first class and after its last, and whether it counts."""

Shares = namedtuple("Shares", "top p every")
"""Factors of a row's gradient, exp(x - top) · p - every."""


@triton.jit
def take(lanes, x, inside, EVEN: tl.constexpr):
    """Add a chunk (L, V) to the lanes' sums. inside: which of its classes exist; None: all."""
    if inside is not None:
        x = tl.where(inside, x, -float("inf"))
    m, s, seen, dot = lanes
    top = tl.maximum(m, tl.max(x, 1))
    step = x - top[:, None]
    s = s * shrunk(m, top) + tl.sum(exp2(step * LOG2E), 1)
    if EVEN:
        dot += tl.where(seen == 0, 0.0, seen * (m - top))
        if inside is None:
            dot += tl.sum(step, 1)
            seen += x.shape[1]
        else:
            dot += tl.sum(tl.where(inside, step, 0.0), 1)
            seen += tl.sum(tl.where(inside, 1.0, 0.0), 1)
    return Lanes(top, s, seen, dot)


@triton.jit
def opaque(x):
    """Return x, but hide its origin from the compiler, which would otherwise keep the first sweep's float32 copy in twice the registers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth)


@triton.jit
def slope_of(x, shares):
    return exp2((x - shares.top) * LOG2E) * shares.p - shares.every


@gluon.jit
def fetch(place, line, lane, config):
    """Start to copy all aligned vectors of a chunk that hold a class of the row."""
    async_load(place, line.base + lane, mask=(lane < gl.cdiv(line.end, config.VEC) * config.VEC) & line.keep)
    commit_group()


@gluon.jit
def refill(place, c, again, at, line, next_line, config):
    """Prefetch the next chunk into the c-th freed slot of the ring: this row's chunks again, the last first, then the next row's."""
    this = c < again
    position = (config.P + gl.where(this, again - 1 - c, c - again)) * config.CHUNK + at
    base, end = gl.where(this, line.base, next_line.base), gl.where(this, line.end, next_line.end)
    fetch(place, Line(base, line.first, end, gl.where(this, line.keep, next_line.keep)), position, config)


@gluon.jit
def chunk_of(ring, slot, prior, c, tile: gl.constexpr, config):
    """Read chunk c of a row from its slot in the ring, in float32, and add its classes' bias."""
    chunk = ring.index(slot).load(tile).to(gl.float32)
    if config.B:
        chunk += prior.index(c).load(tile)
    return chunk


@gluon.jit(do_not_specialize=("rows", "counted"))
def resident_kernel(x, target, gradient, sum, loss, rows, counted, config: gl.constexpr):
    """Compute the total of rows, and its gradient.

    Args:
        x: Logits with one outer index, classes next to each other; rows and classes multiples of VEC where SHIFT is 1.
        target: Target, without probabilities, class weights beside smoothing, or a focus.
        gradient: Strided.
        sum: Sum.
        loss: RowLoss.
        config: Chunks.
    """
    dtype: gl.constexpr = x.ptr.dtype.element_ty
    CHUNK: gl.constexpr = config.CHUNK
    K: gl.constexpr = config.K
    P: gl.constexpr = config.P
    VEC: gl.constexpr = config.VEC
    SHIFT: gl.constexpr = config.SHIFT
    PAIR: gl.constexpr = target.b.ptr is not None
    EVEN: gl.constexpr = target.labels.smoothing is not None
    L: gl.constexpr = CHUNK // VEC
    tile: gl.constexpr = gl.BlockedLayout([1, VEC], [32, 1], [config.W, 1], [1, 0])
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    ring = gl.allocate_shared_memory(dtype, [K, L, VEC], unswizzled)
    at = positions(tile, config)
    scale = scale_of(loss, target.a, target.labels.weight_ptr, target.labels.ignore, counted, x.classes, config)
    classes = x.classes
    if SHIFT == 1:
        classes = classes // VEC * VEC  # tells the compiler that classes are a multiple of VEC, so that loads are vectorised
    even = 0.0
    if EVEN:
        even = target.labels.smoothing / classes
    chunks = gl.cdiv(classes + SHIFT - 1, CHUNK) - P  # chunks of a row that pass through the ring
    again = chunks - K  # how many of these are fetched twice
    row = gl.program_id(0)
    outer = row.to(gl.int64) * 0
    terms = row_terms(target, outer, row, row < rows, x)
    part = outer.to(gl.float32)
    slot = 0
    base, first, end = row_of(x, row, classes, config)
    line = Line(base, first, end, terms.keep)
    prior = ring
    if config.B:  # a program's rows all begin at the same lane
        prior = gl.allocate_shared_memory(gl.float32, [config.B, L, VEC], unswizzled)
        for c in range(config.B):
            position = c * CHUNK + at
            bias = gl.load(x.bias_ptr + position - first, mask=(position >= first) & (position < end), other=0.0)
            prior.index(c).store(bias.to(gl.float32) * x.tau)
        barrier()
    held = ()
    for p in gl.static_range(P):
        held = longer(held, gl.load(base + p * CHUNK + at, mask=(at >= 0) & line.keep, other=0.0))
    for p in gl.static_range(K):
        fetch(ring.index(p), line, (P + p) * CHUNK + at, config)

    while row < rows:
        to, _, _ = row_of(gradient, row, classes, config)
        first, end, keep = line.first, line.end, line.keep
        low, high = gl.cdiv(first, VEC) * VEC, end // VEC * VEC  # lanes of whole vectors in the row
        next_row = row + gl.num_programs(0)
        next_terms = row_terms(target, outer, next_row, next_row < rows, x)
        next_base, next_first, next_end = row_of(x, next_row, classes, config)
        next_line = Line(next_base, next_first, next_end, next_terms.keep)
        zero = gl.full([L], 0.0, gl.float32, lane)
        lanes = Lanes(gl.full([L], LOWEST, gl.float32, lane), zero, zero, zero)
        for c in range(again):
            wait_group(K - 1)
            chunk = chunk_of(ring, slot, prior, P + c, tile, config)
            fetch(ring.index(slot), line, (P + K + c) * CHUNK + at, config)
            lanes = take(lanes, chunk, None, EVEN)
            slot = following(slot, config)
        place = slot
        for p in gl.static_range(K):
            wait_group(K - 1 - p)
            chunk = chunk_of(ring, place, prior, P + again + p, tile, config)
            if p >= K - (1 if SHIFT == 1 else 2) or (p == 0 and P == 0 and SHIFT > 1):
                position = (P + again + p) * CHUNK + at
                lanes = take(lanes, chunk, (position >= first) & (position < end), EVEN)
            else:
                lanes = take(lanes, chunk, None, EVEN)
            place = following(place, config)
        for p in gl.static_range(P):
            if p == 0 and SHIFT > 1:
                lanes = take(lanes, held[p].to(gl.float32), at >= first, EVEN)
            else:
                lanes = take(lanes, held[p].to(gl.float32), None, EVEN)

        top = gl.max(lanes.m, 0)
        total = gl.sum(lanes.s * shrunk(lanes.m, top), 0)
        ls = log(total)
        lse = top + ls
        value, q, _ = hard_loss(terms.c_a, terms.a, terms.logit_a, top, ls, None, target, loss)
        c_a, c_b = q, terms.c_b
        if PAIR:
            of_b, c_b, _ = hard_loss(terms.c_b, terms.b, terms.logit_b, top, ls, None, target, loss)
            value += of_b
            q += c_b
        if EVEN:
            dot = lanes.dot + gl.where(lanes.seen == 0, 0.0, lanes.seen * (lanes.m - top))
            value += target.labels.smoothing * ls - even * gl.sum(dot, 0)
            q += target.labels.smoothing
        p_share = q
        if loss.z_loss is not None:
            value += loss.z_loss * lse * lse
            p_share += 2.0 * loss.z_loss * lse
        part += gl.where(keep, gl.where(terms.valid & (total == total), value, float("nan")), 0.0)
        shrink = gl.where(terms.valid, scale, float("nan"))
        p_share = gl.where(keep, p_share * shrink / total, 0.0)
        q_share = gl.where(keep, shrink, 0.0)
        every = 0.0
        if EVEN:
            every = q_share * even
        shares = Shares(gl.where(keep, top, 0.0), p_share, every)

        renewed = ()
        for p in gl.static_range(P):
            g = slope_of(opaque(held[p]).to(gl.float32), shares)
            renewed = longer(renewed, gl.load(next_line.base + p * CHUNK + at, mask=(at >= 0) & next_line.keep, other=0.0))
            gl.store(to + p * CHUNK + at, g.to(dtype), mask=p * CHUNK + at >= low)
        held = renewed
        for c in range(K):
            g = slope_of(chunk_of(ring, slot, prior, P + again + c, tile, config), shares)
            refill(ring.index(slot), c, again, at, line, next_line, config)
            position = (P + again + c) * CHUNK + at
            gl.store(to + position, g.to(dtype), mask=(position >= low) & (position < high))
            slot = following(slot, config)
        for c in range(again):
            wait_group(K - 1)
            g = slope_of(chunk_of(ring, slot, prior, P + again - 1 - c, tile, config), shares)
            refill(ring.index(slot), K + c, again, at, line, next_line, config)
            gl.store(to + (P + again - 1 - c) * CHUNK + at, g.to(dtype))
            slot = following(slot, config)

        if SHIFT > 1:
            few_at = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [config.W], [0]))
            position = gl.where(few_at < VEC, few_at, high + few_at - VEC)
            exists = gl.where(few_at < VEC, (few_at >= first) & (few_at < low), (position < end) & (few_at < 2 * VEC))
            few = gl.load(line.base + position, mask=exists & keep, other=0.0).to(gl.float32)
            if config.B:
                few += gl.load(x.bias_ptr + position - first, mask=exists, other=0.0).to(gl.float32) * x.tau
            gl.store(to + position, slope_of(few, shares).to(dtype), mask=exists)
        # overwrite the gradient at the targets' classes, because comparing every element would cost more
        barrier()
        a, b, q_a, q_b = terms.a, terms.b, q_share * c_a, q_share * c_b
        g = slope_of(terms.logit_a, shares) - q_a - gl.where(a == b, q_b, 0.0)
        gl.store(to + first + a, g.to(dtype), mask=keep & (a >= 0))
        if PAIR:
            g = slope_of(terms.logit_b, shares) - q_b - gl.where(a == b, q_a, 0.0)
            gl.store(to + first + b, g.to(dtype), mask=keep & (b >= 0))
        row, line, terms = next_row, next_line, next_terms
    wait_group(0)
    finish(part, sum, scale, config)

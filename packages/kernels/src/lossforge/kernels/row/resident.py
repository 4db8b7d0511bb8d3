"""Value and gradient of long rows in one launch, each logit read from memory once: rows stay on the chip between their two sweeps.

The row-wise template sweeps a row twice and counts on the L2 cache for the second time, which fails where the rows under way are
larger than it. Here a program works through rows one after the other. A row is cut into chunks: the first P stay in registers, the
others pass through a ring of K chunks in shared memory, filled by asynchronous copies. The first sweep leaves a row's last K chunks
in the ring, and the second starts with them; each place that it frees is filled with what comes next: first the chunks of this row that did
not fit (they are in the L2), then those of the next row, so that its reading overlaps with this row's writing.

Triton itself has no shared memory to hold; Gluon, which comes with it, has. Only what the loop needs is written in it: the formulas
and the targets' device functions are those of the template.
"""

import triton
import triton.language as tl

from lossforge.kernels.engine.gluon import async_load, barrier, commit_group, gl, gluon, wait_group
from lossforge.kernels.engine.layout import longer
from lossforge.kernels.engine.reduce import count_rows, divided, over
from lossforge.kernels.math import LOG2E, exp2, log
from lossforge.kernels.row.rows import LOWEST, row_terms, shrunk, surprise

PARTS = tl.constexpr(1024)  # programs at most


@triton.jit
def take(m, s, seen, dot, x, inside, EVEN: tl.constexpr):
    """Take a chunk (L, V) into the sums that each lane keeps relative to its maximum m: s = Σ exp(x - m), dot = Σ (x - m), seen = Σ 1."""
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
    return top, s, seen, dot


@triton.jit
def opaque(x):
    """x, of which the compiler forgets what it is: else it keeps the float32 copy of the first sweep, in twice the registers."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth)


@triton.jit
def slope_of(x, top, p_share, even):
    return exp2((x - top) * LOG2E) * p_share - even


@triton.jit
def row_of(t, row, classes, VEC: tl.constexpr, SHIFT: tl.constexpr):
    """Where a row is read or written from, the lane of its class 0 there, and the lane after its last.

    A multiple of VEC elements; with SHIFT at or before the row's begin, which then need not be one.
    """
    offset = row.to(tl.int64) * t.s1
    aligned = offset // VEC * VEC
    first = (offset * 0).to(tl.int32)
    if SHIFT > 1:
        first = (offset - aligned).to(tl.int32)
    return t.ptr + aligned, first, classes + first


@gluon.jit
def fetch(place, base, lane, end, wanted, VEC: gl.constexpr):
    """Start to copy whole vectors that hold a class of the row."""
    async_load(place, base + lane, mask=(lane < gl.cdiv(end, VEC) * VEC) & wanted)
    commit_group()


@gluon.jit
def shifted(chunk, prior, c, tile: gl.constexpr, B: gl.constexpr):
    """Chunk c of a row with the bias of its classes."""
    if B:
        chunk += prior.index(c).load(tile)
    return chunk


@gluon.jit
def finish(part, sum, scale, W: gl.constexpr):
    """As reduce.finish, for at most PARTS programs."""
    gl.store(sum.parts + gl.program_id(0), part)
    barrier()
    finished = gl.atomic_add(sum.ticket, 1, sem="acq_rel", scope="gpu")
    if finished == gl.num_programs(0) - 1:
        i = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [W], [0]))
        parts = gl.load(sum.parts + i, mask=i < gl.num_programs(0), other=0.0, cache_modifier=".cg")
        gl.store(sum.total, gl.sum(parts, 0) * scale)
        gl.store(sum.ticket, 0)


@gluon.jit(do_not_specialize=("rows", "counted"))
def resident_kernel(
    x,  # Logits with one outer index, classes next to each other; rows and classes multiples of VEC where SHIFT is 1
    index_a,  # this and the next three: Strided
    index_b,
    lam,
    gradient,
    labels,
    sum,
    divisor_ptr,
    hyper,
    z_loss,
    scale,
    rows,
    counted,
    phi: gl.constexpr,
    EMPTY_IS_ZERO: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNK: gl.constexpr,
    K: gl.constexpr,
    P: gl.constexpr,
    B: gl.constexpr,  # chunks of a bias, which stays in shared memory; 0 without one, else P is 0
    VEC: gl.constexpr,
    SHIFT: gl.constexpr,
    W: gl.constexpr,
):
    dtype: gl.constexpr = x.ptr.dtype.element_ty
    PAIR: gl.constexpr = index_b.ptr is not None
    EVEN: gl.constexpr = labels.smoothing is not None
    L: gl.constexpr = CHUNK // VEC
    tile: gl.constexpr = gl.BlockedLayout([1, VEC], [32, 1], [W, 1], [1, 0])
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    ring = gl.allocate_shared_memory(dtype, [K, L, VEC], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    at = gl.arange(0, L, layout=lane)[:, None] * VEC + gl.arange(0, VEC, layout=gl.SliceLayout(0, tile))[None, :]
    if COUNT:
        i = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [W], [0]))
        divisor = count_rows(index_a.ptr, None, None, labels.weight_ptr, i, counted, x.classes, labels.ignore)
        scale = over(scale, divisor, EMPTY_IS_ZERO)
    else:
        scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    classes = x.classes
    if SHIFT == 1:
        classes = classes // VEC * VEC  # changes nothing but what the compiler knows
    even = 0.0
    if EVEN:
        even = labels.smoothing / classes
    chunks = gl.cdiv(classes + SHIFT - 1, CHUNK) - P  # of a row, in the ring
    again = chunks - K  # of them, fetched twice
    row = gl.program_id(0)
    outer = row.to(gl.int64) * 0
    a, c_a, logit_a, b, c_b, logit_b, keep, valid = row_terms(index_a, index_b, lam, labels, outer, row, row < rows, x)
    part = outer.to(gl.float32)
    slot = 0

    base, first, end = row_of(x, row, classes, VEC, SHIFT)
    prior = ring
    if B:  # a program's rows all begin at the same lane
        prior = gl.allocate_shared_memory(gl.float32, [B, L, VEC], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
        for c in range(B):
            position = c * CHUNK + at
            bias = gl.load(x.bias_ptr + position - first, mask=(position >= first) & (position < end), other=0.0)
            prior.index(c).store(bias.to(gl.float32) * x.tau)
        barrier()
    held = ()
    for p in gl.static_range(P):
        held = longer(held, gl.load(base + p * CHUNK + at, mask=(at >= 0) & keep, other=0.0))
    for p in gl.static_range(K):
        fetch(ring.index(p), base, (P + p) * CHUNK + at, end, keep, VEC)

    while row < rows:
        to, _, _ = row_of(gradient, row, classes, VEC, SHIFT)
        low, high = gl.cdiv(first, VEC) * VEC, end // VEC * VEC  # lanes of whole vectors in the row
        next_row = row + gl.num_programs(0)
        next_base, next_first, next_end = row_of(x, next_row, classes, VEC, SHIFT)
        next_a, next_c_a, next_logit_a, next_b, next_c_b, next_logit_b, next_keep, next_valid = row_terms(
            index_a, index_b, lam, labels, outer, next_row, next_row < rows, x
        )
        m = gl.full([L], LOWEST, gl.float32, lane)
        s = gl.full([L], 0.0, gl.float32, lane)
        seen, dot = s, s
        for c in range(again):
            wait_group(K - 1)
            chunk = shifted(ring.index(slot).load(tile).to(gl.float32), prior, P + c, tile, B)
            fetch(ring.index(slot), base, (P + K + c) * CHUNK + at, end, keep, VEC)
            m, s, seen, dot = take(m, s, seen, dot, chunk, None, EVEN)
            slot = gl.where(slot == K - 1, 0, slot + 1)
        place = slot
        for p in gl.static_range(K):
            wait_group(K - 1 - p)
            chunk = shifted(ring.index(place).load(tile).to(gl.float32), prior, P + again + p, tile, B)
            if p >= K - (1 if SHIFT == 1 else 2) or (p == 0 and P == 0 and SHIFT > 1):
                position = (P + again + p) * CHUNK + at
                inside = (position >= first) & (position < end)
                m, s, seen, dot = take(m, s, seen, dot, gl.where(inside, chunk, -float("inf")), inside, EVEN)
            else:
                m, s, seen, dot = take(m, s, seen, dot, chunk, None, EVEN)
            place = gl.where(place == K - 1, 0, place + 1)
        for p in gl.static_range(P):
            chunk = held[p].to(gl.float32)
            if p == 0 and SHIFT > 1:
                m, s, seen, dot = take(m, s, seen, dot, gl.where(at >= first, chunk, -float("inf")), at >= first, EVEN)
            else:
                m, s, seen, dot = take(m, s, seen, dot, chunk, None, EVEN)

        top = gl.max(m, 0)
        total = gl.sum(s * shrunk(m, top), 0)
        ls = log(total)
        lse = top + ls
        of_a, slope_a = phi(surprise(c_a, top, ls, logit_a), *hyper)
        value = c_a * of_a
        c_a *= slope_a
        q = c_a
        if PAIR:
            of_b, slope_b = phi(surprise(c_b, top, ls, logit_b), *hyper)
            value += c_b * of_b
            c_b *= slope_b
            q += c_b
        if EVEN:
            dot += gl.where(seen == 0, 0.0, seen * (m - top))
            value += labels.smoothing * ls - even * gl.sum(dot, 0)
            q += labels.smoothing
        p_share = q
        if z_loss is not None:
            value += z_loss * lse * lse
            p_share += 2.0 * z_loss * lse
        part += gl.where(keep, gl.where(valid & (total == total), value, float("nan")), 0.0)
        shrink = gl.where(valid, scale, float("nan"))
        p_share = gl.where(keep, p_share * shrink / total, 0.0)
        q_share = gl.where(keep, shrink, 0.0)
        top = gl.where(keep, top, 0.0)
        every = q_share * even

        renewed = ()
        for p in gl.static_range(P):
            g = slope_of(opaque(held[p]).to(gl.float32), top, p_share, every)
            load = gl.load(next_base + p * CHUNK + at, mask=(at >= 0) & next_keep, other=0.0)
            renewed = longer(renewed, load)
            gl.store(to + p * CHUNK + at, g.to(dtype), mask=p * CHUNK + at >= low)
        held = renewed
        for c in range(K):
            g = slope_of(shifted(ring.index(slot).load(tile).to(gl.float32), prior, P + again + c, tile, B), top, p_share, every)
            this = c < again
            position = (P + gl.where(this, again - 1 - c, c - again)) * CHUNK + at
            source, limit, wanted = gl.where(this, base, next_base), gl.where(this, end, next_end), gl.where(this, keep, next_keep)
            fetch(ring.index(slot), source, position, limit, wanted, VEC)
            position = (P + again + c) * CHUNK + at
            gl.store(to + position, g.to(dtype), mask=(position >= low) & (position < high))
            slot = gl.where(slot == K - 1, 0, slot + 1)
        for c in range(again):
            wait_group(K - 1)
            g = slope_of(shifted(ring.index(slot).load(tile).to(gl.float32), prior, P + again - 1 - c, tile, B), top, p_share, every)
            this = K + c < again
            position = (P + gl.where(this, again - 1 - K - c, K + c - again)) * CHUNK + at
            source, limit, wanted = gl.where(this, base, next_base), gl.where(this, end, next_end), gl.where(this, keep, next_keep)
            fetch(ring.index(slot), source, position, limit, wanted, VEC)
            gl.store(to + (P + again - 1 - c) * CHUNK + at, g.to(dtype))
            slot = gl.where(slot == K - 1, 0, slot + 1)

        if SHIFT > 1:
            few_at = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [W], [0]))
            position = gl.where(few_at < VEC, few_at, high + few_at - VEC)
            exists = gl.where(few_at < VEC, (few_at >= first) & (few_at < low), (position < end) & (few_at < 2 * VEC))
            few = gl.load(base + position, mask=exists & keep, other=0.0).to(gl.float32)
            if B:
                few += gl.load(x.bias_ptr + position - first, mask=exists, other=0.0).to(gl.float32) * x.tau
            gl.store(to + position, slope_of(few, top, p_share, every).to(dtype), mask=exists)
        # the targets' own classes once more: a comparison an element would cost more
        barrier()
        q_a, q_b = q_share * c_a, q_share * c_b
        g = slope_of(logit_a, top, p_share, every) - q_a - gl.where(a == b, q_b, 0.0)
        gl.store(to + first + a, g.to(dtype), mask=keep & (a >= 0))
        if PAIR:
            g = slope_of(logit_b, top, p_share, every) - q_b - gl.where(a == b, q_a, 0.0)
            gl.store(to + first + b, g.to(dtype), mask=keep & (b >= 0))
        row, base, first, end = next_row, next_base, next_first, next_end
        a, c_a, logit_a, b, c_b, logit_b = next_a, next_c_a, next_logit_a, next_b, next_c_b, next_logit_b
        keep, valid = next_keep, next_valid
    wait_group(0)
    finish(part, sum, scale, W)

"""Value and gradient of divergences over long rows in one launch, logits and teacher read from memory once: both rows stay on the chip.

As in resident.py a program works through rows one after the other, and what is read from memory passes through a ring in shared memory,
filled by asynchronous copies. A place of the ring holds a chunk of the logits and the same chunk of the teacher's; the ring has room for
all chunks of a row, and for some of the rows to come, which are read while this row is computed and written.

A formula without a closed form of Σ h takes a sweep more, over the ring. What it finds of h stays in registers for the first HELD chunks,
whose gradient then takes p alone: the special-function unit is what limits these formulas, and p is one of its three results. Where it
holds all, a chunk or two that the ring has no room for stay in registers, too.
"""

import triton
import triton.language as tl

from lossforge.kernels.divergence.rows import (
    accumulate_both,
    at_logits,
    closed,
    divergence_gradient,
    log_softmax,
    merge_both,
    of_tile,
    row_weight,
)
from lossforge.kernels.engine.gluon import async_load, commit_group, gl, gluon, wait_group
from lossforge.kernels.engine.layout import longer
from lossforge.kernels.engine.reduce import count_rows, divided, over
from lossforge.kernels.math import LOG2E, log, widened
from lossforge.kernels.row.resident import finish
from lossforge.kernels.row.rows import LOWEST


@triton.jit
def weight_of(labels, weight, ignore, row, rows):
    return row_weight(labels, weight, ignore, row.to(tl.int64) * 0, row, row < rows)


@triton.jit
def counts(labels, weight, ignore, row, rows):
    _, keep = weight_of(labels, weight, ignore, row, rows)
    return keep


@triton.jit
def row_of(t, row, VEC: tl.constexpr):
    return t.ptr + row.to(tl.int64) * t.s1 // VEC * VEC  # changes nothing but what the compiler knows


@triton.jit
def inside(position, classes, WHOLE: tl.constexpr):
    """Which of a chunk's classes there are; WHOLE: it is known not to be a row's last."""
    return position >= 0 if WHOLE else position < classes


@gluon.jit
def fetch(ring, slot, t, row, position, here, VEC: gl.constexpr):
    """Start to copy a chunk."""
    async_load(ring.index(slot), row_of(t, row, VEC) + position, mask=here)


@gluon.jit
def fetch_both(rings, slot, pair, row, position, here, VEC: gl.constexpr):
    """Start to copy a chunk of both rows, as one group."""
    fetch(rings[0], slot, pair[0], row, position, here, VEC)
    fetch(rings[1], slot, pair[1], row, position, here, VEC)
    commit_group()


@gluon.jit
def read(t, row, position, classes, wanted, VEC: gl.constexpr):
    """A chunk on its way to registers, -inf outside the row."""
    return gl.load(row_of(t, row, VEC) + position, mask=(position < classes) & wanted, other=-float("inf"))


@gluon.jit
def chunk_of(ring, place, tile: gl.constexpr, PAIRS: gl.constexpr):
    """A chunk in float32. PAIRS: two neighbours of bfloat16 are widened together."""
    chunk = ring.index(place).load(tile)
    return widened(chunk) if PAIRS else chunk.to(gl.float32)


@gluon.jit
def chunks_of(rings, place, inside, tile: gl.constexpr, PAIRS: gl.constexpr):
    """A chunk of logits and teacher; -inf where not `inside` the row, unless that is None."""
    chunk_x, chunk_t = chunk_of(rings[0], place, tile, PAIRS), chunk_of(rings[1], place, tile, PAIRS)
    if inside is not None:
        chunk_x, chunk_t = gl.where(inside, chunk_x, -float("inf")), gl.where(inside, chunk_t, -float("inf"))
    return chunk_x, chunk_t


@gluon.jit
def following(place, K: gl.constexpr):
    return gl.where(place == K - 1, 0, place + 1)


@gluon.jit(do_not_specialize=("rows", "counted"))
def resident_divergence_kernel(
    x,  # Logits with one outer index, classes next to each other, rows and classes multiples of VEC; and of the teacher
    teacher,
    labels,  # this and the next two: Strided
    weight,
    gradient,
    sum,
    divisor_ptr,
    hyper,
    inverse,
    scale,
    ignore,
    rows,
    counted,
    terms: gl.constexpr,
    sums: gl.constexpr,
    SWAP: gl.constexpr,
    EMPTY_IS_ZERO: gl.constexpr,
    COUNT: gl.constexpr,
    CHUNK: gl.constexpr,
    N: gl.constexpr,  # chunks a row, in the ring
    P: gl.constexpr,  # and in registers, its last; 0 unless HELD and K are N
    K: gl.constexpr,  # places in the ring, at least N
    HELD: gl.constexpr,  # at most N; 0 with a closed form
    VEC: gl.constexpr,
    W: gl.constexpr,
):
    gl.static_assert(P == 0 or (HELD == N and K == N))
    L: gl.constexpr = CHUNK // VEC
    DOT: gl.constexpr = sums is not None
    PAIRS: gl.constexpr = not DOT or SWAP  # fewer instructions; but KL was 5 % slower with them on an H200
    EARLY: gl.constexpr = HELD == N and K == N  # no room for rows to come but that of the teacher's row, from the middle sweep on
    tile: gl.constexpr = gl.BlockedLayout([1, VEC], [32, 1], [W, 1], [1, 0])
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    ring_x = gl.allocate_shared_memory(x.ptr.dtype.element_ty, [K, L, VEC], unswizzled)
    ring_t = gl.allocate_shared_memory(teacher.ptr.dtype.element_ty, [K, L, VEC], unswizzled)
    rings, pair = (ring_x, ring_t), (x, teacher)
    at = gl.arange(0, L, layout=lane)[:, None] * VEC + gl.arange(0, VEC, layout=gl.SliceLayout(0, tile))[None, :]
    if COUNT:
        i = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [W], [0]))
        scale = over(scale, count_rows(labels.ptr, None, None, None, i, counted, x.classes, ignore), EMPTY_IS_ZERO)
    else:
        scale = divided(scale, divisor_ptr, EMPTY_IS_ZERO)
    classes = x.classes // VEC * VEC  # changes nothing but what the compiler knows
    rate = inverse * LOG2E
    programs = gl.num_programs(0)
    row = gl.program_id(0)
    for k in gl.static_range(K):
        ahead = row + k // N * programs
        wanted = counts(labels, weight, ignore, ahead, rows)
        position = k % N * CHUNK + at
        fetch_both(rings, k, pair, ahead, position, inside(position, classes, k % N < N + P - 1) & wanted, VEC)
    kept_x, kept_t = (), ()
    for p in gl.static_range(P):
        wanted = counts(labels, weight, ignore, row, rows)
        kept_x = longer(kept_x, read(x, row, (N + p) * CHUNK + at, classes, wanted, VEC))
        kept_t = longer(kept_t, read(teacher, row, (N + p) * CHUNK + at, classes, wanted, VEC))
    part = (row * 0).to(gl.float32)
    slot = row * 0

    while row < rows:
        w, keep = weight_of(labels, weight, ignore, row, rows)
        if EARLY:
            next_keep = counts(labels, weight, ignore, row + programs, rows)
        m_x = gl.full([L], LOWEST, gl.float32, lane)
        s_x = gl.full([L], 0.0, gl.float32, lane)
        m_t, s_t, dot = m_x, s_x, s_x
        place = slot
        for n in gl.static_range(N):
            wait_group(K - 1 - n)
            chunk_x, chunk_t = chunks_of(rings, place, n * CHUNK + at < classes if n == N + P - 1 else None, tile, PAIRS)
            m_x, s_x, m_t, s_t, dot = accumulate_both(m_x, s_x, m_t, s_t, dot, chunk_x, chunk_t, rate, DOT, SWAP)
            place = following(place, K)
        for p in gl.static_range(P):
            chunk_x, chunk_t = widened(kept_x[p]), widened(kept_t[p])
            m_x, s_x, m_t, s_t, dot = accumulate_both(m_x, s_x, m_t, s_t, dot, chunk_x, chunk_t, rate, DOT, SWAP)
        top_x, top_t = gl.max(m_x, 0), gl.max(m_t, 0)
        total_x, total_t, dot_row = merge_both(m_x, s_x, m_t, s_t, dot, top_x, top_t, rate, DOT, SWAP)
        ls_x, ls_t = log(total_x), log(total_t)
        held = ()
        if DOT:
            value, h_sum = closed(dot_row, total_x, total_t, ls_x, ls_t, inverse, sums, SWAP)
        else:
            f_sum = gl.full([L], 0.0, gl.float32, lane)
            slopes = f_sum
            place = slot
            for n in gl.static_range(N):
                chunk_x, chunk_t = chunks_of(rings, place, n * CHUNK + at < classes if n == N + P - 1 else None, tile, PAIRS)
                f, h, _ = of_tile(chunk_x, chunk_t, top_x, ls_x, top_t, ls_t, rate, terms, hyper, SWAP)
                f_sum += gl.sum(f, 1)
                slopes += gl.sum(h, 1)
                if n < HELD:
                    held = longer(held, h)
                if EARLY:
                    position = n * CHUNK + at
                    fetch(ring_t, place, teacher, row + programs, position, inside(position, classes, n < N + P - 1) & next_keep, VEC)
                    commit_group()
                place = following(place, K)
            next_t = ()
            for p in gl.static_range(P):
                f, h, _ = of_tile(widened(kept_x[p]), widened(kept_t[p]), top_x, ls_x, top_t, ls_t, rate, terms, hyper, SWAP)
                f_sum += gl.sum(f, 1)
                slopes += gl.sum(h, 1)
                held = longer(held, h)
                next_t = longer(next_t, read(teacher, row + programs, (N + p) * CHUNK + at, classes, next_keep, VEC))
            kept_t = next_t
            value, h_sum = gl.sum(f_sum, 0), gl.sum(slopes, 0)
        part += gl.where(keep, w * value, 0.0)
        share = gl.where(keep, w * scale * inverse, 0.0)

        to = row_of(gradient, row, VEC)
        for n in gl.static_range(HELD):
            _, p = log_softmax(chunk_of(ring_x, slot, tile, PAIRS), top_x, ls_x, rate)
            g = at_logits(held[n], p, h_sum, share)
            position = n * CHUNK + at
            here = inside(position, classes, n < N + P - 1)
            gl.store(to + position, gl.where(keep, g, 0.0).to(gradient.ptr.dtype.element_ty), mask=here)
            if EARLY:
                fetch(ring_x, slot, x, row + programs, position, here & next_keep, VEC)
                commit_group()
            else:
                ahead = row + (n + K) // N * programs
                wanted = counts(labels, weight, ignore, ahead, rows)
                position = (n + K) % N * CHUNK + at
                fetch_both(rings, slot, pair, ahead, position, inside(position, classes, (n + K) % N < N - 1) & wanted, VEC)
            slot = following(slot, K)
        next_x = ()
        for p in gl.static_range(P):
            position = (N + p) * CHUNK + at
            _, probability = log_softmax(widened(kept_x[p]), top_x, ls_x, rate)
            g = at_logits(held[N + p], probability, h_sum, share)
            next_x = longer(next_x, read(x, row + programs, position, classes, next_keep, VEC))
            gl.store(to + position, gl.where(keep, g, 0.0).to(gradient.ptr.dtype.element_ty), mask=position < classes)
        kept_x = next_x
        for n in range(HELD, N):
            chunk_x, chunk_t = chunks_of(rings, slot, None, tile, PAIRS)
            g = divergence_gradient(chunk_x, chunk_t, top_x, ls_x, top_t, ls_t, rate, h_sum, share, terms, hyper, SWAP)
            ahead = row + (n + K) // N * programs
            wanted = counts(labels, weight, ignore, ahead, rows)
            position = (n + K) % N * CHUNK + at
            fetch_both(rings, slot, pair, ahead, position, (position < classes) & wanted, VEC)
            position = n * CHUNK + at
            gl.store(to + position, gl.where(keep, g, 0.0).to(gradient.ptr.dtype.element_ty), mask=position < classes)
            slot = following(slot, K)
        row += programs
    wait_group(0)
    finish(part, sum, scale, W)

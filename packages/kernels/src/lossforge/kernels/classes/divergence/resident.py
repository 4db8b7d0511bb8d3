"""Value and gradient of divergences over long rows in one launch. Logits and teacher are read from memory once; both rows stay on the chip.

As in rowwise/resident.py a program processes its rows one after the other, and asynchronous copies fill a ring in shared memory. A slot of
the ring holds a chunk of the logits and the same chunk of the teacher's. The ring has room for all chunks of a row, and for some of the
next rows, which are read while this row is computed and written.

A formula without a closed form of Σ h needs one more sweep, over the ring. The slopes h of the first HELD chunks stay in registers. Their
gradient then needs only p. This matters because the special-function unit limits these formulas, and p takes one of its three results. If
all chunks are held, one or two chunks for which the ring has no room stay in registers, too.
"""

from collections import namedtuple

import triton

from lossforge.kernels.classes.divergence import rows
from lossforge.kernels.classes.rowwise.chunks import finish, following, positions, row_of, scale_of
from lossforge.kernels.classes.rowwise.rows import LOWEST
from lossforge.kernels.engine.gluon import async_load, commit_group, gl, gluon, wait_group
from lossforge.kernels.engine.layout import longer
from lossforge.kernels.math import log, widened

Rows = namedtuple("Rows", "x teacher marks ignore count classes")
"""Logits and teacher, labels and weights of the rows, the ignored label, the number of rows, and their classes."""


@triton.jit
def counts(of, row):
    _, keep = rows.row_weight(of.marks, of.ignore, row.to(gl.int64) * 0, row, row < of.count)
    return keep


@triton.jit
def inside(position, classes, WHOLE: gl.constexpr):
    """Return which of a chunk's classes exist. WHOLE: the chunk is known not to be a row's last."""
    return position >= 0 if WHOLE else position < classes


@gluon.jit
def fetch(ring, slot, t, row, position, here, config):
    """Start to copy a chunk."""
    base, _, _ = row_of(t, row, 0, config)
    async_load(ring.index(slot), base + position, mask=here)


@gluon.jit
def fetch_both(rings, slot, of, row, n, at, WHOLE: gl.constexpr, config):
    """Start to copy the n-th chunk from this row on, of logits and teacher, as one group. WHOLE: it is not a row's last."""
    ahead = row + n // config.N * gl.num_programs(0)
    wanted = counts(of, ahead)
    position = n % config.N * config.CHUNK + at
    here = inside(position, of.classes, WHOLE) & wanted
    fetch(rings[0], slot, of.x, ahead, position, here, config)
    fetch(rings[1], slot, of.teacher, ahead, position, here, config)
    commit_group()


@gluon.jit
def read(t, row, position, classes, wanted, config):
    """Load a chunk into registers, with -inf outside the row."""
    base, _, _ = row_of(t, row, 0, config)
    return gl.load(base + position, mask=(position < classes) & wanted, other=-float("inf"))


@gluon.jit
def chunk_of(ring, place, tile: gl.constexpr, PAIRS: gl.constexpr):
    """Return a chunk in float32. PAIRS: two neighbours of bfloat16 are widened together."""
    chunk = ring.index(place).load(tile)
    return widened(chunk) if PAIRS else chunk.to(gl.float32)


@gluon.jit
def chunks_of(rings, place, inside, tile: gl.constexpr, PAIRS: gl.constexpr):
    """Return a chunk of logits and teacher, with -inf where it is not `inside` the row; None: all are inside."""
    chunk_x, chunk_t = chunk_of(rings[0], place, tile, PAIRS), chunk_of(rings[1], place, tile, PAIRS)
    if inside is not None:
        chunk_x, chunk_t = gl.where(inside, chunk_x, -float("inf")), gl.where(inside, chunk_t, -float("inf"))
    return chunk_x, chunk_t


@gluon.jit(do_not_specialize=("rows_outer", "counted"))
def resident_divergence_kernel(x, teacher, marks, gradient, sum, formula, rows_outer, counted, config: gl.constexpr):
    """Compute the total of rows, and its gradient.

    Args:
        x, teacher: Logits with one outer index and adjacent classes; rows and classes are multiples of VEC.
        marks: Marks.
        gradient: Strided.
        sum: Sum.
        formula: Formula.
        config: Chunks: N of a row in the ring, and P, its last, in registers; HELD is 0 with a closed form.
    """
    CHUNK: gl.constexpr = config.CHUNK
    N: gl.constexpr = config.N
    P: gl.constexpr = config.P
    K: gl.constexpr = config.K
    HELD: gl.constexpr = config.HELD
    SWAP: gl.constexpr = config.SWAP
    gl.static_assert(P == 0 or (HELD == N and K == N))
    L: gl.constexpr = CHUNK // config.VEC
    DOT: gl.constexpr = formula.averaged is not None
    PAIRS: gl.constexpr = not DOT or SWAP  # fewer instructions; but for KL this was 5 % slower on an H200
    EARLY: gl.constexpr = HELD == N and K == N  # the ring has no room for the next row, except the teacher's slots after the middle sweep
    tile: gl.constexpr = gl.BlockedLayout([1, config.VEC], [32, 1], [config.W, 1], [1, 0])
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    dtype: gl.constexpr = gradient.ptr.dtype.element_ty
    ring_x = gl.allocate_shared_memory(x.ptr.dtype.element_ty, [K, L, config.VEC], unswizzled)
    ring_t = gl.allocate_shared_memory(teacher.ptr.dtype.element_ty, [K, L, config.VEC], unswizzled)
    rings = (ring_x, ring_t)
    at = positions(tile, config)
    scale = scale_of(formula, marks.labels, None, formula.ignore, counted, x.classes, config)
    classes = x.classes // config.VEC * config.VEC  # tells the compiler that classes are a multiple of VEC, so that loads are vectorised
    programs = gl.num_programs(0)
    row = gl.program_id(0)
    for k in gl.static_range(K):
        fetch_both(rings, k, Rows(x, teacher, marks, formula.ignore, rows_outer, classes), row, k, at, k % N < N + P - 1, config)
    kept_x, kept_t = (), ()
    for p in gl.static_range(P):
        wanted = counts(Rows(x, teacher, marks, formula.ignore, rows_outer, classes), row)
        kept_x = longer(kept_x, read(x, row, (N + p) * CHUNK + at, classes, wanted, config))
        kept_t = longer(kept_t, read(teacher, row, (N + p) * CHUNK + at, classes, wanted, config))
    part = (row * 0).to(gl.float32)
    slot = row * 0

    while row < rows_outer:
        w, keep = rows.row_weight(marks, formula.ignore, row.to(gl.int64) * 0, row, row < rows_outer)
        if EARLY:
            next_keep = counts(Rows(x, teacher, marks, formula.ignore, rows_outer, classes), row + programs)
        m = gl.full([L], LOWEST, gl.float32, lane)
        zero = gl.full([L], 0.0, gl.float32, lane)
        lanes = rows.Lanes(m, zero, m, zero, zero)
        place = slot
        for n in gl.static_range(N):
            wait_group(K - 1 - n)
            chunk_x, chunk_t = chunks_of(rings, place, n * CHUNK + at < classes if n == N + P - 1 else None, tile, PAIRS)
            lanes = rows.accumulate_both(lanes, chunk_x, chunk_t, formula, SWAP)
            place = following(place, config)
        for p in gl.static_range(P):
            lanes = rows.accumulate_both(lanes, widened(kept_x[p]), widened(kept_t[p]), formula, SWAP)
        top_x, top_t = gl.max(lanes.m_x, 0), gl.max(lanes.m_t, 0)
        total_x, total_t, dot = rows.merge_both(lanes, top_x, top_t, formula, SWAP)
        soft = rows.Softmaxes(top_x, log(total_x), top_t, log(total_t))
        held = ()
        if DOT:
            value, h_sum = rows.closed(dot, total_x, total_t, soft, formula, SWAP)
        else:
            f_sum, slopes = zero, zero
            place = slot
            for n in gl.static_range(N):
                chunk_x, chunk_t = chunks_of(rings, place, n * CHUNK + at < classes if n == N + P - 1 else None, tile, PAIRS)
                f, h, _ = rows.of_tile(chunk_x, chunk_t, soft, formula, SWAP)
                f_sum += gl.sum(f, 1)
                slopes += gl.sum(h, 1)
                if n < HELD:
                    held = longer(held, h)
                if EARLY:
                    position = n * CHUNK + at
                    fetch(ring_t, place, teacher, row + programs, position, inside(position, classes, n < N + P - 1) & next_keep, config)
                    commit_group()
                place = following(place, config)
            next_t = ()
            for p in gl.static_range(P):
                f, h, _ = rows.of_tile(widened(kept_x[p]), widened(kept_t[p]), soft, formula, SWAP)
                f_sum += gl.sum(f, 1)
                slopes += gl.sum(h, 1)
                held = longer(held, h)
                next_t = longer(next_t, read(teacher, row + programs, (N + p) * CHUNK + at, classes, next_keep, config))
            kept_t = next_t
            value, h_sum = gl.sum(f_sum, 0), gl.sum(slopes, 0)
        part += gl.where(keep, w * value, 0.0)
        share = gl.where(keep, w * scale * formula.inverse, 0.0)

        to, _, _ = row_of(gradient, row, 0, config)
        for n in gl.static_range(HELD):
            _, p = rows.log_softmax(chunk_of(ring_x, slot, tile, PAIRS), soft.top_x, soft.ls_x, formula.rate)
            g = rows.at_logits(held[n], p, h_sum, share)
            position = n * CHUNK + at
            here = inside(position, classes, n < N + P - 1)
            gl.store(to + position, gl.where(keep, g, 0.0).to(dtype), mask=here)
            if EARLY:
                fetch(ring_x, slot, x, row + programs, position, here & next_keep, config)
                commit_group()
            else:
                fetch_both(
                    rings, slot, Rows(x, teacher, marks, formula.ignore, rows_outer, classes), row, n + K, at, (n + K) % N < N - 1, config
                )
            slot = following(slot, config)
        next_x = ()
        for p in gl.static_range(P):
            position = (N + p) * CHUNK + at
            _, probability = rows.log_softmax(widened(kept_x[p]), soft.top_x, soft.ls_x, formula.rate)
            g = rows.at_logits(held[N + p], probability, h_sum, share)
            next_x = longer(next_x, read(x, row + programs, position, classes, next_keep, config))
            gl.store(to + position, gl.where(keep, g, 0.0).to(dtype), mask=position < classes)
        kept_x = next_x
        for n in range(HELD, N):
            chunk_x, chunk_t = chunks_of(rings, slot, None, tile, PAIRS)
            g = rows.divergence_gradient(chunk_x, chunk_t, soft, h_sum, share, formula, SWAP)
            fetch_both(rings, slot, Rows(x, teacher, marks, formula.ignore, rows_outer, classes), row, n + K, at, False, config)
            position = n * CHUNK + at
            gl.store(to + position, gl.where(keep, g, 0.0).to(dtype), mask=position < classes)
            slot = following(slot, config)
        row += programs
    wait_group(0)
    finish(part, sum, scale, config)

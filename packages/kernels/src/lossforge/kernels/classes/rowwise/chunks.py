"""What the kernels written in Gluon share. Their rows stay on the chip between two sweeps.

Triton does not let a kernel keep data in shared memory; Gluon, which comes with Triton, does. Only the loops over chunks are written in
Gluon. The formulas and the device functions of the targets are those of the templates.
"""

from typing import NamedTuple

import triton

from lossforge.kernels.classes.rowwise.sweep import COUNTED, scaled
from lossforge.kernels.engine.gluon import barrier, gl, gluon

PARTS = gl.constexpr(1024)  # most programs of a launch


class Chunks(NamedTuple):
    """Compile-time constants of a kernel whose rows stay on the chip, beside its formula."""

    CHUNK: int  # classes of a chunk
    K: int  # slots of the ring in shared memory
    P: int  # chunks in registers
    VEC: int
    W: int  # warps
    COUNT: bool
    EMPTY_IS_ZERO: bool
    SHIFT: int = 1
    B: int = 0  # chunks of a bias, which stays in shared memory; then P is 0
    N: int = 0  # chunks of a row in the ring
    HELD: int = 0  # chunks of h in registers
    SWAP: bool = False


@gluon.jit
def positions(tile: gl.constexpr, config):
    """Return the indices of a chunk's elements, (lanes, VEC)."""
    lane = gl.arange(0, config.CHUNK // config.VEC, layout=gl.SliceLayout(1, tile))
    return lane[:, None] * config.VEC + gl.arange(0, config.VEC, layout=gl.SliceLayout(0, tile))[None, :]


@gluon.jit
def scale_of(loss, index, weight_ptr, ignore, counted, classes, config):
    i = gl.arange(0, COUNTED, layout=gl.BlockedLayout([1], [32], [config.W], [0]))
    return scaled(loss, index, weight_ptr, ignore, i, counted, classes, config)


@triton.jit
def row_of(t, row, classes, config):
    """Return where a row is read or written from, the lane of its class 0 there, and the lane after its last class.

    The address is a multiple of VEC elements. With SHIFT it may lie before the row's begin.
    """
    offset = row.to(gl.int64) * t.s1
    aligned = offset // config.VEC * config.VEC
    first = (offset * 0).to(gl.int32)
    if config.SHIFT > 1:
        first = (offset - aligned).to(gl.int32)
    return t.ptr + aligned, first, classes + first


@gluon.jit
def following(place, config):
    return gl.where(place == config.K - 1, 0, place + 1)


@gluon.jit
def finish(part, sum, scale, config):
    """Store and sum the programs' parts as reduce.finish does, for at most PARTS programs."""
    gl.store(sum.parts + gl.program_id(0), part)
    barrier()
    finished = gl.atomic_add(sum.ticket, 1, sem="acq_rel", scope="gpu")
    if finished == gl.num_programs(0) - 1:
        i = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [config.W], [0]))
        parts = gl.load(sum.parts + i, mask=i < gl.num_programs(0), other=0.0, cache_modifier=".cg")
        gl.store(sum.total, gl.sum(parts, 0) * scale)
        gl.store(sum.ticket, 0)

"""Rows of logits whose classes are sharded over processes, from each process's exponentials: the loss, and the factors of the gradient.

Process r has exponentials of its own classes, relative to an offset c_r a row, and ls_r = ln Σ exp(x - c_r). With all of them

    lse = ln Σ_r exp(c_r + ls_r),  nll = lse - x_t

nothing of which needs more than differences of c_r, so that a common offset of the logits costs no digits.
"""

import triton
import triton.language as tl

from lossforge.kernels.classes.rowwise import rows
from lossforge.kernels.engine.reduce import divided, finish
from lossforge.kernels.linear.exponentials import LEAST
from lossforge.kernels.linear.kernel import span_of_rows
from lossforge.kernels.math import exp, log


@triton.jit
def number_of(gathered, r, plane, span, keep):
    """Load a number of the rows, of process r: 0 c_r, 1 ls_r, 2 the loss over its own classes, nan where it does not have the target."""
    at = gathered.ptr + (r + span.row * 0).to(tl.int64) * gathered.s0 + plane * gathered.s1 + span.row
    return tl.load(at, mask=keep, other=0.0)


@triton.jit(do_not_specialize=("count", "rank"))
def linear_sharded_rows_kernel(
    x, target, gathered, e_ptr, stride, factors_ptr, sum, loss, count, rank, WORLD: tl.constexpr, HELD: tl.constexpr, config: tl.constexpr
):
    """Compute the total loss and the rows' factors, and write the exponentials of the targets that this process has.

    Args:
        x: Logits without a pointer, of this process's classes.
        target: Target, whose class index counts from this process's first class; lam: the rows' weights.
        gathered: Strided, (processes, 3, rows).
        e_ptr: exponentials. stride: from a row of them to the next.
        factors_ptr: v of each row: the gradient of the logits is v times the exponentials.
        sum: Sum of the loss.
        loss: RowLoss.
        count: rows.
        HELD: whether a row's weight is its probability.
    """
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of_rows(count, x.classes, config)
    t = tl.load(target.a.ptr + span.row, mask=span.inside, other=target.labels.ignore)
    keep = span.inside & (t != target.labels.ignore)
    w = tl.full([config.BR], 1.0, tl.float32)
    if target.lam.ptr is not None:
        w = tl.load(target.lam.ptr + span.row * target.lam.s1, mask=span.inside, other=0.0).to(tl.float32)
        keep = keep & (w != 0.0)
    top = tl.full([config.BR], rows.LOWEST, tl.float32)
    for r in tl.static_range(WORLD):
        top = tl.maximum(top, number_of(gathered, r, 0, span, keep))
    s = tl.full([config.BR], 0.0, tl.float32)
    for r in tl.static_range(WORLD):
        s += exp((number_of(gathered, r, 0, span, keep) - top) + number_of(gathered, r, 1, span, keep))
    ls = log(s)
    nll = tl.full([config.BR], 0.0, tl.float32)
    known = nll
    for r in tl.static_range(WORLD):
        own = number_of(gathered, r, 2, span, keep)
        there = own == own
        beside = (top - number_of(gathered, r, 0, span, keep)) + (ls - number_of(gathered, r, 1, span, keep))
        nll += tl.where(there, own + beside, 0.0)
        known += tl.where(there, 1.0, 0.0)
    nll = tl.where((known > 0.0) & (s == s), nll, float("nan"))
    if HELD:
        w = exp(-nll)
    value, of_p = tl.where(w == 0.0, 0.0, w * nll), w
    if loss.z_loss is not None:
        lse = top + ls
        value += loss.z_loss * lse * lse
        of_p += 2.0 * loss.z_loss * lse
    finish(tl.sum(tl.where(keep, value, 0.0), 0), sum, scale)
    c, own = number_of(gathered, rank, 0, span, keep), number_of(gathered, rank, 2, span, keep)
    share = of_p * exp((c - top) - ls)
    share = tl.where(tl.abs(share) < LEAST, LEAST, share)  # of a smaller one the target's entry would be infinite
    step = number_of(gathered, rank, 1, span, keep) - own  # of the target's logit, from c
    entry = exp(step) - w / share
    if x.softcap is not None:
        u = (c + step) / x.softcap
        entry *= 1.0 - u * u
    v = tl.where(keep, tl.where(nll == nll, share * scale, float("nan")), 0.0)
    if x.scale is not None:
        v *= x.scale
    tl.store(factors_ptr + span.row, v, mask=span.inside)
    here = keep & (own == own) & (t >= 0) & (t < x.classes)
    tl.store(e_ptr + span.row.to(tl.int64) * stride + t, entry.to(e_ptr.dtype.element_ty), mask=here)

"""The second launch of the row-wise template's classic split: the gradient from the logits and the statistics that forward kept."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.math import exp
from lossforge.kernels.row.focus import spread_of, spread_shares
from lossforge.kernels.row.rows import Shares, Slope, Summed, hard_loss, row_terms, write_slope
from lossforge.kernels.row.sweep import load_stats, place_of, read_one, span_of, start_of, write_one


class Kept(NamedTuple):
    """What forward returned: its statistics and each row's entropy."""

    stats: Tensor
    entropy: Tensor | None


class GradOutputs(NamedTuple):
    """Gradients of the outputs: per row where the stride is 1, one for all where it is 0; None where there is none."""

    loss: Tensor | None
    loss_stride: int
    z_loss: Tensor | None
    z_stride: int
    lse: Tensor | None
    entropy: Tensor | None


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def rowwise_backward_kernel(x, target, gradient, kept, grad_outputs, loss, rows_outer, blocks, config: tl.constexpr):
    """One tile of the gradient from kept statistics; the second grid axis walks the classes."""
    scale = divided(loss.scale, loss.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of(x, rows_outer, blocks, config)
    inside, place = span.inside, place_of(span)
    terms = row_terms(target, span.outer, span.row, inside, x)
    keep = terms.keep
    read = inside if config.ALL_ROWS else keep
    stored = read_one((x,), span, read, config)
    top, ls, q = load_stats(kept.stats, 3, span)
    c_a, c_b = terms.c_a, terms.c_b
    if target.a.ptr is not None:
        _, c_a = hard_loss(c_a, terms.logit_a, top, ls, loss)
    if target.b.ptr is not None:
        _, c_b = hard_loss(c_b, terms.logit_b, top, ls, loss)
    p_share = tl.full([config.BR], 0.0, tl.float32)
    q_share = tl.full([config.BR], 0.0, tl.float32)
    if grad_outputs.loss is not None:
        of_loss = tl.load(grad_outputs.loss + place * grad_outputs.loss_stride, mask=inside, other=0.0).to(tl.float32) * scale
        q_share += of_loss
        p_share += of_loss * q
        if loss.z_loss is not None:
            p_share += of_loss * 2.0 * loss.z_loss * (top + ls)
    if grad_outputs.z_loss is not None:
        of_z = tl.load(grad_outputs.z_loss + place * grad_outputs.z_stride, mask=inside, other=0.0).to(tl.float32) * scale
        p_share += of_z * 2.0 * loss.z_loss * (top + ls)
    p_share = tl.where(keep, tl.where(terms.valid, p_share, float("nan")), 0.0)
    q_share = tl.where(keep, q_share, 0.0)
    if grad_outputs.lse is not None:
        p_share += tl.load(grad_outputs.lse + place, mask=inside, other=0.0).to(tl.float32)
    inverse = exp(-ls)
    p_share *= inverse
    h_share = tl.full([config.BR], 0.0, tl.float32)
    h_shift = tl.full([config.BR], 0.0, tl.float32)
    if target.labels.focus is not None:
        h_share, h_shift = spread_shares(spread_of(q_share * (terms.c_a + terms.c_b), ls, target.labels), ls, target.labels)
    if config.ENTROPY:
        h_share = tl.load(grad_outputs.entropy + place, mask=inside, other=0.0).to(tl.float32) * inverse
        h_shift = h_share * (tl.load(kept.entropy + place, mask=inside, other=0.0) - ls)
    even = tl.full([config.BR, 1], 0.0, tl.float32)
    if config.EVEN:
        even = q_share[:, None] * (target.labels.smoothing / span.classes)
    shares = Shares(top, p_share, q_share, q_share * c_a, q_share * c_b, h_share, h_shift, even)
    write_one(
        stored, (x,), Slope(x, target, gradient, Summed(span, start_of(gradient, span, config), terms, shares, read)), write_slope, config
    )

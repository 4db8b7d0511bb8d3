"""The second launch of the divergence template's classic split: the gradient from both tensors and the statistics that forward kept."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lossforge.kernels.divergence.rows import Gradient, Softmaxes, Summed, row_weight, write_slope
from lossforge.kernels.engine.reduce import divided
from lossforge.kernels.row.sweep import load_stats, place_of, read_one, span_of, start_of, write_one


class GradOutput(NamedTuple):
    """The gradient of the loss: one for all rows where the stride is 0."""

    ptr: Tensor | None
    stride: int


@triton.jit(do_not_specialize=("rows_outer", "blocks"))
def divergence_backward_kernel(x, teacher, marks, gradient, stats_ptr, grad_output, formula, rows_outer, blocks, config: tl.constexpr):
    """One tile of the gradient from kept statistics; the second grid axis walks the classes."""
    scale = divided(formula.scale, formula.divisor_ptr, config.EMPTY_IS_ZERO)
    span = span_of(x, rows_outer, blocks, config)
    to = start_of(gradient, span, config)
    w, keep = row_weight(marks, formula.ignore, span.outer, span.row, span.inside)
    stored = read_one((x, teacher), span, keep, config)
    top_x, ls_x, top_t, ls_t, h_sum = load_stats(stats_ptr, 5, span)
    of_loss = tl.load(grad_output.ptr + place_of(span) * grad_output.stride, mask=span.inside, other=0.0).to(tl.float32)
    share = tl.where(keep, of_loss * w * scale * formula.inverse, 0.0)
    soft = Softmaxes(top_x[:, None], ls_x[:, None], top_t[:, None], ls_t[:, None])
    rows = Summed(span, to, soft, h_sum[:, None], share[:, None], keep)
    write_one(stored, (x, teacher), Gradient(gradient, formula, rows), write_slope, config)

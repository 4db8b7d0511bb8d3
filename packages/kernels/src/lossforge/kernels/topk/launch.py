"""Host side of the losses with a teacher's top-K logits: tiles, and the launch; the rest is that of divergences."""

from typing import Any

import triton

from lossforge.kernels.divergence.kernel import GradOutput, Outputs
from lossforge.kernels.divergence.launch import FromTeacher, formula_of
from lossforge.kernels.divergence.rows import Marks
from lossforge.kernels.engine.launch import Launch, sum_slots
from lossforge.kernels.engine.template import Launches
from lossforge.kernels.rowwise.layout import Wanted, row_layout
from lossforge.kernels.rowwise.rows import Logits
from lossforge.kernels.tiles import forward_tiles
from lossforge.kernels.topk.call import TopKCall
from lossforge.kernels.topk.kernel import Entries, topk_kernel


def _make(formulas: Any, call: TopKCall, wanted: Wanted, out: Outputs, grad_output: GradOutput) -> Launch | None:
    at = row_layout(call.x.shape, (call.x, call.indices, call.target, call.labels, call.weight, wanted.gradient), 1, wanted.gradient)
    if at is None:
        return None
    x, indices, log_q, labels, weight, gradient = at.strided
    k = call.indices.shape[1]
    total = out.loss is None and grad_output.ptr is None
    given = (Logits(*x, at.classes), Entries(indices, log_q, k), Marks(labels, weight), gradient)
    arguments = (*given, out, grad_output, sum_slots() if total else None, formula_of(call, wanted.divisor))
    tiles = forward_tiles(at.classes, call.x.itemsize, at.adjacent, at.adjacent, True)
    constants = {"EMPTY_IS_ZERO": call.empty_is_zero, "RENORMALIZE": call.renormalize, "TAIL": call.tail}
    return at.launch(topk_kernel, tiles, arguments, wanted.counted, int(total), KP=triton.next_power_of_2(k), **constants)


_LAUNCH: Launches = FromTeacher(_make)
forward, backward = _LAUNCH.forward, _LAUNCH.backward

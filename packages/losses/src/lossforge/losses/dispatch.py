"""From a checked call to the kernels, through the operators or without them, or to the plain-torch reference."""

from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.call import DivergenceCall, RowCall, TopKCall
from lossforge.losses.autograd import Run, Several, last_tensor, leaves, run
from lossforge.losses.operators import by_operator, for_reference
from lossforge.losses.reference import reference
from lossforge.losses.repeat import note
from lossforge.losses.state import KERNEL_DTYPES, gradient_in_forward, kernels_apply, plain


def compute(call: Any, mode: str | None, inplace: bool = False) -> Several:
    """Return the results of a checked call, None where not asked for. mode: when the gradient is written."""
    tensors, differentiable = call[1 : last_tensor(call)], leaves(call)
    others = tensors[len(differentiable) :]
    narrow = not isinstance(call, (DivergenceCall, TopKCall)) or call.target.dtype in KERNEL_DTYPES
    if not (narrow and kernels_apply(differentiable[0], *others)):
        return tuple(reference(for_reference(call)))
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in differentiable]
    in_forward = gradient_in_forward(mode, differentiable[wanted.index(True) if any(wanted) else 0], call.reduction)
    inplace = inplace and any(wanted) and not torch.compiler.is_compiling()
    if inplace or plain(*tensors):
        how = Run.of(call, in_forward, inplace)
        results = run(how, any(wanted))
        note(how, any(wanted), results)
        return results
    # as Run.keeps, from fields, because Dynamo of torch 2.9 cannot trace a record's properties
    further = isinstance(call, RowCall) and any(call.outputs[:3])
    keep = any(wanted) and (not in_forward or further)
    return tuple(by_operator(call, [in_forward and want for want in wanted], keep))


def value(call: Any, mode: str | None, inplace: bool = False) -> Tensor:
    """Return the first result."""
    result = compute(call, mode, inplace)[0]
    assert result is not None
    return result

"""Cross entropy of rows whose classes are spread over processes: the call of this process's classes, checked and computed.

The gradient of a layer's input is the sum over the processes. Backward writes this process's part of it first. The sum runs beside the last
product, that of the weight's gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.options import of_classes, rows_of
from lossforge.losses.base.record import CheckedCall, Several, rebuilt
from lossforge.losses.engine.autograd import DIFFERENTIATED
from lossforge.losses.engine.calls import compute, planned
from lossforge.losses.engine.gradients import new_gradients, of_results, recalled, remember
from lossforge.losses.engine.linear.engine import backward, forward
from lossforge.losses.engine.parallel.cross_entropy_forward import in_three_products
from lossforge.losses.engine.parallel.cross_entropy_rows import Joining, joined
from lossforge.losses.engine.parallel.shards import NO_CLASS, Shards, SummedGradient, is_dtensor, shards_of
from lossforge.losses.engine.spec import ExecutionSpec
from lossforge.losses.templates.plain_forms import which_count
from lossforge.losses.templates.rowwise import RowOptions, entropy_weight, rowwise_results


def over_processes(
    call: RowwiseCall[Any],
    options: RowOptions,
    group: Any,
    classes: int | None,
    target_name: str = "target",
    each_row: bool = False,
) -> Any:
    """Check and compute the call of this process's classes; return the results of all, in the template's order.

    call: with the function's arguments as they are. target_name: in messages. each_row: return the cross entropy of each row, too, without
    its weight and without gradient.
    """
    x = call.x
    if options.get("gradient") == "forward" and not isinstance(x, Head):
        raise ValueError('gradient="forward" with group is served from a layer\'s input, as by linear_cross_entropy, not from logits')
    dim = min(x.ndim - 1, 1) if is_dtensor(x) else of_classes(x)
    shards, x = shards_of(group, classes, x, dim, "input")
    x = x if isinstance(x, Head) else shards.trimmed(x, dim)
    call = call._replace(entropy_weight=entropy_weight(shards.classes) if call.entropy_weight else 0.0)
    weight = call.weight if call.weight is None else shards.trimmed(checks.tensor("weight", call.weight), 0)
    z_loss = checks.number("z_loss", options.get("z_loss", 0.0), 0.0)
    label_smoothing = checks.number("label_smoothing", call.label_smoothing, 0.0, 1.0)
    ignore_index = checks.whole_number("ignore_index", call.ignore_index)
    target, target_b, _lam = checks.tensor("target", call.target), options.get("target_b"), options.get("lam")
    local: dict[str, Any] = {}
    if target.is_floating_point():
        checks.ignores_none(ignore_index)
        checks.without_gradient("target", target)
        target = own_target = shards.trimmed(target, dim)
    else:
        allowed, rows = checks.Allowed(0, shards.classes, ignore_index, options.get("validate")), rows_of(x, dim)
        target = checks.indices(target_name, target, x, allowed, rows).long()
        own_target = shards.mine(target, ignore_index)
        if target_b is not None:
            target_b = checks.indices("target_b", target_b, x, allowed, rows).long()
            local["target_b"] = shards.mine(target_b, ignore_index)
    # this process spreads its classes' part of the smoothing over them: factor · (1 - own) = 1 - ε, factor · own / own classes = ε / C
    part = label_smoothing * shards.own / shards.classes
    factor = 1.0 - label_smoothing + part
    given: RowOptions = {**options, **local, "z_loss": 0.0}  # type: ignore[typeddict-item]
    own_call = call._replace(x=x, target=own_target, weight=weight, ignore_index=NO_CLASS, label_smoothing=part / factor if factor else 0.0)
    checked = rowwise_results(own_call, given, probabilities=True)
    own: RowwiseCall[Any] = checked.call
    of_rows = own.lam if target_b is None else None
    one = (lambda t: t.unsqueeze(0)) if own.target.ndim > target.ndim else (lambda t: t)
    whole = own._replace(target=one(target), target_b=None if target_b is None else one(target_b), ignore_index=ignore_index)
    if of_rows is not None and not of_rows.requires_grad:  # a row of weight 0 may be nan
        own = own._replace(target=torch.where(of_rows == 0, NO_CLASS, own.target))
    _, _, want_entropy, want_correct, want_argmax, want_log_p2, want_mean = own.outputs
    own = own._replace(
        loss="cross_entropy",
        lam=None if of_rows is not None else own.lam,
        entropy_weight=0.0,
        loss_scale=1.0,
        reduction="none",
        normalizer=None,
        mean_of_rows=False,
        outputs=[False, True, want_entropy, False, want_argmax or want_correct, want_log_p2, want_mean],
    )
    kept = {name: v for name, v in options.items() if name != "gradient"}
    own, whole = rebuilt(own), rebuilt(whole)
    joining = Joining(shards, whole, own, z_loss, factor, options.get("gradient"), of_rows, each_row)
    smoothed = _with_smoothing(own, whole) if label_smoothing and not target.is_floating_point() else own
    results = _results(joining, CheckedCall(smoothed, kept, tuple))
    return [t if t is None or t.ndim == 0 else t.squeeze(0) for t in results] if x.ndim == 1 else tuple(results)


def _with_smoothing(own: RowwiseCall[Any], whole: RowwiseCall[Any]) -> RowwiseCall[Any]:
    """Return the call with a second target of no share in the rows whose target another process has, so that they are smoothed too."""
    counts = which_count(whole)
    target_b = torch.full_like(own.target, own.ignore_index) if own.target_b is None else own.target_b
    elsewhere = counts & (own.target == own.ignore_index) & (target_b == own.ignore_index)
    lam = torch.ones((), dtype=torch.float32, device=counts.device) if own.lam is None else own.lam
    lam = torch.where(elsewhere, 1.0, lam).expand(counts.shape)
    return rebuilt(own._replace(target_b=torch.where(elsewhere, 0, target_b), lam=lam))


def _results(joining: Joining, checked: CheckedCall[RowwiseCall[Any], Any]) -> Sequence[Tensor | None]:
    """Compute this process's call, and return the results of all classes."""
    if (found := in_three_products(joining)) is not None:
        loss, each = found
        return loss, *[None] * 7, *([] if each is None else [each])
    shards, layer = joining.shards, checked.call.x
    if shards.sums_input and torch.is_grad_enabled() and layer.input.requires_grad:
        plan, tensors = planned(checked)
        if plan.way is DIFFERENTIATED:
            return joined(joining, _Own.apply(plan.spec, tensors, shards, *tensors[:3]))
        summed = layer.with_input(SummedGradient.apply(layer.input, shards.group))
        checked = checked._replace(call=checked.call._replace(x=summed))
    return joined(joining, compute(checked))


class _Own(torch.autograd.Function):
    """A call of this process's classes, with a result a row: the results that were asked for."""

    @staticmethod
    def forward(ctx: Any, spec: ExecutionSpec[Any], tensors: Several, shards: Shards, *inputs: Tensor | None) -> Several:
        none = [None] * len(inputs)
        results, kept = spec.split(forward(spec.call(tensors), None, none, spec.keeps))
        remember(ctx, spec, tensors, kept, none)
        ctx.shards = shards
        ctx.mark_non_differentiable(*[t for t in results[spec.template.graded :] if t is not None])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        tensors, kept = recalled(ctx)
        written = new_gradients(tensors, ctx.needs_input_grad[3:])
        backward(ctx.spec.call(tensors), None, kept, of_results(ctx.spec, grad_outputs), written, ctx.shards.summing)
        return None, None, None, *written

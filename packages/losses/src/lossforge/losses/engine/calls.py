"""The path of a public function: a call is checked, its way chosen, and its plan found under its key from then on.

Everything that checks and plans depend on is in the key: layouts and devices of the tensors, whether they require grad and are leaves,
the values of all other arguments, and the state of torch (grad mode, modes, transforms, tracing). Calls are kept whose tensors are the
arguments themselves, perhaps in another shape, and that the kernels compute.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels import INTERPRETED
from lossforge.kernels.plans import PLANS, Key
from lossforge.kernels.torch_internals import ordinary
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Declared
from lossforge.losses.base.record import C, CheckedCall, Finish, FusedTemplate, R, Several
from lossforge.losses.base.state import autocast_dtype, gradient_in_forward, kernels_apply, plain, state
from lossforge.losses.base.text import whole_docstring
from lossforge.losses.engine import by_operators
from lossforge.losses.engine.autograd import DIFFERENTIATED, undifferentiated
from lossforge.losses.engine.spec import ExecutionSpec, template_of
from lossforge.losses.formulas import has_kernel
from lossforge.losses.templates import reference

SIMPLE = frozenset((int, float, bool, str, type(None)))


class CallPlan(NamedTuple):
    """A public call that was checked.

    Attributes:
        way: what computes it: from its spec, its tensors, and once more those of them that are differentiated, to its results.
        spec: all of it but its tensors.
        finish: from the results to what the public function returns.
        places: of its tensors among the arguments, each with the shape that it is viewed in, if any.
    """

    way: Callable[..., Several]
    spec: ExecutionSpec[Any]
    finish: Finish[Any]
    places: Sequence[tuple[int | None, torch.Size | None]] = ()

    def tensors(self, values: Sequence[Any]) -> Several:
        """Return the call's tensors from the values of its arguments."""
        return tuple([None if at is None else values[at] if shape is None else values[at].view(shape) for at, shape in self.places])


def planned(checked: CheckedCall[Any, Any]) -> tuple[CallPlan, Several]:
    """Return the plan of a checked call, and its tensors: by the plain-torch reference, the operators, or the kernels."""
    call, options = checked.call, checked.options
    template = template_of(call)
    tensors, numbers = template.flat(call)
    tensors = _with_values(tensors)
    first: Any = tensors[0]
    differentiable, others = tensors[: len(template.differentiable)], tensors[len(template.differentiable) :]
    # without a kernel the chunks are differentiated by autograd, which an operator cannot do within itself: then only on plain tensors
    by_chunks = isinstance(template, FusedTemplate) and plain(*tensors)
    launchable = template.launchable(call) and (by_chunks or has_kernel(call.loss))
    if not (launchable and kernels_apply(first, *others, fused=by_chunks)):
        return CallPlan(_by_reference, ExecutionSpec(template, call.loss, numbers), checked.finish), tensors
    wanted = [t is not None and torch.is_grad_enabled() and t.requires_grad for t in differentiable]
    x: Any = differentiable[wanted.index(True)] if any(wanted) else first
    # a graph gives each result that may be differentiated a gradient, of which what forward wrote is no multiple
    alone = len(template.results) == 1 or not any(numbers[-1][: template.graded - 1])
    in_graph = isinstance(template, FusedTemplate) and alone
    in_forward = gradient_in_forward(options.get("gradient"), x, call.reduction, in_graph)
    inplace = options.get("inplace", False) and any(wanted) and not torch.compiler.is_compiling()
    spec = ExecutionSpec(template, call.loss, numbers, wanted, in_forward, inplace)
    if not (inplace or plain(*tensors)):
        return CallPlan(by_operators.results, spec, checked.finish), tensors
    return CallPlan(DIFFERENTIATED if any(wanted) else undifferentiated, spec, checked.finish), tensors


def _by_reference(spec: ExecutionSpec[Any], tensors: Several, *differentiable: Tensor | None) -> Several:
    return reference(spec.call(tensors))


def _with_values(tensors: Several) -> Several:
    """Return the tensors with lazy negative views written out, because kernels read memory; a graph's operators do so anyway.

    No other lazy view gets here: conjugates are complex.
    """
    if torch.compiler.is_compiling():
        return tensors
    return tuple([t.resolve_neg() if t is not None and t.is_neg() else t for t in tensors])


def compute(checked: CheckedCall[C, R]) -> R:
    """Compute a checked call, and return what its public function returns."""
    plan, tensors = planned(checked)
    found: R = plan.finish(plan.way(plan.spec, tensors, *tensors[: len(plan.spec.wanted)]))
    return found


def computed(found: Any) -> Any:
    """Return what a public function returns, from what its definition does: a checked call, or that itself."""
    return compute(found) if type(found) is CheckedCall else found


def entry_point(
    definition: Callable[..., Any], signature: inspect.Signature, *, repeats: bool = True, autocast: bool = False
) -> Callable[..., Any]:
    """Make the public function of a definition: it checks keywords and flags of its calls, and keeps a plan of each.

    Args:
        definition: takes the function's arguments, and has a default for each option that it takes by `**options`. It returns a checked
            call, which is then computed, or what the function returns.
        signature: the public function's.
        repeats: whether calls are kept.
        autocast: whether the function follows autocast.
    """
    owner, names, flags = definition.__qualname__, tuple(signature.parameters), checks.flags_of(signature)

    @functools.wraps(definition)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                raise checks.unexpected(owner, name, names)
        validate = kwargs.get("validate")
        key = None
        if repeats and (validate is None or validate is False) and not checks.VALIDATE:
            key = _key(definition, args, kwargs, autocast)
        if autocast and key is not None:
            key = (*key, *map(autocast_dtype, ("cuda", "cpu")))
        plan = None if key is None else PLANS.get(key)
        if plan is not None:
            tensors = plan.tensors((*args, *kwargs.values()) if kwargs else args)
        else:
            checks.all_strided(names, args, kwargs)
            found = definition(*checks.with_flags(flags, args, kwargs), **kwargs)
            if type(found) is not CheckedCall:
                return found
            plan, tensors = planned(found)
            if key is not None:
                _keep(key, plan, tensors, (*args, *kwargs.values()))
        return plan.finish(plan.way(plan.spec, tensors, *tensors[: len(plan.spec.wanted)]))

    made: Any = checks.with_own_code(call, definition.__name__)
    made.__signature__ = signature
    made.definition = definition
    made.entry = made  # not so of a wrapper, which takes over the attributes
    return call


def function_of(each: Declared, place: str) -> Callable[..., Any]:
    """Make the public function that a definition declares. place: the Python module that has it."""
    signature, autocast = each.whole_signature, each.docs.autocast
    made = entry_point(each.definition, signature, repeats=each.repeats or autocast, autocast=autocast)
    made.__module__, made.__doc__ = place, whole_docstring(each)
    made.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": signature.return_annotation}
    return made


def _key(function: Any, args: Sequence[Any], kwargs: dict[str, Any], of_layer: bool) -> Key | None:
    """Return what a call's checks and plans depend on; None where it is more than plain tensors and simple values.

    Nor is there any on the CPU where no kernel runs, because the reference keeps no calls. of_layer: whether the call's logits are those of
    a layer: then they are computed by chunks, and kept, there too.

    Nor is there any while torch.compile traces this function, be it alone, after it has given up on the call around it.
    """
    if torch.compiler.is_compiling():
        return None
    key = [function, *kwargs]
    for v in (*args, *kwargs.values()) if kwargs else args:
        kind = type(v)
        if kind in SIMPLE:
            key += kind, v
        elif kind in (tuple, list) and all(type(each) is str for each in v):
            key += kind, *v
        elif ordinary(v):
            device, shape = v.get_device(), v.shape
            if device < 0 and shape and not (INTERPRETED or of_layer):
                return None
            key += shape, v.stride(), v.dtype, device, v.data_ptr() & 15, v.requires_grad, v.is_leaf
            if device < 0 and not shape:
                key.append(v.item())  # a number of the host
        else:
            return None
    return *key, *state()


def _keep(key: Key, plan: CallPlan, tensors: Several, values: Sequence[Any]) -> None:
    """Keep the plan of a call that the kernels compute, where it needs no more than the values of its arguments."""
    if plan.way is DIFFERENTIATED or plan.way is undifferentiated:
        places = _places(values, tensors)
        if places is not None:
            plan.spec.keep()
            PLANS.keep(key, plan._replace(places=places))


def _places(values: Sequence[Any], tensors: Several) -> list[tuple[int | None, torch.Size | None]] | None:
    """Return where a call's tensors are among the arguments; None where one is made from them, or has its values checked each time."""
    places: list[tuple[int | None, torch.Size | None]] = []
    for t in tensors:
        if t is None:
            places.append((None, None))
            continue
        found = [i for i, v in enumerate(values) if isinstance(v, Tensor) and (v is t or _is_view(t, v))]
        if len(found) != 1 or (t.device.type == "cpu" and not t.is_floating_point()):
            return None
        places.append((found[0], None if values[found[0]] is t else t.shape))
    return places


def _is_view(t: Tensor, v: Tensor) -> bool:
    """Return whether t is v in another shape."""
    same = t.data_ptr() == v.data_ptr() and t.numel() == v.numel() and t.dtype == v.dtype and t.requires_grad == v.requires_grad
    return same and t.is_contiguous() and v.is_contiguous()

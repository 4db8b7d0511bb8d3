"""The contenders of a case: each mode of ours, its matrix products alone, and the libraries in use today that compute the same function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import CONTENDERS, RECORDS, Case
from lossforge.bench.record import Call, Inputs, LinearInputs

DISTRIBUTIONS = {
    "torchvision": "torchvision",
    "timm": "timm",
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "cut-cross-entropy": "cut-cross-entropy",
    "trl": "trl",
    "verl": "verl",
}
_MODULES = {name: name for name in DISTRIBUTIONS}
_MODULES |= dict.fromkeys(("liger", "liger-sm90"), "liger_kernel") | {"quack-plain": "quack"}
_MODULES |= dict.fromkeys(("cut-cross-entropy", "cut-cross-entropy-exact"), "cut_cross_entropy")
ON_CPU = ("torchvision", "timm", "trl")
"""Peers that need no GPU."""
PARTS = ("products", "products-weight", "products-backward", "objective")
"""Contenders that compute a part of the loss, of which no error is known."""


@dataclass(frozen=True)
class Contender:
    """An implementation to measure.

    Attributes:
        name: one of CONTENDERS.
        call: (inputs, options by name) → loss.
        floor: the mode of `least_bytes` that it is compared with.
        destroys: the gradient overwrites the logits.
        refuses: why it cannot be called here; empty if it can.
    """

    name: str
    call: Call
    floor: str = "one launch"
    destroys: bool = False
    refuses: str = ""


def contenders(case: Case, device: torch.device, names: set[str]) -> list[Contender]:
    """Return the contenders among `names` that compute this case."""
    made = _of_layer if case.fused else _of_logits
    return [found for name in CONTENDERS if name in names and (found := made(name, case, device)) is not None]


def refusal(name: str, device: torch.device) -> str:
    """Return why a peer cannot be called here; empty if it can."""
    if name == "torch-linear":
        return "" if hasattr(F, "linear_cross_entropy") else f"torch {torch.__version__} has no linear_cross_entropy"
    if find_spec(_MODULES[name]) is None:
        return "not installed"
    return "" if device.type == "cuda" or name in ON_CPU else "needs a CUDA GPU"


def by_names(function: Call) -> Call:
    """Give a function its tensors as callers do: logits, target and labels by place, the others by name."""

    def call(inputs: Inputs, **options: Any) -> Tensor:
        others = dict(inputs.others)
        first = [others.pop(name) for name in ("target", "label") if name in others]
        return function(inputs.x, *first, **others, **options)

    return call


def _of_logits(name: str, case: Case, device: torch.device) -> Contender | None:
    record, none = RECORDS[case.loss], case.options.get("reduction") == "none"
    # A loss a row knows its gradient only when backward brings one factor a row. Sums over regions or columns, and a choice among all rows,
    # are complete only after everything was read. None of these can be computed in a single pass.
    passes = "split" if none or record.late else "one launch"
    if name == "torch":
        return Contender(name, by_names(record.plain), passes)
    if name == "torch.compile":
        torch.compiler.reset()
        return Contender(name, by_names(torch.compile(record.plain)), passes)
    if name in record.peers:
        call = record.peers[name](case)
        destroys = name == "liger" and case.loss == "ce"
        floor = passes if destroys or name == "quack" else "one launch"
        return None if call is None else Contender(name, by_names(call), floor, destroys, refusal(name, device))
    if not name.startswith("lossforge"):
        return None
    function, offered = record.adapt(record.public), inspect.signature(record.public).parameters
    if name == "lossforge":
        return Contender(name, by_names(function), passes)
    if name == "lossforge-backward" and not none and "gradient" in offered:
        return Contender(name, by_names(partial(function, gradient="backward")), "split")
    if name == "lossforge-inplace" and not none and "inplace" in offered and device.type == "cuda":  # where forward writes the gradient
        return Contender(name, by_names(partial(function, inplace=True)), destroys=True)
    return None


def _large(case: Case) -> bool:
    return case.loss == "ce" and case.inputs == "classes"


def _in_forward(case: Case) -> bool:
    """Return whether a case has a second form, whose gradient backward computes."""
    return _large(case) or case.suite in ("exact", "objectives")


_FORMS: dict[str, tuple[Callable[[Case], bool], dict[str, Any]]] = {
    "lossforge": (lambda case: True, {}),
    "lossforge-weight": (_large, {"accumulate": "weight"}),
    "lossforge-backward": (_in_forward, {"gradient": "backward"}),
    "lossforge-rounded": (lambda case: case.suite == "exact", {"logits": "weight"}),
    "lossforge-float32": (lambda case: case.suite == "exact", {"logits": "float32"}),
    "lossforge-lean": (
        lambda case: case.suite == "drafts" and case.inputs == "near linear teacher",
        {"accumulate": "weight", "chunk": 512},
    ),
    "lossforge-skip": (lambda case: case.inputs == "half ignored", {"skip_ignored": True}),
    "products": (lambda case: True, {}),
    "products-weight": (_large, {"accumulate": 0}),
    "products-backward": (_in_forward, {"twice": True}),
}
"""Forms of ours that are fused with the layer, and their products alone: which cases have them, and their options."""


def _of_layer(name: str, case: Case, device: torch.device) -> Contender | None:
    """Return the contender of a loss fused with its layer. It takes no options of the case but `chunk`, because its record has them."""
    layer = RECORDS[case.loss].layer
    if name in _FORMS:
        applies, how = _FORMS[name]
        if not applies(case):
            return None
        if name.startswith("lossforge"):
            how = how | {k: v for k, v in case.options.items() if k == "chunk"}
            return Contender(name, lambda inputs, **_: layer.ours(inputs, **how))
        how = {"twice": layer.backward or case.suite == "features", "together": layer.together * case.shape[1] or 1} | how
        return Contender(name, lambda inputs, **_: products(inputs.joined() if layer.joined else inputs, **how))
    if name == "objective" and case.suite == "objectives" and case.inputs in ("rollouts", "pairs"):
        logps = torch.full(case.shape[:2], -1.0, device=device, requires_grad=True)
        return Contender(name, lambda inputs, **_: layer.total(logps, inputs.others))  # of log-probabilities that are there
    if name == "torch":
        return Contender(name, lambda inputs, **_: layer.plain(inputs.x, inputs.head, inputs.others))
    if name == "torch.compile":
        torch.compiler.reset()
        compiled = torch.compile(layer.plain, dynamic=False)
        return Contender(name, lambda inputs, **_: compiled(inputs.x, inputs.head, inputs.others))
    if name not in layer.peers or case.suite == "features":
        return None
    return Contender(name, lambda inputs, **_: layer.peers[name](inputs), refuses=refusal(name, device))


def products(inputs: LinearInputs, accumulate: int = -1, twice: bool = False, together: int = 1) -> Tensor:
    """Compute the engine's matrix products with the same chunks and memory as ours, and nothing between them.

    Args:
        inputs: of the layer.
        accumulate: as in lossforge.kernels.call.Head.
        twice: whether backward computes the logits again.
        together: rows that no chunk parts.
    """
    from lossforge.kernels.call import FROM_WEIGHT, Head
    from lossforge.kernels.classes.calls import DivergenceCall, RowwiseCall
    from lossforge.losses.engine.linear.engine import Gradients, GradientsByClasses, goes_by_classes
    from lossforge.losses.engine.linear.products import logits_of, new_logits

    x, head, differentiable = inputs.flat, inputs.head.detach(), inputs.x.requires_grad
    teacher = inputs.others.get("teacher_input")
    layer = Head(x, head, accumulate=accumulate, logits=FROM_WEIGHT)
    of_teacher = None if teacher is None else Head(inputs.part(0, len(x))["teacher_input"], inputs.part(0, len(x))["teacher_head"])
    call: Any = RowwiseCall("cross_entropy", layer, x) if of_teacher is None else DivergenceCall("kl", layer, of_teacher)
    none = [None, None, None]
    found = [torch.empty_like(x), torch.empty_like(head), None] if differentiable else none

    def by_rows(sums: Gradients) -> None:
        memory, _ = sums.memory()
        others = None if teacher is None else new_logits(sums.rows, len(head), x)
        for start in range(0, len(x), sums.rows):
            end = min(start + sums.rows, len(x))
            logits_of(layer.of_rows(start, end), memory[: end - start])
            if others is not None:
                part = inputs.part(start, end)
                logits_of(Head(part["teacher_input"], part["teacher_head"]), others[: end - start])
            if sums.input.gradient is not None:
                sums.add(end)

    if twice or not differentiable:
        by_rows(Gradients(call, none, False))
    if differentiable and twice and goes_by_classes(call, {"stats": x}, found):
        sums = GradientsByClasses(call, found)
        memory, _ = sums.memory()
        for start in range(0, len(head), sums.classes):
            end = min(start + sums.classes, len(head))
            sums.add(start, end, logits_of(layer.of_classes(start, end), memory[:, : end - start]))
    elif differentiable:
        by_rows(Gradients(call, found, False, together))
    return x

"""The contenders of a fused case: ours in each mode, its matrix products alone, and the libraries in use today."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lossforge.bench.cases import CONTENDERS, Case
from lossforge.bench.contenders import Contender, absent, installed
from lossforge.bench.linear.inputs import LinearInputs
from lossforge.bench.linear.losses import BETA, EPSILON, KL_WEIGHT, LOSSES

OF_TOKENS = ("selective_log_softmax",)
"""Losses of ours whose gradient only backward can compute, because each token's result has its own upstream gradient."""


def contenders(case: Case, device: torch.device, names: set[str]) -> list[Contender]:
    """Return the contenders among `names` that compute this case. Their `call` takes its LinearInputs."""
    return [c for name in CONTENDERS if name in names and name in _MAKERS and (c := _MAKERS[name](case, device)) is not None]


def _ours(name: str, applies: Callable[[Case], bool], **how: Any) -> Callable[[Case, torch.device], Contender | None]:
    def make(case: Case, device: torch.device) -> Contender | None:
        ours, chunk = LOSSES[case.loss].ours, {k: v for k, v in case.options.items() if k == "chunk"}
        return Contender(name, lambda inputs: ours(inputs, **chunk, **how)) if applies(case) else None

    return make


def _always(case: Case) -> bool:
    return True


def _cross_entropy(case: Case) -> bool:
    return case.loss == "ce" and case.inputs == "classes"


def _large(case: Case) -> bool:
    return _cross_entropy(case) and case.suite == "linear"


def _exact(case: Case) -> bool:
    return case.suite == "exact"


def _in_forward(case: Case) -> bool:
    """Return whether a case has a second form, whose gradient backward computes."""
    return _large(case) or case.suite in ("exact", "objectives")


def _products(name: str, applies: Callable[[Case], bool], accumulate: int = -1, twice: bool = False) -> Any:
    """Return the maker of a contender that computes only the products.

    Args:
        name: one of CONTENDERS.
        applies: whether a case has this contender.
        accumulate: as in lossforge.kernels.call.Head.
        twice: whether backward computes the logits again.
    """

    def make(case: Case, device: torch.device) -> Contender | None:
        again = twice or case.loss in OF_TOKENS or case.suite == "features"
        of = (lambda inputs: inputs.joined()) if LOSSES[case.loss].joined else (lambda inputs: inputs)
        if not applies(case):
            return None
        together = {"dpo": 2, "gspo": 1}.get(case.loss, 0) * case.shape[1] or 1  # a pair of sequences, one sequence
        return Contender(name, lambda inputs: products(of(inputs), accumulate, again, together))

    return make


def products(inputs: LinearInputs, accumulate: int, twice: bool, together: int) -> Tensor:
    """Compute the engine's matrix products with the same chunks and memory as ours, and nothing between them.

    together: rows that no chunk parts.
    """
    from lossforge.kernels.call import FROM_WEIGHT, Head
    from lossforge.kernels.classes.calls import DivergenceCall, RowwiseCall
    from lossforge.losses.engine.linear.engine import Gradients, GradientsByClasses, goes_by_classes
    from lossforge.losses.engine.linear.products import logits_of, new_logits

    x, head, differentiable = inputs.rows, inputs.head.detach(), inputs.input.requires_grad
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
            logits = logits_of(layer.of_rows(start, end), memory[: end - start])
            if others is not None:
                part = inputs.part(start, end)
                logits_of(Head(part["teacher_input"], part["teacher_head"]), others[: end - start])
            if sums.input is not None:
                sums.add(start, end, logits)

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


def _objective(case: Case, device: torch.device) -> Contender | None:
    """Return the objective alone, forward and backward, from log-probabilities that are there."""
    if case.suite != "objectives" or case.inputs not in ("rollouts", "pairs"):
        return None
    total = LOSSES[case.loss].total
    logps = torch.full(case.shape[:2], -1.0, device=device, requires_grad=True)
    return Contender("objective", lambda inputs: total(logps, inputs.others))


def _torch(case: Case, device: torch.device) -> Contender:
    plain = LOSSES[case.loss].plain
    return Contender("torch", lambda inputs: plain(inputs.input, inputs.head, inputs.others))


def _compiled(case: Case, device: torch.device) -> Contender | None:
    torch.compiler.reset()
    plain = torch.compile(LOSSES[case.loss].plain, dynamic=False)
    return Contender("torch.compile", lambda inputs: plain(inputs.input, inputs.head, inputs.others))


def _torch_linear(case: Case, device: torch.device) -> Contender | None:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None or case.loss != "ce" or case.suite != "linear":
        return None
    return Contender("torch-linear", lambda inputs: function(inputs.input, inputs.head, inputs.others["target"]))


def _peer(name: str, of: Callable[[Case], Callable[[LinearInputs], Tensor] | None], library: str = "") -> Any:
    """Return the maker of a library's contender, on a GPU only. `of` returns its function for a case; only a call imports the library."""

    def make(case: Case, device: torch.device) -> Contender | None:
        call = of(case)
        if call is None or case.suite == "features" or device.type != "cuda":
            return None
        return Contender(name, call) if installed(library or name) else absent(name)

    return make


def _liger(case: Case) -> Callable[[LinearInputs], Tensor] | None:
    def functional() -> Any:
        return import_module("liger_kernel.transformers.functional")

    def cross_entropy(inputs: LinearInputs) -> Tensor:
        return functional().liger_fused_linear_cross_entropy(inputs.input, inputs.head, inputs.others["target"])

    def kl(inputs: LinearInputs) -> Tensor:
        others = inputs.others
        if "teacher" in others:
            return functional().liger_fused_linear_kl_div(inputs.input, inputs.head, others["teacher"].softmax(-1))
        return functional().liger_fused_linear_jsd(inputs.input, inputs.head, others["teacher_input"], others["teacher_head"], jsd_beta=0.0)

    def dpo(inputs: LinearInputs) -> Tensor:
        loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
        return loss(inputs.head, inputs.input, inputs.others["target"])[0]

    def grpo(inputs: LinearInputs) -> Tensor:
        kind, others = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss, inputs.others
        loss = kind(beta=KL_WEIGHT, loss_type="bnpo", epsilon_low=EPSILON, epsilon_high=EPSILON)
        every = torch.ones_like(others["target"])
        given = {"ref_per_token_logps": others["reference"], "old_per_token_logps": others["old"]}
        return loss(inputs.input, inputs.head, others["target"], every, others["advantage"], **given)[0]

    return {"ce": cross_entropy, "kl": kl, "dpo": dpo, "grpo": grpo}.get(case.loss)


def _cut(case: Case) -> Callable[[LinearInputs], Tensor] | None:
    """Return cut-cross-entropy in its exact mode, which drops no small gradients."""

    def call(inputs: LinearInputs) -> Tensor:
        function = import_module("cut_cross_entropy").linear_cross_entropy
        return function(inputs.input, inputs.head, inputs.others["target"], filter_eps=None)

    return call if case.loss == "ce" else None


def _quack(scaled: bool) -> Callable[[Case], Callable[[LinearInputs], Tensor] | None]:
    def of(case: Case) -> Callable[[LinearInputs], Tensor] | None:
        def call(inputs: LinearInputs) -> Tensor:
            function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
            return function(inputs.input, inputs.head, inputs.others["target"], tuned=False, use_scaled_exp=scaled)

        return call if (_large(case) or _exact(case)) and case.use != "imagenet-21k" else None  # its classes must be a multiple of 8

    return of


def _tokens(compute: Callable[[LinearInputs], Sequence[Tensor]]) -> Callable[[Case], Callable[[LinearInputs], Tensor] | None]:
    """Return a library's function of a case, from what computes the log-probabilities and entropies of tokens."""

    def call(inputs: LinearInputs) -> Tensor:
        logps, entropy = compute(inputs)
        return (inputs.others["factor"] * (logps - entropy)).mean()

    return lambda case: call if case.loss == "selective_log_softmax" else None


def _trl(inputs: LinearInputs) -> Sequence[Tensor]:
    function = import_module("trl.kernels").ChunkedLogProbFunction
    found: Sequence[Tensor] = function.apply(inputs.input, inputs.head, None, inputs.others["target"], 1.0, 32_768, None, 1.0, ("entropy",))
    return found[:2]


def _verl(inputs: LinearInputs) -> Sequence[Tensor]:
    function = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    found: Sequence[Tensor] = function(inputs.input, inputs.head, inputs.others["target"], 1.0)
    return found


_MAKERS: dict[str, Callable[[Case, torch.device], Contender | None]] = {
    "lossforge": _ours("lossforge", _always),
    "lossforge-weight": _ours("lossforge-weight", _cross_entropy, accumulate="weight"),
    "lossforge-backward": _ours("lossforge-backward", _in_forward, gradient="backward"),
    "lossforge-rounded": _ours("lossforge-rounded", _exact, logits="weight"),
    "lossforge-float32": _ours("lossforge-float32", _exact, logits="float32"),
    "objective": _objective,
    "lossforge-skip": _ours("lossforge-skip", lambda case: case.inputs == "half ignored", skip_ignored=True),
    "products": _products("products", _always),
    "products-weight": _products("products-weight", _large, accumulate=0),
    "products-backward": _products("products-backward", _in_forward, twice=True),
    "torch": _torch,
    "torch.compile": _compiled,
    "torch-linear": _torch_linear,
    "liger": _peer("liger", _liger),
    "cut-cross-entropy": _peer("cut-cross-entropy", _cut),
    "quack": _peer("quack", _quack(False)),
    "quack-scaled": _peer("quack-scaled", _quack(True), "quack"),
    "trl": _peer("trl", _tokens(_trl)),
    "verl": _peer("verl", _tokens(_verl)),
}

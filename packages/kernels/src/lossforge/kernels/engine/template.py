"""What launches a template: `forward` and `backward` of its module, by one launch or by two."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from lossforge.kernels.call import Formulas, scale_of
from lossforge.kernels.engine.launch import Launch, addressed, new_like
from lossforge.kernels.engine.layout import Results, Tensors, constants
from lossforge.kernels.engine.reduce import Scaling

C = TypeVar("C", bound=Any)


class Launches(Protocol):
    """The launches of a template."""

    def forward(self, call: Any, formulas: Any, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
        """Compute the results of a call, and the gradients that are asked for.

        Args:
            call: the checked call.
            formulas: the loss's device functions; None where its kernels have the formula.
            gradients: for each differentiable tensor the tensor that its gradient is written to, or None. The upstream gradient is 1.
            keep: whether what only backward needs is wanted.
            alone: whether no backward follows, so that one launch may also count what a mean divides by, and need not return it.

        Returns:
            The results, then what backward takes, as `call.shapes(keep)` lists them; None for what is absent.
        """

    def backward(self, call: Any, formulas: Any, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
        """Write the gradients of a call for those of its results.

        Args:
            call: the checked call.
            formulas: as in forward.
            kept: what forward returned after the results. What is None is computed again.
            grad_outputs: the upstream gradient of each result, or None: one for all elements, or one for each.
            gradients: as in forward.
        """


def _no_change(call: C) -> C:
    return call


@dataclass(frozen=True)
class TwoLaunches(Generic[C]):
    """Launches of a template that first computes results and statistics, and from these the gradients, in both modes.

    Attributes:
        compute: (call, formulas, keep) → (results, statistics); keep: whether the statistics are wanted.
        differentiate: (call, formulas, statistics, grad_output, gradients): writes the gradients; without grad_output for 1.
        prepare: from a call to the one that is launched.
    """

    compute: Callable[[C, Any, bool], tuple[Tensors, Tensors]]
    differentiate: Callable[[C, Any, Tensors, Tensor | None, Tensors], None]
    prepare: Callable[[C], C] = _no_change

    def forward(self, call: C, formulas: Formulas | None, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
        """Compute as Launches says."""
        call = self.prepare(call)
        wanted = any(t is not None for t in gradients)
        results, kept = self.compute(call, formulas, keep or wanted)
        if wanted:
            self.differentiate(call, formulas, kept, None, gradients)
        return tuple([None if shape is None else t for t, shape in zip((*results, *kept), call.shapes(keep), strict=True)])

    def backward(self, call: C, formulas: Formulas | None, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
        """Write gradients as Launches says."""
        call = self.prepare(call)
        if any(t is None and shape is not None for t, shape in zip(kept, call.shapes(True)[-len(kept) :], strict=True)):
            _, kept = self.compute(call, formulas, True)
        self.differentiate(call, formulas, kept, grad_outputs[0], gradients)


class Wanted(NamedTuple):
    """What a launch is to give beside what the call says: value · scale / divisor, and its gradients into those tensors that are given.

    divisor: 0-d; counted: in its place the launch counts the elements of rows not ignored. grad_output: of each element, or 0-d. Without it
    there is a value: each element's into `out`, else their sum.
    """

    scale: float
    divisor: Tensor | None = None
    counted: bool = False
    grad_output: Tensor | None = None
    out: Tensor | None = None
    gradients: Tensors = ()

    @property
    def upstream(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what arrives at each element, and what arrives at all."""
        return (self.grad_output, None) if self.grad_output is not None and self.grad_output.ndim else (None, self.grad_output)

    @property
    def total(self) -> bool:
        return self.out is None and self.grad_output is None

    def scaling(self, call: Any) -> Scaling:
        return constants(Scaling(self.scale, self.divisor, self.upstream[1], call.empty_is_zero))


@dataclass(frozen=True)
class OneLaunch(Generic[C]):
    """Forward and backward of a template whose one launch gives the value, the gradients of the first tensors, or both.

    make: the launch, None where the layouts cannot be addressed. shape: of the values, to which a weight broadcasts. prepare: from a call
    to the one that is launched.
    """

    make: Callable[[C, Wanted, Formulas], Launch | None]
    shape: Callable[[C], Sequence[int]]
    prepare: Callable[[C], C] = _no_change

    def start(self, call: C, formulas: Formulas, gradients: Tensors, grad_output: Tensor | None, out: Tensor | None) -> tuple[Tensor, ...]:
        """Launch, and return the total where it was asked for."""
        call, shape = self.prepare(call), self.shape(call)
        wanted = Wanted(scale_of(call, math.prod(shape)), call.normalizer, False, grad_output, out, tuple(gradients))
        return addressed(self.make, call, wanted, formulas, expands={"weight": shape, "mask": shape}).start()

    def forward(self, call: C, formulas: Formulas, gradients: Tensors, keep: bool, alone: bool = False) -> Results:
        """Compute the loss as Launches says, with a gradient of each tensor."""
        out = new_like(call[1], call.shapes(keep)[0]) if call.reduction == "none" else None
        totals = self.start(call, formulas, gradients, None, out)
        return (totals[0] if out is None else out,)

    def backward(self, call: C, formulas: Formulas, kept: Tensors, grad_outputs: Tensors, gradients: Tensors) -> None:
        """Write the gradients as Launches says."""
        self.start(call, formulas, gradients, grad_outputs[0], None)

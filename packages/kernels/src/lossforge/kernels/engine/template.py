"""What launches a template: `forward` and `backward` in the launch.py of its folder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from lossforge.kernels.call import Formulas
from lossforge.kernels.engine.layout import Results, Tensors

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

"""How a call is computed: its template, what of it is differentiated, and the plans of its launches."""

from collections.abc import Sequence
from typing import Any, Generic

from torch import Tensor

from lossforge.kernels.call import Formulas, Head
from lossforge.kernels.plans import Key, call_key
from lossforge.losses.base.record import C, FusedTemplate, Several, Template
from lossforge.losses.engine.linear.engine import FUSED
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates import TEMPLATES


def template_of(call: C) -> Template[C]:
    """Return the template of a call."""
    return FUSED[type(call)] if isinstance(getattr(call, "x", None), Head) else TEMPLATES[type(call)]


class ExecutionSpec(Generic[C]):
    """How a call is computed: all but its tensors.

    Attributes:
        template: of the call.
        formula: the name of its formula.
        numbers: the fields of the call that are no tensors.
        wanted: which of the first tensors are differentiated.
        in_forward: whether forward writes the gradients.
        inplace: whether the gradient takes the memory of the logits.
        key: what the plans of its launches are kept under: the spec itself where equal calls find it again, else what the call's tensors
            and numbers are.
        vector: of an operator, the numbers that were tensors: see operators.py.
        present: whether each result was asked for.
        keeps: whether forward keeps what backward needs.
        chunked: whether the engine of fused losses computes it.
        recorded: whether its launches can be recorded; None: not known yet. The plain-torch reference of a chunk has none.
    """

    __slots__ = (
        "chunked", "formula", "in_forward", "inplace", "keeps", "key", "numbers", "present", "recorded", "template", "vector", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        template: Template[C],
        formula: str,
        numbers: tuple[Any, ...],
        wanted: Sequence[bool] = (),
        in_forward: bool = False,
        inplace: bool = False,
    ) -> None:
        self.template, self.formula, self.numbers, self.wanted = template, formula, numbers, wanted
        self.in_forward, self.inplace, self.chunked = in_forward, inplace, isinstance(template, FusedTemplate)
        self.recorded: bool | None = None if self.chunked else True
        self.key: Key | None = None
        self.vector: Tensor | None = None
        self.present: tuple[bool, ...] = (True, *numbers[-1]) if len(template.results) > 1 else (True,)
        # backward needs what forward keeps where the gradient is written there, or other results may be differentiated too
        self.keeps = not in_forward or any(self.present[1 : template.graded])

    def call(self, tensors: Several) -> C:
        return self.template.of(self.formula, tensors, self.numbers)

    def key_of(self, tensors: Several, *more: Any) -> Key | None:
        """Return the key of launches, None where they cannot be recorded. more: what they follow from beside the call."""
        if self.recorded is None:
            self.recorded = isinstance(self.template, FusedTemplate) and self.template.computed_by_kernel(self.call(tensors))
        if not self.recorded:
            return None
        if self.key is None:
            of_call = call_key(self.template.name, self.formula, tensors, self.numbers)
            self.key = (*of_call, self.inplace, self.in_forward, *self.wanted)
        return (*self.key, *more) if more else self.key

    def keep(self) -> None:
        """Make the spec its own key, which takes no time to make and to hash: equal calls find it again, under the key of a public call.

        A spec that is not found again must not be its own key: every call has another, and would record its launches anew.
        """
        self.key = (self,)

    @property
    def formulas(self) -> Formulas | None:
        formula = FORMULAS.get(self.formula)
        return None if formula is None or self.chunked else formula.kernels

    def split(self, found: Several) -> tuple[Several, Several]:
        """Return (results, what is kept for backward) of what forward found."""
        template = self.template
        count = len(template.results)
        results, kept = found[:count], found[count:]
        return results, (*kept, *[results[template.results.index(name)] for name in template.saved]) if template.saved else kept

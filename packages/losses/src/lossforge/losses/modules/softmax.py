"""Losses of rows of classes under a softmax."""

from typing import TYPE_CHECKING, Any, Generic, Literal, Unpack, overload

from torch import Tensor
from typing_extensions import TypeVar

from lossforge.losses import checks, functional
from lossforge.losses.functional.rowwise import RowSettings
from lossforge.losses.functional.softmax import CrossEntropyOutput
from lossforge.losses.modules.common import RowModule
from lossforge.losses.types import Reduction

Result = TypeVar("Result", default=Tensor, covariant=True)


class CrossEntropySettings(RowSettings, total=False):
    """Those of CrossEntropyLoss after the weight, by keyword."""

    size_average: bool | None
    ignore_index: int
    reduce: bool | None
    reduction: Reduction
    label_smoothing: float


class CrossEntropyLoss(RowModule, Generic[Result]):
    """Cross entropy as torch.nn.CrossEntropyLoss, with more options: see functional.cross_entropy.

    For type checkers a call gives a Tensor, or with a return_… CrossEntropyOutput.
    """

    function = staticmethod(functional.cross_entropy)
    label_smoothing: float
    return_z_loss: bool
    return_lse: bool
    return_entropy: bool
    return_correct: bool

    @overload
    def __init__(
        self: "CrossEntropyLoss[Tensor]",
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        **options: Unpack[RowSettings],
    ) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[CrossEntropyOutput]",
        weight: Tensor | None = None,
        *,
        return_z_loss: Literal[True],
        return_lse: bool = False,
        return_entropy: bool = False,
        return_correct: bool = False,
        **options: Unpack[CrossEntropySettings],
    ) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[CrossEntropyOutput]",
        weight: Tensor | None = None,
        *,
        return_lse: Literal[True],
        return_z_loss: bool = False,
        return_entropy: bool = False,
        return_correct: bool = False,
        **options: Unpack[CrossEntropySettings],
    ) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[CrossEntropyOutput]",
        weight: Tensor | None = None,
        *,
        return_entropy: Literal[True],
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_correct: bool = False,
        **options: Unpack[CrossEntropySettings],
    ) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[CrossEntropyOutput]",
        weight: Tensor | None = None,
        *,
        return_correct: Literal[True],
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        **options: Unpack[CrossEntropySettings],
    ) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[Tensor | CrossEntropyOutput]",
        weight: Tensor | None = None,
        *,
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_correct: bool = False,
        **options: Unpack[CrossEntropySettings],
    ) -> None: ...
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        return_z_loss: bool = False,
        return_lse: bool = False,
        return_entropy: bool = False,
        return_correct: bool = False,
        **options: Unpack[RowSettings],
    ) -> None:
        super().__init__(
            options,
            weight=weight,
            ignore_index=ignore_index,
            reduction=checks.legacy_reduction(size_average, reduce, reduction),
            label_smoothing=label_smoothing,
            return_z_loss=return_z_loss,
            return_lse=return_lse,
            return_entropy=return_entropy,
            return_correct=return_correct,
        )

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Result:  # type: ignore[override]  # more than the loss, if asked
        return self.compute(input, target, **per_call)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor, **per_call: Any) -> Result: ...  # type: ignore[override]

"""The checked call of the router template."""

from typing import NamedTuple

from torch import Tensor

from lossforge.kernels.call import FLOAT, NO_OUTPUTS, Shape


class RouterCall(NamedTuple):
    """A loss of a router's logits x (T, E), of which each token takes the top_k largest. mask (T,): what each token counts.

    The value is balance · E Σ f P + z_loss · mean lse²: see router/kernel.py.
    """

    loss: str
    x: Tensor
    mask: Tensor | None = None
    normalizer: Tensor | None = None
    top_k: int = 1
    balance: float = 1.0
    z_loss: float = 0.0
    reduction: str = "mean"
    empty_is_zero: bool = False
    outputs: list[bool] = NO_OUTPUTS[:1]  # z_loss

    def shapes(self, keep: bool) -> tuple[Shape, ...]:
        return ((), FLOAT), ((), FLOAT) if self.outputs[0] else None, ((self.x.shape[1] + 1,), FLOAT)

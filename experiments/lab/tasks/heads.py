"""Linear heads that leave the product with their weight to the loss, so that a batch's logits are never in memory."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.base.errors import UserError

LOGITS_AT_ONCE = 2**26
"""As many as metrics of training take, 256 MiB in float32."""


class HeadInput(NamedTuple):
    """The input of a linear head's product: features (N, H), its weight (C, H) and bias (C,)."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None


class OpenHead(nn.Linear):
    """A linear layer that returns its product's factors in training, in the product's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        # views, because FSDP adds a hook to each output of every forward, and a parameter would keep them all
        weight, bias = (None if t is None else t.view_as(t).to(dtype) for t in (self.weight, self.bias))
        return HeadInput(input.to(dtype), weight, bias)  # type: ignore[return-value]  # nn.Linear returns a Tensor


class CosineHead(nn.Linear):
    """A linear layer without bias that returns `scale` times the cosines of its input and its rows, in float32."""

    scale: float

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return self.scale * F.linear(F.normalize(input.float(), dim=-1), F.normalize(self.weight.float(), dim=1))


def open_head(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Let a classifier return a HeadInput in training. shape: an image's (channels, height, width).

    Raises:
        UserError: the logits are not the output of one plain linear layer.
    """
    _last_layer(model, shape, "loss.fused_head=true").__class__ = OpenHead  # the same parameters under the same names


def cosine_head(model: nn.Module, shape: tuple[int, int, int], loss: str, scale: float) -> None:
    """Let a classifier return cosines times a scale. shape: an image's (channels, height, width). loss: its name, for messages.

    Raises:
        UserError: the logits are not the output of one plain linear layer.
    """
    head: Any = _last_layer(model, shape, f"loss={loss}")
    head.register_parameter("bias", None)
    head.__class__, head.scale = CosineHead, scale


def _last_layer(model: nn.Module, shape: tuple[int, int, int], setting: str) -> nn.Linear:
    """Return the linear layer whose output the logits are.

    Raises:
        UserError: the logits are not the output of one plain linear layer.
    """
    from timm.layers import Linear

    head: Any = getattr(model, "get_classifier", lambda: None)()
    reason = None
    if isinstance(head, (tuple, list, nn.ModuleList)):
        reason = f"has {len(head)} heads"
    elif type(head) not in (nn.Linear, Linear):
        reason = "has no head" if head is None else f"has a {type(head).__name__} as its head"
    elif not _is_last(model, head, shape):
        reason = "does more than take its head's output, once"
    if reason:
        raise UserError(f"{setting}: a model is expected that ends with one torch.nn.Linear; {type(model).__name__} {reason}.")
    return cast(nn.Linear, head)


def _is_last(model: nn.Module, head: nn.Linear, shape: tuple[int, int, int]) -> bool:
    """Return whether the head is the model's last layer and is called once; found by shapes only, without computing values."""
    given: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: given.append(output))
    state = {name: torch.empty_like(t, device="meta") for name, t in (*model.named_parameters(), *model.named_buffers())}
    try:
        output = torch.func.functional_call(model, state, torch.empty((2, *shape), device="meta"))
    finally:
        hook.remove()
    return len(given) == 1 and output is given[0] and output.ndim == 2


def sum_of_rows(function: Callable[..., Tensor], output: Tensor | HeadInput, *targets: Tensor) -> Tensor:
    """Sum a function of logits (N, C) and targets (N, …) over the rows; for a HeadInput, compute the logits in groups of rows."""
    if isinstance(output, Tensor):
        return function(output, *targets)
    features, weight, bias = output
    rows = max(LOGITS_AT_ONCE // weight.shape[0], 1)
    parts = zip(*(t.split(rows) for t in (features, *targets)), strict=True)
    return torch.stack([function(F.linear(some, weight, bias), *theirs) for some, *theirs in parts]).sum(0)

"""Losses of the router of a mixture of experts."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RouterCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import public
from lossforge.losses.base.option_types import RouterOutput
from lossforge.losses.base.options import InplaceScalarOptions, check_options
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.templates.router import ROUTER

__all__ = ["LoadBalancingOutput"]

EXPERTS = 4096
"""More experts do not fit in a tile."""


class LoadBalancingOutput(Outputs):
    """What `load_balancing_loss` returns with outputs.

    Attributes:
        loss: the sum of both parts, 0-d.
        z_loss: the part that z_loss adds, 0-d, without gradient.
    """

    loss: Tensor
    z_loss: Tensor


@public(ROUTER.docs, repeats=True)
def load_balancing_loss(
    router_logits: Tensor,  # (…, E)
    top_k: int = 2,
    attention_mask: Tensor | None = None,  # broadcasts to (…); (batch, tokens)
    *,
    balance: float = 1.0,
    z_loss: float = 0.0,
    outputs: Sequence[RouterOutput] = (),
    **options: Unpack[InplaceScalarOptions],
) -> CheckedCall[RouterCall, Tensor | LoadBalancingOutput]:
    """Load balancing of a router's experts, as transformers' load_balancing_loss_func (Fedus et al. 2021, arXiv 2101.03961), with the
    router z-loss (Zoph et al. 2022, arXiv 2202.08906).

    L = balance E Σₑ fₑ Pₑ + z_loss · mean lse(x)². fₑ is the number of tokens that have expert e among the top_k largest of their E logits,
    over the number of tokens; Pₑ is the mean of their probability softmax(x)ₑ. The first part is balance · top_k where all experts are used
    equally.

    Both parts come from one reading of the logits, and the gradient from another; no one-hot tensor is made. fₑ has no gradient. Where
    logits are equal, the expert of the lower index is taken. Tokens of mask 0 count nowhere, whatever their logits hold.

    Logits of several layers are one tensor, stacked or concatenated: f and P are then those of all layers together, as in transformers.
    For a loss of each layer call it for each.

    Args:
        router_logits: (…, E), of any floating dtype, the experts last; at most 4,096.
        top_k: experts that each token takes.
        attention_mask: 1 where a token counts, 0 where it is padding, of any dtype; broadcasts to the leading dimensions. Or, as in
            transformers, (batch, tokens) beside logits (batch · tokens, E), or (layers · batch · tokens, E) of layers one after the other,
            for each of which the mask holds.
        balance: coefficient of the load balancing; with 0 the loss is the z-loss.
        z_loss: coefficient of the router z-loss, such as 1e-3.
        outputs: names of what to give as well: "z_loss", the part of z_loss, without gradient, for logs.

    Examples:
        >>> router_logits = torch.randn(4, 128, 8, requires_grad=True)
        >>> load_balancing_loss(router_logits, top_k=2, z_loss=1e-3).backward()
    """
    checks.whole("router_logits", router_logits)
    check_options(router_logits, "mean", options, InplaceScalarOptions, "router_logits")
    if router_logits.ndim == 0 or not 1 <= router_logits.shape[-1] <= EXPERTS:
        raise ValueError(f"router_logits must have the experts last, 1 to {EXPERTS}, got shape {tuple(router_logits.shape)}")
    *lead, experts = router_logits.shape
    top_k = checks.whole_number("top_k", top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be at least 1 and at most the {experts} experts, got {top_k}")
    if attention_mask is not None:
        checks.tensor("attention_mask", attention_mask)
        if attention_mask.is_complex():
            raise TypeError(f"attention_mask must be of a real dtype or bool, got {attention_mask.dtype}")
        checks.beside("attention_mask", attention_mask, router_logits, "router_logits")
        mask = _of_tokens(attention_mask, lead)
        attention_mask = mask if mask.is_floating_point() else mask.to(torch.float32)
    call = RouterCall(
        "load_balancing",
        router_logits if router_logits.ndim == 2 else router_logits.reshape(-1, experts),
        attention_mask,
        top_k=top_k,
        balance=checks.number("balance", balance),
        z_loss=checks.number("z_loss", z_loss),
        empty_is_zero=options.get("empty") == "zero",
        outputs=LoadBalancingOutput.asked(outputs),
    )
    return CheckedCall(call, options, LoadBalancingOutput.of if any(call.outputs) else first)


def _of_tokens(mask: Tensor, lead: list[int]) -> Tensor:
    """Return a mask as one entry a row of logits whose leading dimensions are `lead`."""
    if checks.expands(mask, tuple(lead)):
        return mask.expand(lead).reshape(-1)
    if not (mask.ndim == 2 and len(lead) == 1 and mask.numel() and lead[0] % mask.numel() == 0):
        raise ValueError(
            f"attention_mask must broadcast to {tuple(lead)}, or be (batch, tokens) of rows (layers · batch · tokens,), "
            f"got shape {tuple(mask.shape)}"
        )
    return mask.reshape(-1).repeat(lead[0] // mask.numel())

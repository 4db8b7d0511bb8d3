"""What the preference objectives share: checks, precision and reduction."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, public
from lossforge.losses.base.options import Options, check_options
from lossforge.losses.base.record import SCALAR, Keeping, TemplateDocs

LOGPS = "(N,), in nats, summed over the tokens of each completion."
PREFERENCE = TemplateDocs(
    arguments={
        "policy_chosen_logps": f"{LOGPS} Of the model that learns, for the chosen completions.",
        "policy_rejected_logps": "(N,), likewise for the rejected ones.",
        "reference_chosen_logps": "(N,), the reference model's for the chosen completions.",
        "reference_rejected_logps": "(N,), the reference model's for the rejected ones.",
        "reduction": '"mean", "sum", or "none" for one loss an item.',
        "normalizer": (
            "number or 0-d tensor that takes the place of the mean's divisor. Give the number of items of the whole batch where it is "
            "split into micro-batches or over devices."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" one value an item, in float32.',
    keeping=Keeping(forward="*logps: Tensor | None"),
)


F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["sequence_logps"]


def objective(name: str, summary: str, remark: str = "") -> Callable[[F], F]:
    """Declare a preference objective, with its module."""
    return public(PREFERENCE, Module(name, summary, remark))


def same_shapes(optional: Sequence[str] = (), /, **given: Tensor | None) -> list[Tensor]:
    """Return the tensors that are given, once they are checked to be floating, of the first's shape and on its device.

    optional: names of those that may be None.
    """
    tensors = {name: checks.tensor(name, t) for name, t in given.items() if t is not None or name not in optional}
    first, x = next(iter(tensors.items()))
    for name, t in tensors.items():
        checks.floating(name, t)
        checks.fits(name, t, t.shape == x.shape, f"have the shape of {first}, {{}}", x.shape)
        checks.beside(name, t, x, first)
    return list(tensors.values())


def check_mask(mask: Tensor | None, first: str, x: Tensor) -> None:
    if mask is None:
        return
    checks.tensor("mask", mask)
    if mask.is_complex():
        raise TypeError(f"mask must be of dtype bool, an integer dtype or a floating dtype, got {mask.dtype}")
    checks.without_gradient("mask", mask)
    checks.fits("mask", mask, mask.shape == x.shape, f"have the shape of {first}, {{}}", x.shape)
    checks.beside("mask", mask, x, first)


def counted(mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return where a mask counts, and its weights where it is of a floating dtype, in that of x."""
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool), None
    return mask != 0, mask.to(x.dtype) if mask.is_floating_point() else None


def accurate(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the dtype that is computed in: float64 where one of them is, else float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]


def reduced(losses: Tensor, reduction: str, normalizer: float | Tensor | None, empty: str, items: int | Tensor | None = None) -> Tensor:
    """Check how to reduce. Return the losses, their sum, or that over the normalizer or the number of items, by default of the losses."""
    options: Options = {"normalizer": normalizer, "empty": empty}  # type: ignore[typeddict-item]
    check_options(losses, reduction, options, Options)
    if reduction == "none":
        return losses
    total = losses.sum()
    divisor = options["normalizer"]
    if divisor is None and reduction == "mean":
        divisor = losses.numel() if items is None else items
    if divisor is None:
        return total
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=total.dtype, device=total.device)
    divisor = divisor.to(total.dtype)
    if empty == "nan":
        return total / divisor
    nothing = divisor == 0
    return torch.where(nothing, 0.0, total / torch.where(nothing, 1.0, divisor))


@checks.named
def sequence_logps(
    per_token_logps: Tensor,  # (..., T)
    mask: Tensor | None = None,  # (..., T)
    average_log_prob: bool = False,
) -> Tensor:
    """log-probability of each sequence from those of its tokens.

    Σₜ mₜ log pₜ, or with `average_log_prob` the mean over the sequence's tokens, Σₜ mₜ log pₜ / Σₜ mₜ, as IPO, ORPO and SimPO want.

    Args:
        per_token_logps: (…, T), in nats, the tokens along the last dimension.
        mask: bool or integer, non-zero where a token counts; None for all. Floats are weights m of at least 0. What a masked token holds
            does not matter, nan and -inf included; its gradient is 0.
        average_log_prob: the mean over the sequence's tokens in place of the sum.

    Returns:
        (...,), in float32 (float64 for float64). A sequence without tokens has 0, with `average_log_prob` too.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Examples:
        >>> import torch
        >>> from lossforge.losses import sequence_logps
        >>> sequence_logps(-torch.rand(4, 12), mask=torch.ones(4, 12, dtype=torch.bool))
    """
    checks.floating("per_token_logps", per_token_logps)
    if not per_token_logps.ndim:
        raise ValueError("per_token_logps must have shape (..., T), got ()")
    check_mask(mask, "per_token_logps", per_token_logps)
    (logps,) = accurate(per_token_logps)
    keep, weight = counted(mask, logps)
    if mask is not None:
        logps = torch.where(keep, logps, 0.0)
    total = (logps if weight is None else logps * weight).sum(-1)
    if not average_log_prob:
        return total
    if mask is None:
        return total / max(logps.shape[-1], 1)
    size = (keep if weight is None else weight).sum(-1)
    return total / torch.where(size == 0, 1, size)

"""Log-probabilities of tokens: what preference objectives and policy gradients start from."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.rowwise.call import RowwiseCall
from lossforge.losses import checks
from lossforge.losses.base.declare import public
from lossforge.losses.base.options import check_options
from lossforge.losses.option_types import Positive
from lossforge.losses.run import compute
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_results

__all__ = ["TokenLogps"]


class TokenLogps(NamedTuple):
    """What `selective_log_softmax` returns with return_entropy.

    Attributes:
        logps: as index, in nats.
        entropy: one a row, in nats.
    """

    logps: Tensor
    entropy: Tensor


@public(ROWWISE.docs, repeats=True)
def selective_log_softmax(
    logits: Tensor,  # (..., V)
    index: Tensor,  # (...), or (..., K)
    *,
    temperature: Positive = 1.0,
    return_entropy: bool = False,
    scale: Positive = 1.0,
    softcap: float | None = None,
    lse: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor | TokenLogps:
    """Log-probability of each token, as TRL's selective_log_softmax: log_softmax(x / T) at the indices, in one pass over the logits.

    L = ln p_t = x_t / T - ln Σⱼ exp(xⱼ / T), H = -Σⱼ pⱼ ln pⱼ with p = softmax(x / T). x is scale · logits, with a soft cap
    softcap · tanh(scale · logits / softcap).

    Neither the log-softmax nor a copy of sliced logits (`logits[:, :-1]`) is stored; both results are differentiable, together in one
    further pass.

    Args:
        logits: (…, C), the vocabulary last, as models give it (in cross_entropy it is dimension 1).
        index: tokens (…) or (…, K), of any integer dtype. With K tokens a row, two gradients of the logits' size are added.
        temperature: T above 0.
        return_entropy: give H as well.
        scale: above 0; the logits become scale · x, as the model has them, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T.
        lse: log-sum-exp of each row's softened logits where it is known, such as cross_entropy's with return_lse, scale=scale / T and, with
            a cap, softcap=softcap / T. The logits are then read at the indices alone. It is an input like others: a gradient of the whole
            row arrives through it.
        ignore_index: tokens whose log-probability is 0, without gradient, but whose H is still computed.

    Returns:
        as index, float32 (float64 for float64), or TokenLogps(logps, entropy), whose entropy is (…). `sequence_logps` adds
        log-probabilities up to sequences.

    Examples:
        >>> logits = torch.randn(2, 6, 100, requires_grad=True)
        >>> selective_log_softmax(logits, torch.randint(100, (2, 6))).mean().backward()
    """
    checks.whole("logits", logits)
    checks.integer("index", index)
    lead, several = logits.shape[:-1], index.ndim == logits.ndim
    of_rows = logits.ndim >= max(index.ndim, 1) and index.shape[: len(lead)] == lead
    checks.fits("index", index, of_rows, "have shape {}, or {} for K tokens a row", lead, (*lead, "K"))
    scale, cap = softened(temperature, softcap, scale)
    if lse is not None:
        _check_lse(lse, logits, return_entropy, inplace)
    options: RowOptions = {"scale": scale, "softcap": cap, "inplace": inplace, "validate": validate}
    check_options(logits, "none", options, RowOptions)  # of the logits themselves: x below is a view of them
    x = logits if logits.ndim < 3 else logits.movedim(-1, 1)
    target = index
    if lse is not None:
        index = checks.indices("index", index, logits, checks.Allowed(0, logits.shape[-1], ignore_index, validate))
        found = _logps(logits, index if several else index.unsqueeze(-1), lse, (scale, cap), ignore_index)
        return found if several else found.squeeze(-1)
    if several:
        if inplace:
            raise ValueError("inplace=True needs one index a row, got several")
        index = checks.indices("index", index, logits, checks.Allowed(0, logits.shape[-1], ignore_index, validate))
        near = logits.gather(-1, index.long().clamp(0, logits.shape[-1] - 1))
        target, place = first_of(near, index, logits.shape[-1], ignore_index)
    call = RowwiseCall("cross_entropy", x, target, ignore_index=ignore_index, loss_scale=-1.0, reduction="none")
    call = call._replace(outputs=[False, False, return_entropy, *[False] * 4])
    # computed here, because only one token a row without lse is a call's own result
    found = compute(rowwise_results(call, options, logps_and_entropy, target_name="index"))
    if not several:
        return found
    first, entropy = found if isinstance(found, TokenLogps) else (found, None)
    logps = logps_beside(near, index, logits.shape[-1], (first.view(lead), place), (scale, cap), ignore_index)
    return logps if entropy is None else TokenLogps(logps, entropy.view(lead))


def softened(temperature: float, softcap: float | None, scale: float = 1.0) -> tuple[float, float | None]:
    """Return the scale and the soft cap of rows whose logits are scaled and capped, then divided by a temperature.

    The rows' own cap comes after their scale: softcap · tanh(scale · x / softcap) / T = c · tanh(scale / T · x / c) with c = softcap / T.
    """
    scale = checks.number("scale", scale, 0.0, exclusive=True)
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    softcap = None if softcap is None else checks.number("softcap", softcap, 0.0, exclusive=True)
    cap = None if softcap is None else softcap / temperature
    if isinstance(cap, float):
        checks.in_float32("softcap / temperature", cap)
    return scale / temperature, cap


def _check_lse(lse: Tensor, logits: Tensor, return_entropy: bool, inplace: bool) -> None:
    checks.floating_beside("lse", lse, logits)
    checks.fits("lse", lse, lse.shape == logits.shape[:-1], "have one entry a row of logits, shape {}", logits.shape[:-1])
    if return_entropy or inplace:
        raise ValueError(f"lse excludes {'return_entropy' if return_entropy else 'inplace'}=True, because the rows are not read")


def _logps(logits: Tensor, index: Tensor, lse: Tensor, read: tuple[float, float | None], ignore_index: int) -> Tensor:
    """Return the log-probabilities at the indices (…, K), 0 where they are ignored."""
    near = index.long().clamp(0, logits.shape[-1] - 1)
    logps = logps_at(logits.gather(-1, near), index, logits.shape[-1], lse, read)
    return torch.where(index == ignore_index, 0.0, logps)


def logps_and_entropy(results: Sequence[Tensor | None]) -> Tensor | TokenLogps:
    logps, _, _, entropy, *_ = results
    assert logps is not None
    return logps if entropy is None else TokenLogps(logps, entropy)


def first_of(x: Tensor, index: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the token of each row, among several, whose log-probability the loss computes: the likeliest; and its place.

    Where no token exists or counts, it is one that does not. x: (…, K), the tokens' logits.
    """
    if not index.shape[-1]:
        index, x = (torch.full((*t.shape[:-1], 1), ignore_index, dtype=t.dtype, device=t.device) for t in (index, x))
    exists = (index >= 0) & (index < classes) & (index != ignore_index)
    x = x.detach()
    place = torch.where(exists, x.clamp(min=torch.finfo(x.dtype).min), -torch.inf).argmax(-1, keepdim=True)
    return index.gather(-1, place).squeeze(-1), place


def logps_beside(
    x: Tensor, index: Tensor, classes: int, known: tuple[Tensor, Tensor], read: tuple[float, float | None], ignore_index: int
) -> Tensor:
    """Return the log-probabilities of several tokens a row from one of them, because differences lose no digits to a common offset.

    x, index: the tokens' logits and classes, (…, K). known: the log-probability of one token of each row (…), and its place (…, 1). read:
    the logits' scale and cap, as `softened` returns them.
    """
    logps, place = known
    scale, softcap = read
    x = x.to(logps.dtype)
    if softcap is not None:
        x = softcap * torch.tanh(x * scale / softcap)
        scale = 1.0
    own = x.gather(-1, place) if x.shape[-1] else x
    beside = torch.where(x == own, 0.0, (x - own) * scale) + logps.unsqueeze(-1)
    return torch.where(index == ignore_index, 0.0, torch.where((index < 0) | (index >= classes), torch.nan, beside))


def logps_at(x: Tensor, index: Tensor, classes: int, lse: Tensor, read: tuple[float, float | None]) -> Tensor:
    """Return the log-probabilities of the logits x (…, K) at `index`, nan where that is out of range.

    lse: (…), of each row's softened logits. read: their scale and cap, as `softened` returns them.
    """
    scale, softcap = read
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return torch.where((index < 0) | (index >= classes), torch.nan, x) - lse.unsqueeze(-1)

"""Log-probabilities of tokens: what preference objectives and policy gradients start from."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import public
from lossforge.losses.base.option_types import Positive, RowOutput
from lossforge.losses.base.options import check_options
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall
from lossforge.losses.engine.calls import compute
from lossforge.losses.templates.rowwise import ROWWISE, RowOptions, rowwise_results

__all__ = ["TokenLogps"]


class TokenLogps(Outputs):
    """What `selective_log_softmax` returns when further outputs are asked for: the log-probabilities and these alone, in this order.

    Attributes:
        logps: as index, in nats; differentiable.
        z_loss: one a row, lse²; differentiable.
        lse: one a row, log-sum-exp of x / T, in nats; differentiable.
        entropy: one a row, of softmax(x / T), in nats; differentiable.
        correct: as index, bool: the largest logit is the token's.
        argmax: one a row, int64: the class of the largest logit that is not nan, the first of equal ones.
        log_p2: one a row, ln Σ p², without gradient: minus the Rényi entropy of order 2.
        mean_logit: one a row, mean of x / T, without gradient.
    """

    logps: Tensor
    z_loss: Tensor
    lse: Tensor
    entropy: Tensor
    correct: Tensor
    argmax: Tensor
    log_p2: Tensor
    mean_logit: Tensor


@public(ROWWISE.docs, repeats=True)
@checks.renamed(input="logits")
def selective_log_softmax(
    logits: Tensor,  # (..., V)
    index: Tensor,  # (...), or (..., K)
    *,
    temperature: Positive | Tensor = 1.0,  # number, or (...)
    outputs: Sequence[RowOutput] = (),
    scale: Positive = 1.0,
    softcap: float | None = None,
    lse: Tensor | None = None,  # (...)
    ignore_index: int = -100,
    inplace: bool = False,
    validate: bool | None = None,
) -> CheckedCall[RowwiseCall, Tensor | TokenLogps]:
    """Log-probability of each token, as TRL's selective_log_softmax: log_softmax(x / T) at the indices, in one pass over the logits.

    L = ln p_t = x_t / T - ln Σⱼ exp(xⱼ / T), H = -Σⱼ pⱼ ln pⱼ with p = softmax(x / T). x is scale · logits, with a soft cap
    softcap · tanh(scale · logits / softcap).

    Neither the log-softmax nor a copy of sliced logits (`logits[:, :-1]`) is stored. Log-probabilities, entropy and log-sum-exp are
    differentiable, together in one further pass.

    Args:
        logits: (…, C), the vocabulary last, as models give it (in cross_entropy it is dimension 1).
        index: tokens (…) or (…, K), of any integer dtype. With K tokens a row, two gradients of the logits' size are added.
        temperature: T above 0; or one a row, (…), without gradient, for tokens that were sampled at different temperatures.
        outputs: names of what to give as well, in this order: "z_loss" (lse²), "lse" (ln Σⱼ exp(xⱼ / T)) and "entropy" (H), differentiable;
            "correct", "argmax", "log_p2" and "mean_logit", as TokenLogps explains them.
        scale: above 0; the logits become scale · x, as the model has them, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T.
        lse: log-sum-exp of each row's softened logits where it is known, such as cross_entropy's with outputs=("lse",), scale=scale / T
            and, with a cap, softcap=softcap / T. The logits are then read at the indices alone. It is an input like others: a gradient of
            the whole row arrives through it.
        ignore_index: tokens whose log-probability is 0, without gradient, but whose further outputs are still computed.

    Returns:
        as index, float32 (float64 for float64); with outputs TokenLogps, whose logps and correct are as index, the others (…).
        `sequence_logps` adds log-probabilities up to sequences.

    Examples:
        >>> logits = torch.randn(2, 6, 100, requires_grad=True)
        >>> selective_log_softmax(logits, torch.randint(100, (2, 6))).mean().backward()
    """
    checks.whole("logits", logits)
    checks.integer("index", index)
    lead, several = logits.shape[:-1], index.ndim == logits.ndim
    of_rows = logits.ndim >= max(index.ndim, 1) and index.shape[: len(lead)] == lead
    checks.fits("index", index, of_rows, "have shape {}, or {} for K tokens a row", lead, (*lead, "K"))
    temperature, row_scale = row_scale_of(temperature, lead, logits, validate)
    scale, cap = softened(temperature, softcap, scale)
    asked = TokenLogps.asked(outputs)
    if lse is not None:
        _check_lse(lse, logits, asked, inplace)
    options: RowOptions = {"scale": scale, "softcap": cap, "inplace": inplace, "validate": validate}
    check_options(logits, "none", options, RowOptions)  # of the logits themselves: x below is a view of them
    x = logits if logits.ndim < 3 else logits.movedim(-1, 1)
    call = RowwiseCall("cross_entropy", x, index, ignore_index=ignore_index, loss_scale=-1.0, reduction="none")
    call = call._replace(outputs=asked_of_rows(asked, several), row_scale=row_scale)
    if lse is None and not several:
        return rowwise_results(call, options, target_name="index").returning(functools.partial(with_outputs, asked))
    if inplace:
        raise ValueError("inplace=True needs one index a row, got several")
    index = checks.indices("index", index, logits, checks.Allowed(0, logits.shape[-1], ignore_index, validate))
    each = index if several else index.unsqueeze(-1)
    near = logits.gather(-1, each.long().clamp(0, logits.shape[-1] - 1))
    if lse is not None:
        call = call._replace(target=index, logit_scale=scale, softcap=cap)
        return _beside_lse(call, near, lse)
    target, place = first_of(near, index, logits.shape[-1], ignore_index)
    checked = rowwise_results(call._replace(target=target), options, target_name="index").returning(tuple)
    call = checked.call
    beside = SeveralTokens(near, index, place, logits.shape[-1], ignore_index, call.logit_scale, call.softcap, call.row_scale)
    return beside_first(compute(checked), beside, asked)


def asked_of_rows(outputs: list[bool], several: bool) -> list[bool]:
    """Return which results of rows a call needs for further outputs, both in the order of a row-wise call's. several: tokens a row."""
    z_loss, lse, entropy, correct, argmax, *logs = outputs
    by_argmax = several and correct
    return [False, z_loss or lse or by_argmax, entropy, correct and not several, argmax or by_argmax, *logs]


def with_outputs(outputs: list[bool], results: Sequence[Any], several: tuple[Tensor, int] | None = None) -> Tensor | TokenLogps:
    """Return log-probabilities, and the further outputs where some are asked for.

    results: log-probabilities, and the results of rows that `asked_of_rows` names. several: where there are several tokens a row, these and
    ignore_index.
    """
    logps: Tensor = results[0]
    if not any(outputs):
        return logps
    _, lse, entropy, correct, argmax, log_p2, mean_logit = results[1:]
    z_loss, want_lse, _, want_correct, want_argmax, *_ = outputs
    if several is not None and want_correct and argmax is not None and lse is not None:
        index, ignore_index = several
        correct = (index == argmax.unsqueeze(-1)) & (index != ignore_index) & ~lse.isnan().unsqueeze(-1)
    squared = lse.square() if z_loss and lse is not None else None
    lse, argmax = lse if want_lse else None, argmax if want_argmax else None
    return TokenLogps.of([logps, squared, lse, entropy, correct, argmax, log_p2, mean_logit])


def row_scale_of(temperature: float | Tensor, lead: Sequence[int], x: Tensor, validate: bool | None) -> tuple[float, Tensor | None]:
    """Return a temperature as a number and None, or 1 and the inverses of one a row. lead: the shape of the rows."""
    if not (isinstance(temperature, Tensor) and temperature.ndim):
        return temperature, None  # type: ignore[return-value]  # a 0-d tensor is a number
    checks.floating_beside("temperature", temperature, x)
    checks.without_gradient("temperature", temperature)
    checks.fits("temperature", temperature, temperature.shape == torch.Size(lead), "be a number or have one entry a row, {}", tuple(lead))
    if checks.to_read(temperature, validate) and not (temperature > 0).all():
        raise ValueError("temperature must be above 0 in every row")
    dtype = torch.promote_types(torch.promote_types(temperature.dtype, x.dtype), torch.float32)
    return 1.0, temperature.to(dtype).reciprocal()


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


def _check_lse(lse: Tensor, logits: Tensor, outputs: list[bool], inplace: bool) -> None:
    checks.floating_beside("lse", lse, logits)
    checks.fits("lse", lse, lse.shape == logits.shape[:-1], "have one entry a row of logits, shape {}", logits.shape[:-1])
    if any(outputs) or inplace:
        raise ValueError(f"lse excludes {'further outputs' if any(outputs) else 'inplace=True'}, because the rows are not read")


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


class SeveralTokens(NamedTuple):
    """Several tokens a row, of which the log-probability of one is computed.

    Attributes:
        logits, tokens: (…, K).
        place: (…, 1), that of the token which is computed.
        classes: how many there are.
        ignore_index: the class of tokens whose log-probability is 0.
        scale, softcap, row_scale: how the logits are softened; row_scale has one number a row.
    """

    logits: Tensor
    tokens: Tensor
    place: Tensor
    classes: int
    ignore_index: int
    scale: float
    softcap: float | None
    row_scale: Tensor | None


def beside_first(results: Sequence[Any], several: SeveralTokens, outputs: list[bool]) -> Any:
    """Return the log-probabilities of several tokens a row from that of one, because differences lose no digits to a common offset.

    results: of rows, of the token that is computed. outputs: which further ones are asked for.
    """
    logps, *of_rows = results
    x, index, scale, softcap = several.logits.to(logps.dtype), several.tokens, several.scale, several.softcap
    if softcap is not None:
        x = softcap * torch.tanh(x * scale / softcap)
        scale = 1.0
    if several.row_scale is not None:
        x = x * several.row_scale.to(x.dtype).reshape(*x.shape[:-1], 1)
    own = x.gather(-1, several.place) if x.shape[-1] else x
    beside = torch.where(x == own, 0.0, (x - own) * scale) + logps.unsqueeze(-1)
    known = torch.where((index < 0) | (index >= several.classes), torch.nan, beside)
    return with_outputs(outputs, (torch.where(index == several.ignore_index, 0.0, known), *of_rows), (index, several.ignore_index))


def _beside_lse(call: RowwiseCall, x: Tensor, lse: Tensor) -> Any:
    """Return the log-probabilities of the tokens of a call from their logits (…, K) and the log-sum-exp of each row's softened logits."""
    index = call.target.view(x.shape)
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * call.logit_scale
    x = x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
    x = x if call.row_scale is None else x * call.row_scale.to(x.dtype).unsqueeze(-1)
    logps = torch.where((index < 0) | (index >= call.x.shape[min(call.x.ndim - 1, 1)]), torch.nan, x) - lse.unsqueeze(-1)
    return torch.where(index == call.ignore_index, 0.0, logps).view(call.target.shape)

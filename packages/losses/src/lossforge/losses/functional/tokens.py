"""Log-probabilities of tokens: what preference objectives and policy gradients start from."""

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from lossforge.kernels.call import RowCall
from lossforge.losses import checks
from lossforge.losses.repeat import repeated
from lossforge.losses.templates.docstrings import completed
from lossforge.losses.templates.options import check_options
from lossforge.losses.templates.row import RowOptions, rowwise_results

__all__ = ["TokenLogps", "selective_log_softmax"]


class TokenLogps(NamedTuple):
    """What `selective_log_softmax` returns with return_entropy.

    Attributes:
        logps: as index, in nats.
        entropy: one a row, in nats.
    """

    logps: Tensor
    entropy: Tensor


class TokenOptions(TypedDict, total=False):
    temperature: float
    softcap: float | None
    ignore_index: int
    inplace: bool
    validate: bool | None


@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, *, return_entropy: Literal[False] = False, **options: Unpack[TokenOptions]
) -> Tensor: ...
@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, *, return_entropy: Literal[True], **options: Unpack[TokenOptions]
) -> TokenLogps: ...
@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, *, return_entropy: bool, **options: Unpack[TokenOptions]
) -> Tensor | TokenLogps: ...
@completed("rowwise")
@repeated
def selective_log_softmax(
    logits: Tensor,  # (..., V)
    index: Tensor,  # (...), or (..., K)
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    softcap: float | None = None,
    ignore_index: int = -100,
    inplace: bool = False,
    validate: bool | None = None,
) -> Tensor | TokenLogps:
    """Log-probability of each token, as TRL's selective_log_softmax: log_softmax(x / T) at the indices, in one pass over the logits.

    L = ln p_t = x_t / T - ln Σⱼ exp(xⱼ / T), H = -Σⱼ pⱼ ln pⱼ with p = softmax(x / T).

    Neither the log-softmax nor a copy of sliced logits (`logits[:, :-1]`) is stored; both results are differentiable, together in one
    further pass.

    Args:
        logits: (…, C), the vocabulary last, as models give it (in cross_entropy it is dimension 1).
        index: tokens (…) or (…, K), of any integer dtype. Of K a row, the gradient of the logits is the sum of two.
        temperature: T above 0.
        return_entropy: give H as well.
        softcap: logits x / T become softcap · tanh(x / (T softcap)).
        ignore_index: tokens whose log-probability is 0, without gradient, and whose H is computed nevertheless.

    Returns:
        as index, float32 (float64 for float64), or TokenLogps(logps, entropy), whose entropy is (…). `sequence_logps` adds
        log-probabilities up to sequences.
    """
    checks.whole("logits", logits)
    checks.integer("index", index)
    lead, several = logits.shape[:-1], index.ndim == logits.ndim
    if not logits.ndim or index.ndim > logits.ndim or index.shape[: len(lead)] != lead:
        raise ValueError(f"index must have shape {tuple(lead)}, or {(*lead, 'K')} for K tokens a row, got {tuple(index.shape)}")
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    options: RowOptions = {"scale": 1.0 / temperature, "softcap": softcap, "inplace": inplace, "validate": validate}
    check_options(logits, "none", options, RowOptions)  # of the logits themselves: x below is a view of them
    x = logits if logits.ndim < 3 else logits.movedim(-1, 1)
    target = index
    if several:
        if inplace:
            raise ValueError("inplace=True needs one index a row, got several")
        index = checks.indices("index", index, logits, checks.Allowed(0, logits.shape[-1], ignore_index, validate))
        target = torch.full(lead, ignore_index, dtype=torch.int64, device=logits.device)
    call = RowCall("cross_entropy", x, target, ignore_index=ignore_index, loss_scale=-1.0, reduction="none")
    call = call._replace(outputs=[False, several, return_entropy, False])
    logps, _, lse, entropy, _ = rowwise_results(call, options, target_name="index")
    if lse is not None:
        near = index.long().clamp(0, logits.shape[-1] - 1)
        logps = logps_at(logits.gather(-1, near), index, logits.shape[-1], lse, (1.0 / temperature, softcap))
        logps = torch.where(index == ignore_index, 0.0, logps)
    assert logps is not None
    return logps if entropy is None else TokenLogps(logps, entropy)


def logps_at(x: Tensor, index: Tensor, classes: int, lse: Tensor, softened: tuple[float, float | None]) -> Tensor:
    """Return the log-probabilities of the logits x (…, K) at `index`, nan where that is out of range.

    lse: (…), of each row's softened logits. softened: scale and softcap.
    """
    scale, softcap = softened
    x = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return torch.where((index < 0) | (index >= classes), torch.nan, x) - lse.unsqueeze(-1)

"""Log-probabilities of tokens: what preference objectives and policy gradients start from."""

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

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
    index: Tensor,  # (...)
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
        index: tokens (…) or (…, K), of any integer dtype.
        temperature: T above 0.
        return_entropy: give H as well.
        softcap: logits x / T become softcap · tanh(x / (T softcap)).
        ignore_index: tokens whose log-probability is 0, without gradient, and whose H is computed nevertheless.

    Returns:
        (...), float32 (float64 for float64), or TokenLogps(logps, entropy). `sequence_logps` adds them up to sequences.
    """
    checks.whole("logits", logits)
    checks.integer("index", index)
    if not logits.ndim or index.shape != logits.shape[:-1]:
        raise ValueError(
            f"index must have the shape of logits without the last dimension, {tuple(logits.shape[:-1])}, got {tuple(index.shape)}"
        )
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    options: RowOptions = {"scale": 1.0 / temperature, "softcap": softcap, "inplace": inplace, "validate": validate}
    check_options(logits, "none", options, RowOptions)  # of the logits themselves: x below is a view of them
    x = logits if logits.ndim < 3 else logits.movedim(-1, 1)
    call = RowCall("cross_entropy", x, index, ignore_index=ignore_index, loss_scale=-1.0, reduction="none")
    call = call._replace(outputs=[False, False, return_entropy, False])
    logps, _, _, entropy, _ = rowwise_results(call, options, target_name="index")
    assert logps is not None
    return logps if entropy is None else TokenLogps(logps, entropy)

"""Multi-token prediction: several hidden states of a token, each with a target of its own, and one shared head."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, public
from lossforge.losses.base.option_types import DeviceMesh, Gradient, MTPOutputs, Positive, ProcessGroup
from lossforge.losses.base.options import checked_normalizer
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.definitions.classes.cross_entropy import cross_entropy_of_index
from lossforge.losses.definitions.language.linear import LINEAR, SEE, linear_objective
from lossforge.losses.engine.linear.fuse import Accumulate, LogitsDtype, fused, layer_of
from lossforge.losses.engine.parallel.shards import local_layer

__all__ = ["MTPOutput", "mtp_targets"]


class MTPOutput(Outputs):
    """What `linear_mtp_loss` returns with outputs.

    Attributes:
        loss: a scalar, Σ depth_weights · losses.
        losses: (K,), the cross entropy of each depth, without gradient.
    """

    loss: Tensor
    losses: Tensor


class MTPOptions(TypedDict, total=False):
    chunk: int | None
    accumulate: Accumulate | None
    logits: LogitsDtype | None
    skip_ignored: bool
    valid: int | None
    group: ProcessGroup | DeviceMesh | None
    classes: int | None
    sum_input_gradient: bool


@public(LINEAR, Module("LinearMTPLoss", "Multi-token prediction loss of several hidden states and one head", SEE))
def linear_mtp_loss(
    input: Tensor | Sequence[Tensor],  # (K, …, H), or K tensors (…, H)
    weight: Tensor,  # (C, H)
    target: Tensor,  # class indices (K, …)
    bias: Tensor | None = None,  # (C,)
    *,
    depth_weights: Sequence[float] | Tensor | None = None,  # (K,)
    token_weight: Tensor | None = None,  # (K, …)
    ignore_index: int = -100,
    scale: Positive = 1.0,
    softcap: float | None = None,
    normalizer: float | Tensor | None = None,  # number, or (K,)
    outputs: Sequence[MTPOutputs] = (),
    gradient: Gradient | None = None,
    validate: bool | None = None,
    **options: Unpack[MTPOptions],
) -> Tensor | MTPOutput:
    """Loss of multi-token prediction (MTP): the cross entropies of K depths, which share one head, and their weighted sum.

    L = Σₖ wₖ Lₖ, Lₖ = -1/Nₖ Σᵢ ln softmax(hₖᵢ · weightᵀ + bias)[tₖᵢ], Nₖ the number of targets of the depth that are not ignored, or
    `normalizer`. A depth without targets has Lₖ = 0.

    All depths are one call: no logits are kept, three matrix products are taken, and the head has one gradient, which is summed in
    float32 over the depths. Several tensors are copied into one; hidden states that lie in one tensor already, (K, …, H), are not.

    Source: DeepSeek-V3, arXiv 2412.19437, equations 24 and 25, whose Nₖ is the length of the sequences: `normalizer`; Megatron Core's
    process_mtp_loss, whose Nₖ is the number of targets.

    Args:
        input: the hidden states of the K depths before the head: (K, …, H), or K tensors (…, H). The main model's may be the first.
        weight: (C, H), the head's.
        target: class indices (K, …) of any integer dtype, those of each depth, such as `mtp_targets` makes.
        bias: (C,), the head's; None for none.
        depth_weights: w, K numbers, or a tensor (K,) without gradient. Default: 1 each. With the main model's hidden states first, λ and D
            further depths they are (1, λ / D, …, λ / D).
        token_weight: (K, …), or broadcast to it, without gradient: a factor of each token's loss, which Nₖ does not have. Tokens of
            factor 0 are left out of the loss.
        ignore_index: the target of tokens that do not count.
        scale: above 0; the logits become scale · x, before the cap.
        softcap: the logits become softcap · tanh(x / softcap); None for none.
        normalizer: what each depth is divided by, in place of Nₖ: a number, a 0-d tensor, or one a depth, (K,).
        outputs: ("losses",) to get the loss of each depth as well.
        group: processes over which the classes are spread.

    Returns:
        a scalar, in float32 (float64 for float64); with outputs MTPOutput.

    Examples:
        >>> from lossforge.losses import mtp_targets
        >>> head, tokens = torch.nn.Linear(32, 100, bias=False), torch.randint(100, (2, 16))
        >>> hidden = [torch.randn(2, 16, 32, requires_grad=True) for _ in range(3)]  # of the main model and of two depths
        >>> target = mtp_targets(tokens, 3)
        >>> loss, losses = linear_mtp_loss(hidden, head.weight, target, depth_weights=(1.0, 0.15, 0.15), outputs=("losses",))
        >>> loss.backward()
    """
    (want_losses,) = MTPOutput.asked(outputs)
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    x = input if isinstance(input, Tensor) else _stacked(input)
    checks.floating("input", x)
    checks.fits("input", x, x.ndim > 1 and len(x) > 0, "have shape (K, …, H) with at least one depth")
    checks.integer("target", target)
    checks.fits("target", target, target.shape == x.shape[:-1], "have shape {}, those of each depth", tuple(x.shape[:-1]))
    of_depths = _Depths(
        _weights(depth_weights, len(x), x),
        _divisors(normalizer, target, ignore_index),
        None if token_weight is None else _factors(token_weight, target),
    )
    given: dict[str, Any] = {"scale": scale, "softcap": softcap, "ignore_index": ignore_index, "validate": validate}
    spread: Any = {name: options[name] for name in SPREAD if name in options}  # type: ignore[literal-required]
    linear: Any = {name: v for name, v in options.items() if name not in SPREAD}
    if options.get("group") is None:
        local_layer((x, weight, bias), spread)  # refuses what needs a group
        loss = linear_objective(x, weight, target, of_depths, bias, independent="tokens", gradient=gradient, **given, **linear)
    else:
        layer, shards, _ = local_layer((x, weight, bias), spread)
        given |= {"target": target, "gradient": gradient, "reduction": "sum", "outputs": [False] * 7, **shards}
        dtype = torch.promote_types(x.dtype, torch.float32)
        given |= {"token_weight": of_depths.token_weights(target, dtype, LEAST if want_losses else 0.0), "each_row": want_losses}
        loss, *others = fused(cross_entropy_of_index, layer_of(*layer), given, linear, ("target",), _wanted)
        if want_losses:
            of_depths(-others[-1])
    return MTPOutput.of([loss, of_depths.losses]) if want_losses else loss


SPREAD = ("group", "classes", "sum_input_gradient")
LEAST = 1e-30
"""In place of a depth's weight of 0, whose loss is wanted: rows of weight 0 are not read."""


def _wanted(results: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in results if t is not None]


class _Depths:
    """An objective of the log-probabilities (K, …) of each depth's targets, which keeps the losses of the depths beside their sum.

    weights: K numbers, as a tensor or not. divisors: (K,). factors: (K, …) or None, of the tokens.
    """

    losses: Tensor

    def __init__(self, weights: Sequence[float] | Tensor, divisors: Tensor, factors: Tensor | None) -> None:
        self.weights, self.divisors, self.factors = weights, divisors, factors

    def token_weights(self, target: Tensor, dtype: torch.dtype, least: float) -> Tensor:
        """Return the factor of each token's cross entropy in the sum, in the shape of target. least: in place of a depth's weight of 0."""
        divisors, weights = self.divisors.to(dtype), self.weights
        if isinstance(weights, Tensor):
            shares = torch.where(weights == 0, least, weights.to(dtype)) / divisors
        else:
            shares = torch.stack([(w or least) / each for w, each in zip(weights, divisors, strict=True)])
        shares = shares.view(-1, *(1,) * (target.ndim - 1)).expand(target.shape)
        return shares if self.factors is None else shares * self.factors.to(dtype)

    def __call__(self, logps: Tensor) -> Tensor:
        values = -logps
        if self.factors is not None:  # a token of factor 0 may be of probability 0
            values = torch.where(self.factors == 0, 0.0, values) * self.factors.to(logps.dtype)
        losses = values.reshape(len(logps), -1).sum(1) / self.divisors.to(logps.dtype)
        self.losses = losses.detach()
        weights = self.weights.to(logps.dtype) if isinstance(self.weights, Tensor) else self.weights
        return torch.stack([w * each for w, each in zip(weights, losses, strict=True)]).sum()


def _stacked(input: Sequence[Tensor]) -> Tensor:
    """Return the hidden states of several depths in one tensor."""
    if not isinstance(input, Sequence) or not len(input):
        raise TypeError(f"input must be a tensor (K, …, H) or a sequence of tensors (…, H), got {type(input).__name__}")
    for i, t in enumerate(input):
        checks.floating(f"input[{i}]", t)
        checks.fits(f"input[{i}]", t, t.shape == input[0].shape, "have the shape of input[0], {}", tuple(input[0].shape))
    return torch.stack(tuple(input))


def _weights(given: Sequence[float] | Tensor | None, depths: int, x: Tensor) -> Sequence[float] | Tensor:
    """Return the weight of each depth."""
    if isinstance(given, Tensor):
        return _one_a_depth("depth_weights", given, depths, x)
    found = [1.0] * depths if given is None else [checks.number("depth_weights", each) for each in checks.several("depth_weights", given)]
    if len(found) != depths:
        raise ValueError(f"depth_weights must have one number a depth, {depths}, got {len(found)}")
    return found


def _divisors(given: float | Tensor | None, target: Tensor, ignore_index: int) -> Tensor:
    """Return what the sum of each depth is divided by, (K,)."""
    depths = len(target)
    if given is None:
        return (target != ignore_index).reshape(depths, -1).sum(1).clamp(min=1)
    if isinstance(given, Tensor) and given.ndim:
        return _one_a_depth("normalizer", given, depths, target)
    number = checked_normalizer(given, target, "target")
    if isinstance(number, Tensor):
        return number.expand(depths)
    return torch.full((depths,), number, dtype=torch.float64, device=target.device)


def _one_a_depth(name: str, given: Tensor, depths: int, x: Tensor) -> Tensor:
    checks.real(name, given)
    checks.without_gradient(name, given)
    checks.beside(name, given, x)
    checks.fits(name, given, given.shape == (depths,), "have one number a depth, shape {}", (depths,))
    return given


def _factors(token_weight: Any, target: Tensor) -> Tensor:
    """Return the factor of each token, broadcast to the targets."""
    t = checks.real("token_weight", token_weight)
    checks.without_gradient("token_weight", t)
    checks.beside("token_weight", t, target)
    checks.fits("token_weight", t, checks.expands(t, target.shape), "broadcast to the shape of target, {}", tuple(target.shape))
    return t.expand(target.shape)


@checks.named
def mtp_targets(tokens: Tensor, depths: int, *, first: int = 1, documents: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Return the targets of several depths of prediction: of depth k the token that is first + k places later.

    Targets beyond the end of a row, and in another document of a packed row, are ignore_index.

    Args:
        tokens: (…, T), tokens of any integer dtype. Or labels that are shifted already, as Megatron Core and torchtitan have them, with
            first=0: those equal to ignore_index stay so.
        depths: K, the number of depths.
        first: by how many places the targets of the first depth are later: 1 for the main model's, the next token.
        documents: (…, T), or broadcast to it: an integer a token, the same within a document of a packed row. Of position ids that begin
            at 0 in each document it is (position_ids == 0).cumsum(-1); of cumulative lengths
            torch.bucketize(torch.arange(T), cu_seqlens[1:], right=True).
        ignore_index: what tokens without a target get.

    Returns:
        (K, …, T), int32 for int32 and otherwise int64.

    Raises:
        TypeError, ValueError: tokens or documents are not integers, or their shapes do not fit, or depths is below 1.

    Examples:
        >>> import torch
        >>> from lossforge.losses import mtp_targets
        >>> mtp_targets(torch.tensor([3, 4, 5, 7, 8]), 2, documents=torch.tensor([0, 0, 0, 1, 1]))
        tensor([[   4,    5, -100,    8, -100],
                [   5, -100, -100, -100, -100]])
    """
    checks.integer("tokens", tokens)
    checks.fits("tokens", tokens, tokens.ndim > 0, "have shape (…, T)")
    depths, first = checks.whole_number("depths", depths), checks.whole_number("first", first)
    ignore_index = checks.whole_number("ignore_index", ignore_index)
    if depths < 1:
        raise ValueError(f"depths must be at least 1, got {depths}")
    if first < 0:
        raise ValueError(f"first must be at least 0, got {first}")
    if documents is not None:
        checks.integer("documents", documents)
        checks.beside("documents", documents, tokens, "tokens")
        fits = documents.ndim > 0 and checks.expands(documents, tokens.shape)
        checks.fits("documents", documents, fits, "broadcast to the shape of tokens, {}", tuple(tokens.shape))
        documents = documents.expand(tokens.shape)
    wide = tokens if tokens.dtype in (torch.int32, torch.int64) else tokens.long()
    targets = torch.full((depths, *tokens.shape), ignore_index, dtype=wide.dtype, device=tokens.device)
    for k in range(depths):
        there = max(tokens.shape[-1] - first - k, 0)  # how many tokens have a target
        later = wide[..., tokens.shape[-1] - there :]
        if documents is not None:
            later = torch.where(documents[..., tokens.shape[-1] - there :] == documents[..., :there], later, ignore_index)
        targets[k, ..., :there] = later
    return targets

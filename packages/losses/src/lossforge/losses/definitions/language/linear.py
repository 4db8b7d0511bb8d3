"""Losses of a linear layer's output."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import DivergenceCall, RowwiseCall, TopKCall
from lossforge.losses.base import checks
from lossforge.losses.base.declare import Module, public
from lossforge.losses.base.option_types import (
    BatchReduction,
    DeviceMesh,
    DivergenceOutputs,
    DraftKind,
    DraftOutputs,
    Empty,
    Gradient,
    Independent,
    NonNegative,
    Positive,
    ProcessGroup,
    Reduction,
    RowOutput,
    TokenWeight,
    UnitInterval,
)
from lossforge.losses.base.record import SCALAR, SETTINGS, CheckedCall, Keeping, TemplateDocs
from lossforge.losses.definitions.classes.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_of_index
from lossforge.losses.definitions.classes.divergence import (
    DivergenceOutput,
    cosine_distance_with_logits,
    js_div_with_logits,
    kl_div_with_logits,
    topk_kl_div_with_logits,
    total_variation_with_logits,
)
from lossforge.losses.definitions.classes.draft import DraftOutput, draft_loss_with_logits
from lossforge.losses.definitions.language.tokens import (
    SeveralTokens,
    TokenLogps,
    asked_of_rows,
    beside_first,
    first_of,
    row_scale_of,
    softened,
    with_outputs,
)
from lossforge.losses.engine.calls import computed
from lossforge.losses.engine.linear.entries import top_k_of
from lossforge.losses.engine.linear.fuse import (
    OPTIONS,
    FusedLinear,
    LinearOptions,
    LogitsDtype,
    check_all_rows,
    chunked,
    fuse_linear,
    fused,
    layer_of,
    logits_at,
    logits_over_processes,
    split,
)
from lossforge.losses.engine.linear.objective import by_objective, in_pairs, of_tokens
from lossforge.losses.engine.linear.teacher import LinearTeacher, Teacher, TopKTeacher, by_teacher
from lossforge.losses.engine.parallel.shards import Shards, local_layer
from lossforge.losses.templates import divergence

__all__ = ["FusedLinear", "LinearTeacher", "TopKLogps", "TopKTeacher", "fuse_linear"]


LINEAR = TemplateDocs(
    arguments={
        "input": "(…, H), what the layer takes, of any floating dtype.",
        "weight": "(C, H), the layer's.",
        "bias": "(C,), the layer's; None for none.",
        "teacher": (
            "the teacher's logits (…, C), or a LinearTeacher; with group, of this process's classes, and torch.compile then breaks its "
            "graph."
        ),
        "temperature": "T above 0.",
        "temperature_squared": divergence.DOCS.arguments["temperature_squared"],
        "labels": "integers (…); rows whose label is ignore_index are left out. With hard_weight classes, with group of all processes.",
        "hard_weight": divergence.DOCS.arguments["hard_weight"],
        "outputs": divergence.DOCS.arguments["outputs"],
        "gradient": (
            '"forward" writes the gradients of input, weight and bias in forward, by three matrix products. "backward" computes the logits '
            "again, by four products, and takes any gradient. Default: forward where the result is a scalar, but for float16, and under "
            "torch.compile where outputs may be differentiated too."
        ),
        "chunk": (
            "rows at a time. Default: as many as 1 GiB of logits has, of large bfloat16 scalar losses a 32nd of the GPU's memory, if that "
            "is more; fewer where memory is short."
        ),
        "accumulate": (
            'dtype in which a weight\'s gradient of half precision is summed over the chunks: "float32", or "weight", its own, which takes '
            "a third of the memory and rounds after every chunk. Default: float32 where memory allows."
        ),
        "logits": (
            'how logits are kept, where input and weight are of half precision. "float32": a chunk\'s in float32, beside their gradient. '
            '"weight": they may be rounded to the dtype of the weight, where this takes less time or memory. '
            "Default: they are never rounded, by the fastest way that does not round them."
        ),
        "group": (
            "processes over which the classes are spread, a ProcessGroup or a DeviceMesh of one dimension: each has all rows, and the part "
            "of weight, bias and what else has an entry a class that belongs to its classes. weight may be a DTensor, Shard(0)."
        ),
        "classes": "with group, how many there are in all processes. Parts may be padded, and the last be smaller. A DTensor needs none.",
        "sum_input_gradient": (
            "with group, give the sum over the processes as the gradient of input, not this process's part, which a reduce-scatter over "
            "the sequence would add up. Default: True."
        ),
        "skip_ignored": "leave ignored rows out of the products; the host waits for the device to learn how many are left.",
        "valid": "the same without waiting: a number that the rows not ignored do not exceed. Where they do, the result is nan.",
        "shift": (
            "the class index of a row, or its label, is that so many rows later in the last leading dimension; the last rows are ignored. "
            "1 predicts the next token, without a sliced copy of input. What else has an entry a row stays in its place."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    keeping=Keeping(
        {**SETTINGS, **OPTIONS, "ignore_index": -100, "sum_input_gradient": True, "hard_weight": 0.0},
        per_call=("bias", "loss_weight"),
        forward="input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None",
    ),
    autocast=True,
)


_as_fused: Any = checks.renamed(weight="loss_weight", target_logits="teacher")
CROSS_ENTROPY, KL, TOP_K, JS, TOTAL_VARIATION, COSINE, DRAFT = map(
    _as_fused,
    (
        cross_entropy,
        kl_div_with_logits,
        topk_kl_div_with_logits,
        js_div_with_logits,
        total_variation_with_logits,
        cosine_distance_with_logits,
        draft_loss_with_logits,
    ),
)
"""The losses of logits, whose errors name arguments as here, where `weight` is the layer's."""

SEE = " The layer's tensors belong to the call."


class ShardedLinearOptions(LinearOptions, total=False):
    """For losses whose classes may be spread over processes."""

    group: ProcessGroup | DeviceMesh | None
    classes: int | None
    sum_input_gradient: bool


class LinearCrossEntropyOptions(ShardedLinearOptions, total=False):
    token_weight: Tensor | TokenWeight | None
    scale: float
    softcap: float | None
    z_loss: float
    target_b: Tensor | None
    lam: float | Tensor | None
    normalizer: float | Tensor | None
    empty: Empty
    gradient: Gradient | None
    validate: bool | None


@public(LINEAR, Module("LinearCrossEntropyLoss", "Cross entropy of a linear layer's output", SEE, kept=("loss_weight",)))
def linear_cross_entropy(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    target: Tensor,  # class indices (…), or probabilities (…, C)
    bias: Tensor | None = None,  # (C,)
    *,
    loss_weight: Tensor | None = None,  # (C,)
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    outputs: Sequence[RowOutput] = (),
    **options: Unpack[LinearCrossEntropyOptions],
) -> CheckedCall[RowwiseCall, Tensor | CrossEntropyOutput]:
    """Cross entropy of a linear layer's output: cross_entropy(F.linear(input, weight, bias), target) with the classes last.

    Args:
        target: class indices (…) of any integer dtype; or probabilities (…, C).
        loss_weight: (C,), the class weights of cross_entropy.
        label_smoothing: ε in [0, 1].
        outputs: names of what to give as well, as in cross_entropy.
        token_weight: (…), or broadcast to it: a factor of each token's loss, "probability" (DFT) or "entropy" (EAFT), as in cross_entropy.
            A scalar loss with such weights takes three matrix products, where reduction="none" takes four.
        scale: the logits become scale · x.
        softcap: the logits become softcap · tanh(scale · x / softcap); None for none.
        z_loss: coefficient of lse², averaged over the rows not ignored.

    Returns:
        as cross_entropy; what has an entry a row in the leading dimensions of input.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_cross_entropy(hidden, head.weight, torch.randint(100, (6,)), head.bias).backward()
    """
    layer, shards, others = local_layer((input, weight, bias), options)
    own, linear = split(others)
    given = {
        "weight": loss_weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "outputs": outputs,
        "target": target,
        **own,
        **shards,
    }
    return fused(CROSS_ENTROPY, layer_of(*layer), given, linear, ("target",))


@public(LINEAR)
def linear_selective_log_softmax(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    index: Tensor,  # (…), or (…, K)
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive | Tensor = 1.0,  # number, or (…)
    scale: Positive = 1.0,
    softcap: float | None = None,
    outputs: Sequence[RowOutput] = (),
    ignore_index: int = -100,
    validate: bool | None = None,
    **options: Unpack[ShardedLinearOptions],
) -> CheckedCall[RowwiseCall, Tensor | TokenLogps]:
    """Log-probability of each token from a model's hidden states: selective_log_softmax(F.linear(input, weight, bias), index).

    What GRPO, PPO, DPO and other preference objectives start from. Log-probabilities, entropy and log-sum-exp are differentiable,
    together in one further pass. `linear_objective` computes such an objective with its gradient, by one product fewer.

    Args:
        index: tokens, one a row or K. Of several, the rows of weight that they name are copied, K · H numbers a row, and the gradient of
            weight is the sum of two. With group, each class's process gives its logit.
        temperature: T above 0; or one a row, (…), without gradient.
        scale: above 0; the logits become scale · x, as the model has them, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T.
        outputs: names of what to give as well, in this order: "z_loss" (lse²), "lse" (ln Σⱼ exp(xⱼ / T)) and "entropy" (of softmax(x / T)),
            differentiable; "correct", "argmax", "log_p2" and "mean_logit", as TokenLogps explains them.
        ignore_index: tokens whose log-probability is 0, without gradient.

    Returns:
        as index, float32 (float64 for float64); with outputs TokenLogps, whose logps and correct are as index, the others (…).

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_selective_log_softmax(hidden, head.weight, torch.randint(100, (6,)), head.bias).mean().backward()
    """
    layer, shards, others = local_layer((input, weight, bias), options)
    head, (_, linear) = layer_of(*layer), split(others)
    checks.integer("index", index)
    lead = head.input.shape[:-1]
    of_rows = index.shape[: len(lead)] == lead and index.ndim <= input.ndim
    checks.fits("index", index, of_rows, "have shape {}, or {} for K tokens a row", lead, (*lead, "K"))
    asked = TokenLogps.asked(outputs)
    given = {"ignore_index": ignore_index, "validate": validate, "outputs": asked_of_rows(asked, index.ndim == input.ndim), **shards}
    given |= _softened(temperature, softcap, scale, head, validate)
    if index.ndim < input.ndim:
        finish = functools.partial(_logps, asked)
        return fused(cross_entropy_of_index, head, {**given, "target": index}, linear, ("target",), finish)
    spread: Shards | None = shards.get("group")
    classes = head.weight.shape[0] if spread is None else spread.classes
    index = checks.indices("index", index, head.input, checks.Allowed(0, classes, ignore_index, validate))
    check_all_rows(linear, "one index a row, got several")
    x = logits_at(head, index) if spread is None else logits_over_processes(spread, head, index)
    given["target"], place = first_of(x, index, classes, ignore_index)
    found = computed(fused(cross_entropy_of_index, head, given, linear, ("target",), _negated))
    several = SeveralTokens(x, index, place, classes, ignore_index, given["scale"], given["softcap"], given["row_scale"])
    return beside_first(found, several, asked)


@public(LINEAR)
def linear_objective(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    index: Tensor,  # (…)
    objective: Callable[..., Tensor],  # of log-probabilities (…)
    bias: Tensor | None = None,  # (C,)
    *,
    independent: Independent | None = None,
    entropy: bool = False,
    temperature: Positive | Tensor = 1.0,  # number, or (…)
    scale: Positive = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    gradient: Gradient | None = None,
    validate: bool | None = None,
    **options: Unpack[LinearOptions],
) -> Tensor:
    """Objective of the log-probabilities of tokens, such as grpo_loss or dpo_loss, from a model's hidden states in three products.

    objective(linear_selective_log_softmax(input, weight, index, bias)), where that takes four. A chunk of tokens is computed, then the
    derivatives of the objective by their log-probabilities, then the gradients of input, weight and bias from the same logits.

    objective is called once a chunk. Log-probabilities of later chunks are then 0, so that a chunk's derivatives must not depend on them:
    `independent` says which tokens belong together. Where it is wrong, result and gradients are nan. The last call has all
    log-probabilities.

    Four products are taken where a chunk does not hold what belongs together, where `gradient` says so, for tensors that the kernels do
    not serve (on the CPU), for float16 unless `gradient` is "forward", and for subclasses of torch.Tensor. Under torch.compile three are
    taken in bfloat16 on GPUs from sm_90 on, where one chunk holds all tokens and `entropy` is not given.

    Args:
        index: tokens (…), of any integer dtype.
        objective: from the log-probabilities, in the shape of index, to a 0-d tensor. It may hold other tensors, none that requires grad.
        independent: "tokens", each token alone; "sequences", each entry of dimension 0; "pairs", each entry of dimension 0 with the one
            half of its length further, as a chosen completion with its rejected one. Default: no token is, and a chunk must hold all.
        entropy: call objective(logps, entropy), with the entropy of each token's softmax, in nats; both are differentiated. Three products
            and a pass over the logits.
        temperature: T above 0; or one a row, (…), without gradient.
        scale: above 0; the logits become scale · x, as the model has them, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T.
        ignore_index: tokens whose log-probability is 0, without gradient.

    Returns:
        what objective returns.

    Raises:
        TypeError, ValueError: objective does not return a 0-d floating tensor, or depends on another tensor that requires grad.

    Examples:
        >>> from lossforge.losses import dpo_loss, grpo_loss, sequence_logps
        >>> hidden, head = torch.randn(4, 6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> tokens, advantages = torch.randint(100, (4, 6)), torch.randn(4)
        >>> linear_objective(hidden, head.weight, tokens, lambda logps: grpo_loss(logps, advantages), independent="tokens").backward()
        >>> reference = -torch.rand(2, 2)
        >>> def dpo(logps):
        ...     return dpo_loss(*sequence_logps(logps).chunk(2), *reference)
        >>> linear_objective(hidden, head.weight, tokens, dpo, independent="pairs").backward()
    """
    head, (_, linear) = layer_of(input, weight, bias), split(options)
    lead = head.input.shape[:-1]
    head, index, whole = of_tokens(objective, head, index, independent, entropy, gradient, linear)
    outputs = [False, False, entropy, *[False] * 4]
    given = {"ignore_index": ignore_index, "validate": validate, "outputs": outputs, "target": index}
    if independent == "pairs" and isinstance(temperature, Tensor) and temperature.ndim:
        checks.fits("temperature", temperature, temperature.shape == lead, "be a number or have one entry a row, {}", tuple(lead))
        temperature = in_pairs(temperature)
    given |= _softened(temperature, softcap, scale, head, validate)
    return by_objective(whole, fused(cross_entropy_of_index, head, given, linear, ("target",), functools.partial(_logps, outputs)))


@public(LINEAR)
def linear_entropy(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive | Tensor = 1.0,  # number, or (…)
    scale: Positive = 1.0,
    softcap: float | None = None,
    **options: Unpack[ShardedLinearOptions],
) -> CheckedCall[RowwiseCall]:
    """Entropy of each row's softmax of a linear layer's output, differentiable.

    H = -Σⱼ pⱼ ln pⱼ, p = softmax(x / T), x = scale · (input · weightᵀ + bias). With a soft cap x is softcap · tanh(x / softcap).

    Args:
        temperature: T above 0; or one a row, (…), without gradient.
        scale: above 0; the logits become scale · x, as the model has them, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T.

    Returns:
        (…), float32 (float64 for float64), in nats.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_entropy(hidden, head.weight, head.bias).mean().backward()
    """
    layer, shards, others = local_layer((input, weight, bias), options)
    head, (_, linear) = layer_of(*layer), split(others)
    check_all_rows(linear, "class indices as target, which an entropy does not have")
    nothing = torch.full(head.input.shape[:-1], -100, dtype=torch.int64, device=input.device)
    given = {"target": nothing, "ignore_index": -100, "validate": False, **shards}
    given |= _softened(temperature, softcap, scale, head, False)
    given["outputs"] = [False, False, True, *[False] * 4]
    return fused(cross_entropy_of_index, head, given, linear, ("target",), _entropy)


class TopKLogps(NamedTuple):
    """The likeliest classes of each row.

    Attributes:
        values: (…, K), their log-probabilities at temperature T, in nats, the largest first.
        indices: (…, K), int64, their classes.
        lse: (…), log-sum-exp of x / T over all classes, in nats: values + lse are the softened logits.
    """

    values: Tensor
    indices: Tensor
    lse: Tensor


class TopKOptions(TypedDict, total=False):
    chunk: int | None
    logits: LogitsDtype | None
    group: ProcessGroup | DeviceMesh | None
    classes: int | None


@public(LINEAR)
def linear_top_k(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    k: int,
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive = 1.0,
    scale: Positive = 1.0,
    softcap: float | None = None,
    **options: Unpack[TopKOptions],
) -> TopKLogps:
    """Return the K likeliest classes of each row of a linear layer's output, without a gradient, from one product and no kept logits.

    With them a teacher is asked for its log-probabilities of the student's own candidates: the reverse divergence on the student's
    support is linear_kl_div(..., TopKTeacher(teacher's values, indices), reverse=True). As a TopKTeacher, values and indices are a teacher.

    Of equal logits any may be taken, and in any order, as torch.topk does. torch.compile breaks its graph here.

    Args:
        k: K, the number of classes, from 1 to C.
        temperature: T above 0.
        scale: above 0; the logits become scale · x, before the cap.
        softcap: the logits become softcap · tanh(x / softcap), before they are divided by T; None for none.

    Returns:
        TopKLogps, in float32 (float64 for float64).

    Examples:
        >>> hidden, head = torch.randn(6, 32), torch.nn.Linear(32, 100)
        >>> values, indices, lse = linear_top_k(hidden, head.weight, 8, head.bias)
    """
    layer, shards, others = local_layer((input, weight, bias), options)
    head, (_, linear) = layer_of(*layer), split(others)
    k = checks.whole_number("k", k)
    count = shards["group"].classes if shards else head.weight.shape[0]
    if not 1 <= k <= count:
        raise ValueError(f"k must be from 1 to the number of classes, {count}, got {k}")
    softening = softened(checks.number("temperature", temperature, 0.0, exclusive=True), softcap, scale)
    lead = head.input.shape[:-1]
    with torch.no_grad():
        found = top_k_of(chunked(head.with_input(head.input.reshape(-1, head.input.shape[-1])), linear), k, *softening, **shards)
    values, indices, lse = found
    return TopKLogps(values.view(*lead, k), indices.view(*lead, k), lse.view(lead))


def _negated(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return -results[0], *results[1:]


def _logps(outputs: list[bool], results: tuple[Any, ...]) -> Tensor | TokenLogps:
    return with_outputs(outputs, _negated(results))


def _entropy(results: tuple[Any, ...]) -> Tensor:
    entropy: Tensor = results[3]
    return entropy


def _softened(temperature: float | Tensor, softcap: float | None, scale: float, head: Head, validate: bool | None) -> dict[str, Any]:
    temperature, row_scale = row_scale_of(temperature, head.input.shape[:-1], head.input, validate)
    scale, cap = softened(temperature, softcap, scale)
    return {"scale": scale, "softcap": cap, "row_scale": row_scale, "reduction": "none"}


class LinearDivergenceOptions(ShardedLinearOptions, total=False):
    scale: float
    softcap: float | None
    hard_weight: float
    labels: Tensor | None
    ignore_index: int
    normalizer: float | Tensor | None
    empty: Empty
    gradient: Gradient | None


@public(LINEAR, Module("LinearKLDivLoss", "Kullback-Leibler divergence of a linear layer's output from a teacher's", SEE))
def linear_kl_div(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Teacher,  # logits (…, C), a LinearTeacher or a TopKTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    reverse: bool | float = False,
    temperature_squared: bool = True,
    renormalize: bool = False,
    tail: bool = False,
    loss_weight: Tensor | None = None,  # (…)
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[LinearDivergenceOptions],
) -> CheckedCall[DivergenceCall | TopKCall, Tensor | DivergenceOutput]:
    """Kullback-Leibler divergence of the softmax of a linear layer's output from a teacher's.

    kl_div_with_logits(F.linear(input, weight, bias), teacher), or topk_kl_div_with_logits of a TopKTeacher, with the classes last. Of a
    LinearTeacher no logits are kept either. "batchmean" is the mean over all rows: input counts as (N, H).

    Args:
        teacher: the teacher's logits (…, C), a LinearTeacher, or a TopKTeacher. With group, torch.compile breaks its graph; a LinearTeacher
            or logits are of this process's classes, a TopKTeacher's indices count all classes, and it takes four products.
        reverse: KL(student ‖ teacher). Of a TopKTeacher also a number in [0, 1], its share beside that of KL(teacher ‖ student).
        renormalize: of a TopKTeacher: q = softmax(values / T) over the K.
        tail: of a TopKTeacher: the classes that are not among the K count as one more.
        loss_weight: (…), a factor a row; the means divide by its sum.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_kl_div(hidden, head.weight, torch.randn(6, 100), head.bias).backward()
    """
    given: dict[str, Any] = {
        "temperature": temperature,
        "reduction": reduction,
        "temperature_squared": temperature_squared,
        "weight": loss_weight,
        "outputs": outputs,
    }
    if isinstance(teacher, TopKTeacher):
        given |= {"renormalize": renormalize, "tail": tail, "reverse": reverse}
        return by_teacher(TOP_K, (input, weight, bias), teacher, options, **given)
    if renormalize or tail:
        raise ValueError(f"{'renormalize' if renormalize else 'tail'} needs a TopKTeacher, got {type(teacher).__name__}")
    return by_teacher(KL, (input, weight, bias), teacher, options, reverse=checks.flag("reverse", reverse), **given)


@public(LINEAR, Module("LinearJSDivLoss", "Generalised Jensen-Shannon divergence of a linear layer's output", SEE))
def linear_js_div(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Tensor | LinearTeacher,  # logits (…, C), or a LinearTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    beta: UnitInterval = 0.5,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    temperature_squared: bool = False,
    loss_weight: Tensor | None = None,  # (…)
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[LinearDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DivergenceOutput]:
    """Generalised Jensen-Shannon divergence of the softmax of a linear layer's output and a teacher's: js_div_with_logits, fused.

    Args:
        beta: β in [0, 1].
        temperature_squared: as in js_div_with_logits: multiply by T². Off by default, as in TRL.
        loss_weight: (…), a factor a row; the means divide by its sum.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_js_div(hidden, head.weight, torch.randn(6, 100), head.bias).backward()
    """
    return by_teacher(
        JS,
        (input, weight, bias),
        teacher,
        options,
        beta=beta,
        temperature=temperature,
        reduction=reduction,
        temperature_squared=temperature_squared,
        weight=loss_weight,
        outputs=outputs,
    )


@public(LINEAR, Module("LinearTotalVariationLoss", "Total variation distance of a linear layer's output", SEE))
def linear_total_variation(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Tensor | LinearTeacher,  # logits (…, C), or a LinearTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    temperature_squared: bool = False,
    loss_weight: Tensor | None = None,  # (…)
    outputs: Sequence[DivergenceOutputs] = (),
    **options: Unpack[LinearDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DivergenceOutput]:
    """Total variation distance of the softmax of a linear layer's output and a teacher's: total_variation_with_logits, fused.

    Args:
        temperature_squared: as in total_variation_with_logits: multiply by T². Off by default: the value is then a distance in [0, 1].
        loss_weight: (…), a factor a row; the means divide by its sum.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_total_variation(hidden, head.weight, torch.randn(6, 100), head.bias).backward()
    """
    return by_teacher(
        TOTAL_VARIATION,
        (input, weight, bias),
        teacher,
        options,
        temperature=temperature,
        reduction=reduction,
        temperature_squared=temperature_squared,
        weight=loss_weight,
        outputs=outputs,
    )


@public(LINEAR, Module("LinearCosineDistanceLoss", "Cosine distance of a linear layer's output from a teacher's", SEE))
def linear_cosine_distance(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Tensor | LinearTeacher,  # logits (…, C), or a LinearTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    reduction: BatchReduction = "batchmean",
    loss_weight: Tensor | None = None,  # (…)
    **options: Unpack[LinearDivergenceOptions],
) -> CheckedCall[DivergenceCall]:
    """Cosine distance of a linear layer's output and a teacher's, as rows of logits: cosine_distance_with_logits, fused.

    With hard_weight it is Liger-Kernel's LigerFusedLinearCosineSimilarityLoss. group is refused.

    Args:
        loss_weight: (…), a factor a row; the means divide by its sum.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> linear_cosine_distance(hidden, head.weight, torch.randn(6, 100), head.bias).backward()
    """
    for name in ("group", "classes"):
        if options.get(name) is not None:
            raise ValueError(f"{name} is not served by linear_cosine_distance, which takes all classes in one process")
    return by_teacher(COSINE, (input, weight, bias), teacher, options, reduction=reduction, weight=loss_weight)


@public(LINEAR, Module("LinearDraftLoss", "Loss of a draft model from its hidden states and a teacher's", SEE))
def linear_draft_loss(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Tensor | LinearTeacher,  # logits (…, C), or a LinearTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    kind: DraftKind = "lk",
    eta: NonNegative = 3.0,
    kl_scale: NonNegative = 1.0,
    teacher_lse: Tensor | None = None,  # (…)
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    temperature_squared: bool = False,
    loss_weight: Tensor | None = None,  # (…)
    outputs: Sequence[DraftOutputs] = (),
    **options: Unpack[LinearDivergenceOptions],
) -> CheckedCall[DivergenceCall, Tensor | DraftOutput]:
    """Loss of a draft model for speculative decoding, from its hidden states and its teacher's: draft_loss_with_logits, fused.

    Neither the draft's logits nor those of a LinearTeacher are kept. Where the draft has some of the teacher's classes, DraftVocabulary
    gives the teacher and `teacher_lse`.

    Args:
        kind: "lk", "log_tv", "tv", "kl" or "ce", as in draft_loss_with_logits.
        eta: η of at least 0, of "lk".
        kl_scale: s of at least 0, of "lk".
        teacher_lse: (…), log-sum-exp of the teacher's softened logits over all its classes, as in draft_loss_with_logits.
        temperature_squared: multiply by T². Off by default.
        loss_weight: (…), a factor a row, such as draft_decay_weights; the means divide by its sum.
        outputs: "entropy" and "acceptance", as in draft_loss_with_logits.

    Returns:
        a scalar, or (…) with reduction "none", in float32 (float64 where an input is); with outputs DraftOutput.

    Examples:
        >>> hidden, head = torch.randn(6, 32, requires_grad=True), torch.nn.Linear(32, 100)
        >>> from lossforge.losses import LinearTeacher
        >>> teacher = LinearTeacher(torch.randn(6, 48), torch.randn(100, 48))
        >>> loss, acceptance = linear_draft_loss(hidden, head.weight, teacher, outputs=("acceptance",))
        >>> loss.backward()
    """
    return by_teacher(
        DRAFT,
        (input, weight, bias),
        teacher,
        options,
        kind=kind,
        eta=eta,
        kl_scale=kl_scale,
        teacher_lse=teacher_lse,
        temperature=temperature,
        reduction=reduction,
        temperature_squared=temperature_squared,
        weight=loss_weight,
        outputs=outputs,
    )

"""Losses fused with the linear layer whose output they take: the logits are computed by chunks, and never kept.

Each takes the layer's input (…, H), its weight (C, H) and bias (C,) in place of the logits input · weightᵀ + bias, (…, C), with the classes
last; `fuse_linear` takes the bias by name alone. What holds one entry a row has the leading dimensions of input. Options that every one
has, beside those of its loss:

- `loss_weight`: the loss's own `weight`, whose name the layer's has here.
- `gradient`: "forward" writes the gradients of input, weight and bias in the forward pass: three matrix products. It is the default for
    scalar results, but for float16 and under torch.compile. "backward" keeps a few numbers a row and computes the logits again: four
    products, and any gradient may arrive, also for the loss of each row. Of losses of rows and divergences it takes about half of the
    memory, where there are more classes than rows: it goes by classes, and needs no sum of the weight's gradient.
- `chunk`: rows at a time. By default as many as 1 GiB of logits has, fewer where a GPU has less than 4 GiB to spare, on a CPU 256 MiB.
    A weight's gradient of half precision that is summed in float32 is written at the end; until then its memory holds the logits of a
    chunk, where they fit, and there may be as many rows as fit. One chunk of all rows needs no such sum, and is taken where it has the
    room of that. By classes, as many are taken as fill the memory of `chunk` rows, by default 0.5 GiB.
- `accumulate`: the dtype in which a weight's gradient of half precision is summed over the chunks: "float32" (by default where it takes
    no more than half of the GPU's free memory) or "weight", its own, which takes a third of the memory, and rounds after every chunk: in
    bfloat16 the error of the gradient was up to 1.4 times that of one product at 4 chunks, and 1.6 times at 16.
- `skip_ignored`: leave ignored rows out of the products. The host waits for the device, to learn how many rows are left.
- `valid`: the same without waiting: how many rows are not ignored, or a number that they do not exceed. Where more are, the result is nan.
    Further results of a row that is left out are 0.

"batchmean" divides by the number of all rows, as if input were (N, H).

Products are torch's own, of the dtype of input and weight, or of autocast's; the loss, its sums and those of the bias are computed in
float32. Where input, weight and bias do not require grad, nothing is kept. Derivatives of second order, in forward mode, under torch.func
and of what else requires grad (a teacher, class weights) come from the unfused computation.
"""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lossforge.losses import checks
from lossforge.losses.functional.cross_entropy import CrossEntropyOutput, cross_entropy
from lossforge.losses.functional.divergence import (
    js_div_with_logits,
    kl_div_with_logits,
    topk_kl_div_with_logits,
    total_variation_with_logits,
)
from lossforge.losses.functional.tokens import TokenLogps, logps_at
from lossforge.losses.linear.call import ROWS, Head, Settings
from lossforge.losses.templates.docstrings import completed
from lossforge.losses.templates.element import IGNORED
from lossforge.losses.templates.module import SETTINGS, LossModule, Module, shown, with_module
from lossforge.losses.types import BatchReduction, Empty, Gradient, Positive, Reduction, UnitInterval

__all__ = [
    "FusedLinear",
    "LinearTeacher",
    "TopKTeacher",
    "fuse_linear",
    "linear_cross_entropy",
    "linear_entropy",
    "linear_js_div",
    "linear_kl_div",
    "linear_selective_log_softmax",
    "linear_total_variation",
]

Accumulate = Literal["float32", "weight"]
PER_ROW = (*ROWS, "score")


class LinearOptions(TypedDict, total=False):
    chunk: int | None
    accumulate: Accumulate | None
    skip_ignored: bool
    valid: int | None


class LinearTeacher(NamedTuple):
    """A teacher's logits as a linear layer, computed by chunks. H may differ from the student's.

    Attributes:
        input: (…, H), what the teacher's head takes.
        weight: (C, H), the head's.
        bias: (C,), the head's; None for none.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None


class TopKTeacher(NamedTuple):
    """A teacher known by its K likeliest classes.

    Attributes:
        values: (…, K), their log-probabilities.
        indices: (…, K), their class indices.
    """

    values: Tensor
    indices: Tensor


def _layer(input: Tensor, weight: Tensor, bias: Tensor | None, of: str = "") -> Head:
    """Return a layer whose tensors are checked, in the dtype that torch.nn.functional.linear would compute in."""
    given = {f"{of}input": input, f"{of}weight": weight} | ({} if bias is None else {f"{of}bias": bias})
    for name, t in given.items():
        checks.whole(name, t)
        checks.beside(name, t, input, f"{of}input")
    if not input.ndim:
        raise ValueError(f"{of}input must have shape (…, H), got ()")
    if weight.ndim != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(f"{of}weight must have shape (C, {input.shape[-1]}), got {tuple(weight.shape)}")
    if not weight.shape[0]:
        raise ValueError(f"{of}weight must have at least one class, shape (C, {input.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{of}bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (input, weight))
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    head = Head(input, weight, bias)
    for name, t in zip(given, head.tensors, strict=True):
        if t.dtype != input.dtype:
            raise TypeError(f"{name} must have the dtype of {of}input, {input.dtype}, got {t.dtype}")
    return head


class _Rows:
    """The leading dimensions of an input, as one: what has an entry a row is brought to it, and results back.

    Of an input (H,) there is one row; of one (N, H) nothing changes.
    """

    def __init__(self, lead: tuple[int, ...], classes: int) -> None:
        self.lead, self.classes, self.count = lead, classes, 1
        for n in lead:
            self.count = self.count * n

    def joined(self, name: str, t: Any) -> Any:
        k = len(self.lead)
        if not isinstance(t, Tensor) or not (t.ndim or not k) or k == 1:
            return t
        if not k:
            return t.unsqueeze(0) if name in PER_ROW else t
        if name == "lam" and t.ndim == 1:
            t = t.view(-1, *(1,) * (k - 1)).expand(self.lead)
        if t.shape[:k] == self.lead:
            return t.reshape(self.count, *t.shape[k:])
        if name in ("weight", "group", "pos_weight", "alpha") and t.ndim > 1 and checks.expands(t, (*self.lead, self.classes)):
            return t.expand(*self.lead, self.classes).reshape(self.count, self.classes)
        return t

    def apart(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.ndim or len(self.lead) == 1:
            return t
        return t.reshape((*self.lead, *t.shape[1:]))


def _counting(function: Callable[..., Any], given: dict[str, Any]) -> Tensor:
    """Return which rows are not ignored."""
    target = given.get("labels")
    if target is None:
        target = next((given[name] for name in ("target", "targets", "index") if name in given), None)
    ignored = given.get("ignore_index", -100 if "ignore_index" in (checks.keywords(function) or ()) else IGNORED)
    if not isinstance(target, Tensor) or target.is_floating_point():
        raise ValueError("skip_ignored and valid need class indices as target, or labels")
    counts = target != ignored
    target_b = given.get("target_b")
    return counts if target_b is None else counts | (target_b != ignored)


def _first(counts: Tensor, valid: int) -> Tensor:
    """Return where the rows are that count, then others, `valid` together but at least one, which can show that they are too few."""
    valid = checks.whole_number("valid", valid)
    if valid < 0:
        raise ValueError(f"valid must be at least 0 rows, got {valid}")
    return counts.to(torch.uint8).argsort(descending=True, stable=True)[: max(valid, 1)]


def _of_kept(function: Callable[..., Any], given: dict[str, Any], targets: tuple[str, ...], kept: Tensor, count: int) -> dict[str, Any]:
    """Return a loss's arguments for those of `count` rows that are kept."""
    of_rows = {*PER_ROW, *targets}
    if "labels" in given:
        of_rows.add("weight")  # a divergence's
    elif given.get("reduction", inspect.signature(function).parameters["reduction"].default) == "batchmean":
        given = {"normalizer": count, **{name: t for name, t in given.items() if name != "normalizer" or t is not None}}

    def select(name: str, t: Any) -> Any:
        by_row = isinstance(t, Tensor) and t.ndim > 0 and t.shape[0] == count and (name in of_rows or t.ndim > 1)
        return t.index_select(0, kept) if by_row else t

    return {name: select(name, t) for name, t in given.items()}


def _unselect(t: Any, rows: Tensor, count: int) -> Any:
    if not isinstance(t, Tensor) or not t.ndim:
        return t
    return t.new_zeros((count, *t.shape[1:])).index_copy(0, rows, t)


def _each(make: Callable[[Any], Any], results: Any) -> Any:
    if isinstance(results, Tensor):
        return make(results)
    return type(results)(*[make(t) for t in results])


def _settings(chunk: int | None, accumulate: Accumulate | None) -> Settings:
    checks.one_of("accumulate", accumulate, (None, "float32", "weight"))
    if chunk is None:
        rows = 0
    else:
        rows = checks.whole_number("chunk", chunk)
        if rows < 1:
            raise ValueError(f"chunk must be at least 1 row, got {rows}")
    return Settings(rows, -1 if accumulate is None else int(accumulate == "float32"))


def _fused(
    function: Callable[..., Any],
    head: Head,
    given: dict[str, Any],
    linear: LinearOptions,
    targets: tuple[str, ...],
    teacher: Head | None = None,
) -> Any:
    """Call a loss on the logits of a layer. given: its other arguments by name, `targets` of them with an entry a row."""
    if given.get("inplace"):
        raise ValueError("inplace=True needs logits, which a fused loss does not have")
    settings = _settings(linear.get("chunk"), linear.get("accumulate"))
    lead = tuple(head.input.shape[:-1])
    rows = _Rows(lead, head.weight.shape[0])
    head = head.with_input(head.input.reshape(rows.count, head.input.shape[-1]))
    if teacher is not None:
        if teacher.input.shape[:-1] != torch.Size(lead) or teacher.weight.shape[0] != rows.classes:
            shape = (*teacher.input.shape[:-1], teacher.weight.shape[0])
            raise ValueError(f"teacher must give logits of shape {(*lead, rows.classes)}, got {shape}")
        teacher = teacher.with_input(teacher.input.reshape(rows.count, teacher.input.shape[-1]))
    given = {name: rows.joined("target" if name in targets else name, t) for name, t in given.items()}
    kept: Tensor | None = None
    valid = linear.get("valid")
    if valid is not None or linear.get("skip_ignored"):
        counts = _counting(function, given)
        kept = counts.nonzero().squeeze(1) if valid is None else _first(counts, valid)
        given = _of_kept(function, given, targets, kept, rows.count)
        x = head.input.index_select(0, kept)
        head = head.with_input(x if valid is None else torch.where(counts.sum() > valid, torch.nan, x))
        if teacher is not None:
            teacher = teacher.with_input(teacher.input.index_select(0, kept))
    if teacher is not None:
        given[targets[0]] = teacher.logits
    plain = getattr(function, "__wrapped__", function)  # without the look for calls alike
    found = plain(head.logits, **given, linear=(head, teacher, settings))
    if kept is not None:
        which = kept
        found = _each(lambda t: _unselect(t, which, rows.count), found)
    return _each(rows.apart, found)


def fuse_linear(loss: Any) -> Callable[..., Any]:
    """Return a loss fused with the linear layer that gives its logits, which are computed by chunks and never kept.

    Args:
        loss: a function of lossforge.losses over rows or elements or a divergence, a loss of your own (`@elementwise`, `@rowwise`), or a
            module of either, whose options then hold.

    Returns:
        a function of (input, weight, target, ..., bias=None, **options), the loss of input · weightᵀ + bias. After input and weight of
            the layer go the loss's own arguments as its signature has them, of a module its targets alone; the layer's bias is given by
            name. The loss's own `weight` is called loss_weight. Further options: see lossforge.losses.functional.linear.

    Raises:
        TypeError: the loss is none of these. The fused loss: TypeError, ValueError, as the loss itself.

    Examples:
        >>> import torch
        >>> from lossforge.losses import fuse_linear, softmax_focal_loss
        >>> head = torch.nn.Linear(16, 1000)
        >>> fused = fuse_linear(softmax_focal_loss)
        >>> fused(torch.randn(8, 16), head.weight, torch.arange(8), bias=head.bias, gamma=1.5, reduction="mean").backward()
    """
    return FusedLoss(loss)


LAYER = ("input", "weight")
PUBLIC = {"weight": "loss_weight"}
"""What arguments of a loss are called where they would have the name of the layer's."""


class FusedLoss:
    """What `fuse_linear` returns: no closure, so that a model that has it can be copied and saved.

    by_position, accepted: the names of its arguments. needed: those of the loss's own without a default. targets: those with an entry
    a row.
    """

    def __init__(self, loss: Any) -> None:
        self.loss, self.function = loss, getattr(loss, "function", loss)
        name = getattr(self.function, "__name__", type(loss).__name__)
        taken = (checks.keywords(self.function) if callable(self.function) else None) or [""]
        if not ("normalizer" in taken and taken[0].startswith("input")) or "chunk" in taken:
            raise TypeError(
                f"loss must be a loss of lossforge.losses that takes logits, one of one's own, or the module of either, got {name}"
            )
        self.__name__ = f"linear_{name}"
        others = [p.replace(name=PUBLIC.get(p.name, p.name)) for p in inspect.signature(self.function).parameters.values()][1:]
        by_position = [p for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.needed = tuple([p.name for p in by_position if p.default is p.empty])
        self.targets = self.needed or ("target",)
        if isinstance(loss, LossModule):  # which keeps the rest
            by_position = [p for p in by_position if p.name in self.targets]
        layer = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for each in LAYER]
        settings = {"bias": Tensor | None, **LinearOptions.__annotations__}
        by_name = [p.replace(kind=p.KEYWORD_ONLY) for p in others if p not in by_position]
        by_name += [Parameter(k, Parameter.KEYWORD_ONLY, default=LinearModule.settings.get(k), annotation=t) for k, t in settings.items()]
        self.by_position = (*LAYER, *[p.name for p in by_position])
        self.__signature__ = Signature([*layer, *by_position, *by_name])  # inspect reads it
        self.accepted = tuple(self.__signature__.parameters)

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        if len(tensors) > len(self.by_position):
            raise TypeError(f"{self.__name__}() takes {', '.join(self.by_position)} by position, and bias by name, got {len(tensors)}")
        given = dict(zip(self.by_position, tensors, strict=False))
        for name in named:
            if name not in self.accepted:
                raise checks.unexpected(self.__name__, name, self.accepted)
            if name in given:
                meant = "; did you mean 'loss_weight', the loss's own?" if name == "weight" and "loss_weight" in self.accepted else ""
                raise TypeError(f"{self.__name__}() got {name} twice, by position and by name{meant}")
        given.update(named)
        for name in (*LAYER, *self.needed):
            if name not in given:
                raise TypeError(f"{self.__name__}() needs {name}. It takes {', '.join(self.accepted)}")
        layer = _layer(given.pop("input"), given.pop("weight"), given.pop("bias", None))
        own, linear = _split(given)
        kept = {name: getattr(self.loss, name) for name in self.loss.option_names} if isinstance(self.loss, LossModule) else {}
        kept.update({"weight" if name == "loss_weight" else name: t for name, t in own.items()})
        return _fused(self.function, layer, kept, linear, self.targets)


class FusedLinear(nn.Module):
    """A loss fused with a linear layer of a model: FusedLinear(loss, head)(input, *targets) is loss(head(input), *targets).

    Args:
        loss: as for `fuse_linear`.
        head: a torch.nn.Linear, whose weight and bias stay the model's own.

    Raises:
        TypeError: the loss cannot be fused, or head is no linear layer. A call: bias= is given, which is always the head's.

    Examples:
        >>> import torch
        >>> from lossforge.losses import FusedLinear, cross_entropy
        >>> head = torch.nn.Linear(16, 1000)
        >>> FusedLinear(cross_entropy, head)(torch.randn(8, 16), torch.arange(8)).backward()
    """

    def __init__(self, loss: Any, head: nn.Linear) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise TypeError(f"head must be a torch.nn.Linear, got {type(head).__name__}")
        self.loss, self.head, self.fused = loss, head, fuse_linear(loss)

    def forward(self, input: Tensor, *targets: Tensor, **options: Any) -> Any:
        if "bias" in options:
            raise TypeError("FusedLinear takes the bias of its head, got bias= too: set head.bias, or call fuse_linear(loss) with it")
        return self.fused(input, self.head.weight, *targets, bias=self.head.bias, **options)


class LinearModule(LossModule):
    per_call = ("bias", "loss_weight")
    settings: ClassVar[Mapping[str, Any]] = {
        **SETTINGS,
        **dict.fromkeys(("chunk", "accumulate")),
        "skip_ignored": False,
        "ignore_index": -100,
    }

    def forward(self, input: Tensor, weight: Tensor, target: Any, bias: Tensor | None = None, **per_call: Any) -> Any:  # type: ignore[override]
        return self.compute(input, weight, target, bias, **per_call)


SEE = " The layer's tensors belong to the call."


class LinearCrossEntropyOptions(LinearOptions, total=False):
    scale: float
    softcap: float | None
    z_loss: float
    target_b: Tensor | None
    lam: float | Tensor | None
    normalizer: float | Tensor | None
    empty: Empty
    gradient: Gradient | None
    validate: bool | None


def _split(options: Any) -> tuple[dict[str, Any], LinearOptions]:
    """Return the loss's options and the layer's."""
    own = LinearOptions.__annotations__
    linear: LinearOptions = {name: t for name, t in options.items() if name in own}  # type: ignore[assignment]
    return {name: t for name, t in options.items() if name not in own}, linear


_cross_entropy = FusedLoss(cross_entropy)


class LinearCrossEntropyArguments(LinearCrossEntropyOptions, total=False):
    """Those of linear_cross_entropy by keyword, without what it shall return."""

    loss_weight: Tensor | None
    ignore_index: int
    reduction: Reduction
    label_smoothing: float


@overload
def linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Unpack[LinearCrossEntropyArguments]
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: Literal[True],
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_z_loss: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_entropy: Literal[True],
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_correct: bool = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_correct: Literal[True],
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[LinearCrossEntropyArguments],
) -> Tensor | CrossEntropyOutput: ...
@with_module(
    Module("LinearCrossEntropyLoss", "Cross entropy of a linear layer's output", SEE, base=LinearModule, kept=("loss_weight",)), "linear"
)
@checks.named
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
    return_z_loss: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of a linear layer's output: cross_entropy(F.linear(input, weight, bias), target) with the classes last.

    Args:
        target: class indices (…) of any integer dtype; or probabilities (…, C).
        loss_weight: (C,), the class weights of cross_entropy.
        label_smoothing: ε in [0, 1].
        scale: the logits become scale · x.
        softcap: the logits become softcap · tanh(scale · x / softcap); None for none.
        z_loss: coefficient of lse², averaged over the rows not ignored.

    Returns:
        as cross_entropy; what has an entry a row in the leading dimensions of input.
    """
    return _cross_entropy(
        input,
        weight,
        target,
        bias=bias,
        loss_weight=loss_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        return_z_loss=return_z_loss,
        return_lse=return_lse,
        return_entropy=return_entropy,
        return_correct=return_correct,
        **options,
    )


class LinearTokenOptions(LinearOptions, total=False):
    temperature: float
    softcap: float | None
    ignore_index: int
    validate: bool | None


@overload
def linear_selective_log_softmax(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[LinearTokenOptions],
) -> Tensor: ...
@overload
def linear_selective_log_softmax(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    return_entropy: Literal[True],
    **options: Unpack[LinearTokenOptions],
) -> TokenLogps: ...
@overload
def linear_selective_log_softmax(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    return_entropy: bool,
    **options: Unpack[LinearTokenOptions],
) -> Tensor | TokenLogps: ...
@shown(LinearModule.settings)
@completed("linear")
@checks.named
def linear_selective_log_softmax(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    index: Tensor,  # (…), or (…, K)
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    validate: bool | None = None,
    **linear: Unpack[LinearOptions],
) -> Tensor | TokenLogps:
    """Log-probability of each token from a model's hidden states: selective_log_softmax(F.linear(input, weight, bias), index).

    What GRPO, PPO, DPO and other preference objectives start from. Both results are differentiable, together in one further pass.

    Args:
        index: tokens, one a row or K. Of several, the rows of weight that they name are copied, K · H numbers a row, and the gradient of
            weight is the sum of two.
        temperature: T above 0.
        softcap: logits x / T become softcap · tanh(x / (T softcap)).
        return_entropy: give the entropy as well.
        ignore_index: tokens whose log-probability is 0, without gradient.

    Returns:
        as index, float32 (float64 for float64), or TokenLogps(logps, entropy).
    """
    head = _layer(input, weight, bias)
    checks.integer("index", index)
    lead, several = input.shape[:-1], index.ndim == input.ndim
    if index.shape[: len(lead)] != lead or index.ndim > input.ndim:
        raise ValueError(f"index must have shape {tuple(lead)}, or {(*lead, 'K')} for K tokens a row, got {tuple(index.shape)}")
    given = {"ignore_index": ignore_index, "validate": validate, "return_entropy": return_entropy} | _softened(temperature, softcap)
    if not several:
        found = _fused(cross_entropy, head, {**given, "target": index}, linear, ("target",))
        return TokenLogps(-found.loss, found.entropy) if return_entropy else -found
    index = checks.indices("index", index, input, checks.Allowed(0, weight.shape[0], ignore_index, validate))
    _no_skipping(linear, "one index a row, got several")
    nothing = torch.full(lead, -100, dtype=torch.int64, device=input.device)
    every = _fused(cross_entropy, head, {**given, "ignore_index": -100, "target": nothing, "return_lse": True}, linear, ("target",))
    classes = head.weight.shape[0]
    near = index.long().clamp(0, classes - 1)
    x = torch.matmul(F.embedding(near, head.weight), head.input.unsqueeze(-1)).squeeze(-1)
    x = x if head.bias is None else x + head.bias[near]
    logps = torch.where(index == ignore_index, 0.0, logps_at(x, index, classes, every.lse, (given["scale"], softcap)))
    return TokenLogps(logps, every.entropy) if return_entropy else logps


@shown(LinearModule.settings)
@completed("linear")
@checks.named
def linear_entropy(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    **linear: Unpack[LinearOptions],
) -> Tensor:
    """Entropy of each row's softmax of a linear layer's output, differentiable.

    H = -Σⱼ pⱼ ln pⱼ, p = softmax((input · weightᵀ + bias) / T).

    Args:
        temperature: T above 0.
        softcap: logits x / T become softcap · tanh(x / (T softcap)).

    Returns:
        (…), float32 (float64 for float64), in nats.
    """
    head = _layer(input, weight, bias)
    _no_skipping(linear, "class indices as target, which an entropy does not have")
    nothing = torch.full(input.shape[:-1], -100, dtype=torch.int64, device=input.device)
    given = {"target": nothing, "return_entropy": True, "validate": False}
    return _fused(cross_entropy, head, given | _softened(temperature, softcap), linear, ("target",)).entropy


def _no_skipping(linear: LinearOptions, needed: str) -> None:
    if linear.get("skip_ignored") or linear.get("valid") is not None:
        raise ValueError(f"skip_ignored and valid need {needed}")


def _softened(temperature: float, softcap: float | None) -> dict[str, Any]:
    temperature = checks.number("temperature", temperature, 0.0, exclusive=True)
    return {"scale": 1.0 / temperature, "softcap": softcap, "reduction": "none"}


Teacher = Tensor | LinearTeacher | TopKTeacher


class LinearDivergenceOptions(LinearOptions, total=False):
    labels: Tensor | None
    ignore_index: int
    normalizer: float | Tensor | None
    empty: Empty
    gradient: Gradient | None


def _of_teacher(
    function: Callable[..., Any], layer: tuple[Tensor, Tensor, Tensor | None], teacher: Teacher, given: dict[str, Any], options: Any
) -> Any:
    own, linear = _split(options)
    head, given = _layer(*layer), {**given, **own}
    if isinstance(teacher, TopKTeacher):
        return _fused(function, head, {"values": teacher.values, "indices": teacher.indices, **given}, linear, ("values", "indices"))
    if isinstance(teacher, LinearTeacher):
        return _fused(function, head, given, linear, ("target_logits",), _layer(*teacher, of="teacher."))
    if not isinstance(teacher, Tensor):
        raise TypeError(f"teacher must be logits, a LinearTeacher or a TopKTeacher, got {type(teacher).__name__}")
    return _fused(function, head, {"target_logits": teacher, **given}, linear, ("target_logits",))


def _no_topk(teacher: Teacher, name: str) -> None:
    if isinstance(teacher, TopKTeacher):
        raise TypeError(
            f"{name} needs all of the teacher's logits, as a tensor or LinearTeacher, got a TopKTeacher: linear_kl_div takes it"
        )


@with_module(
    Module("LinearKLDivLoss", "Kullback-Leibler divergence of a linear layer's output from a teacher's", SEE, base=LinearModule), "linear"
)
@checks.named
def linear_kl_div(
    input: Tensor,  # (…, H)
    weight: Tensor,  # (C, H)
    teacher: Teacher,  # logits (…, C), a LinearTeacher or a TopKTeacher
    bias: Tensor | None = None,  # (C,)
    *,
    temperature: Positive = 1.0,
    reduction: BatchReduction = "batchmean",
    reverse: bool = False,
    temperature_squared: bool = True,
    renormalize: bool = False,
    tail: bool = False,
    loss_weight: Tensor | None = None,  # (…)
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """Kullback-Leibler divergence of the softmax of a linear layer's output from a teacher's.

    kl_div_with_logits(F.linear(input, weight, bias), teacher), or topk_kl_div_with_logits of a TopKTeacher, with the classes last. Of a
    LinearTeacher no logits are kept either. "batchmean" is the mean over all rows: input counts as (N, H).

    Args:
        teacher: the teacher's logits (…, C), a LinearTeacher, or a TopKTeacher.
        reverse: of a teacher with all its logits: KL(student ‖ teacher).
        renormalize: of a TopKTeacher: q = softmax(values / T) over the K.
        tail: of a TopKTeacher: the classes that are not among the K count as one more.
        loss_weight: (…), a factor a row; the means divide by its sum.
    """
    given = {"temperature": temperature, "reduction": reduction, "temperature_squared": temperature_squared, "weight": loss_weight}
    if isinstance(teacher, TopKTeacher):
        if reverse:
            raise ValueError("reverse needs all of the teacher's logits, got a TopKTeacher")
        given |= {"renormalize": renormalize, "tail": tail}
        return _of_teacher(topk_kl_div_with_logits, (input, weight, bias), teacher, given, options)
    if renormalize or tail:
        raise ValueError(f"{'renormalize' if renormalize else 'tail'} needs a TopKTeacher, got {type(teacher).__name__}")
    return _of_teacher(kl_div_with_logits, (input, weight, bias), teacher, {**given, "reverse": reverse}, options)


@with_module(
    Module("LinearJSDivLoss", "Generalised Jensen-Shannon divergence of a linear layer's output", SEE, base=LinearModule), "linear"
)
@checks.named
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
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the softmax of a linear layer's output and a teacher's: js_div_with_logits, fused.

    Args:
        beta: β in [0, 1].
        temperature_squared: as in js_div_with_logits: multiply by T². Off by default, as in TRL.
        loss_weight: (…), a factor a row; the means divide by its sum.
    """
    _no_topk(teacher, "linear_js_div")
    given = {"temperature": temperature, "reduction": reduction, "temperature_squared": temperature_squared, "weight": loss_weight}
    return _of_teacher(js_div_with_logits, (input, weight, bias), teacher, {**given, "beta": beta}, options)


@with_module(Module("LinearTotalVariationLoss", "Total variation distance of a linear layer's output", SEE, base=LinearModule), "linear")
@checks.named
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
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """Total variation distance of the softmax of a linear layer's output and a teacher's: total_variation_with_logits, fused.

    Args:
        temperature_squared: as in total_variation_with_logits: multiply by T². Off by default: the value is then a distance in [0, 1].
        loss_weight: (…), a factor a row; the means divide by its sum.
    """
    _no_topk(teacher, "linear_total_variation")
    given = {"temperature": temperature, "reduction": reduction, "temperature_squared": temperature_squared, "weight": loss_weight}
    return _of_teacher(total_variation_with_logits, (input, weight, bias), teacher, given, options)

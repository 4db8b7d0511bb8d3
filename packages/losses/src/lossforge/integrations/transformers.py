"""Hugging Face transformers: train a language model without its logits.

    from lossforge.integrations import transformers

    transformers.fuse(model)                                   # hidden states -> loss; logits in eval, or where no labels are given
    model.loss_function = transformers.loss_function           # or: logits -> loss

Tested with transformers 4.57.6, 5.23 and 5.24.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lossforge.losses import cross_entropy, linear_cross_entropy
from lossforge.patch.patching import Patch, Replacement, once, say, say_once

TESTED = "4.57.6 to 5.24"
OF_NEXT = "(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs)"
OF_MASKED = "(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs)"
STANDS_FOR = (
    Replacement("transformers.loss.loss_utils:ForCausalLMLoss", None, OF_NEXT),
    Replacement("transformers.loss.loss_utils:ForMaskedLMLoss", None, OF_MASKED),
    Replacement("transformers:PreTrainedModel.loss_function", None),
)
"""What `fuse` and `loss_function` stand for or read."""
_check = once("transformers", TESTED, STANDS_FOR)


def loss_function(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Cross entropy of the next token from logits, as transformers' ForCausalLMLoss, without a copy in float32.

    Args:
        logits: (B, T, V), in any floating dtype; the arithmetic is float32.
        labels: (B, T), moved by one here.
        num_items_in_batch: what the sum is divided by; None for the labels that count.
        ignore_index: labels that do not count.
        shift_labels: (B, T), labels that are moved already, in the place of `labels`.

    Returns:
        a scalar in float32.

    Raises:
        IntegrationError: transformers' names or parameters are not those that were tested.
    """
    _check()
    target = _next(labels, ignore_index) if shift_labels is None else shift_labels
    logits = logits if vocab_size is None else logits.reshape(-1, vocab_size)
    return cross_entropy(
        logits.flatten(0, -2),
        target.flatten().to(logits.device),
        ignore_index=ignore_index,
        normalizer=_beside(logits, num_items_in_batch),
    )


def _beside(x: Tensor, number: Tensor | int | None) -> Tensor | int | None:
    """Return a number on the device of x: where a model is spread over devices, the Trainer's is on the first."""
    return number.to(x.device) if isinstance(number, Tensor) else number


def _next(labels: Tensor, ignore_index: int) -> Tensor:
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


@dataclass
class _Asked:
    """What a training call asks of the head: the loss of these labels in the place of logits."""

    labels: Tensor
    given: dict[str, Any]
    loss: Tensor | None = None
    declined: str = ""  # why the head gave logits in its place


class _StandIn(torch.autograd.Function):
    """Return zeros in the place of logits, which carry the loss's gradient back to it through the head's output."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ndim: int) -> Tensor:
        return loss.new_zeros((1,) * ndim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].sum(), None


class FusedHead(nn.Linear):
    """A head that computes the loss in its own forward where it is asked to, so that FSDP, ZeRO-3 and checkpoints see it called."""

    asked: _Asked | None
    how: "_How"

    def forward(self, input: Tensor) -> Tensor:
        """Return logits; or, where a loss is asked for, zeros that carry its gradient."""
        asked = self.asked
        if asked is None:
            return super().forward(input)
        # only here does FSDP2 have the weight gathered
        if type(self.weight).__name__ == "DTensor":
            asked.declined = "its head's weight is a DTensor, whose classes lie on several processes"
            return super().forward(input)
        given = asked.given
        ignore_index = given.get("ignore_index", -100)
        target = given.get("shift_labels")
        if target is None:
            target = _next(asked.labels, ignore_index) if self.how.shifts else asked.labels
        loss = linear_cross_entropy(
            input,
            self.weight,
            target.to(input.device),
            self.bias,
            ignore_index=ignore_index,
            normalizer=_beside(input, given.get("num_items_in_batch")),
            scale=self.how.scale,
            softcap=self.how.softcap,
            **self.how.options,
        )
        asked.loss = loss.detach()
        stand_in: Tensor = _StandIn.apply(loss, input.ndim)
        return stand_in


@dataclass(frozen=True)
class _How:
    """How a model's loss follows from its head's output."""

    scale: float
    softcap: float | None
    passed: frozenset[str]  # arguments of the call that the model hands on to its loss
    shifts: bool
    options: dict[str, Any]


PASSED = ("num_items_in_batch", "ignore_index", "shift_labels")
PROBES = (0.0, 1.0, -3.0, 40.0, 1e9)
"""Logits by which scale and softcap are measured."""


@functools.cache
def _fused_class(own: Any) -> Any:
    """Return a model's class with a forward that asks its head for the loss."""
    names = tuple(inspect.signature(own.forward).parameters)[1:]

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        kwargs = dict(zip(names[: len(args)], args, strict=True)) | kwargs
        labels, head = kwargs.get("labels"), self.get_output_embeddings()
        wanted = self.training if skip_logits is None else skip_logits
        if labels is None or not wanted:
            return own.forward(self, **kwargs)
        if reason := _why_not(head):
            say_once(f"{own.__name__}: {reason}: its own head and loss run")
            return own.forward(self, **kwargs)
        head.asked = asked = _Asked(labels, {name: kwargs[name] for name in head.how.passed if kwargs.get(name) is not None})
        try:
            output = own.forward(self, **kwargs)
        finally:
            head.asked = None
        if asked.declined:
            say_once(f"{own.__name__}: {asked.declined}: its own head and loss run")
            return output
        return _without_logits(output)

    def find_loss(self: Any) -> Callable[..., Tensor]:
        head = self.get_output_embeddings()
        asked = getattr(head, "asked", None)
        if asked is None or asked.declined:
            found: Callable[..., Tensor] = own.loss_function.fget(self)
            return found
        return functools.partial(_arrive, head.how, asked)

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    members = {
        "forward": forward,
        "loss_function": property(find_loss, own.loss_function.fset),
        "__reduce_ex__": _reduce,
        "fused_from": own,
    }
    return type(own.__name__, (own,), {**named, **members})


def _reduce(self: Any, protocol: int) -> Any:
    _, args, *rest = super(type(self), self).__reduce_ex__(protocol)
    return _remake, (type(self).fused_from, args[1:]), *rest


def _remake(own: type, args: tuple[Any, ...]) -> Any:
    kind = _fused_class(own)
    return kind.__new__(kind, *args)


def _why_not(head: Any) -> str:
    """Return why a head cannot compute the loss now; "" if it can."""
    if not isinstance(head, FusedHead):
        return f"its head is a {type(head).__module__}.{type(head).__qualname__} now (adapters that came after fuse?)"
    return ""


def _arrive(how: _How, asked: _Asked, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the loss that the head computed. logits: what the model made of the head's zeros."""
    if asked.loss is None or labels is not asked.labels:
        raise RuntimeError("the model gave its loss other logits or labels than the call's; undo fuse() for this model")
    return asked.loss + logits.sum() / how.scale  # softcap · tanh(scale · x / softcap) has the slope `scale` at 0


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return (output[0], *output[2:])
    return type(output)(**{**output, "logits": None})


def fuse(model: nn.Module, **options: Any) -> Patch:
    """Let a language model compute its training loss in its head, without logits.

    The model's own forward runs, with its auxiliary losses. Its head is still called, so that FSDP, FSDP2, ZeRO-3, DDP and checkpointing
    see it, and returns the loss in the place of logits. The scale and softcap of the logits are measured on the model's own forward.
    In eval mode, and where no labels are given, nothing changes; a call's `skip_logits=True` or `False` decides otherwise. Fuse before
    adapters, FSDP or torch.compile are applied. Where adapters or parallel heads replace the head later, the model's own loss runs.

    Args:
        model: a model of transformers with a linear head and a loss over next tokens, or a PEFT model around one.
        options: of `linear_cross_entropy`, such as z_loss=1e-4.

    Returns:
        a handle: `undo()` gives the model its own forward back.

    Raises:
        TypeError: the model's head or loss is none that can be fused; the message says what its forward did.
        IntegrationError: transformers' names or parameters are not those that were tested.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
        >>> handle = fuse(model)
        >>> tokens = torch.randint(50, (2, 8))
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    _check()
    return _fuse(getattr(model, "get_base_model", lambda: model)(), options)


def _fuse(model: Any, options: dict[str, Any]) -> Patch:
    _unfuse(model)
    own: Any = type(model)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    kind: Any = type(head)
    if kind is not nn.Linear:
        _refuse(model, f"needs a torch.nn.Linear as head, got {kind.__module__}.{kind.__qualname__}")
    if any((head._forward_hooks, head._forward_pre_hooks, "forward" in vars(head))):
        _refuse(model, "needs a head without hooks or a forward of its own. Fuse before what adds them")
    how = _measure(model, head, options)
    head.__class__, head.asked, head.how = FusedHead, None, how
    model.__class__ = _fused_class(own)
    scale = "" if how.scale == 1 else f", scale {how.scale:g}"
    softcap = "" if how.softcap is None else f", softcap {how.softcap:g}"
    say(f"{own.__name__} computes its loss without logits{scale}{softcap}")
    names = f"{own.__name__}.forward", f"{own.__name__}.loss_function", "its head's forward"
    return Patch("transformers", names, functools.partial(_unfuse, model))


def _unfuse(model: Any) -> None:
    """Give a model that is fused its own classes back."""
    own: Any = getattr(type(model), "fused_from", None)
    if own is None:
        return
    head = model.get_output_embeddings()
    kinds: Any = type(model), type(head)
    if kinds != (_fused_class(own), FusedHead):
        raise RuntimeError(f"{own.__name__} was changed since it was fused (FSDP, adapters?): undo that first")
    del head.asked, head.how
    model.__class__, head.__class__ = own, nn.Linear


def _refuse(model: Any, why: str, cause: Exception | None = None) -> NoReturn:
    raise TypeError(f"{type(model).__name__} cannot be fused: fuse {why}") from cause


class _LossReached(BaseException):  # which no handler of a model catches
    """Ends the trial forward with what the model gave its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


class _Hidden:
    """What the trial's body returns: hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _measure(model: Any, head: nn.Linear, options: dict[str, Any]) -> _How:
    """Run the model's own forward without its body on a few numbers as logits, up to its loss, and read off what it does to them."""
    body = getattr(model, "base_model", model)
    body = getattr(model, "model", model) if body is model else body  # a vision-language model before transformers 5
    if body is model:
        _refuse(model, "needs a model whose body is a module of its own (base_model_prefix)")
    if not hasattr(type(model), "loss_function"):
        _refuse(model, "needs a model of transformers with a loss_function")
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    own_loss = model.loss_function
    known = [each for each in (ForCausalLMLoss, ForMaskedLMLoss, loss_function) if own_loss is each]
    if not known:
        name = f"{own_loss.__module__}.{getattr(own_loss, '__qualname__', type(own_loss).__qualname__)}"
        _refuse(model, f"knows ForCausalLMLoss and ForMaskedLMLoss of transformers, and ours of logits; the model's loss is {name}")
    device = "cpu" if head.weight.is_meta else head.weight.device
    length = -(-len(PROBES) // head.out_features)
    probes = torch.tensor(PROBES, dtype=torch.float64, device=device)
    probes = probes.repeat(head.out_features)[: length * head.out_features].view(1, length, -1)
    tokens = torch.zeros((1, length), dtype=torch.int64, device=device)
    sent = {"num_items_in_batch": torch.ones((), device=device), "ignore_index": -7, "shift_labels": tokens + 1}
    widths = head.in_features, getattr(model.config.get_text_config(), "hidden_size", head.in_features)  # a layer may stand before the head
    for width in dict.fromkeys(widths):
        hidden = torch.zeros((1, length, width), dtype=head.weight.dtype, device=device)
        with _forward(body, lambda *args, hidden=hidden, **kwargs: _Hidden(hidden)), _forward(head, lambda input: probes):
            seen = _call_of_loss(model, {"input_ids": tokens, "labels": tokens, **sent})
        if not isinstance(seen, Exception):
            break
    if seen is None or (isinstance(seen, Exception) and "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names):
        _refuse(model, "needs a forward that calls self.loss_function, and this model computes its loss itself", seen)
    if isinstance(seen, Exception):
        why = f"{type(seen).__name__}: {seen}"
        _refuse(model, f"runs its forward once with stand-ins for its body and head, and this failed ({why})", seen)
    given = dict(zip(("logits", "labels"), seen.args, strict=False)) | seen.kwargs
    logits, labels = given.get("logits"), given.get("labels")
    if labels is not tokens or not isinstance(logits, Tensor) or logits.numel() != probes.numel():
        _refuse(model, "needs a forward that gives its loss the head's logits and the call's labels, and this one gives others")
    scale, softcap = _fit(probes.flatten(), logits.flatten().double(), model)
    taken = inspect.signature(own_loss).parameters  # a masked model hands shift_labels on to a loss that does not read them
    passed = frozenset(name for name in PASSED if name in taken and given.get(name) is sent[name])
    return _How(scale, softcap, passed, own_loss is not ForMaskedLMLoss, options)


def _call_of_loss(model: Any, given: dict[str, Any]) -> _LossReached | Exception | None:
    """Run the model's own forward up to its loss, and return the loss's arguments; None if it calls none, or the forward's error."""

    def record(*args: Any, **kwargs: Any) -> NoReturn:
        raise _LossReached(*args, **kwargs)

    own = model.__dict__.get("_loss_function")
    model.loss_function = record
    try:
        type(model).forward(model, **given)
    except _LossReached as called:
        return called
    except Exception as error:
        return error
    finally:
        del model._loss_function
        if own is not None:
            model._loss_function = own
    return None


def _fit(probes: Tensor, found: Tensor, model: Any) -> tuple[float, float | None]:
    """Return scale and softcap by which softcap · tanh(scale · x / softcap), or scale · x, is what was found for each probe."""
    of_one, of_last = (found[PROBES.index(x)].item() for x in (1.0, PROBES[-1]))
    scale, softcap = of_one, None
    if not math.isclose(of_last, scale * PROBES[-1], rel_tol=1e-5):
        softcap = of_last
        scale = math.atanh(of_one / softcap) * softcap if softcap > 0 and abs(of_one) < softcap else math.nan
        scale = round(scale, 6) if math.isclose(scale, round(scale, 6), rel_tol=1e-6) else scale
    expected = scale * probes if softcap is None else softcap * torch.tanh(scale * probes / softcap)
    other = ~torch.isclose(found, expected, rtol=1e-5, atol=1e-9)
    if not scale > 0 or other.any():
        shown = slice(len(PROBES)) if other[: len(PROBES)].any() or not other.any() else other
        made = ", ".join(f"{x:g} → {y:g}" for x, y in list(zip(probes[shown].tolist(), found[shown].tolist(), strict=True))[: len(PROBES)])
        _refuse(model, f"knows a scale and a softcap of logits, and this model's forward does something else: {made}")
    return scale, softcap


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own

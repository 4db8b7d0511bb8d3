"""Fuse a loss with the linear layer that gives its logits: check a call, bring its rows into one dimension, and back."""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from lossforge.kernels.call import FLOAT32, FROM_WEIGHT, NEVER_ROUNDED, Head
from lossforge.losses.base import checks
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.module import LossModule, OfFunction
from lossforge.losses.base.namespace import PACKAGE
from lossforge.losses.base.outputs import Outputs
from lossforge.losses.base.record import CheckedCall, rebuilt
from lossforge.losses.base.state import autocast_dtype, without_autocast
from lossforge.losses.engine.calls import entry_point
from lossforge.losses.engine.linear.engine import FUSED
from lossforge.losses.engine.parallel.shards import Shards, SummedGradient, local_layer
from lossforge.losses.templates.elementwise import IGNORED

Accumulate = Literal["float32", "weight"]
LogitsDtype = Literal["float32", "weight"]
PER_ROW = ("target", "target_b", "lam", "token_weight", "indices", "labels", "score", "row_scale", "teacher_lse")
"""Arguments with an entry a row."""
FUNCTIONAL = f"{PACKAGE}.functional"
OPTIONS = {"chunk": None, "accumulate": None, "logits": None, "skip_ignored": False, "shift": 0}
"""The defaults of a layer's options, where None is not said."""


class LinearOptions(TypedDict, total=False):
    chunk: int | None
    accumulate: Accumulate | None
    logits: LogitsDtype | None
    skip_ignored: bool
    valid: int | None
    shift: int


def layer_of(input: Tensor, weight: Tensor, bias: Tensor | None, of: str = "") -> Head:
    """Return a layer whose tensors are checked, in the dtype that torch.nn.functional.linear would compute in."""
    given = {f"{of}input": input, f"{of}weight": weight} | ({} if bias is None else {f"{of}bias": bias})
    for name, t in given.items():
        checks.whole(name, t)
        checks.beside(name, t, input, f"{of}input")
    if not input.ndim:
        raise ValueError(f"{of}input must have shape (…, H), got ()")
    checks.fits(f"{of}weight", weight, weight.ndim == 2 and weight.shape[1] == input.shape[-1], "have shape (C, {})", input.shape[-1])
    checks.fits(f"{of}weight", weight, weight.shape[0] > 0, "have at least one class, shape (C, {})", input.shape[-1])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{of}bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if dtype := autocast_dtype(input.device.type):
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

    def __init__(self, lead: tuple[int, ...], classes: int, broadcast: Sequence[str] = ()) -> None:
        """Make it of the leading dimensions. broadcast: the arguments that broadcast to (*lead, classes)."""
        self.lead, self.classes, self.count, self.broadcast = lead, classes, 1, broadcast
        for n in lead:
            self.count = self.count * n

    def of_input(self, t: Tensor) -> Tensor:
        return t if len(self.lead) == 1 else t.reshape(self.count, t.shape[-1])

    def joined(self, name: str, t: Any) -> Any:
        k = len(self.lead)
        if not isinstance(t, Tensor) or not (t.ndim or not k) or k == 1:
            return t
        if not k:
            return t.unsqueeze(0) if name in PER_ROW else t
        if name == "token_weight" and checks.expands(t, self.lead):
            t = t.expand(self.lead)
        if name == "lam" and t.ndim == 1:
            t = t.view(-1, *(1,) * (k - 1)).expand(self.lead)
        if name in self.broadcast and t.ndim > 1 and checks.expands(t, (*self.lead, self.classes)):
            return t.expand(*self.lead, self.classes).reshape(self.count, self.classes)
        return t.reshape(self.count, *t.shape[k:]) if t.shape[:k] == self.lead else t

    def separated(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.ndim or len(self.lead) == 1:
            return t
        return t.reshape((*self.lead, *t.shape[1:]))


def _ignored(function: Callable[..., Any], given: dict[str, Any]) -> int:
    """Return the class index of rows that do not count."""
    found: int = given.get("ignore_index", -100 if "ignore_index" in (checks.keywords(function) or ()) else IGNORED)
    return found


def _shifted(given: dict[str, Any], names: Sequence[str], lead: tuple[int, ...], shift: int, ignored: int) -> dict[str, Any]:
    """Return arguments whose class indices are those `shift` rows later in a sequence; the last rows have the ignored one.

    names: of the arguments that may be class indices. lead: the leading dimensions of the input, the last that of a sequence.
    """
    if shift < 0:
        raise ValueError(f"shift must be at least 0 tokens, got {shift}")
    indices = {name: t for name in names if isinstance(t := given.get(name), Tensor) and t.shape == lead and not t.is_floating_point()}
    if not (lead and indices):
        raise ValueError(f"shift needs class indices of tokens, target or labels of shape (…, T), got input of shape {(*lead, 'H')}")
    last = min(shift, lead[-1])
    found = {}
    for name, t in indices.items():
        wide = t if t.dtype in (torch.int32, torch.int64) else t.long()
        found[name] = torch.cat([wide[..., last:], wide.new_full((*lead[:-1], last), ignored)], -1)
    return {**given, **found}


def _counting(function: Callable[..., Any], given: dict[str, Any]) -> Tensor:
    """Return which rows are not ignored."""
    target = given.get("labels")
    if target is None:
        target = next((given[name] for name in ("target", "targets", "index") if name in given), None)
    ignored = _ignored(function, given)
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
        if isinstance(t, Head):
            return t.with_input(t.input.index_select(0, kept))
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
    made = [make(t) for t in results]
    return type(results)(*made) if isinstance(results, Outputs) else tuple(made)


def chunked(head: Head, linear: LinearOptions) -> Head:
    """Return the layer with how its logits are computed."""
    chunk, accumulate, logits = (linear.get(name) for name in ("chunk", "accumulate", "logits"))
    checks.one_of("logits", logits, (None, "float32", "weight"))
    checks.one_of("accumulate", accumulate, (None, "float32", "weight"))
    if chunk is None:
        rows = 0
    else:
        rows = checks.whole_number("chunk", chunk)
        if rows < 1:
            raise ValueError(f"chunk must be at least 1 row, got {rows}")
    kept_as = NEVER_ROUNDED if logits is None else FROM_WEIGHT if logits == "weight" else FLOAT32
    return Head(head.input, head.weight, head.bias, rows, -1 if accumulate is None else int(accumulate == "float32"), kept_as)


def fused(
    function: Callable[..., Any],
    head: Head,
    given: dict[str, Any],
    linear: LinearOptions,
    targets: tuple[str, ...],
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Check a loss of the logits of a layer. Where its classes are spread over processes, the loss's definition computes it, too.

    Args:
        given: the loss's other arguments by name, `targets` of them with an entry a row. The first of these may be a teacher's layer.
        finish: from what the loss returns to what is returned.
    """
    if given.get("inplace"):
        raise ValueError("inplace=True needs logits, which a fused loss does not have")
    head = chunked(head, linear)
    lead = tuple(head.input.shape[:-1])
    of_rows = "labels" in (checks.keywords(function) or ())  # a divergence, whose weights have an entry a row
    rows = _Rows(lead, head.weight.shape[0], ("pos_weight", "alpha") if of_rows else ("weight", "group", "pos_weight", "alpha"))
    head = head.with_input(rows.of_input(head.input))
    teacher = given.get(targets[0])
    if isinstance(teacher, Head):
        if teacher.input.shape[:-1] != torch.Size(lead) or teacher.weight.shape[0] != rows.classes:
            shape = (*teacher.input.shape[:-1], teacher.weight.shape[0])
            raise ValueError(f"teacher must give logits of shape {(*lead, rows.classes)}, got {shape}")
        given[targets[0]] = teacher.with_input(rows.of_input(teacher.input))
    if linear.get("shift", 0) != 0:
        given = _shifted(given, ("labels", "target_b", *targets), lead, linear["shift"], _ignored(function, given))
    given = {name: rows.joined("target" if name in targets else name, t) for name, t in given.items()}
    kept: Tensor | None = None
    sound: Tensor | None = None
    valid = linear.get("valid")
    if valid is not None or linear.get("skip_ignored"):
        counts = _counting(function, given)
        kept = counts.nonzero().squeeze(1) if valid is None else _first(counts, valid)
        given = _of_kept(function, given, targets, kept, rows.count)
        sound = None if valid is None else torch.where(counts.sum() > valid, torch.nan, 1.0)
        head = head.with_input(head.input.index_select(0, kept))
    found = _definition(function)(head, **given)
    in_shape = functools.partial(_in_shape, rows, kept, sound, finish)
    if type(found) is not CheckedCall:
        return in_shape(found)
    if type(found.call) not in FUSED:
        raise TypeError(f"only losses of rows or elements and divergences can be fused with a linear layer, got {found.call.loss}")
    return CheckedCall(rebuilt(found.call), found.options, functools.partial(_after, found.finish, in_shape))


def _after(first: Callable[[Any], Any], second: Callable[[Any], Any], results: Any) -> Any:
    return second(first(results))


def _in_shape(rows: "_Rows", kept: Tensor | None, sound: Tensor | None, finish: Callable[[Any], Any] | None, found: Any) -> Any:
    """Return what the loss returns, with 0 in the rows that were left out, and the leading dimensions of the input.

    sound: 1, or nan where more rows count than were said to. Results are multiplied by it, and so are all gradients.
    """
    found = found if finish is None else finish(found)
    if sound is not None:
        found = _each(lambda t: t * sound if t.is_floating_point() else t, found)
    if kept is not None:
        found = _each(functools.partial(_unselect, rows=kept, count=rows.count), found)
    return _each(rows.separated, found)


def _definition(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what checks the calls of a public function, of a custom loss or of a definition: it takes a layer in place of logits."""
    definition: Callable[..., Any] = getattr(function, "definition", function)
    return definition


def fuse_linear(loss: Any) -> Callable[..., Any]:
    """Return a loss fused with the linear layer that gives its logits, which are computed by chunks and never kept.

    It takes the layer's tensors, and cannot see what else the layer computes: of a layer with an adapter (LoRA), a soft cap or a hook it
    gives another loss than the layer's output would. FusedLinear takes the layer, and refuses one with an adapter or a hook.

    Args:
        loss: a function of lossforge.losses over rows or elements or a divergence, a loss of your own (`@elementwise`, `@rowwise`), or a
            module of either, whose options then hold.

    Returns:
        a function of (input, weight, target, ..., bias=None, **options), the loss of input · weightᵀ + bias. After input and weight of
            the layer go the loss's own arguments as its signature has them, of a module its targets alone; the layer's bias is given by
            name. The loss's own `weight` is called loss_weight. Further options: see lossforge.losses.engine.linear.

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


def _is_fused(name: str) -> bool:
    """Return whether a public function's template can take a layer in place of logits."""
    template = DECLARED[name].template if name in DECLARED else None
    return template is not None and template.fusing is not None


def _is_loss(function: Any) -> bool:
    """Return whether a function is a public loss or a custom one: no wrapper, partial or function that only calls one."""
    return getattr(function, "entry", None) is function


def _function_of(loss: Any) -> Any:
    """Return the function of a module or of a custom loss, and anything else as it is."""
    return _function_of(loss.function) if isinstance(loss, OfFunction) else loss


def _hooked(module: nn.Module) -> bool:
    """Return whether hooks, or a forward that was set on the module itself, alter what it computes. torch.compile traces this."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(len(each) > 0 for each in hooks) or "forward" in module.__dict__


def _check_loss(loss: Any, name: str) -> None:
    if not isinstance(loss, LossModule):
        return
    own = type(loss).compute is not LossModule.compute or not type(loss).forward.__module__.startswith(f"{PACKAGE}.")
    if own or _hooked(loss):
        raise TypeError(
            f"loss must not have hooks or a forward of its own, which a fused loss would not run, got {_full_name(loss)}: fuse {name} "
            "itself"
        )


def _full_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


LAYER = ("input", "weight")
PUBLIC = {"weight": "loss_weight"}
"""What arguments of a loss are called where they would have the name of the layer's."""


class FusedLoss:
    """What `fuse_linear` returns: no closure, so that a model that has it can be copied and saved.

    by_position, accepted: the names of its arguments. needed: those of the loss's own without a default. entry: what a call goes to, which
    is not saved.
    """

    def __init__(self, loss: Any) -> None:
        self.loss, self.function = loss, _function_of(loss)
        name = getattr(self.function, "__name__", type(loss).__name__)
        _check_loss(loss, name)
        taken = (checks.keywords(self.function) if callable(self.function) else None) or [""]
        if not ("normalizer" in taken and taken[0].startswith("input")) or "chunk" in taken:
            raise TypeError(
                f"loss must be a loss of lossforge.losses that takes logits, a custom loss, or the module of either, got {name}"
            )
        if self.function.__module__ in (FUNCTIONAL, f"{PACKAGE}.detection.seesaw") and not _is_fused(name):
            raise TypeError(f"only losses of rows or elements and divergences can be fused with a linear layer, got {name}")
        if not _is_loss(self.function):
            raise TypeError(
                f"{name} wraps a loss or is none, and a fused loss would not call it: fuse the loss itself, and give options to the call"
            )
        self.__name__ = f"linear_{name}"
        self.by_position, self.needed, self.__signature__ = _signature_of(self.function, isinstance(loss, LossModule))  # inspect reads it
        self.accepted = tuple(self.__signature__.parameters)
        self.entry = _entry_of(self.function, self.__name__, isinstance(loss, LossModule))

    def __getstate__(self) -> dict[str, Any]:
        return {name: v for name, v in vars(self).items() if name != "entry"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.entry = _entry_of(self.function, self.__name__, isinstance(self.loss, LossModule))

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        _check_loss(self.loss, self.function.__name__)  # a hook may have come since
        meant = {"weight": "; did you mean 'loss_weight', the loss's own?"} if "loss_weight" in self.accepted else {}
        given = checks.bound(self.__name__, self.by_position, self.accepted, (*LAYER, *self.needed), tensors, named, meant)
        if isinstance(self.loss, LossModule):
            given = {PUBLIC.get(name, name): getattr(self.loss, name) for name in self.loss.option_names} | given
        return self.entry(**given)


@functools.lru_cache(maxsize=1024)
def _signature_of(function: Any, module: bool) -> tuple[tuple[str, ...], tuple[str, ...], Signature]:
    """Return the names of a fused loss's arguments by position, those of the loss's own without a default, and its signature.

    module: whether a module keeps all but the targets.
    """
    others = [p.replace(name=PUBLIC.get(p.name, p.name)) for p in inspect.signature(function).parameters.values()][1:]
    by_position = [p for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = tuple([p.name for p in by_position if p.default is p.empty])
    if module:
        by_position = [p for p in by_position if p.name in (needed or ("target",))]
    layer = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for each in LAYER]
    settings = {"bias": Tensor | None, **LinearOptions.__annotations__}
    by_name = [p.replace(kind=p.KEYWORD_ONLY) for p in others if p not in by_position]
    if {"group", "classes"} <= {p.name for p in others}:  # the classes may be spread over processes
        settings |= {"sum_input_gradient": bool}
    defaults = {**OPTIONS, "sum_input_gradient": True}
    by_name += [Parameter(k, Parameter.KEYWORD_ONLY, default=defaults.get(k), annotation=t) for k, t in settings.items()]
    return (*LAYER, *[p.name for p in by_position]), needed, Signature([*layer, *by_position, *by_name])


@functools.lru_cache(maxsize=1024)
def _entry_of(function: Any, name: str, module: bool) -> Callable[..., Any]:
    """Return a fused loss as a function of all its arguments by name, whose calls are kept as those of public functions.

    The loss's module, if it is one, is not a part of it: equal losses have the same.
    """
    _, needed, signature = _signature_of(function, module)
    shared = "sum_input_gradient" in signature.parameters

    def definition(**given: Any) -> Any:
        parts = given.pop("input"), given.pop("weight"), given.pop("bias", None)
        if shared:
            parts, shards, given = local_layer(parts, given)
            given |= shards
        layer = layer_of(*parts)
        own, linear = split(given)
        own = {"weight" if name == "loss_weight" else name: t for name, t in own.items()}
        return fused(function, layer, own, linear, needed or ("target",))

    definition.__name__ = definition.__qualname__ = name
    return entry_point(definition, signature, autocast=True)


CURE = "Merge an adapter (peft: merge_and_unload()), keep it off the head (peft: target_modules), or call the layer and then the loss"
LINEAR_FORWARD = nn.Linear.forward


def _check_head(head: object) -> None:
    if not isinstance(head, nn.Linear):
        raise TypeError(
            f"head must be a torch.nn.Linear, because a fused loss takes its weight and bias alone, got {_full_name(head)}. {CURE}"
        )
    if type(head).forward is not LINEAR_FORWARD or _hooked(head):
        raise TypeError(
            f"head must not have hooks or a forward of its own, which a fused loss would not run, got {_full_name(head)}: call it and "
            "the loss unfused. For weight norm and spectral norm use torch.nn.utils.parametrizations; make pruning permanent"
        )


HOLDERS: "weakref.WeakSet[FusedLinear]" = weakref.WeakSet()


def _note_replaced_heads(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    """Note for each FusedLinear when a layer takes the place of its head in a model, and when the head comes back.

    An adapter does so: its layer holds the head, which knows nothing of it. A module without the head or a layer in it, such as
    torch.nn.Identity, only takes the head off the model.
    """
    if module is None or isinstance(owner, FusedLinear):
        return
    before = owner._modules.get(name)
    for fused in list(HOLDERS):
        if module is fused.head and fused.replaced and fused.replaced[0] == name:
            fused.replaced = None
        elif before is fused.head and _replaces(module, fused.head):
            fused.replaced = name, _full_name(module)


def _replaces(module: nn.Module, head: nn.Linear) -> bool:
    if module is head or getattr(module, "_orig_mod", None) is head:  # of torch.compile
        return False
    return isinstance(module, nn.Linear) or any(part is head for part in module.modules())


@functools.cache
def _watch_registrations() -> None:
    register_module_module_registration_hook(_note_replaced_heads)


class FusedLinear(nn.Module):
    """A loss fused with a linear layer of a model: FusedLinear(loss, head)(input, *targets) is loss(head(input), *targets).

    Args:
        loss: as for `fuse_linear`.
        head: a torch.nn.Linear, whose weight and bias stay the model's own. It is not called, so that it must compute nothing else: hooks
            and adapters are refused, those that come later at the next call. Another loss or head may take its place.

    Raises:
        TypeError: the loss cannot be fused, or head is not a linear layer, or one with hooks or a forward of its own. A call: the head or
            the loss has got one since, another layer such as peft's took the head's place in the model, or bias= is given, which is
            always the head's.

    Examples:
        >>> import torch
        >>> from lossforge.losses import FusedLinear, cross_entropy
        >>> head = torch.nn.Linear(16, 1000)
        >>> FusedLinear(cross_entropy, head)(torch.randn(8, 16), torch.arange(8)).backward()
    """

    replaced: tuple[str, str] | None
    """The name at which another layer took the head's place in a model, and that layer's type."""

    def __init__(self, loss: Any, head: nn.Linear) -> None:
        super().__init__()
        self.fused: FusedLoss
        self.loss, self.head = loss, head
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._watch()

    def _watch(self) -> None:
        if not torch.compiler.is_compiling():  # there it lives for one call
            _watch_registrations()
            HOLDERS.add(self)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "head":
                _check_head(value)
                self.replaced = None
            if name == "loss":
                self.fused = FusedLoss(value)
            super().__setattr__(name, value)

    def forward(self, input: Tensor, *targets: Tensor, **options: Any) -> Any:
        if "bias" in options:
            raise TypeError("FusedLinear takes the bias of its head, got bias= too: set head.bias, or call fuse_linear(loss) with it")
        _check_head(self.head)
        if self.replaced is not None:
            place, found = self.replaced
            raise TypeError(
                f"head must be the model's own layer, but {found} took its place as {place!r}, which a fused loss would not run. {CURE}. "
                "If a new torch.nn.Linear is meant to be the head, set it as the FusedLinear's head"
            )
        return self.fused(input, self.head.weight, *targets, bias=self.head.bias, **options)


def split(options: Any) -> tuple[dict[str, Any], LinearOptions]:
    """Return the loss's options and the layer's."""
    own = LinearOptions.__annotations__
    linear: LinearOptions = {name: t for name, t in options.items() if name in own}  # type: ignore[assignment]
    if "shift" in linear:
        linear["shift"] = checks.whole_number("shift", linear["shift"])
    return {name: t for name, t in options.items() if name not in own}, linear


def check_all_rows(linear: LinearOptions, needed: str) -> None:
    """Refuse options that leave rows out. needed: what they need."""
    if linear.get("skip_ignored") or linear.get("valid") is not None or linear.get("shift", 0) != 0:
        raise ValueError(f"skip_ignored, valid and shift need {needed}")


def logits_at(head: Head, index: Tensor) -> Tensor:
    """Return a layer's logits at K classes a row, (…, K), from copies of the weight's rows. An index out of range takes the nearest."""
    near = index.long().clamp(0, head.weight.shape[0] - 1)
    wide = torch.promote_types(head.dtype, torch.float32)
    with without_autocast(head.input):
        x = torch.matmul(F.embedding(near, head.weight).to(wide), head.input.to(wide).unsqueeze(-1)).squeeze(-1)
    return x if head.bias is None else x + head.bias[near]


def logits_over_processes(shards: Shards, head: Head, index: Tensor) -> Tensor:
    """Return the same of classes that are spread over processes: each gives those of its own."""
    here = (index >= shards.first) & (index < shards.first + shards.own)
    x = SummedGradient.apply(head.input, shards.group) if shards.sums_input else head.input
    own = torch.where(here, logits_at(head.with_input(x), index - shards.first), 0.0)
    return shards.gathered([own]).sum(0)[0]

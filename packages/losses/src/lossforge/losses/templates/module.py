"""Losses as modules: made from the signatures of their functions."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

from torch import Tensor, nn

from lossforge.losses import checks, modules
from lossforge.losses.templates import docstrings

P = ParamSpec("P")
R = TypeVar("R")

LEGACY = ("size_average", "reduce")
PER_CALL = {"target", "target_b", "lam", "score", "preference", "group", "normalizer", "labels", "offset", "negative_only"}
PER_CALL |= {"margin", "policy_nll_loss", "mask", "kl", "old_per_token_logps", "ref_per_token_logps"}
"""Arguments with a default that belong to a call nevertheless."""


SETTINGS = {"empty": "nan", "gradient": None, "inplace": False, "validate": None, "dim": -1, "scale": 1.0, "softcap": None, "z_loss": 0.0}
"""Options that functions take as further keywords and modules keep."""


class LossModule(nn.Module):
    """A function whose options are attributes, which each call reads. An option that holds a tensor is a buffer.

    settings: the options of every loss that a module keeps, and their defaults. signature: of the constructor, without self. shared: the
    options, with their defaults, that are shown only where they have other values. per_call, quiet: names of the function's own parameters
    that belong to a call, and that are in `shared`.
    """

    function: Callable[..., Any]
    settings: ClassVar[Mapping[str, Any]] = SETTINGS
    per_call: ClassVar[tuple[str, ...]] = ()
    quiet: ClassVar[tuple[str, ...]] = ()
    reductions: ClassVar[tuple[str, ...]] = checks.REDUCTIONS
    signature: Signature
    shared: Mapping[str, Any] = {}
    option_names: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name in kwargs:
            if name not in self.signature.parameters:
                raise checks.unexpected(type(self).__name__, name, self.signature.parameters)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = self.options(bound.arguments)
        checks.one_of("reduction", options["reduction"], self.reductions)
        checks.one_of("empty", options["empty"], checks.EMPTY)
        self.option_names = tuple({"reduction": None, **self.shared, **options})
        for name in self.option_names:
            setattr(self, name, options[name])

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the function's options from the constructor's arguments."""
        if "reduce" in given:
            given["reduction"] = checks.legacy_reduction(given.pop("size_average"), given.pop("reduce"), given["reduction"])
        return given

    if not TYPE_CHECKING:  # a checker then knows the attributes that are declared, and no others

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self.__dict__.get("option_names", ()):
                for held in (self.__dict__, self._buffers, self._parameters):
                    held.pop(name, None)
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.register_buffer(name, value)
                    return
            super().__setattr__(name, value)

    def compute(self, *inputs: Any, **per_call: Any) -> Any:
        """Call the function with the options, of which a call may replace some."""
        return self.function(*inputs, **{**{name: getattr(self, name) for name in self.option_names}, **per_call})

    def forward(self, input: Tensor, target: Tensor, **per_call: Any) -> Any:
        return self.compute(input, target, **per_call)

    def extra_repr(self) -> str:
        shown = []
        for name in self.option_names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=<{'x'.join(map(str, value.shape)) or 'scalar'} tensor>")
            elif name not in self.shared or value != self.shared[name]:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


class ElementModule(LossModule):
    quiet = ("weight",)


class DivergenceModule(LossModule):
    per_call = ("weight",)


class BoxModule(LossModule):
    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "empty": "zero", "format": "xyxy"}

    def forward(self, boxes1: Tensor, boxes2: Tensor, **per_call: Any) -> Any:  # type: ignore[override]
        return self.compute(boxes1, boxes2, **per_call)


class RowModule(LossModule):
    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "weight": None, "ignore_index": -100}
    quiet: ClassVar[tuple[str, ...]] = ("scale", "softcap", "z_loss")


BASES: dict[str, type[LossModule]] = {
    "elementwise": ElementModule,
    "rowwise": RowModule,
    "boxes": BoxModule,
    "divergence": DivergenceModule,
    "topk": DivergenceModule,
}


class Module(NamedTuple):
    """How a loss is a module, where its function's signature does not say it.

    summary, remark: its docstring, around where it names the function. base: what it is derived from, by default by the template.
    positional, keyword: options that the function takes only by keyword and the module by position, and the reverse. renamed: arguments
    of the constructor in place of options. without: options that it does not keep. kept: options that it keeps, though their names belong
    to a call elsewhere.
    """

    name: str
    summary: str
    remark: str = ""
    base: type[LossModule] | None = None
    positional: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}
    without: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def module_of(function: Callable[..., Any], how: Module, template: str = "") -> type[LossModule]:
    """Make the module of a function, and put it among lossforge.losses.modules."""
    base = how.base or BASES.get(template, LossModule)
    constructor, shared = constructor_of(function, base, how)
    made: type[LossModule] = type(how.name, (base,), {"__module__": modules.__name__, "function": staticmethod(function)})
    made.__doc__ = docstrings.of_module(function, how.summary, how.remark, list(constructor.parameters), how.renamed)
    made.signature, made.shared = constructor, shared
    made.reductions = get_args(constructor.parameters["reduction"].annotation)

    def construct(self: LossModule, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)

    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    construct.__signature__ = Signature([own, *map(_readable, constructor.parameters.values())], return_annotation=None)  # type: ignore[attr-defined]  # inspect reads it
    construct.__name__, construct.__qualname__, construct.__module__ = "__init__", f"{how.name}.__init__", modules.__name__
    made.__init__ = construct  # type: ignore[method-assign]  # each module has a signature of its own
    setattr(modules, how.name, made)
    modules.__all__.append(how.name)
    shown(base.settings)(function)
    return made


def shown(settings: Mapping[str, Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function the signature that people and editors read: types without ranges, each option with its default for `**options`."""

    def enter(function: Any) -> Any:
        function.declared = inspect.signature(function)
        read: list[Parameter] = []
        for p in function.declared.parameters.values():
            options = get_args(p.annotation)[0].__annotations__ if p.kind is Parameter.VAR_KEYWORD else None
            if options is None:
                read.append(p)
            else:
                read += [Parameter(each, Parameter.KEYWORD_ONLY, default=settings.get(each), annotation=t) for each, t in options.items()]
        function.__signature__ = function.declared.replace(parameters=[*map(_readable, read)])
        return function

    return enter


def _readable(p: Parameter) -> Parameter:
    return p.replace(annotation=_without_ranges(p.annotation))


def _without_ranges(annotation: Any) -> Any:
    """Return a type without the ranges of its numbers."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_without_ranges, get_args(annotation)))
    return annotation


def constructor_of(function: Callable[..., Any], base: type[LossModule], how: Module) -> tuple[Signature, dict[str, Any]]:
    """Return the constructor's signature, and `shared`: the function's options by position, by keyword, then those that are shared."""
    first: list[Parameter] = []
    named: list[Parameter] = []
    quiet: list[Parameter] = []
    settings: list[Parameter] = []
    for name, p in checks.signature(function).parameters.items():
        if p.kind is Parameter.VAR_KEYWORD:
            kept = {each: t for each, t in get_args(p.annotation)[0].__annotations__.items() if each in base.settings}
            settings = [Parameter(each, Parameter.KEYWORD_ONLY, default=base.settings[each], annotation=t) for each, t in kept.items()]
        elif p.default is Parameter.empty or (name not in how.kept and (name in PER_CALL or name in base.per_call)):
            continue
        elif name in how.positional or (p.kind is Parameter.POSITIONAL_OR_KEYWORD and name not in how.keyword):
            first.append(p.replace(name=how.renamed.get(name, name), kind=Parameter.POSITIONAL_OR_KEYWORD))
        else:
            (quiet if name in base.quiet else named).append(p.replace(kind=Parameter.KEYWORD_ONLY))
    settings = [p for p in settings if p.name not in how.without]
    constructor = Signature([*sorted(first, key=lambda p: p.name not in how.positional), *named, *settings, *quiet], return_annotation=None)
    shared = {p.name: p.default for p in settings} | {p.name: p.default for p in (*first, *quiet) if p.name in base.quiet}
    return constructor, shared


def with_module(how: Module, kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make the module of a function that is not in the registry, and complete its docstring by what its kind shares."""

    def enter(function: Callable[P, R]) -> Callable[P, R]:
        docstrings.complete(function, kind)
        module_of(function, how)
        return function

    return enter

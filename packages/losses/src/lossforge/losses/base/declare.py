"""Declare a loss at its definition: its public function and its module, settings and pages are made from what is said here."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, Union, Unpack, get_args, get_origin

from torch import Tensor

from lossforge.losses.base.option_types import Range
from lossforge.losses.base.record import CheckedCall, Keeping, Template, TemplateDocs

F = TypeVar("F", bound=Callable[..., Any])

PER_CALL = {"target", "target_b", "lam", "token_weight", "score", "preference", "group", "normalizer", "labels", "offset", "negative_only"}
PER_CALL |= {"margin", "policy_nll_loss", "mask", "kl", "old_per_token_logps", "ref_per_token_logps"}
PER_CALL |= {"importance_sampling_ratio", "gathered", "gathered1", "gathered2", "gathered_labels", "teacher_lse"}
"""Arguments with a default that belong to a call nevertheless."""


class Converted(NamedTuple):
    """An argument of a module's constructor in place of an option. by: makes the option of it. meaning: its line in the docstring."""

    name: str
    by: Callable[..., Any]
    meaning: str


class Module(NamedTuple):
    """How a loss is a module, where its function's signature does not say it.

    summary, remark: its docstring, around where it names the function. forward: the tensors of a call, where they are not its template's.
    positional, keyword: options that the function takes only by keyword and the module by position, and the reverse. converted: arguments
    of the constructor in place of options. without: options that it does not keep. kept: options that it keeps, though their names belong
    to a call elsewhere.
    """

    name: str
    summary: str
    remark: str = ""
    forward: str = ""
    positional: tuple[str, ...] = ()
    keyword: tuple[str, ...] = ()
    converted: Mapping[str, Converted] = {}
    without: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Facts(TypedDict, total=False):
    """What a loss's function does not say. registry.Loss explains each."""

    options: tuple[dict[str, Any], ...]
    without: tuple[str, ...]
    domain: str
    like: str
    paper: str
    targets: str
    reductions: tuple[str, ...]
    given: str


@dataclass(frozen=True)
class Declared:
    """A function that is declared, with what is made from it.

    definition: the function as it is written, with `**options`. docs: what its arguments share with others'. repeats: whether its
    calls are kept. name: of the loss, where it is in the registry, template: its template there.
    """

    definition: Callable[..., Any]
    docs: TemplateDocs
    module: Module | None = None
    repeats: bool = True
    name: str = ""
    template: Template[Any] | None = None
    formula: str = ""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    @functools.cached_property
    def returned(self) -> Any:
        """What the definition returns: a checked call, or what the function returns."""
        return inspect.signature(self.definition).return_annotation

    @property
    def checks(self) -> bool:
        """Whether the definition returns a checked call, not what the function returns."""
        return get_origin(self.returned) is CheckedCall

    @functools.cached_property
    def signature(self) -> Signature:
        """The definition's signature, with types as users read them, and what the public function returns."""
        short = inspect.signature(self.definition)
        parameters = [p.replace(annotation=without_range(p.annotation)) for p in short.parameters.values()]
        result = (*get_args(self.returned), Tensor)[1] if self.checks else self.returned
        return short.replace(parameters=parameters, return_annotation=result)

    @property
    def has_outputs(self) -> bool:
        """Whether `outputs` makes the function return a record in place of a tensor."""
        return "outputs" in self.signature.parameters

    @functools.cached_property
    def whole_signature(self) -> Signature:
        """The public function's signature."""
        return whole_signature(self.signature, self.docs.keeping.settings)


DECLARED: dict[str, Declared] = {}
"""By the name of the public function, in the order of declaration."""


def public(docs: TemplateDocs, module: Module | None = None, *, repeats: bool = False) -> Callable[[F], F]:
    """Declare a public function that is not in the registry."""

    def enter(function: F) -> F:
        DECLARED[function.__name__] = Declared(function, docs, module, repeats)
        return function

    return enter


def loss(
    name: str,
    template: Template[Any],
    module: Module,
    *,
    formula: str = "",
    switches: tuple[str, ...] = (),
    docs: TemplateDocs | None = None,
    **facts: Unpack[Facts],
) -> Callable[[F], F]:
    """Declare a function as a loss of the registry.

    formula: its name where it is not the loss's. switches: parameters that a config may set although they are no numbers; it may set
    those whose type has a range. docs: in place of the template's. without: by default what the template's losses lack. given: by default
    the logits, of losses of elements or rows that take such.
    """
    facts.setdefault("without", template.without)
    if template.by_rows and facts.get("domain", "logits") == "logits":
        facts.setdefault("given", "logits")

    def enter(function: F) -> F:
        taken = inspect.signature(function).parameters
        hyper = {each: p.default for each, p in taken.items() if each in switches or has_range(p.annotation)}
        DECLARED[function.__name__] = Declared(function, docs or template.docs, module, True, name, template, formula or name, hyper, facts)
        return function

    return enter


def has_range(annotation: Any) -> bool:
    """Return whether a type, or a member of a union, says which numbers it takes."""
    return any(isinstance(each, Range) or has_range(each) for each in get_args(annotation))


def without_range(annotation: Any) -> Any:
    """Return a type without the ranges of numbers, as users read it."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        return functools.reduce(operator.or_, map(without_range, get_args(annotation)))
    return annotation


def whole_signature(short: Signature, settings: Mapping[str, Any]) -> Signature:
    """Return a definition's signature with each option, and its default, in place of `**options`."""
    whole: list[Parameter] = []
    for p in short.parameters.values():
        if p.kind is Parameter.VAR_KEYWORD:
            options = get_args(p.annotation)[0].__annotations__
            whole += [Parameter(each, Parameter.KEYWORD_ONLY, default=settings.get(each), annotation=t) for each, t in options.items()]
        else:
            whole.append(p)
    return short.replace(parameters=whole)


def constructor_of(short: Signature, keeping: Keeping, module: Module) -> tuple[Signature, dict[str, Any]]:
    """Return the constructor's signature, and the options that are shown only where they have other values, with their defaults.

    The constructor takes the function's options by position, those by keyword, and then those of the template.
    """
    first: list[Parameter] = []
    named: list[Parameter] = []
    quiet: list[Parameter] = []
    settings: list[Parameter] = []
    for name, p in short.parameters.items():
        if p.kind is Parameter.VAR_KEYWORD:
            kept = {each: t for each, t in get_args(p.annotation)[0].__annotations__.items() if each in keeping.settings}
            settings = [Parameter(each, Parameter.KEYWORD_ONLY, default=keeping.settings[each], annotation=t) for each, t in kept.items()]
        elif p.default is Parameter.empty or (name not in module.kept and (name in PER_CALL or name in keeping.per_call)):
            continue
        elif name in module.positional or (p.kind is Parameter.POSITIONAL_OR_KEYWORD and name not in module.keyword):
            first.append(p.replace(kind=Parameter.POSITIONAL_OR_KEYWORD))
        else:
            (quiet if name in keeping.quiet else named).append(p.replace(kind=Parameter.KEYWORD_ONLY))
    settings = [p for p in settings if p.name not in module.without]
    whole = Signature([*sorted(first, key=lambda p: p.name not in module.positional), *named, *settings, *quiet], return_annotation=None)
    return whole, {p.name: p.default for p in settings} | {p.name: p.default for p in (*first, *quiet) if p.name in keeping.quiet}

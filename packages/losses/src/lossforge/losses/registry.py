"""Every loss by name, entered by the decorator of its function. Tests, benchmarks and configs follow from this table."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, get_args

from torch import nn

from lossforge.losses.formulas import FORMULAS, Formula
from lossforge.losses.repeat import repeated
from lossforge.losses.state import plain_torch
from lossforge.losses.templates.docstrings import complete
from lossforge.losses.templates.module import Module, module_of
from lossforge.losses.types import Range

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Loss:
    """A loss: its parts, the hyper-parameters a config may set, and what its tests need to know.

    template: one of those that testing.py has samples of; "nll" is computed element by element, with targets as of rows.
    domain: "logits", "probabilities" or "log-probabilities". options: argument sets beside the defaults that tests and benchmarks try.
    without: what of its template the loss does not offer: "probabilities" as targets, "label_smoothing", or that "with weight". judge:
    "module:function" of an independent implementation with the same first two arguments, or of a module class whose options are the
    function's, where there is one. targets: what it takes as such, in the README's words, where these are not its template's.
    reductions: that the function takes. given: what it takes of a classifier that trains with it: "logits", or their "softmax" or
    "sigmoid"; "" where none does.
    """

    name: str
    template: str
    formula: str
    function: Callable[..., Any]
    module: type[nn.Module]
    hyper: dict[str, Any] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    without: tuple[str, ...] = ()
    domain: str = "logits"
    judge: str | None = None
    paper: str = ""
    targets: str = ""
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    given: str = ""

    @property
    def by_rows(self) -> bool:
        """Whether each row or element is a loss of its own, with targets and options that follow from that."""
        return self.template in ("elementwise", "rowwise", "nll")

    @property
    def kernel(self) -> Formula:
        return FORMULAS[self.formula]

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The function computed by its plain-torch reference, on any device."""
        with plain_torch():
            return self.function(*args, **kwargs)

    def judged(self) -> Callable[..., Any] | None:
        if self.judge is None:
            return None
        module, name = self.judge.split(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type):
            return lambda x, target, **options: found(**options)(x, target)
        return found


LOSSES: dict[str, Loss] = {}


class Facts(TypedDict, total=False):
    """Of a Loss, what its function does not say."""

    options: tuple[dict[str, Any], ...]
    without: tuple[str, ...]
    domain: str
    judge: str
    paper: str
    targets: str
    reductions: tuple[str, ...]
    given: str


def has_range(annotation: Any) -> bool:
    """Whether a type, or a member of a union, says which numbers it takes."""
    return any(isinstance(each, Range) or has_range(each) for each in get_args(annotation))


def _source(facts: Facts) -> str:
    """What a docstring says of where a loss is from."""
    judge = facts.get("judge", "").replace(":", ".")
    theirs = "" if judge.startswith("lossforge") else judge
    return "; ".join(filter(None, (facts.get("paper", ""), f"in place of {theirs}" if theirs else "")))


def loss(
    name: str, template: str, module: Module, *, formula: str = "", switches: tuple[str, ...] = (), **facts: Unpack[Facts]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Enter a function as a loss, with its calls kept and its module made.

    formula: its name where it is not the loss's. switches: parameters that a config may set although they are no numbers; it may set
    those whose type has a range. without: by default, of rows, probabilities and label smoothing. given: by default the logits, of losses
    of elements or rows that take such.
    """
    if template == "rowwise":
        facts.setdefault("without", ("probabilities", "label_smoothing"))
    if template in ("elementwise", "rowwise") and facts.get("domain", "logits") == "logits":
        facts.setdefault("given", "logits")

    def enter(function: Callable[P, R]) -> Callable[P, R]:
        public, given = repeated(function), inspect.signature(function).parameters
        defaults = {each: p.default for each, p in given.items() if each in switches or has_range(p.annotation)}
        complete(public, template, source=_source(facts))
        LOSSES[name] = Loss(name, template, formula or name, public, module_of(public, module, template), defaults, **facts)
        return public

    return enter

"""Every loss by name, as definitions declare them. Tests, benchmarks and configs follow from this table."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lossforge.losses import functional, modules
from lossforge.losses.base.declare import DECLARED, Declared
from lossforge.losses.base.record import Template
from lossforge.losses.base.state import plain_torch
from lossforge.losses.formulas import has_kernel


@dataclass(frozen=True)
class Loss:
    """A loss: its parts, the hyper-parameters a config may set, and what its tests need to know.

    domain: "logits", "probabilities", "log-probabilities" or "cosines". options: argument sets beside the defaults that tests and
    benchmarks try. without: what of its template the loss does not offer, or has no kernel for: "probabilities" as targets,
    "label_smoothing", or that "with weight", or an option or a sample by its name; or the "gradient of" an argument. like:
    "module:function" of an independent implementation with the same first two arguments, or of a module class whose options are the
    function's, where there is one. targets: what it takes as such, in the README's words, where these are not its template's. reductions:
    that the function takes. given: what it takes of a classifier that trains with it: "logits", or their "softmax" or "sigmoid"; "" where
    none does. declared: how its definition declares it.
    """

    name: str
    template: Template[Any]
    formula: str
    function: Callable[..., Any]
    module: type[nn.Module]
    hyper: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    without: tuple[str, ...] = ()
    domain: str = "logits"
    like: str | None = None
    paper: str = ""
    targets: str = ""
    reductions: tuple[str, ...] = ("mean", "sum", "none")
    given: str = ""
    declared: Declared | None = None

    @property
    def definition(self) -> Callable[..., Any]:
        """Return the function as its definition has it: types with their ranges, and `**options`."""
        return self.declared.definition if self.declared else self.function

    @property
    def has_kernel(self) -> bool:
        """Return whether a kernel computes it; else plain PyTorch does on every device."""
        return has_kernel(self.formula)

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the function by its plain-torch reference, on any device."""
        with plain_torch():
            return self.function(*args, **kwargs)

    def oracle(self) -> Callable[..., Any] | None:
        """Return the independent implementation, where there is one."""
        if self.like is None:
            return None
        module, name = self.like.split(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, type):
            return lambda x, target, **options: found(**options)(x, target)
        return found


def _entry(name: str, each: Declared) -> Loss:
    assert each.module is not None
    assert each.template is not None
    function, module = getattr(functional, name), getattr(modules, each.module.name)
    return Loss(each.name, each.template, each.formula, function, module, each.hyper, declared=each, **each.facts)


LOSSES = {each.name: _entry(name, each) for name, each in DECLARED.items() if each.name}

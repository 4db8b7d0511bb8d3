"""An extension of griffe: the reference shows functions as Python has them at run time, where docstrings and options are completed."""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, get_args

import griffe

RANGE = re.compile(r"(?:typing\.)?Annotated\[(\w+), Range\([^()]*\)\]")
DEFAULTS = {"empty": "'nan'", "inplace": "False", "dim": "-1"}
"""Of options of functions without a module."""


class Runtime(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Take the docstring from the function, a type without its range, and each option in place of `**options`."""
        for each in func.parameters:
            each.annotation = plain(each.annotation)
        found = named(func.path) if func.path.startswith("lossforge.") else None
        if not inspect.isfunction(found):
            return
        if func.docstring and (text := inspect.getdoc(found)):
            func.docstring.value = text
        for each in inspect.signature(found).parameters.values():
            options = getattr(next(iter(get_args(each.annotation)), None), "__annotations__", {})
            if each.kind is each.VAR_KEYWORD and options:
                del func.parameters[each.name]
                defaults = defaults_of(found)
                for name, annotation in options.items():
                    shown = plain(annotation.__name__ if isinstance(annotation, type) else str(annotation))
                    written = repr(defaults[name].default) if name in defaults else DEFAULTS.get(name, "None")
                    func.parameters.add(griffe.Parameter(name, annotation=shown, kind=griffe.ParameterKind.keyword_only, default=written))


def defaults_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a loss's module, which have the options' defaults."""
    from lossforge.losses.registry import LOSSES

    module = next((loss.module for loss in LOSSES.values() if loss.function is function), None)
    return inspect.signature(module).parameters if module else {}


def plain(annotation: Any) -> Any:
    """Return an annotation without ranges, which the description has, and without names of modules."""
    written = str(annotation)
    shorter = re.sub(r"\b(?:\w+\.)+(?=\w)", "", RANGE.sub(r"\1", written)).replace("Optional[float]", "float | None")
    return annotation if annotation is None or shorter == written else shorter


def named(name: str) -> Any:
    """Return what Python has under a dotted name, or None. A function may hide the module of its name, as lossforge.losses.check does."""
    first, *rest = name.split(".")
    try:
        found, path = importlib.import_module(first), first
        for part in rest:
            if not hasattr(found, part):
                found = importlib.import_module(path)
            path = f"{path}.{part}"
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    except ImportError:
        return None
    return found

"""An extension of griffe: the reference shows functions as Python has them at run time, where docstrings and options are completed."""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import griffe

RANGE = re.compile(r"(?:typing\.)?Annotated\[(\w+), Range\([^()]*\)\]")


class Runtime(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Take the docstring from the function, a type without its range, and each option in place of `**options`."""
        func.returns = plain(func.returns)
        for each in func.parameters:
            each.annotation = plain(each.annotation)
        found = named(func.path) if func.path.startswith("lossforge.") else None
        if not inspect.isfunction(found):
            return
        if func.docstring and (text := inspect.getdoc(found)):
            func.docstring.value = text
        taken = inspect.signature(found).parameters
        for name in [each.name for each in func.parameters if each.name not in taken]:
            del func.parameters[name]
        for name, each in taken.items():
            if name not in func.parameters:
                shown = plain(inspect.formatannotation(each.annotation))
                kind = griffe.ParameterKind.keyword_only
                func.parameters.add(griffe.Parameter(name, annotation=shown, kind=kind, default=repr(each.default)))

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a record its fields with their types; griffe sees those alone that have a default."""
        if inspect.isclass(found := named(cls.path)) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
            for name, annotation in inspect.get_annotations(found).items():
                shown = plain(annotation.__name__ if inspect.isclass(annotation) else str(annotation))
                cls.set_member(name, griffe.Attribute(name, annotation=shown))

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Drop the docstring that an attribute has from its value's type, so that it is not shown."""
        if "property" not in attr.labels:
            attr.docstring = None


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

"""Write what type checkers and editors read: modules.pyi, the modules that are made from functions' signatures, and the list of names.

The list is `__all__` of lossforge.losses. Run `python tools/module_stubs.py` after a change of a signature; --check only says what is
stale.
"""

import inspect
import sys
import types
import typing
from inspect import Parameter
from pathlib import Path
from typing import Any

from generated import write_or_check

from lossforge import losses
from lossforge.losses import checks, modules
from lossforge.losses import types as aliases
from lossforge.losses.templates.module import LossModule

STUB = Path(modules.__file__).with_suffix(".pyi")
ALIASES = {value: name for name, value in vars(aliases).items() if typing.get_origin(value) is typing.Literal}
HEAD = '''"""Written by tools/module_stubs.py from the signatures of the functions."""
# fmt: off
# ruff: noqa

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, overload

from torch import Tensor, nn
from typing_extensions import TypeVar

from lossforge.losses.functional.cross_entropy import CrossEntropyOutput
from lossforge.losses.types import {aliases}

Result = TypeVar("Result", default=Tensor, covariant=True)

class LossModule(nn.Module):
    function: Callable[..., Any]
    option_names: tuple[str, ...]
    shared: Mapping[str, Any]
'''


def written(annotation: Any) -> str:
    """Return an annotation as it stands in source."""
    if typing.get_origin(annotation) is typing.Annotated:
        return written(typing.get_args(annotation)[0])
    if annotation in ALIASES:
        return ALIASES[annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " | ".join(dict.fromkeys(map(written, typing.get_args(annotation))))
    if annotation is types.NoneType or annotation is None:
        return "None"
    return str(annotation).removeprefix("typing.") if typing.get_origin(annotation) else annotation.__name__


def parameters(given: list[Parameter], own: str = "self") -> str:
    """Return a parenthesis of parameters."""
    parts = [own]
    for p in given:
        if p.kind is p.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{star}{p.name}: {written(p.annotation)}{default}")
    return f"({', '.join(parts)})"


def attributes(module: type[LossModule]) -> dict[str, Any]:
    """Return the options that a module keeps, and their types."""
    accepted, of_function = module.signature.parameters, checks.signature(module.function).parameters
    return {name: (accepted.get(name) or of_function[name]).annotation for name in module().option_names}


def overloaded(module: type[LossModule], each: Any) -> list[str]:
    """Return the constructor for one overload of the function."""
    accepted, found = module.signature.parameters, inspect.signature(each)
    kept = []
    for p in found.parameters.values():
        if p.kind is p.VAR_KEYWORD:
            names = typing.get_args(p.annotation)[0].__annotations__
            kept += [accepted[name].replace(kind=p.KEYWORD_ONLY) for name in names if name in accepted]
        elif p.name in accepted:
            kept.append(p)
    own = f'self: "{module.__name__}[{written(found.return_annotation)}]"'
    return ["    @overload", f"    def __init__{parameters(kept, own)} -> None: ..."]


def summary_of(module: type[LossModule]) -> str:
    return (inspect.getdoc(module) or "").partition("\n\n")[0]


def stub(module: type[LossModule]) -> str:
    """Return a module's class."""
    overloads = typing.get_overloads(inspect.unwrap(module.function))
    lines = [f"class {module.__name__}(LossModule{', Generic[Result]' if overloads else ''}):", f'    """{summary_of(module)}"""', ""]
    lines += [f"    {name}: {written(annotation)}" for name, annotation in attributes(module).items()]
    lines += [line for each in overloads for line in overloaded(module, each)]
    if not overloads:
        lines.append(f"    def __init__{parameters(list(module.signature.parameters.values()))} -> None: ...")
    forward = parameters(list(inspect.signature(module.forward).parameters.values())[1:])
    result = "Result" if overloads else "Tensor"
    lines += [f"    def {method}{forward} -> {result}: ..." for method in ("forward", "__call__")]
    return "\n".join(lines)


def text() -> str:
    """Return the stub."""
    names = sorted(modules.__all__)
    listed = "".join(f"    {name!r},\n" for name in names)
    made = HEAD.replace("{aliases}", ", ".join(sorted(ALIASES.values()))) + "\n"
    return made + "\n\n".join(stub(getattr(modules, name)) for name in names) + f"\n\n__all__ = [\n{listed}]\n"


def exported() -> str:
    """Return lossforge/losses/__init__.py with all that it imports in `__all__`."""
    names = sorted(name for name, value in vars(losses).items() if not (name.startswith("_") or inspect.ismodule(value)))
    before, assigned, _ = Path(losses.__file__).read_text(encoding="utf-8").partition("__all__ = [\n")
    return before + assigned + "".join(f'    "{name}",\n' for name in names) + "]\n"


if __name__ == "__main__":
    sys.exit(write_or_check({STUB: text(), Path(losses.__file__): exported()}))

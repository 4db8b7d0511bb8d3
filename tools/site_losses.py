"""Show the site the public losses: they are made at import, so that its static analysis finds only their stubs, without docstrings."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import griffe

LOSSES = "lossforge.losses"


def document(member: griffe.Object, made: object) -> None:
    member.docstring = griffe.Docstring(inspect.getdoc(made) or "", lineno=member.lineno, parent=member)


class MadeAtImport(griffe.Extension):
    """Give functions and modules of stubs their docstrings and their whole signatures, and enter them in lossforge.losses."""

    def on_members(self, *, obj: griffe.Object, **_: Any) -> None:
        if not (isinstance(obj.filepath, Path) and obj.filepath.suffix == ".pyi"):
            return
        for name, overloads in obj.overloads.items():
            if overloads:
                obj.set_member(name, overloads[-1])  # which has every argument
        made = importlib.import_module(obj.path) if obj.is_module else None
        for name in made.__all__ if made else ():
            if not (member := obj.members[name]).is_alias:
                document(member, getattr(made, name))
                if member.is_class:
                    document(member.members["forward"], getattr(made, name).forward)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        losses = loader.modules_collection.get_member(LOSSES) if LOSSES.startswith(pkg.path) else None
        for name in ("functional", "modules") if losses else ():
            for public in importlib.import_module(f"{LOSSES}.{name}").__all__:
                losses.set_member(public, griffe.Alias(public, f"{LOSSES}.{name}.{public}"))

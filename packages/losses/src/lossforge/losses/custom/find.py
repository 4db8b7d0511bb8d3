"""A loss by where it is written."""

import hashlib
import importlib
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lossforge.losses.custom.loss import CustomLoss

READ: dict[str, bytes] = {}
"""Digest of each file as it was read."""


def find(target: str) -> CustomLoss:
    """The loss that "module:name" or "path/to/file.py:name" names, as `named` finds it.

    Raises:
        ValueError: as `named`, or it names no loss. ImportError, FileNotFoundError: as `named`.
    """
    return cast(CustomLoss, _found(target, CustomLoss, "loss"))


def named(target: str) -> Any:
    """What "module:name" or "path/to/file.py:name" names; modules are looked for in the working directory, too. A file that has changed is
    read again.

    Raises:
        ValueError: target has no such form, or the module has no such name. ImportError, FileNotFoundError: as they say.
    """
    return _found(target, object, "object")


def _found(target: str, kind: type, word: str) -> Any:
    article = "an" if word[0] in "aeiou" else "a"
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f'{article} {word} is named "module:name" or "path/to/file.py:name", got {target!r}')
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    if isinstance(found := getattr(module, name, None), kind) and hasattr(module, name):
        return found
    known = [each for each, value in vars(module).items() if isinstance(value, kind) and not each.startswith("_")]
    what = f"is a {type(found).__name__}, not {article} {word}" if hasattr(module, name) else "does not exist"
    raise ValueError(f"{name} in {place} {what}; {word}{'es' if word.endswith('s') else 's'} there: {', '.join(known) or 'none'}")


def _module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    content = hashlib.sha256(path.read_bytes()).digest()
    if name in sys.modules and READ.get(name) == content:
        return sys.modules[name]
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    READ[name] = content
    return module

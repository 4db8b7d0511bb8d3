"""Find a loss by its module or file and its name."""

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
"""Digest of each file when it was read."""


def find(target: str) -> CustomLoss:
    """Return the loss that "module:name" or "path/to/file.py:name" refers to.

    Raises:
        ValueError: `target` has another form, the module has no such name, or the object is not a loss.
        ImportError: the module cannot be imported.
        FileNotFoundError: the file does not exist.
    """
    return cast(CustomLoss, _found(target, CustomLoss, "loss"))


def named(target: str) -> Any:
    """Return the object that "module:name" or "path/to/file.py:name" refers to.

    Modules are also looked for in the working directory. A file that has changed is read again.

    Raises:
        ValueError: `target` has another form, or the module has no such name.
        ImportError: the module cannot be imported.
        FileNotFoundError: the file does not exist.
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

"""A loss by where it is written."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from lossforge.losses.custom.loss import CustomLoss


def find(target: str) -> CustomLoss:
    """The loss that "module:name" or "path/to/file.py:name" names; modules are looked for in the working directory, too.

    Raises:
        ValueError: target has no such form, the module has no such name, or it names no loss. ImportError, FileNotFoundError: as they say.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f'a loss is named "module:name" or "path/to/file.py:name", got {target!r}')
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    found = getattr(module, name, None)
    if not isinstance(found, CustomLoss):
        losses = [n for n, value in vars(module).items() if isinstance(value, CustomLoss)]
        what = "does not exist" if found is None else f"is a {type(found).__name__}, not a loss"
        raise ValueError(f"{name} in {place} {what}; losses there: {', '.join(losses) or 'none'}")
    return found


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
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

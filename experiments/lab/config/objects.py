"""Code by its name: the app's own by `package.module:name`, a user's by `path/to/file.py:name`, too."""

import pkgutil
from collections.abc import Callable
from typing import Any, cast

from lab.base.errors import UserError

CUSTOM = "custom"
"""The option of a group that takes code of the user's own, which its setting `target` names."""


def find(setting: str, target: str) -> Any:
    """Return the object that `target` names, the value of `setting`; the working directory is searched for modules, too.

    Raises:
        UserError: the file, module or name does not exist, or the module's own code fails.
    """
    from lossforge.losses.custom import named

    try:
        return named(target)
    except (ImportError, FileNotFoundError, ValueError, TypeError) as error:
        raise UserError(f"{setting}={target}: {error}") from error
    except Exception as error:
        raise UserError(f"{setting}={target}: its own code fails: {type(error).__name__}: {error}") from error


def find_object(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or import it if it is given as module:name."""
    return cast(Callable[..., Any], pkgutil.resolve_name(named)) if isinstance(named, str) else named


def made(setting: str, target: str, found: Any) -> Any:
    """Return an object of the class `found`, made without arguments; return `found` itself if it is not a class.

    Raises:
        UserError: the class's own code fails.
    """
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{setting}={target}: this class cannot be made without arguments ({reason}); give an object of it.") from error

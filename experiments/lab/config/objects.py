"""User code, found by `package.module:name` or `path/to/file.py:name`."""

from typing import Any

from lab.config.errors import UserError


def find(setting: str, target: str) -> Any:
    """The object that `target` names, which `setting` has given; modules are looked for in the working directory, too.

    Raises:
        UserError: there is no such file, module or name, or the module's own code fails.
    """
    from lossforge.losses.custom import named

    try:
        return named(target)
    except (ImportError, FileNotFoundError, ValueError, TypeError) as error:
        raise UserError(f"{setting}={target}: {error}") from error
    except Exception as error:
        raise UserError(f"{setting}={target}: its own code fails: {type(error).__name__}: {error}") from error


def made(setting: str, target: str, found: Any) -> Any:
    """Return an object of the class `found`, made without arguments; what is not a class is returned as it is.

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

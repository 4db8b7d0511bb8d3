"""Where runs and tracking go if a command does not say it: environment variables, then one file of the user's."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.config.errors import UserError, unknown

FILE = "lossforge.yaml"
"""Below XDG_CONFIG_HOME, which is ~/.config by default."""
VARIABLES = {"runs": "LOSSFORGE_RUNS", "tracking_uri": "MLFLOW_TRACKING_URI"}
"""What the file may set, and the variable that has precedence."""


def xdg_folder(variable: str, default: str) -> Path:
    """Return a folder of the user's, which a variable names by a whole path; a relative one would be found in any folder of others."""
    given = os.environ.get(variable) or default
    return Path(given if os.path.isabs(given) else default).expanduser()


def user_file() -> Path:
    return xdg_folder("XDG_CONFIG_HOME", "~/.config") / FILE


def user_default(name: str) -> str | None:
    """Return a place by its name in VARIABLES: from its environment variable, else from the user's file; None if neither has it."""
    return os.environ.get(VARIABLES[name]) or user_settings().get(name)


def user_settings() -> Mapping[str, str]:
    """Return what the user's file sets; nothing if the file is missing.

    Raises:
        UserError: the file cannot be read, or sets something else.
    """
    try:
        path = user_file()
    except RuntimeError:  # the user has no home folder
        return {}
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: settings by name are expected, such as runs: ~/runs; {', '.join(VARIABLES)} are taken.")
    for name, value in tree.items():
        if name not in VARIABLES:
            raise unknown(f"{path}", str(name), VARIABLES)
        if not isinstance(value, str) or not value:
            raise UserError(f"{path}: {name}: {value!r}; a text is expected.")
    if "runs" in tree and not Path(tree["runs"]).expanduser().is_absolute():
        raise UserError(f"{path}: runs: {tree['runs']}; a whole path is expected, such as ~/runs or /data/runs.")
    return tree


def runs_folder(given: str | None) -> Path:
    """Return the folder of run folders: the one given, else the user's, else runs/ in the current folder."""
    return Path(os.path.expanduser(given or user_default("runs") or "runs")).absolute()

"""What belongs to the user: where runs and tracking go if a command does not say it, and the key that signs what the user made."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.base.errors import UserError, unknown
from lab.base.files import open_to_write, read_bytes, read_text
from lab.base.paths import sqlite_file, sqlite_uri

FILE = "lossforge.yaml"
"""Below XDG_CONFIG_HOME, which is ~/.config by default."""
VARIABLES = {
    "runs": "LOSSFORGE_RUNS",
    "tracking_uri": "MLFLOW_TRACKING_URI",
    "max_pixels": "LOSSFORGE_MAX_PIXELS",
    "max_bytes": "LOSSFORGE_MAX_BYTES",
}
"""What the file may set, and the variable that has precedence."""
KEY = "lossforge/key"
"""The user's key, below XDG_STATE_HOME."""


def xdg_folder(variable: str, default: str) -> Path:
    """Return a folder of the user's, which a variable names by a whole path; a relative one would be found in any folder of others."""
    given = os.environ.get(variable) or default
    return Path(given if os.path.isabs(given) else default).expanduser()


def user_file() -> Path:
    return xdg_folder("XDG_CONFIG_HOME", "~/.config") / FILE


def user_default(name: str) -> str | None:
    """Return a place by its name in VARIABLES: from its environment variable, else from the user's file; None if neither has it."""
    return os.environ.get(VARIABLES[name]) or user_settings().get(name)


def user_limit(name: str, default: int) -> int:
    """Return a limit of data, which the user may set; raise UserError if the value is not a whole number from 1."""
    given = user_default(name) or str(default)
    if not (given.isdecimal() and len(given) < 16 and int(given)):
        raise UserError(f"{VARIABLES[name]}, or {name} of {user_file()}: {given}; a whole number from 1 is expected.")
    return int(given)


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
        tree: Any = yaml.safe_load(read_text(path)) or {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: settings by name are expected, such as runs: ~/runs; {', '.join(VARIABLES)} are taken.")
    tree = {name: str(value) if str(name).startswith("max_") and value is not None else value for name, value in tree.items()}
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


def chosen_uri(given: str | None, recorded: str | None = None) -> str:
    """Return MLflow's address: the one given, else MLFLOW_TRACKING_URI, else the server where a run is `recorded`, else the user's.

    The last choice is mlflow.db in the current folder, which `mlflow ui` opens by default.
    """
    server = recorded if recorded and not sqlite_file(recorded) else None
    return (
        given
        or os.environ.get(VARIABLES["tracking_uri"])
        or server
        or user_default("tracking_uri")
        or sqlite_uri(Path("mlflow.db").absolute())
    )


def has_key() -> bool:
    """Return whether this user has a key, or could make one."""
    return bool(_key())


def hmac_of(text: str) -> str:
    """Return the user's signature of a text; empty if the user has no key."""
    key = _key()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else ""


def seal(folder: Path, *texts: str | None) -> str:
    """Return the user's signature of texts in a file of a run's folder; empty if the user has no key."""
    return hmac_of(json.dumps(["file", str(folder.resolve()), *texts]))


def is_sealed(given: object, folder: Path, *texts: str | None) -> bool:
    """Return whether this user wrote these texts into a file of this folder, by the signature `given` beside them."""
    expected = seal(folder, *texts)
    return bool(expected) and isinstance(given, str) and hmac.compare_digest(expected.encode(), given.encode(errors="replace"))


def _key() -> bytes:
    """Return the user's key, which is made if it does not exist; empty if that fails."""
    try:
        path = xdg_folder("XDG_STATE_HOME", "~/.local/state") / KEY
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path.with_name(f".key-{os.getpid()}-{secrets.token_hex(4)}")
            with os.fdopen(open_to_write(draft, mode=0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(draft, path)  # if two processes make a key, the first one wins, with a complete file
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        key = read_bytes(path)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return b""
    return key if len(key) >= 32 else b""

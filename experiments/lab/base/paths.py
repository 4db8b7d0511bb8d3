"""The repository's folder, paths as the user gave them, and addresses of files."""

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

ROOT = Path(__file__).resolve().parents[3]


def absolute(path: str | None, default: str | Path) -> Path:
    """Return the path that the user gave, else the default; it is relative to the current folder."""
    return Path(os.path.expanduser(path) if path else default).absolute()


def sqlite_uri(path: Path) -> str:
    """Return the address of an SQLite file, as MLflow itself writes it: SQLAlchemy takes `%2F` for a slash, and `?` for the path's end."""
    return f"sqlite:///{quote(str(path))}"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite address, which may name a driver and a query; None for any other address."""
    found = re.match(r"sqlite(?:\+\w+)?:///([^?]*)", uri)
    return Path(unquote(found[1])).absolute() if found else None

"""The repository's folder, and paths as the user gave them."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def absolute(path: str | None, default: str | Path) -> Path:
    """Return the path that the user gave, else the default; it is relative to the current folder."""
    return Path(os.path.expanduser(path) if path else default).absolute()

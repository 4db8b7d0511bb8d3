"""Locks that end with the process that holds them, and with the processes that it gave them to."""

import fcntl
from pathlib import Path
from typing import TextIO


def try_lock(file: Path) -> TextIO | None:
    """The open file, locked until it is closed; None where another process holds it."""
    file.parent.mkdir(exist_ok=True)
    opened = file.open("a")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    return opened

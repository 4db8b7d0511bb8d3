"""End a script with one line at Ctrl-C before its work has begun.

An interrupt in the second of a script's imports, or in those of the libraries, would be a traceback, or be lost in a library.
"""

import os
import signal
from types import FrameType

ABORTED = 130
"""The exit status after Ctrl-C, as in shells."""


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process at once. Scripts call this before their other imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell or a sweep lets the process ignore it
        signal.signal(signal.SIGINT, _end)


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, because there is something to put in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted before it began\n")
    os._exit(ABORTED)

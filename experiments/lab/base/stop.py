"""SIGINT, SIGTERM and SIGHUP: requests to end a run."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By Ctrl-C, by a scheduler, and by a terminal that is closed."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run; not SIGHUP where it is ignored already, as under nohup."""
    return [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


class StoppedError(Exception):
    """The run has ended on request; it can be resumed."""


class Stop:
    """Handle `ending_signals` from now on, in the main thread only, because no other thread receives them.

    The first signal sets `wanted`, which the training loop reads; the second raises KeyboardInterrupt, and the third ends the process.
    With `checkpoint_first=False` the first one raises, because no checkpoint can be written yet. While
    `ignored` is set, signals have no effect.
    """

    PAUSE = 1.0
    """Signals within so many seconds count as one, because `uv run` repeats a signal that its process group has already received."""

    def __init__(self, *, checkpoint_first: bool, quiet: bool = False) -> None:
        self.checkpoint_first, self.quiet, self.ignored = checkpoint_first, quiet, False
        self.signal: int | None = None
        self.seen, self.raised = 0.0, False
        if threading.current_thread() is threading.main_thread():
            for number in ending_signals():
                signal.signal(number, self._take)

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """Return the exit status of a process that a signal ended, as in shells: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.signal or signal.SIGINT)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.ignored:
            return
        if self.signal is not None and now - self.seen < self.PAUSE:
            return
        first, self.seen = self.signal is None, now
        self.signal = self.signal or number
        if first and self.checkpoint_first:
            if not self.quiet:
                with contextlib.suppress(OSError):  # stderr may be closed, which may be why the run must end
                    os.write(2, b"\nstopping after a checkpoint; once more stops at once\n")
        elif not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _leave_terminal() -> None:
    """Let output go nowhere if its terminal was closed, because each further line would be an error."""
    for place in (1, 2):
        try:
            os.write(place, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), place)

"""SIGINT and SIGTERM: requests to end a run."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType


class StoppedError(Exception):
    """The run has ended on request; it can be resumed."""


class Stop:
    """Handles SIGINT and SIGTERM from now on; in another thread than the main one, which alone gets them, nothing.

    The first signal sets `wanted`, which the training loop reads; the second raises KeyboardInterrupt, and the third ends the process.
    With `patient=False` the first one raises. Once `deaf`, signals are ignored.
    """

    PAUSE = 1.0
    """Seconds in which signals are one and the same: `uv run` passes on what its whole process group has got already."""

    def __init__(self, *, patient: bool, quiet: bool = False) -> None:
        self.patient, self.quiet, self.deaf = patient, quiet, False
        self.signal: int | None = None
        self.seen, self.raised = 0.0, False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._take)

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status that shells give a process which a signal ended: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.deaf:
            return
        if self.signal is not None and now - self.seen < self.PAUSE:
            return
        first, self.seen = self.signal is None, now
        self.signal = self.signal or number
        if first and self.patient:
            if not self.quiet:
                with contextlib.suppress(OSError):  # whoever read it may be gone, which is why the run is to end
                    os.write(2, b"\nstopping after a checkpoint; once more stops at once\n")
        elif not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

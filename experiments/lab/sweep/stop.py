"""Ctrl-C, SIGTERM and SIGHUP during a sweep: only the sweep handles them, and it asks its jobs to stop, on any machine.

If the sweep's process is killed, jobs on the same host notice and stop as well.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lab.base.files import read_text, write_text
from lab.base.process import ending_signals
from lab.run.folder import gone

FILE = ".stop"
PAUSE = 1.0  # signals within so many seconds count as one, because `uv run` repeats a signal that its process group has already received
SAID = {
    "stop": "stopping: running jobs save a checkpoint; once more kills them",
    "kill": "killing the running jobs; once more leaves those of other machines alone",
    "leave": "leaving",
}


class Stop:
    """The sweep's request to stop, kept in a file of its folder, so that jobs in other processes and on other machines see it.

    watched: a job uses this, and the sweep's process is on this host; that process locks the sweep's folder as long as it lives.
    """

    def __init__(self, sweep: Path, *, watched: bool = False) -> None:
        self.sweep, self.file, self.watched = sweep, sweep / FILE, watched
        self.wishes = iter(SAID)
        self.seen = float("-inf")

    @property
    def requested(self) -> str:
        """Return '' (go on), 'stop' (save a checkpoint and end), 'kill' (end at once) or 'leave' (end without waiting for jobs)."""
        try:
            return read_text(self.file)
        except FileNotFoundError:
            return "stop" if self.watched and gone(self.sweep) else ""

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Turn each signal inside the block into the next request."""
        self.file.unlink(missing_ok=True)
        before = {number: signal.signal(number, self._take) for number in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self.seen < PAUSE or (wish := next(self.wishes, None)) is None:
            return
        self.seen = now
        write_text(self.file, wish)
        print(SAID[wish], file=sys.stderr, flush=True)

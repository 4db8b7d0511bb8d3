"""Ctrl-C and SIGTERM while a sweep runs: they are for the sweep alone, which asks its jobs to stop, wherever these run."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNALS = {signal.SIGINT, signal.SIGTERM}
FILE = ".stop"
PAUSE = 1.0  # seconds in which signals are one and the same: `uv run` passes on what its whole process group has got already


class Stop:
    """The sweep's wish, kept in a file of its folder, so that jobs in other processes and on other machines see it."""

    def __init__(self, sweep: Path) -> None:
        self.file = sweep / FILE

    @property
    def asked(self) -> str:
        """'' go on; 'stop' save a checkpoint and end; 'kill' end at once."""
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """While inside, signals are written to the file.

        They are blocked, here and so in every process that a launcher starts: Ctrl-C reaches those too, and would end idle workers.
        """
        self.file.unlink(missing_ok=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        ended = threading.Event()
        waiting = threading.Thread(target=self._wait, args=(ended,), name="signals", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            ended.set()
            waiting.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(self, ended: threading.Event) -> None:
        said = {"stop": "stopping: running jobs save a checkpoint (once more: they are killed)", "kill": "killing the running jobs"}
        wishes = iter(said)
        seen = float("-inf")
        while not ended.is_set():
            if signal.sigtimedwait(SIGNALS, 0.2) is None or time.monotonic() - seen < PAUSE:
                continue
            seen = time.monotonic()
            wish = next(wishes, None)
            if wish is None:
                os._exit(130)
            self.file.write_text(wish, encoding="utf-8")
            print(said[wish], file=sys.stderr, flush=True)

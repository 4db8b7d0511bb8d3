"""One fault ends all processes of a run: the first says what it was, and none is left waiting for another that is gone."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lab import distributed

GRACE_SECONDS = 5.0
STOP_SECONDS = 20.0  # torchrun kills 30 s after it asked to stop


def announce(text: str, summary: str) -> None:
    """Print on stderr what went wrong here, unless another process of the run said first what went wrong there.

    Args:
        text: what is printed.
        summary: what the others are told.
    """
    if distributed.launched() == 1:
        print(text, file=sys.stderr, flush=True)
        return
    mine = f"rank {os.environ.get('RANK', '0')}: {summary}"
    store = _store()
    if store is None or store.compare_set(_key(), "", mine).decode() == mine:
        print(f"{mine.partition(':')[0]}: {text}", file=sys.stderr, flush=True)


def first_fault() -> str | None:
    """What the first process that failed has said, if one has."""
    return _read(_store()) if distributed.launched() > 1 else None


@contextmanager
def watched(end: Callable[[str], None]) -> Iterator[None]:
    """Inside, another process's fault ends this one, even while it waits for the device: `end(what happened)` is called, and it exits.

    A process that notices by itself, or that was asked to stop and does, is left in peace.
    """
    if distributed.launched() == 1:
        yield
        return
    watch = Watch(end)
    watch.start()
    try:
        yield
    finally:
        watch.close()


class Watch(threading.Thread):
    """Looks for faults of the others, and for signals that the main thread cannot act upon."""

    def __init__(self, end: Callable[[str], None]) -> None:
        super().__init__(name="peers", daemon=True)
        self.end, self.closed = end, threading.Event()
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        # the number of a signal is written here at once, while Python's own handler waits for the main thread
        self.before = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        owner = os.getpid()
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if os.getppid() == owner and not self.closed.is_set() else None)

    def close(self) -> None:
        """By the main thread, which alone may set what signals write to."""
        self.closed.set()
        signal.set_wakeup_fd(self.before)
        os.write(self.write, b"\0")
        self.join()
        os.close(self.read)
        os.close(self.write)

    def run(self) -> None:
        store = _store()
        while not self.closed.is_set():
            if fault := _read(store):
                return self._end_after(GRACE_SECONDS, fault)
            if select.select([self.read], [], [], 0.5)[0] and set(os.read(self.read, 64)) & {signal.SIGTERM, signal.SIGINT}:
                return self._end_after(STOP_SECONDS, "stopped by a signal, while it waited for another process")

    def _end_after(self, seconds: float, reason: str) -> None:
        if not self.closed.wait(seconds):
            self.end(reason)
            os._exit(1)


def _key() -> str:
    return f"lossforge/fault/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    """A connection of its own to the store in which the processes met; None where nobody answers."""
    import torch

    try:
        return torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False
        )
    except (KeyError, RuntimeError):  # torch's DistNetworkError is a RuntimeError
        return None


def _read(store: Any) -> str | None:
    try:
        return store.get(_key()).decode() if store is not None and store.check([_key()]) else None
    except RuntimeError:
        return None

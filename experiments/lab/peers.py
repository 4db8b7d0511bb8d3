"""One fault ends all processes of a run: the first says what it was, and none is left waiting for another that is gone."""

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lab.errors import UserError
from lab.guard import NonFiniteError
from lab.ranks import launched
from lab.stop import StoppedError

TOGETHER = (StoppedError, NonFiniteError)
"""Ends that all ranks come to at once."""
GRACE_SECONDS = 5.0
STOP_SECONDS = 20.0  # torchrun kills 30 s after it asked to stop


class RankError(Exception):
    """Another process of the run failed, and has said why."""


def announce(error: BaseException, text: str) -> str:
    """Print on stderr what went wrong here, unless another process of the run said first what went wrong there.

    Args:
        error: what went wrong.
        text: how it is printed.

    Returns:
        What the first process said, in one line.
    """
    if launched() == 1:
        print(text, file=sys.stderr, flush=True)
        return text
    rank = f"rank {os.environ.get('RANK', '0')}"
    mine = f"{rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    first = mine
    if (store := _store()) is not None:
        first = store.compare_set(_key(), "", mine).decode()
    if first == mine:
        print(f"{rank}: {text}", file=sys.stderr, flush=True)
    return first


@contextmanager
def watched(end: Callable[[RankError], None]) -> Iterator[None]:
    """Inside, a fault is announced to the other processes, and one of theirs ends this one.

    It does so even while this process waits for the device, which waits for the other: then `end` is called, in a thread, and it exits.
    A process that notices by itself, or that was asked to stop and does, is left in peace.

    Raises:
        RankError: in place of what followed from another one's fault.
    """
    if launched() == 1:
        yield
        return
    watch = Watch(end)
    watch.start()
    try:
        yield
    except TOGETHER:
        raise
    except Exception as error:
        text = f"error: {error}" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        raise RankError(announce(error, text)) from error
    finally:
        watch.close()


class Watch(threading.Thread):
    """Looks for faults of the others, and for signals that the main thread cannot act upon."""

    def __init__(self, end: Callable[[RankError], None]) -> None:
        super().__init__(name="peers", daemon=True)
        self.end, self.closed = end, threading.Event()
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        # the number of a signal is written here at once, while Python's own handler waits for the main thread
        self.before = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)

    def close(self) -> None:
        """By the main thread, which alone may set what signals write to."""
        self.closed.set()
        signal.set_wakeup_fd(self.before)
        os.write(self.write, b"\0")
        self.join()
        os.close(self.read)
        os.close(self.write)

    def run(self) -> None:
        store, signalled = _store(), False
        while not self.closed.is_set():
            if fault := _read(store):
                return self._end_after(GRACE_SECONDS, fault)
            if signalled:  # and by no fault that is known
                return self._end_after(STOP_SECONDS, "a signal came while this process waited for another one")
            if select.select([self.read], [], [], 0.5)[0]:
                signalled = bool(set(os.read(self.read, 64)) & {signal.SIGTERM, signal.SIGINT})
        return None

    def _end_after(self, seconds: float, reason: str) -> None:
        if not self.closed.wait(seconds):
            self.end(RankError(reason))
            os._exit(1)

    def _forget(self) -> None:
        """In a worker process: signals that come to it are no news to the run."""
        if not self.closed.is_set():
            signal.set_wakeup_fd(-1)


def _key() -> str:
    return f"lossforge/fault/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store() -> Any:
    """A connection of its own to the store in which the processes meet; None where nobody answers."""
    import torch

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
    except (KeyError, RuntimeError):  # torch's DistNetworkError is a RuntimeError
        return None


def _read(store: Any) -> str | None:
    try:
        return store.get(_key()).decode() if store is not None and store.check([_key()]) else None
    except RuntimeError:
        return None

"""An error on one rank ends all ranks of a run: the first one reports it, and none waits for a rank that has ended.

torchrun's own @record writes an error to a file of its agent alone: the run's record would not hold it, and a rank that waits for another
one in a collective would be killed after 30 s without having recorded its end.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lab.base.errors import NonFiniteError, RankError, UserError
from lab.base.process import ENDING, StoppedError, launched, launched_here, local_rank

TOGETHER = (StoppedError, NonFiniteError)
"""Ends that all ranks come to at once."""
KILLED = "was killed: its process ended without a word, as by kill -9 or where memory ran out"
GRACE_SECONDS = 5.0
GONE_SECONDS = 3.0
STOP_SECONDS = 20.0  # torchrun kills a process 30 s after it asked it to stop


def announce(error: BaseException, text: str) -> str:
    """Print this rank's error on stderr, unless another rank has already reported one.

    Args:
        error: the error.
        text: the text to print for it.

    Returns:
        The first reported error, in one line.
    """
    if launched() == 1:
        print(text, file=sys.stderr, flush=True)
        return text
    rank = f"rank {_rank()}"
    first = mine = f"{rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    said = f"{rank}: {text}"
    if (store := _store()) is not None:
        # a connection breaks if another process was killed; the report of this comes a moment later
        until = time.monotonic() + GONE_SECONDS * isinstance(error, RuntimeError)
        while not (fault := _fault(store)) and time.monotonic() < until:
            time.sleep(0.1)
        first = store.compare_set(_key(), "", fault or mine).decode()
        if first.endswith(KILLED) and first.startswith("rank 0 ") and _rank() == 1:  # otherwise the first rank prints it
            mine, said = first, f"error: {first}"
    if first == mine:
        print(said, file=sys.stderr, flush=True)
    return first


@contextmanager
def watched(end: Callable[[RankError], None]) -> Iterator[None]:
    """Announce errors of the block to the other ranks, and end this rank at an error of theirs.

    This works even while this process waits for the device, which waits for the other rank: a thread then calls `end` and exits the
    process. It does not do so if the process notices the error itself, or ends because it was asked to stop.

    Raises:
        RankError: another rank failed; raised instead of the error that follows from it.
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
    """Watch for errors of other ranks, and for signals that the main thread cannot handle."""

    def __init__(self, end: Callable[[RankError], None]) -> None:
        super().__init__(name="rank failures", daemon=True)
        self.end, self.closed = end, threading.Event()
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        # Python writes a signal's number here at once, while its handlers wait for the main thread
        self.before = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)

    def close(self) -> None:
        """End the watch; call it from the main thread, because only it may set the wake-up descriptor."""
        self.closed.set()
        signal.set_wakeup_fd(self.before)
        os.write(self.write, b"\0")
        self.join()
        os.close(self.read)
        os.close(self.write)

    def run(self) -> None:
        store = _store()
        _note(store, "came", os.getpid())
        self._look(store)
        _note(store, "left", 0)

    def _look(self, store: Any) -> None:
        signalled = False
        while not self.closed.is_set():
            if fault := _fault(store):
                return self._end_after(GRACE_SECONDS, fault)
            if signalled:  # without a known error
                return self._end_after(STOP_SECONDS, "a signal came while this process waited for another one")
            if select.select([self.read], [], [], 0.5)[0]:
                signalled = bool(set(os.read(self.read, 64)) & set(ENDING))
        return None

    def _end_after(self, seconds: float, reason: str) -> None:
        if not self.closed.wait(seconds):
            self.end(RankError(reason))
            os._exit(1)

    def _forget(self) -> None:
        """Stop reporting signals, in a worker process."""
        if not self.closed.is_set():
            signal.set_wakeup_fd(-1)


def _key(what: str = "fault") -> str:
    return f"lossforge/{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _note(store: Any, what: str, value: int) -> None:
    with suppress(RuntimeError):
        if store is not None:
            store.set(_key(f"{what}/{_rank()}"), str(value))


def _fault(store: Any) -> str | None:
    """Return the reported error, else name a rank of this host that ended without a report; None if there is neither."""
    with suppress(RuntimeError):
        if store is not None and store.check([_key()]):
            return str(store.get(_key()).decode())
        first = _rank() - local_rank()
        for rank in range(first, first + launched_here()) if store is not None else ():
            came, left = _key(f"came/{rank}"), _key(f"left/{rank}")
            if store.check([came]) and _ended(int(store.get(came))) and not store.check([left]):
                return f"rank {rank} {KILLED}"
    return None


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _store() -> Any:
    """Open a connection to the store in which the processes meet; return None if nothing answers."""
    import torch

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
    except (KeyError, RuntimeError):  # torch's DistNetworkError is a RuntimeError
        return None

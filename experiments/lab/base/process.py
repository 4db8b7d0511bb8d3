"""This process: how signals end it, how it was started, and its threads. Needs neither torch nor a process group.

An interrupt in the second of a script's imports, or in those of the libraries, would be a traceback, or be lost in a library: so scripts
call `start_script` before their other imports, and `begin_work` or `Stop` afterwards.
"""

import contextlib
import importlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lab.base.errors import UserError

ABORTED = 130
"""The exit status after Ctrl-C, as in shells."""


def start_script() -> None:
    """Let Ctrl-C end this process at once, and show no warning of libraries. Scripts call this before their other imports."""
    hide_warnings_of_libraries()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell or a sweep lets the process ignore it
        signal.signal(signal.SIGINT, _end)


def hide_warnings_of_libraries() -> None:
    """Show no FutureWarning that an installed package raises about itself or another, because a user cannot change their code."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if not (issubclass(category, FutureWarning) and "site-packages" in filename):
            shown(message, category, filename, *more, **named)

    warnings.showwarning = show


def begin_work() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, because there is something to put in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted before it began\n")
    os._exit(ABORTED)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""By Ctrl-C, by a scheduler, and by a terminal that is closed."""


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run; not SIGHUP where it is ignored already, as under nohup."""
    return [number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


NOTHING = contextlib.nullcontext()
"""The context of a wait in which signals act as around it."""


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

    @contextlib.contextmanager
    def unlike_now(self, ignored: bool) -> Iterator[None]:
        """Let signals have an effect in a block, or none, whatever holds around it."""
        around, self.ignored = self.ignored, ignored
        try:
            yield
        finally:
            self.ignored = around

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


def launched() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_here() -> int:
    """Return how many of them run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", launched()))


def started_by() -> str:
    """Return the words before the script in the command that starts such processes; of several hosts torchrun's own are left open."""
    if launched() == 1:
        return "uv run"
    hosts = launched() // launched_here()
    return f"uv run torchrun{f' --nnodes {hosts}' if hosts > 1 else ''} --nproc-per-node {launched_here()}{' ...' if hosts > 1 else ''}"


def is_rank_zero() -> bool:
    """Return whether this is the rank that writes files and prints."""
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """Return the number of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() > 1 else 0


def refuse_several(app: str) -> None:
    """Raise UserError if torchrun started several processes of an app that runs in one."""
    if launched() > 1:
        raise UserError(f"{app} runs in one process; torchrun started {launched()}. Start it without torchrun.")


class Background(threading.Thread):
    """A daemon thread, some of whose modules are imported by the thread that starts it.

    sklearn and matplotlib look into sys.modules for pandas and IPython, and fail where they meet one that another thread is importing.

    Attributes:
        modules: which of those the thread imports, itself or by what it imports. One that does not import is left to the thread.
    """

    modules: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)

    def start(self) -> None:
        for name in self.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        super().start()

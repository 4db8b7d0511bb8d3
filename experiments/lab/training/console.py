"""Output for the user: a bar on a terminal, plain lines elsewhere, a table at the end."""

import contextlib
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lab.base.files import open_to_append
from lab.base.formats import masked, one_line, visible

LOG = "log.txt"
"""The file in a run's folder that holds what the console says."""


class Console:
    def __init__(self, updates: int, work: str = "training", done: int = 0, *, quiet: bool = False) -> None:
        """Open the console; done: the number of updates that earlier processes made."""
        from rich.console import Console as Rich

        class Terminal(Rich):
            def _check_buffer(self) -> None:
                try:
                    super()._check_buffer()
                except OSError:  # of a terminal that was closed
                    self.on_broken_pipe()

            def on_broken_pipe(self) -> None:
                """Continue without a console; by default rich would end the program here, and the run with it."""
                self.quiet = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        self.rich = Terminal(highlight=False, soft_wrap=True, quiet=quiet, markup=False, emoji=False)
        if not self.rich.is_terminal:
            self.rich.width = 140
        self.updates, self.before = updates, done
        self.began = time.monotonic()
        self.made = False  # whether this process has made an update
        self.bar: Any = None
        self.entry: Any = None
        self.log: Path | None = None  # a file that gets every line, too
        self.last_line = 0.0
        if self.rich.is_terminal and not quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
            self.bar = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.rich)
            self.entry = self.bar.add_task(work, total=updates, completed=done, figures="")
            self.bar.start()

    def say(self, text: str) -> None:
        self.rich.print(visible(masked(text)))
        self.note(text)

    def note(self, text: str) -> None:
        """Append a text with the time to the log file, if there is one; a disk that is full does not end the run."""
        if self.log is not None:
            with contextlib.suppress(OSError), open_to_append(self.log) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(masked(text))}\n".encode())

    def waits(self, what: str) -> None:
        """Show on the bar what the first update waits for."""
        if self.bar is not None:
            self.bar.update(self.entry, figures=f"waits for {what}")

    def advance(self, done: int) -> None:
        """Show how many updates are done; of the first one how long it took, because the next figures may be far."""
        first, self.made = not self.made, True
        if self.bar is not None:
            self.bar.update(self.entry, completed=done, **({"figures": ""} if first else {}))
        elif first:
            self.say(f"update {done}/{self.updates} · after {clock(time.monotonic() - self.began)}")

    def figures(self, done: int, epoch: int, values: dict[str, float]) -> None:
        """Show the figures of a window: on the bar, or as a line every few seconds."""
        speed = values.get("train/images_per_second")
        text = f"loss {values['train/loss']:.4f}" + (f" · {speed:,.0f} images/s" if speed else "")
        if self.bar is not None:
            self.bar.update(self.entry, completed=done, figures=text)
            self.note(f"epoch {epoch} · update {done}/{self.updates} · {text}")
        elif time.monotonic() - self.last_line > 5:
            self.last_line = time.monotonic()
            left = (self.last_line - self.began) / max(done - self.before, 1) * (self.updates - done)
            self.say(f"epoch {epoch} · update {done}/{self.updates} · {text} · {clock(left)} left")

    def finished(self, done: int, text: str) -> None:
        """Show that a piece of work is done: above the bar, or as a line with its number."""
        if self.bar is not None:
            self.bar.update(self.entry, completed=done)
            self.say(text)
        else:
            self.say(f"{done}/{self.updates} · {text}")

    def busy(self, what: str) -> AbstractContextManager[Any]:
        """Show on a terminal what the block does, which takes a while."""
        return self.rich.status(what) if self.rich.is_terminal and not self.rich.quiet else nullcontext()

    def stop_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(self, renderable: Any) -> None:
        self.rich.print(renderable)

    def table(self, title: str, rows: dict[str, str]) -> None:
        from rich.table import Table

        table = Table(title=one_line(title), title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(one_line(name), one_line(masked(value)))
        self.rich.print(table)

    def end_log(self, folder: Any, title: str, rows: dict[str, str]) -> None:
        """Append a run's results to its log file, and record the file as the run's artifact."""
        if self.log is not None:
            self.note("\n".join(map(one_line, [title, *(f"  {name}: {value}" for name, value in rows.items())])))
            folder.artifact(self.log)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

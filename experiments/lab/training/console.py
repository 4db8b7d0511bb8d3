"""What the person at the keyboard sees: a bar on a terminal, plain lines elsewhere, a table at the end."""

import os
import sys
import time
from typing import Any

from lab.runs.formats import visible
from lab.runs.masks import masked


class Console:
    def __init__(self, updates: int, work: str = "training", done: int = 0, *, quiet: bool = False) -> None:
        """done: how many of the updates an earlier process has made."""
        from rich.console import Console as Rich

        class Terminal(Rich):
            def on_broken_pipe(self) -> None:
                """Train on without a console: rich would end the program here, and with it the run."""
                self.quiet = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        self.rich = Terminal(highlight=False, soft_wrap=True, quiet=quiet, markup=False, emoji=False)
        if not self.rich.is_terminal:
            self.rich.width = 140
        self.updates, self.before = updates, done
        self.began = time.monotonic()
        self.bar: Any = None
        self.entry: Any = None
        self.last_line = 0.0
        if self.rich.is_terminal and not quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
            self.bar = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.rich)
            self.entry = self.bar.add_task(work, total=updates, completed=done, figures="")
            self.bar.start()

    def say(self, text: str) -> None:
        self.rich.print(visible(masked(text)))

    def advance(self, done: int) -> None:
        if self.bar is not None:
            self.bar.update(self.entry, completed=done)

    def figures(self, done: int, epoch: int, values: dict[str, float]) -> None:
        """Show the figures of a window: on the bar, or as a line every few seconds."""
        speed = values.get("train/images_per_second")
        text = f"loss {values['train/loss']:.4f}" + (f" · {speed:,.0f} images/s" if speed else "")
        if self.bar is not None:
            self.bar.update(self.entry, completed=done, figures=text)
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

    def stop_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(self, renderable: Any) -> None:
        self.rich.print(renderable)

    def table(self, title: str, rows: dict[str, str]) -> None:
        from rich.table import Table

        table = Table(title=visible(title), title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(visible(name), visible(masked(value)))
        self.rich.print(table)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

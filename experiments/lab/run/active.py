"""A run of any app while it lasts: its folder, its records sent to MLflow, and its end."""

import getpass
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from lab.base.errors import NonFiniteError, RankError, UserError
from lab.base.files import write_text
from lab.base.formats import markdown_code, markdown_text, masked, visible
from lab.base.process import Stop, StoppedError
from lab.config.schema import TrackingConfig
from lab.config.settings import Settings
from lab.config.user import runs_folder
from lab.run.folder import RunFolder
from lab.tracking.store import NOTE, RUN_PAGE
from lab.tracking.uploader import MlflowUploader, checked_uri
from lab.tracking.writers import WriterThread, check_writers


class Run:
    """A run in progress: `start` it or take an earlier run's folder, work inside `noted`, `close` it, and exit with `exit_status`."""

    def __init__(self, folder: RunFolder, tracking: TrackingConfig, uri: str | None, stop: Stop, *, own: bool = True) -> None:
        """Continue or begin a run in its folder.

        Args:
            folder: the run's folder, with its first record.
            tracking: the settings of MLflow.
            uri: the store's address; None to not use MLflow.
            stop: takes the signals since before there was a folder. With `checkpoint_first` the work checks it, ends by itself and can be
                continued; otherwise the first signal interrupts the work.
            own: whether this user made the run.
        """
        self.folder, self.began = folder, time.monotonic()
        self.stop, self.resumable = stop, stop.checkpoint_first
        self.status = "FAILED"
        self.failure: BaseException | None = None
        self.uploader: MlflowUploader | None = None
        if uri is not None:
            self.uploader = MlflowUploader(folder.path, uri, tracking, own=own)
            self.uploader.start()
        self.patience = tracking.patience_seconds
        self.writers = [WriterThread(folder.path, name, tracking.experiment) for name in tracking.writers]
        for writer in self.writers:
            writer.start()

    @classmethod
    def start(
        cls, app: str, settings: Settings[Any], name: str, runs: str | None, tags: dict[str, str], *, setting: str = "trainer.runs"
    ) -> "Run":
        """Start a run of an app in a new folder under `runs`, which `setting` names.

        Raises:
            UserError: the folder cannot be written, or the store's credentials or a writer's package are missing, or the store is refused.
        """
        tracking = settings.config.tracking
        check_writers(tracking)
        uri = checked_uri(tracking) if tracking.enabled else None
        stop = Stop(checkpoint_first=app == "train")
        folder = RunFolder(runs_folder(runs), name, settings.tree(), setting)
        record_start(folder, app, settings, name, tags)
        return cls(folder, tracking, uri, stop)

    @contextmanager
    def noted(self, status: str = "FINISHED") -> Iterator[None]:
        """Record how the block ends: with `status`, by a signal, or with an exception, which is not raised further.

        This includes exceptions that end a program, such as a callback's sys.exit(), or cancel a task.
        """
        try:
            yield
            if self.failure is None:
                self.status = status
        except (KeyboardInterrupt, StoppedError):
            self.status = "KILLED"
        except BaseException as error:
            self.status, self.failure = "FAILED", self.failure or error
        finally:
            self.stop.checkpoint_first = False

    def abandon(self, failure: Exception) -> None:
        """End the run as failed from another thread, while the main thread is blocked."""
        self.status, self.failure = "FAILED", failure
        self.close()
        report(failure)

    def seconds(self) -> float:
        """Return the seconds since the run's start, without the time between its processes."""
        return self.folder.history.seconds + time.monotonic() - self.began

    def close(self, table: dict[str, str] | None = None) -> dict[str, str]:
        """Record the end, wait until MLflow has it, and return the places of all results, as rows of a table.

        Args:
            table: the run's results, as rows of a table; MLflow shows it as the run's description.
        """
        tags = {NOTE: description(table)} if table else {}
        if self.failure:
            tags["error"] = _one_line(self.failure)
        if self.status == "KILLED" and self.resumable:
            tags["resumable"] = "true"
        # A signal acts only while this waits: the end's record is written whole, and a wait that is ended says what is missing.
        heard = self.stop.ignored
        with self.stop.unlike_now(True):
            unwritten = self._write_end(tags)
            rows = {"run folder": os.path.relpath(self.folder.path)}
            if self.uploader:
                rows["MLflow"] = self.uploader.closed(self.stop.unlike_now(heard))
                if unwritten:
                    self.uploader.end(self.status, _one_line(self.failure or unwritten), self.folder.now())
            for writer in self.writers:
                rows[writer.name] = writer.close(self.patience, self.stop.unlike_now(heard))
        return rows

    def _write_end(self, tags: dict[str, str]) -> UserError | None:
        """Write the last records; return why the folder could not be written."""
        unwritten: UserError | None = None
        try:
            if tags:
                self.folder.record("tags", values=tags)
            if self.failure:
                with suppress(UserError):  # the disk may be full; a tag holds the error, too
                    write_error(self.folder, "".join(traceback.format_exception(self.failure)))
        except UserError as error:
            unwritten = error
        try:
            self.folder.close(self.status)
        except UserError as error:
            unwritten = error
        if unwritten:
            self.status, self.failure = "FAILED", self.failure or unwritten
        return unwritten

    def exit_status(self) -> int:
        """Report a failure, and return 0 after the end of the work, `Stop.status` after a signal, else 1.

        A signal that only ended the wait for MLflow counts, too.
        """
        if self.failure:
            report(self.failure)
        if self.status == "FINISHED" and self.uploader and self.uploader.interrupted:
            return self.stop.status
        return {"FINISHED": 0, "KILLED": self.stop.status}.get(self.status, 1)


def report(failure: BaseException) -> None:
    """Print an expected error's message, or any other error's traceback."""
    if isinstance(failure, (NonFiniteError, RankError, UserError)):
        print(f"error: {failure}", file=sys.stderr)
    else:
        print(masked("".join(traceback.format_exception(failure))), end="", file=sys.stderr)


def record_start(folder: RunFolder, app: str, settings: Settings[Any], name: str, tags: dict[str, str]) -> None:
    """Write the first record: app, settings, machine."""
    tags = source_tags(app) | {NOTE: description({})} | tags
    folder.record("start", app=app, name=name, params=settings.flat(), tags=tags | settings.config.tracking.tags)
    folder.artifact(folder.path / "config.yaml")


def source_tags(app: str) -> dict[str, str]:
    """Return tags of the user and the app."""
    tags = {"mlflow.source.name": f"experiments/{app}.py", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


_called: ContextVar[tuple[str, ...] | None] = ContextVar("_called", default=None)


@contextmanager
def called_as(script: str, *arguments: str) -> Iterator[None]:
    """Let `command` return an app's command inside the block, because another program runs the app."""
    token = _called.set((script, *arguments))
    try:
        yield
    finally:
        _called.reset(token)


def command() -> str:
    """Return this process's command, as a shell takes it."""
    script, *arguments = _called.get() or (os.path.basename(sys.argv[0]), *sys.argv[1:])
    return shlex.join([f"experiments/{script}", *arguments])


def in_lines(said: str, width: int = 80) -> str:
    """Return a command in lines that a shell joins; MLflow's page of a run is as wide as the longest line, and hides its right column."""
    lines = [""]
    for word in map(shlex.quote, shlex.split(said)):
        if lines[-1].strip() and len(lines[-1]) + len(word) + len(" \\") > width:
            lines[-1] += "\\"
            lines.append("  ")
        lines[-1] += f"{word} "
    return "\n".join(lines).rstrip()


HEADLINE = ("held-out loss", "images/s", "update", "loss forward + backward", "peak memory")


def description(table: dict[str, str]) -> str:
    """Return a run's description in Markdown: results in one line, its command, its final table, and links to its files."""
    parts = [markdown_code(in_lines(f"uv run {command()}"), "sh")]
    if table:
        first = next(iter(table))
        shown = {markdown_text(name): markdown_text(table[name]) for name in dict.fromkeys((first, *HEADLINE)) if name in table}
        parts.insert(0, ", ".join(f"{name} **{value}**" for name, value in shown.items()))
        rows = [f"| {markdown_text(name)} | {markdown_text(value)} |" for name, value in table.items()]
        parts.append("\n".join(["| | |", "| --- | --- |", *rows]))
        links = {"pictures": "pictures", "checkpoint": "checkpoints", "settings": "config.yaml", "records": "metrics.jsonl"}
        parts.append(", ".join(f"[{name}]({RUN_PAGE}/artifacts/{path})" for name, path in links.items()))
    return "\n\n".join(parts)


def write_error(folder: RunFolder, text: str) -> None:
    """Write the error output of a failed run as an artifact."""
    write_text(folder.path / "error.txt", visible(masked(text)))
    folder.artifact(folder.path / "error.txt")


def _one_line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"

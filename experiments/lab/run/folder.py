"""The folder of one run: its complete record, even if a tracking server fails."""

import contextlib
import fcntl
import json
import math
import os
import platform
import struct
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import open_to_read, open_to_write, refuse_links, remove_unfinished, sha256_of, unwritable, write_text
from lab.base.formats import mapped, masked
from lab.base.records import LONGEST, NAME, History, identity_of, read_history, record_of
from lab.run.trust import written
from lab.tracking.uploader import read_state

LOCK = ".lock"
PLACED = ("start", "resume", "fork")  # kinds of records that hold the folder's path
SILENT_SECONDS = 600.0  # a run on another host, whose locks may not be visible here, counts as gone after so long without a record


class RunFolder:
    """A run's folder: `config.yaml`, `metrics.jsonl`, `checkpoints/` and pictures.

    A line of `metrics.jsonl` is a record with a `kind`: start (app, parameters, tags), resume (step, changed settings), fork (tags),
    metrics (step, values), evaluation (step, counts), summary (values of the complete run), data (sets), model (path, step, shapes),
    tags (values), artifact (path), end (status). Its `time` never goes back, even if the system's clock does.

    `copy_of`: the folder that this one was copied from and that continues without it; None if it is not a copy.

    A step's value is recorded once: a continued run repeats the steps after its checkpoint, and their recorded values are kept.
    """

    def __init__(self, runs: Path, name: str, config: dict[str, Any], setting: str = "trainer.runs") -> None:
        self._open(_new_folder(runs, name, setting), name)
        self.write_config(config)

    @classmethod
    def reopen(cls, path: Path, *, trusted: bool = False) -> "RunFolder":
        """Reopen a run that has ended or was killed; remove half-written files, and turn a copy into a run of its own.

        trusted: whether links may lead out of it.

        Raises:
            UserError: another process works on it, it cannot be written, or a link leads out of it.
        """
        if not trusted:
            refuse_links(path)
        folder = cls.__new__(cls)
        folder._open(path, path.name)
        folder.copy_of = copied_from(path, folder.history)
        if folder.copy_of:
            of = read_state(path).get("run_id") or folder.copy_of.name
            folder.record("fork", id=uuid.uuid4().hex, tags={"forked_from": of, "forked_from.folder": folder.copy_of.name})
        return folder

    def _open(self, path: Path, name: str) -> None:
        self.path, self.name, self.lock = path, name, threading.Lock()
        self.copy_of: Path | None = None
        self.claim = _claim(path)
        self.history: History = read_history(path)
        self.clock = max(time.time(), self.history.time) - _uptime()
        try:
            self.file = open_to_write(path / NAME, os.O_WRONLY | os.O_APPEND, 0o644)
            os.ftruncate(self.file, self.history.size)
            remove_unfinished(path, path / "checkpoints")
        except OSError as error:
            raise unwritable(path / NAME, error) from None

    def now(self) -> float:
        """Return seconds since 1970 by a clock that is never set back."""
        return self.clock + _uptime()

    def write_config(self, config: dict[str, Any], *, signed: bool = True) -> None:
        write_text(self.path / "config.yaml", written(config, self.path, signed=signed))

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record, which other processes can read at once.

        Raises:
            UserError: the record cannot be written; the file ends with the record before.
        """
        where = {"run_folder": str(self.path.absolute()), "host": platform.node()} if kind in PLACED else {}
        record = mapped({"kind": kind, "time": self.now(), **where, **fields}, _recordable)
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with self.lock:
            if self.file < 0:
                return
            size = os.fstat(self.file).st_size
            try:
                while line:
                    line = line[os.write(self.file, line) :]
            except OSError as error:
                os.ftruncate(self.file, size)
                raise unwritable(self.path / NAME, error) from None

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if new := {name: value for name, value in values.items() if (name, step) not in self.history.values}:
            self.record("metrics", step=step, values=new)

    def summary(self, values: dict[str, float]) -> None:
        """Record the results and costs of the finished run; one that then trains for longer records them again."""
        self.record("summary", values=values)

    def evaluation(self, step: int, counts: dict[str, Any]) -> None:
        if ("evaluation", step) not in self.history.values:
            self.record("evaluation", step=step, **counts)

    def artifact(self, path: Path, folder: str = "", *, digest: bool = False) -> None:
        """Record a file that belongs to the run; with its digest if no later step of the run overwrites it."""
        digests = {"sha256": sha256_of(path)} if digest else {}
        self.record("artifact", path=str(path.relative_to(self.path)), folder=folder, **digests)

    def tracked(self) -> dict[str, str]:
        """Return the store, the run's id in MLflow, and the key by which it is found there; empty before it has one."""
        state = read_state(self.path)
        return {name: state[name] for name in ("uri", "run_id", "key") if state.get(name)}

    def close(self, status: str, **fields: Any) -> None:
        """Record the end and release the folder, even if the record cannot be written."""
        try:
            self.record("end", status=status, **fields)
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock, so that other processes can work on the folder."""
        with self.lock:
            if self.file >= 0:
                os.close(self.file)
                self.file = -1
                (self.path / LOCK).unlink(missing_ok=True)
                os.close(self.claim)


def running(path: Path) -> bool:
    """Return whether another process works on this run; False if the file system has no locks."""
    return _locked(path) is True


def gone(path: Path) -> bool:
    """Return whether certainly no other process of this host works on this run: its lock is free, and locks work here."""
    return _locked(path) is False


def end_if_killed(path: Path) -> bool:
    """Record a run as KILLED if its process ended without recording it; return whether it did.

    A copy is not changed, because its original may still run.
    """
    history = read_history(path)
    if history.start is None or history.status is not None or not gone(path) or copied_from(path, history):
        return False
    if history.host != platform.node() and time.time() - (path / NAME).stat().st_mtime < SILENT_SECONDS:
        return False
    folder = RunFolder.reopen(path)
    resumable = {"resumable": "true"} if history.start.get("app") == "train" else {}
    folder.record("tags", time=history.time, values={"error": "its process was killed", **resumable})
    folder.close("KILLED", time=history.time)
    return True


def copied_from(path: Path, history: History) -> Path | None:
    """Return the folder that a run's folder was copied from, if it still exists; otherwise the folder counts as moved."""
    original = Path(history.folder) if history.folder else path
    with contextlib.suppress(OSError, ValueError):
        if not original.exists():  # a stranger may have added the record of such a folder
            original = Path((record_of(identity_of(path)) or {}).get("run_folder") or path)
        if not original.samefile(path) and _first_line(original) == _first_line(path):
            return original
    return None


def _first_line(path: Path) -> bytes:
    with open_to_read(path / NAME) as file:
        return file.readline(LONGEST)


def _locked(path: Path) -> bool | None:
    """Return whether another process has the folder's lock, without taking it; None if the file system has no locks."""
    asked = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_to_read(path / LOCK) as file:
            return bool(struct.unpack("hhqqi0q", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _uptime() -> float:
    """Return the seconds of a clock that is never set, and continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _claim(path: Path) -> int:
    """Open and lock a file; the system releases the lock when this process ends in any way, and child processes do not inherit it."""
    try:
        file = open_to_write(path / LOCK, os.O_RDWR, 0o644)
    except OSError as error:
        raise unwritable(path / LOCK, error) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UserError(f"{path}: another process works in this folder; wait until it has ended.") from None
    except OSError:
        pass  # a file system without locks
    return file


def _new_folder(runs: Path, name: str, setting: str) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace('/', '_').encode(errors='backslashreplace').decode()}"
    for number in range(1, 1000):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{setting}={runs}: cannot be written: {error.strerror}. Choose another folder by {setting}=.") from None
        return path
    raise UserError(f"{setting}={runs}: no free folder name for {stem}")


def _recordable(value: Any) -> Any:
    """Mask a text; replace nan and infinity by strings, because JSON has neither."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else masked(value) if isinstance(value, str) else value

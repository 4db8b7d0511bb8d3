"""The folder of one run: the truth about it, whatever becomes of a tracking server."""

import fcntl
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from lab.errors import UserError
from lab.files import remove_unfinished, unwritable, write_whole
from lab.records import NAME, History, read_history
from lab.tracking import read_state

LOCK = ".lock"


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `checkpoints/` and pictures.

    A line of `metrics.jsonl` is a record with a `kind`: start (app, parameters, tags), resume (step, changed settings), metrics (step,
    values), evaluation (step, counts), tags (values), artifact (path), end (status).

    A value of a step is recorded once: a continued run repeats what came after its checkpoint, and what is on record already stays.
    """

    def __init__(self, runs: Path, name: str, config: dict[str, Any], setting: str = "trainer.runs") -> None:
        self._open(_new_folder(runs, name, setting), name)
        self.write_config(config)

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Go on with a run that has ended or was killed; what was left half-written goes.

        Raises:
            UserError: another process is at it, or it cannot be written.
        """
        folder = cls.__new__(cls)
        folder._open(path, path.name)
        return folder

    def _open(self, path: Path, name: str) -> None:
        self.path, self.name, self.lock = path, name, threading.Lock()
        self.claim = _claim(path)
        self.history: History = read_history(path)
        try:
            self.file = os.open(path / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.ftruncate(self.file, self.history.size)
            remove_unfinished(path, path / "checkpoints")
        except OSError as error:
            raise unwritable(path / NAME, error) from None

    def write_config(self, config: dict[str, Any]) -> None:
        text = yaml.safe_dump(config, sort_keys=False)
        write_whole(self.path / "config.yaml", lambda file: file.write(text.encode()))

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record; it is readable by others at once.

        Raises:
            UserError: it cannot be written; the file ends with the record before.
        """
        line = json.dumps(_finite({"kind": kind, "time": time.time(), **fields}), allow_nan=False).encode() + b"\n"
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

    def evaluation(self, step: int, counts: dict[str, Any]) -> None:
        if ("evaluation", step) not in self.history.values:
            self.record("evaluation", step=step, **counts)

    def artifact(self, path: Path, folder: str = "") -> None:
        self.record("artifact", path=str(path.relative_to(self.path)), folder=folder)

    def tracked(self) -> dict[str, str]:
        """The store and the id that the run has in MLflow; empty before it has."""
        state = read_state(self.path)
        return {name: state[name] for name in ("uri", "run_id") if state.get(name)}

    def close(self, status: str) -> None:
        """Record the end and let others have the folder, the latter even if the former cannot be written."""
        try:
            self.record("end", status=status)
        finally:
            with self.lock:
                if self.file >= 0:
                    os.close(self.file)
                    self.file = -1
                    (self.path / LOCK).unlink(missing_ok=True)
                    os.close(self.claim)


def running(path: Path) -> bool:
    """Whether a process is at this run."""
    try:
        os.close(_claim(path))
    except UserError:
        return True
    (path / LOCK).unlink(missing_ok=True)
    return False


def _claim(path: Path) -> int:
    """An open file whose lock the system takes back when this process ends, however it does; child processes do not have it."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(path / LOCK, error) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UserError(f"{path}: another process is at this run.") from None
    except OSError:
        pass  # a file system without locks
    return file


def _new_folder(runs: Path, name: str, setting: str) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace('/', '_')}"
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


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they are written as strings."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

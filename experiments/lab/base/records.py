"""Read metrics.jsonl, the records of a run."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import IO, Any

from lab.base.errors import UserError
from lab.base.files import open_to_read

NAME = "metrics.jsonl"
LONGEST = 2**28  # bytes of a record


@dataclass
class History:
    """A run's history, from its records."""

    path: Path = Path()  # the run's folder
    start: dict[str, Any] | None = None
    status: str | None = None  # how its last process ended; None if that was killed, or still runs
    size: int = 0  # bytes of its complete lines; a half-written line may follow
    seconds: float = 0.0  # how long processes worked on the run, by their records
    values: set[tuple[str, int]] = field(default_factory=set)  # name and step of the recorded values
    last: dict[str, Any] = field(default_factory=dict)  # each metric's last value
    error: str = ""  # the last process's error
    time: float = 0.0  # time of the last record
    folder: str | None = None  # the run's folder in the last process
    host: str | None = None  # the host of that process
    digests: dict[str, str] = field(default_factory=dict)  # digests of files that its last process wrote

    @property
    def monitor(self) -> str:
        """Return the name of the metric whose best value is the run's score."""
        return self.start["tags"].get("monitor", "") if self.start else ""

    @property
    def goal(self) -> str:
        """Return max or min."""
        return self.start["tags"].get("monitor_goal", "max") if self.start else "max"

    @property
    def score(self) -> float | None:
        best = self.last.get(f"best_{self.monitor}")
        return None if best is None else float(best)

    @property
    def rank(self) -> float:
        """Return the score, with its sign changed if lower is better; a missing score and nan are the worst."""
        score = math.nan if self.score is None else self.score if self.goal == "max" else -self.score
        return -math.inf if math.isnan(score) else score

    def next_step(self, prefix: str) -> int:
        """Return the step after the last one of the values whose names have this prefix."""
        return max((step + 1 for name, step in self.values if name.startswith(prefix)), default=0)


def read_history(folder: Path) -> History:
    """Read a run's history from its folder.

    Raises:
        UserError: a line is damaged.
    """
    history = History(folder)
    before = 0.0
    for record, size in _records(folder / NAME):
        history.size += size
        kind, now = record["kind"], record["time"]
        if kind in ("start", "resume"):
            history.status, history.error, history.digests = None, "", {}
            before = now
        history.seconds += max(now - before, 0.0)
        before = history.time = now
        history.folder, history.host = record.get("run_folder", history.folder), record.get("host", history.host)
        if kind == "start":
            history.start = record
        elif kind == "metrics":
            history.values.update((name, record["step"]) for name in record["values"])
            history.last |= record["values"]
        elif kind == "summary":
            history.last |= record["values"]
        elif kind == "evaluation":
            history.values.add((kind, record["step"]))
        elif kind == "tags":
            history.error = record["values"].get("error", history.error)
        elif kind == "end":
            history.status = record["status"]
        elif kind == "artifact" and "sha256" in record:
            history.digests[record["path"]] = record["sha256"]
    return history


FIELDS: dict[str, dict[str, type]] = {
    "start": {"name": str, "params": dict, "tags": dict},
    "resume": {"tags": dict},
    "fork": {"tags": dict},
    "metrics": {"step": int, "values": dict},
    "evaluation": {"step": int},
    "summary": {"values": dict},
    "data": {"sets": list},
    "model": {"path": str, "step": int},
    "tags": {"values": dict},
    "artifact": {"path": str, "folder": str},
    "end": {"status": str},
}
"""What a record of each kind has at least."""


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line of metrics.jsonl; None if the line is damaged."""
    try:
        record = json.loads(line)
        fields: dict[str, Any] = {"kind": str, "time": (int, float)} | FIELDS.get(record["kind"], {})
        whole = all(isinstance(record[name], kind) for name, kind in fields.items()) and math.isfinite(record["time"])
        if record["kind"] in ("metrics", "summary"):
            [float(value) for value in record["values"].values()]  # nan and inf are strings
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    places = (record.get("run_folder"), record.get("host"))
    return record if whole and all(isinstance(each, (str, NoneType)) for each in places) else None


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's folder.

    Raises:
        UserError: a line is damaged.
    """
    return (record for record, _ in _records(folder / NAME))


def identity_of(folder: Path) -> bytes:
    """Return the line that makes a run itself, wherever its folder is: its first record, or the last that says it is a copy."""
    with open_to_read(folder / NAME) as file:
        found = file.readline(LONGEST)
        for line in _lines(file):
            if line.startswith(b'{"kind": "fork"'):
                found = line
    return found


def lines_of(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield a file's lines from an offset on; skip a last line without an end, because its process was killed while writing it."""
    with open_to_read(path) as file:
        file.seek(start)
        yield from takewhile(lambda line: line.endswith(b"\n"), _lines(file))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's lines; one that is longer than any record is cut off, so that it does not fill the memory."""
    return iter(partial(file.readline, LONGEST), b"")


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the records with their sizes."""
    for number, line in enumerate(lines_of(path) if path.is_file() else (), start=1):
        if (record := record_of(line)) is None:
            raise UserError(f"{path}, line {number}: is damaged: a record of a run is expected. Delete it to go on without it.")
        yield record, len(line)

"""Reading metrics.jsonl, the records of a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any

from lab.config.errors import UserError

NAME = "metrics.jsonl"


@dataclass
class History:
    """A run's history, from its records."""

    start: dict[str, Any] | None = None
    status: str | None = None  # as its last process ended; None if that was killed, or is at it
    size: int = 0  # bytes of its whole lines; what comes after them is half of one
    seconds: float = 0.0  # how long processes worked at it, as far as records tell
    values: set[tuple[str, int]] = field(default_factory=set)  # name and step of what is on record
    last: dict[str, Any] = field(default_factory=dict)  # each metric's last value
    error: str = ""  # of its last process
    time: float = 0.0  # of its last record
    folder: str | None = None  # where it was, as its last process said
    host: str | None = None  # on which that process ran
    digests: dict[str, str] = field(default_factory=dict)  # of files that are as its last process left them

    def next_step(self, prefix: str) -> int:
        """After the last one of the values whose names begin so."""
        return max((step + 1 for name, step in self.values if name.startswith(prefix)), default=0)


def read_history(folder: Path) -> History:
    """
    Raises:
        UserError: a line is damaged.
    """
    history = History()
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
    """Return the record that a line of metrics.jsonl holds; None where it is damaged."""
    try:
        record = json.loads(line)
        fields: dict[str, Any] = {"kind": str, "time": (int, float)} | FIELDS.get(record["kind"], {})
        whole = all(isinstance(record[name], kind) for name, kind in fields.items()) and isfinite(record["time"])
        if record["kind"] in ("metrics", "summary"):
            [float(value) for value in record["values"].values()]  # nan and inf are strings
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    places = (record.get("run_folder"), record.get("host"))
    return record if whole and all(isinstance(each, (str, NoneType)) for each in places) else None


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The records with their sizes; a last line without its end is none: its process was killed as it wrote."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if (record := record_of(line)) is None:
                raise UserError(f"{path}, line {number}: is damaged: a record of a run is expected. Delete it to go on without it.")
            yield record, len(line)

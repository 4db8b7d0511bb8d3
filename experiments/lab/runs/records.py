"""Reading metrics.jsonl, the records of a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
        UserError: a line is no record.
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


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The records with their sizes; a last line without its end is none: its process was killed as it wrote."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                record["kind"], record["time"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number}: is no record of a run.") from None
            yield record, len(line)

"""What a run folder says of its run: how it ended, what it reached."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BESIDE = ("name", "tracking", "resume")  # settings that change nothing of what a run computes; so does trainer.runs


@dataclass
class RunRecord:
    """status: FINISHED, FAILED or KILLED; None while it runs, and where it was cut off. score: of the task's metric, `monitor`, at its best."""

    folder: Path
    status: str | None = None
    monitor: str = ""
    score: float | None = None
    seconds: float | None = None
    error: str = ""

    @property
    def resumable(self) -> bool:
        return self.status in (None, "KILLED") and (self.folder / "checkpoints" / "last.pt").is_file()


def read_run(folder: Path) -> RunRecord:
    """Read the records of a run's `metrics.jsonl`; a line that was cut off is passed over."""
    run = RunRecord(folder)
    values: dict[str, Any] = {}
    times: list[float] = []
    with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            times.append(record["time"])
            if record["kind"] == "metrics":
                values |= record["values"]
            elif record["kind"] == "start":
                run.monitor = record["tags"].get("monitor", "")
            elif record["kind"] == "tags":
                run.error = record["values"].get("error", run.error)
            run.status = record["status"] if record["kind"] == "end" else None
    if run.status == "FINISHED":
        run.error = ""
    best = values.get(f"best/{run.monitor}")
    run.score = float(best) if best is not None else None
    run.seconds = float(values["run/seconds"]) if "run/seconds" in values else times[-1] - times[0] if times else None
    return run


def runs_of(sweep: Path, name: str, tree: dict[str, Any]) -> list[RunRecord]:
    """The runs in a sweep's folder that have the settings `tree`, the oldest first; `name` is part of their folders' names."""
    wanted = essence(tree)
    found = []
    for folder in sorted(sweep.glob(f"*-{name}*")):
        config = folder / "config.yaml"
        if (folder / "metrics.jsonl").is_file() and config.is_file() and essence(yaml.safe_load(config.read_text(encoding="utf-8"))) == wanted:
            found.append(read_run(folder))
    return found


def essence(tree: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run computes."""
    kept = {key: value for key, value in tree.items() if key not in BESIDE}
    kept["trainer"] = {key: value for key, value in tree["trainer"].items() if key != "runs"}
    return kept

"""The folder of one run: the truth about it, whatever becomes of a tracking server."""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from lab.errors import UserError


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `checkpoints/` and pictures.

    A line of `metrics.jsonl` is a record with a `kind`: start (parameters, tags), metrics (step, values), evaluation (its counts),
    artifact (path), end (status).
    """

    def __init__(self, runs: Path, name: str, config: dict[str, Any], setting: str = "trainer.runs") -> None:
        self.name = name
        self.path = _new_folder(runs, name, setting)
        (self.path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.lock = threading.Lock()
        self.file = (self.path / "metrics.jsonl").open("a", encoding="utf-8")

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record; it is readable by others at once."""
        line = json.dumps(_finite({"kind": kind, "time": time.time(), **fields}), allow_nan=False)
        with self.lock:
            if not self.file.closed:
                self.file.write(line + "\n")
                self.file.flush()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.record("metrics", step=step, values=values)

    def artifact(self, path: Path, folder: str = "") -> None:
        self.record("artifact", path=str(path.relative_to(self.path)), folder=folder)

    def close(self, status: str) -> None:
        self.record("end", status=status)
        with self.lock:
            self.file.close()


def _new_folder(runs: Path, name: str, setting: str) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name.replace('/', '_')}"
    for number in range(1, 1000):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{setting}={runs}: cannot be written: {error.strerror}") from None
        return path
    raise UserError(f"{setting}={runs}: no free folder name for {stem}")


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: they are written as strings."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

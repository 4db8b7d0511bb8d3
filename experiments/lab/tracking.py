"""MLflow, fed in the background from a run folder's metrics.jsonl: training never waits for it and never fails with it."""

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lab.files import write_whole
from lab.schema import TrackingConfig
from lab.settings import ROOT

STATE = "tracking.json"


def tracking_uri(config: TrackingConfig) -> str:
    """The setting, else MLFLOW_TRACKING_URI, else the SQLite file that `mlflow ui` opens in the repository's root."""
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{ROOT / 'mlflow.db'}"


def read_state(folder: Path) -> dict[str, Any]:
    """What has been sent of a run folder, and where: uri, experiment, run_id, offset; empty if nothing has."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    return {}


class Feeder(threading.Thread):
    """Sends the records of a run folder to an MLflow store, in order, each until it has arrived.

    What it has sent is kept in tracking.json, so that another Feeder can go on where this one ended.
    """

    def __init__(self, folder: Path, uri: str, experiment: str, patience: float, known: dict[str, str] | None = None) -> None:
        """known: uri and run_id that a checkpoint holds, in case that tracking.json is lost; what the run has is not added twice."""
        super().__init__(name="mlflow", daemon=True)
        self.folder, self.uri, self.experiment, self.patience = folder, uri, experiment, patience
        self.ended = threading.Event()
        self.error: str | None = None
        state: dict[str, Any] = read_state(folder)
        if state.get("uri") != uri:
            state = known if known and known.get("uri") == uri else {}
        self.offset: int = state.get("offset", 0)
        self.run_id: str | None = state.get("run_id")
        self.client: Any = None

    def close(self) -> str | None:
        """Wait until all has been sent, at most `patience` seconds; return what went wrong, if it did."""
        self.ended.set()
        self.join(self.patience + 5)
        if self.is_alive() and self.error is None:
            self.error = f"not finished within tracking.patience_seconds={self.patience:g}"
        return None if not self.is_alive() and self._all_sent() else self.error

    def end(self, status: str, error: str) -> None:
        """Tell the store how the run ended where its folder cannot be written any more; call after `close`."""
        with contextlib.suppress(Exception):
            if self.run_id is not None and not self.is_alive():
                self._tag(self._connected(), {"error": error})
                self._connected().set_terminated(self.run_id, status)

    def run(self) -> None:
        pause = 0.5
        deadline: float | None = None
        while True:
            ending = self.ended.is_set()
            if ending and deadline is None:
                deadline = time.monotonic() + self.patience
            try:
                sent = self._send_new()
                self.error, pause = None, 0.5
                if ending and not sent:
                    return
            except Exception as error:
                self.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                pause = min(pause * 2, 10.0)
            if deadline is not None and time.monotonic() + pause > deadline:
                return
            if not (ending and self.error is None):
                self.ended.wait(pause) if not ending else time.sleep(pause)

    def _all_sent(self) -> bool:
        return self.offset == (self.folder / "metrics.jsonl").stat().st_size

    def _send_new(self) -> bool:
        """Send what the file has gained; return whether there was anything."""
        with (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(self.offset)
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        pending: list[dict[str, Any]] = []
        passed = 0
        for line in lines:
            record = json.loads(line)
            if record["kind"] != "metrics":
                self._flush(pending, passed)
                pending, passed = [], 0
                self._send(record)
                self._advance(len(line))
            else:
                pending.append(record)
                passed += len(line)
                if len(pending) >= 50:
                    self._flush(pending, passed)
                    pending, passed = [], 0
        self._flush(pending, passed)
        return bool(lines)

    def _flush(self, records: list[dict[str, Any]], size: int) -> None:
        if not records:
            return
        from mlflow.entities import Metric

        metrics = [Metric(name, float(value), int(r["time"] * 1000), r["step"]) for r in records for name, value in r["values"].items()]
        client = self._connected()
        for start in range(0, len(metrics), 1000):
            client.log_batch(self.run_id, metrics=metrics[start : start + 1000])
        self._advance(size)

    def _send(self, record: dict[str, Any]) -> None:
        client = self._connected()
        if record["kind"] == "start":
            self._start(client, record)
        elif record["kind"] == "resume":
            client.update_run(self.run_id, status="RUNNING")
            for name in {"error", "resumable"} & set(client.get_run(self.run_id).data.tags):
                client.delete_tag(self.run_id, name)
            self._tag(client, record["tags"])
        elif record["kind"] == "tags":
            self._tag(client, record["values"])
        elif record["kind"] == "artifact":
            path = self.folder / record["path"]
            if path.exists():
                client.log_artifact(self.run_id, str(path), record["folder"] or None)
        elif record["kind"] == "end":
            client.log_artifact(self.run_id, str(self.folder / "metrics.jsonl"))
            client.set_terminated(self.run_id, record["status"], int(record["time"] * 1000))

    def _start(self, client: Any, record: dict[str, Any]) -> None:
        from mlflow.entities import Param

        if self.run_id is None:
            experiment = self._experiment_id(client)
            run = client.create_run(experiment, int(record["time"] * 1000), dict(record["tags"]), record["name"])
            self.run_id = run.info.run_id
            self._advance(0)
        params = [Param(name, value[:6000]) for name, value in record["params"].items()]
        for start in range(0, len(params), 100):
            client.log_batch(self.run_id, params=params[start : start + 100])
        self._tag(client, record["tags"])

    def _tag(self, client: Any, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _experiment_id(self, client: Any) -> str:
        with _lock_of(self.uri):
            found = client.get_experiment_by_name(self.experiment)
            if found is not None:
                return found.experiment_id
            database = _sqlite_file(self.uri)
            place = (database.parent / "mlartifacts" / self.experiment).as_uri() if database else None
            kind = {
                "mlflow.experimentKind": "custom_model_development"
            }  # MLflow's UI opens an experiment without it as one of language models
            try:
                return client.create_experiment(self.experiment, artifact_location=place, tags=kind)
            except Exception:
                if (found := client.get_experiment_by_name(self.experiment)) is not None:
                    return found.experiment_id
                raise

    def _connected(self) -> Any:
        if self.client is None:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
            if database := _sqlite_file(self.uri):
                database.parent.mkdir(parents=True, exist_ok=True)
                os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", str(database.parent / "mlartifacts"))
            from mlflow.tracking import MlflowClient

            for name in ("alembic", "mlflow"):
                logging.getLogger(name).setLevel(logging.WARNING)
            with _lock_of(self.uri):
                client = MlflowClient(tracking_uri=self.uri)
                client.search_experiments(max_results=1)
            self.client = client
        return self.client

    def _advance(self, size: int) -> None:
        self.offset += size
        state = {"uri": self.uri, "experiment": self.experiment, "run_id": self.run_id, "offset": self.offset}
        write_whole(self.folder / STATE, lambda file: file.write(json.dumps(state).encode()))


def _sqlite_file(uri: str) -> Path | None:
    return Path(unquote(uri.removeprefix("sqlite:///"))).absolute() if uri.startswith("sqlite:///") else None


@contextlib.contextmanager
def _lock_of(uri: str) -> Iterator[None]:
    """Only one process at a time makes or migrates an SQLite store: MLflow's migration fails when two start it at once."""
    database = _sqlite_file(uri)
    if database is None:
        yield
        return
    with database.with_name(f"{database.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

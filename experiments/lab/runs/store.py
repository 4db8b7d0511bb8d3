"""One run in an MLflow store. Every call here may be repeated: an answer can be lost after its request has arrived."""

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lab.runs.masks import masked

RUN_KEY = "lossforge.run_key"  # the tag that says which run folder a run is of
# what MLflow takes; the rest is cut or replaced, because a refused record would keep back all that follow it
PARAM_LENGTH, TAG_LENGTH, NAME_LENGTH = 6000, 5000, 250


class Store:
    """What is sent of one run folder.

    Sent again, metrics add nothing (an SQL store's primary key is key, step, time and value), params, tags and artifacts are
    overwritten by the same, and a run is found by its tag before one is created.
    """

    def __init__(self, uri: str, experiment: str, run_id: str | None = None) -> None:
        self.uri, self.experiment, self.run_id = uri, experiment, run_id
        self._client: Any = None

    def open_run(self, record: dict[str, Any], key: str) -> None:
        """Create the run of a `start` record, or find the one whose creation was never answered."""
        tags = _tags(record["tags"]) | {RUN_KEY: key}
        if self.run_id is None:
            experiment = self._experiment_id()
            if found := self._runs_of(key):
                self.run_id = found[0]
            else:
                run = self.client.create_run(experiment, int(record["time"] * 1000), tags, record["name"])
                self.run_id = run.info.run_id
        self._params({_name(name): value[:PARAM_LENGTH] for name, value in record["params"].items()})
        self.tags(tags)

    def reopen_run(self, tags: dict[str, str]) -> None:
        """Let the run of a folder that trains on be running again."""
        self.client.update_run(self.run_id, status="RUNNING")
        for name in {"error", "resumable"} & set(self.client.get_run(self.run_id).data.tags):
            self.client.delete_tag(self.run_id, name)
        self.tags(tags)

    def metrics(self, points: list[tuple[str, float, int, int]]) -> None:
        """Send (name, value, time in ms, step) of many metrics."""
        from mlflow.entities import Metric

        metrics = [Metric(_name(name), value, milliseconds, step) for name, value, milliseconds, step in points]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def tags(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(name, value) for name, value in _tags(values).items()]
        for start in range(0, len(tags), 100):
            self.client.log_batch(self.run_id, tags=tags[start : start + 100])

    def artifact(self, path: Path, folder: str = "") -> None:
        self.client.log_artifact(self.run_id, str(path), folder or None)

    def end(self, status: str, milliseconds: int, key: str) -> None:
        """Close the run, and delete the empty doubles that a server made after its answer was no longer waited for."""
        for double in self._runs_of(key):
            if double != self.run_id:
                self.client.delete_run(double)
        self.client.set_terminated(self.run_id, status, milliseconds)

    @property
    def client(self) -> Any:
        if self._client is None:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
            os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
            # MLflow's own repetitions would create a run twice, unseen by us; what fails is repeated by who calls
            os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
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
            self._client = client
        return self._client

    def _experiment_id(self) -> str:
        client = self.client
        with _lock_of(self.uri):
            found = client.get_experiment_by_name(self.experiment)
            if found is not None:
                return found.experiment_id
            database = _sqlite_file(self.uri)
            place = (database.parent / "mlartifacts" / self.experiment).as_uri() if database else None
            # MLflow's UI opens an experiment without it as one of language models
            kind = {"mlflow.experimentKind": "custom_model_development"}
            try:
                return client.create_experiment(self.experiment, artifact_location=place, tags=kind)
            except Exception:
                if (found := client.get_experiment_by_name(self.experiment)) is not None:
                    return found.experiment_id
                raise

    def _runs_of(self, key: str) -> list[str]:
        runs = self.client.search_runs([self._experiment_id()], f"tags.`{RUN_KEY}` = '{key}'")
        return [run.info.run_id for run in runs]

    def _params(self, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(name, value) for name, value in values.items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[start : start + 100])


def reason(error: BaseException, uri: str) -> str:
    """Say in one line what went wrong: what the system said, where a server was not reached, else the error itself."""
    for each in _within(error, set()):
        # the system's own errors, not the libraries' around them, and none about a file
        if isinstance(each, OSError) and type(each).__module__ in ("builtins", "socket", "http.client", "ssl") and each.filename is None:
            return f"{masked(uri)} does not answer: {each.strerror or each}"
    lines = masked(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _within(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """The error and all that it was made from."""
    seen.add(id(error))
    yield error
    for each in (error.__cause__, error.__context__, getattr(error, "reason", None), *error.args):
        if isinstance(each, BaseException) and id(each) not in seen:
            yield from _within(each, seen)


def _name(name: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", name)[:NAME_LENGTH]


def _tags(values: dict[str, str]) -> dict[str, str]:
    return {_name(name): str(value)[:TAG_LENGTH] for name, value in values.items()}


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

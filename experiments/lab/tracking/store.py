"""One run in an MLflow store. Every call here may be repeated: an answer can be lost after its request has arrived."""

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lab.runs.masks import masked
from lab.tracking.names import valid_name, valid_text
from lab.tracking.views import VIEW, Pages, experiment_tags, pages_of

RUN_KEY = "lossforge.run_key"  # the tag that says which run folder a run is of
NOTE = "mlflow.note.content"  # the tag that MLflow's UI shows as a description, in Markdown
RUN_PAGE = "{run}"  # in a description: how the address of the run's page begins
PARAM_LENGTH, TAG_LENGTH = 6000, 5000  # characters that MLflow takes; it refuses longer values
REFUSALS = (400, 413, 414, 422)  # HTTP's statuses of a request that will not do, however often it is sent
CONTEXT = "mlflow.data.context"
OF_MODEL = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")  # tags that a model has of its run


class RefusedError(Exception):
    """What a store does not take, and why; it is not sent again."""


class Store:
    """What is sent of one run folder. Names and texts go through `valid_name` and `valid_text` here, whatever sends them.

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
        from mlflow.entities import Param

        self.tags(tags)
        self._log(params=[Param(valid_name(name), valid_text(value, PARAM_LENGTH)) for name, value in record["params"].items()])

    def reopen_run(self, tags: dict[str, str]) -> None:
        """Let the run of a folder that trains on be running again."""
        self.client.update_run(self.run_id, status="RUNNING")
        for name in {"error", "resumable"} & set(self.client.get_run(self.run_id).data.tags):
            self.client.delete_tag(self.run_id, name)
        self.tags(tags)

    def metrics(self, points: list[tuple[str, float, int, int]]) -> None:
        """Send (name, value, time in ms, step) of many metrics."""
        from mlflow.entities import Metric

        self._log(metrics=[Metric(valid_name(name), value, milliseconds, step) for name, value, milliseconds, step in points])

    def summary(self, values: dict[str, float], milliseconds: int) -> None:
        """Send figures of the run as a whole, and say of the best ones which model and data they are of.

        MLflow draws bars of a metric whose last step is 0; of another step it would draw a line through one point.
        """
        from mlflow.entities import Metric

        model, held_out = self._best_model(), self._held_out()
        metrics = []
        for name, value in values.items():
            of: dict[str, Any] = {"model_id": model, "run_id": self.run_id, **held_out} if model and name.startswith("best_") else {}
            metrics.append(Metric(valid_name(name), float(value), milliseconds, 0, **of))
        self._log(metrics=metrics)

    def data(self, sets: list[dict[str, Any]]) -> None:
        """Send what the run reads, as `lab.tracking.datasets.data_sets` describes it."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for each in sets:
            source = {"uri": each["source"]}
            profile = {"num_rows": each["samples"], "num_classes": each["classes"]}
            data = Dataset(each["name"], each["digest"], "local", json.dumps(source), profile=json.dumps(profile))
            inputs.append(DatasetInput(data, [InputTag(CONTEXT, each["context"])]))
        self.client.log_inputs(self.run_id, inputs)

    def model(self, record: dict[str, Any], exported: Path, key: str) -> None:
        """Send the model of a `model` record, tie it to the run, and register it where the record names a registered model."""
        from mlflow.entities import LoggedModelOutput

        from lab.tracking.logged_model import write_model

        run = self.client.get_run(self.run_id)
        tag = f"{key}-{record['step']}"
        tags = {RUN_KEY: tag} | {name: run.data.tags[name] for name in OF_MODEL if name in run.data.tags}
        # of an answer that was lost there may be a double, which came later
        model, *doubles = self._models_of(run.info.experiment_id, tag) or [
            self.client.create_logged_model(run.info.experiment_id, record["name"], self.run_id, tags, record["params"], record["type"])
        ]
        for double in doubles:
            self.client.delete_logged_model(double.model_id)
        with tempfile.TemporaryDirectory() as place:
            of = {"run_id": self.run_id, "model_id": model.model_id, "location": model.artifact_location}
            write_model(exported, record, Path(place), **of)
            self.client.log_model_artifacts(model.model_id, place)
        outputs = run.outputs.model_outputs if run.outputs else []
        if model.model_id not in [output.model_id for output in outputs]:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, record["step"])])
        self.client.finalize_logged_model(model.model_id, "READY")
        if record.get("register"):
            self._register(record["register"], model)

    def _register(self, name: str, model: Any) -> None:
        """Make the model the newest version of a registered one, once."""
        with contextlib.suppress(Exception):  # it is there, or the next call says why not
            self.client.create_registered_model(name)
        versions = [each for each in self.client.search_model_versions(f"name = '{name}'") if each.source == model.artifact_location]
        if not versions:
            versions = [self.client.create_model_version(name, model.artifact_location, self.run_id, model_id=model.model_id)]
        known = [{"name": name, "version": str(version.version)} for version in versions]
        self.client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(known)})

    def _models_of(self, experiment: str, tag: str) -> list[Any]:
        """The logged models of a tag, the oldest first."""
        found = self.client.search_logged_models([experiment], f"tags.`{RUN_KEY}` = '{tag}'")
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))

    def _best_model(self) -> str | None:
        """The id of the run's last model."""
        outputs = self.client.get_run(self.run_id).outputs
        return max(outputs.model_outputs, key=lambda output: output.step).model_id if outputs and outputs.model_outputs else None

    def _held_out(self) -> dict[str, str]:
        """Name and digest of the data that the run's figures are of, as a metric has them."""
        inputs = self.client.get_run(self.run_id).inputs
        for each in inputs.dataset_inputs if inputs else []:
            if any(tag.key == CONTEXT and tag.value == "validation" for tag in each.tags):
                return {"dataset_name": each.dataset.name, "dataset_digest": each.dataset.digest}
        return {}

    def tags(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        if RUN_PAGE in values.get(NOTE, ""):
            experiment = self.client.get_run(self.run_id).info.experiment_id
            address = Pages().run(experiment, str(self.run_id)).partition("?")[0]
            values = values | {NOTE: values[NOTE].replace(RUN_PAGE, address)}
        self._log(tags=[RunTag(name, value) for name, value in _tags(values).items()])

    def artifact(self, path: Path, folder: str = "") -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repo import verify_artifact_path

        try:
            verify_artifact_path(folder or None)
        except MlflowException as error:  # to MLflow it is an internal error, as of a store that fails
            raise RefusedError(f"{path.name}: {error}") from None
        self.client.log_artifact(self.run_id, str(path), folder or None)

    def address(self) -> str | None:
        """Of the run's page in MLflow's UI; None before there is one."""
        if self.run_id is None:
            return None
        return pages_of(self.uri).run(self.client.get_run(self.run_id).info.experiment_id, self.run_id)

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
        """The experiment's id, which is made if it is not there; what the UI is to show of it is said once and never changed."""
        client = self.client
        with _lock_of(self.uri):
            if (found := client.get_experiment_by_name(self.experiment)) is None:
                database = _sqlite_file(self.uri)
                place = (database.parent / "mlartifacts" / self.experiment).as_uri() if database else None
                try:
                    client.create_experiment(self.experiment, artifact_location=place)
                except Exception:
                    if client.get_experiment_by_name(self.experiment) is None:
                        raise
                found = client.get_experiment_by_name(self.experiment)
            for name, value in experiment_tags(found.experiment_id).items():
                if name not in found.tags:
                    client.set_experiment_tag(found.experiment_id, name, value)
        return str(found.experiment_id)

    def view(self, key: str, state: dict[str, Any]) -> None:
        """Keep a view of the run's experiment, which `view_address` opens."""
        experiment = self.client.get_run(self.run_id).info.experiment_id
        self.client.set_experiment_tag(experiment, f"{VIEW}{key}", json.dumps(state))

    def _runs_of(self, key: str) -> list[str]:
        runs = self.client.search_runs([self._experiment_id()], f"tags.`{RUN_KEY}` = '{key}'")
        return [run.info.run_id for run in runs]

    def _log(self, **given: list[Any]) -> None:
        """Send metrics, params or tags in batches.

        Raises:
            RefusedError: the store refuses some; all others are there.
        """
        refused: list[str] = []
        for kind, entities in given.items():
            most = 1000 if kind == "metrics" else 100
            for start in range(0, len(entities), most):
                refused += self._log_batch(kind, entities[start : start + most])
        if refused:
            raise RefusedError("; ".join(refused))

    def _log_batch(self, kind: str, entities: list[Any]) -> list[str]:
        """Send a batch, and of one that is refused each half; return what is refused by itself, and why."""
        try:
            self.client.log_batch(self.run_id, **{kind: entities})
        except Exception as error:
            if not self.refuses(error):
                raise
            if len(entities) == 1:
                return [f"{kind[:-1]} {entities[0].key!r}: {reason(error, self.uri)}"]
            middle = len(entities) // 2
            return self._log_batch(kind, entities[:middle]) + self._log_batch(kind, entities[middle:])
        return []

    def refuses(self, error: Exception) -> bool:
        """Return whether a record failed for what is in it, and the store takes a tag at the same time.

        Python's own errors, but the system's, are of a record that is not as it should be, or of a server whose answer cannot be read.
        """
        from mlflow.exceptions import MlflowException

        if self.run_id is None:  # without a run nothing else could be sent
            return False
        if isinstance(error, RefusedError):
            return True
        answer = getattr(error, "response", None)
        status = error.get_http_status_code() if isinstance(error, MlflowException) else getattr(answer, "status_code", None)
        malformed = type(error).__module__ == "builtins" and not isinstance(error, (OSError, MemoryError))
        return (status in REFUSALS or malformed) and self.works()

    def works(self) -> bool:
        """Return whether the store takes a tag of the run, the one that it has."""
        with contextlib.suppress(Exception):
            key = self.client.get_run(self.run_id).data.tags[RUN_KEY]
            self.client.set_tag(self.run_id, RUN_KEY, key)
            return True
        return False


def reason(error: BaseException, uri: str) -> str:
    """Say in one line what went wrong: what the system said, where a server was not reached, else the error itself."""
    if isinstance(error, RefusedError):
        return str(error)
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


def _tags(values: dict[str, str]) -> dict[str, str]:
    return {valid_name(name): valid_text(value, TAG_LENGTH) for name, value in values.items()}


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

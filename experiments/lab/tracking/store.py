"""One run in an MLflow store. Every call here may be repeated, because an answer can be lost after its request was executed."""

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import UNFINISHED, link_whole, locked
from lab.base.formats import masked
from lab.base.paths import sqlite_file, sqlite_uri
from lab.tracking.logged_model import MODEL, write_model
from lab.tracking.store_paths import LOCK, SQLITES, leads_outside, outside, refuse_links_to_write
from lab.tracking.views import VIEW, Pages, experiment_tags, pages_of

LONGEST = 250
MARK = 6  # hexadecimal digits of the digest at the end of a changed name


def valid_name(name: str) -> str:
    """Return the name of a metric, param or tag in a form that MLflow accepts.

    A valid name is unchanged: letters, digits, `_-.: `, and parts between slashes, none of them empty, `.` or `..`. In any other name the
    rest is replaced and a digest of the name appended, so that two names stay different: `ap/a//b` becomes `ap/a/_/b-9f2c41`.
    """
    first, *rest = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = [re.sub(r"^\.\.", "__", first), *rest]  # MLflow refuses a name that begins with two dots
    cleaned = "/".join("_" * max(len(part), 1) if part in ("", ".", "..") else part for part in parts)
    if cleaned == name and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:MARK]
    return f"{cleaned[: LONGEST - MARK - 1]}-{digest}"


def valid_text(value: object, length: int) -> str:
    """Return a value of a param or tag, cut to a length, without characters that databases refuse: NUL and halves of surrogate pairs."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", str(value))[:length]


RUN_KEY = "lossforge.run_key"  # the tag that identifies a run's folder
NOTE = "mlflow.note.content"  # the tag that MLflow's UI shows as a description, in Markdown
RUN_PAGE = "{run}"  # in a description: a placeholder for the address of the run's page
EXPERIMENT = "{experiment}"  # in a description: a placeholder for the experiment's id
PARAM_LENGTH, TAG_LENGTH = 6000, 5000  # longest values that MLflow accepts, in characters
REFUSALS = (400, 403, 404, 405, 413, 414, 422, 501)
"""HTTP statuses of requests that always fail, where the store works: among them a missing right, and a path that an older server lacks."""
CONTEXT = "mlflow.data.context"
OF_MODEL = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")  # tags that a model copies from its run


class RefusedError(Exception):
    """A store refuses a record, for the reason in the message; it is not sent again."""


class AnswerError(Exception):
    """A store's answer lacks what was asked for, as one without content that a proxy gives with status 200; the request is sent again."""


class Store:
    """Send one run's records to a store. Names and texts always go through `valid_name` and `valid_text`.

    Sending again changes nothing: an equal metric is not added (an SQL store's primary key is key, step, time and value), params, tags and
    artifacts are overwritten by equal ones, and a run is searched by its tag before it is created.

    `artifacts_outside`: as the setting of this name.
    """

    def __init__(self, uri: str, experiment: str, run_id: str | None = None, *, artifacts_outside: bool = False) -> None:
        self.uri, self.experiment, self.run_id, self.artifacts_outside = uri, experiment, run_id, artifacts_outside
        self._client: Any = None
        self._place: str | None = None  # of the run's artifacts

    def open_run(self, record: dict[str, Any], key: str) -> None:
        """Create the run of a `start` record, or find the run whose creation was not answered."""
        tags = _tags(record["tags"])
        if self.run_id is None:
            experiment = self._experiment_id()
            if found := self._runs_of(key):
                self.run_id = found[0]
            else:
                run = self.client.create_run(experiment, int(record["time"] * 1000), tags | {RUN_KEY: key}, record["name"])
                self.run_id = _known("run", run.info.run_id)
        from mlflow.entities import Param

        self.client.set_tag(self.run_id, RUN_KEY, key)
        self.tags(tags)
        self._log(params=[Param(valid_name(name), valid_text(value, PARAM_LENGTH)) for name, value in record["params"].items()])

    def reopen_run(self, tags: dict[str, str]) -> None:
        """Set a continued run to RUNNING again."""
        self.client.update_run(self.run_id, status="RUNNING")
        for name in {"error", "resumable"} & set(self.client.get_run(self.run_id).data.tags):
            self.client.delete_tag(self.run_id, name)
        self.tags(tags)

    def metrics(self, points: list[tuple[str, float, int, int]]) -> None:
        """Send (name, value, time in ms, step) of many metrics."""
        from mlflow.entities import Metric

        self._log(metrics=[Metric(valid_name(name), value, milliseconds, step) for name, value, milliseconds, step in points])

    def summary(self, values: dict[str, float], milliseconds: int) -> None:
        """Send figures of the complete run, and link the best ones to their model and data.

        MLflow draws bars for a metric whose last step is 0; for another step it would draw a line through one point.
        """
        from mlflow.entities import Metric

        run = self.client.get_run(self.run_id)
        model, held_out = _best_model(run), _held_out(run)
        metrics = []
        for name, value in values.items():
            of: dict[str, Any] = {"model_id": model, "run_id": self.run_id, **held_out} if model and name.startswith("best_") else {}
            metrics.append(Metric(valid_name(name), float(value), milliseconds, 0, **of))
        self._log(metrics=metrics)

    def data(self, sets: list[dict[str, Any]]) -> None:
        """Send the run's data sets, as `lab.tracking.datasets.data_sets` describes them."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for each in sets:
            source = {"uri": each["source"]}
            profile = {"num_rows": each["samples"], "num_classes": each["classes"]}
            data = Dataset(each["name"], each["digest"], "local", json.dumps(source), profile=json.dumps(profile))
            inputs.append(DatasetInput(data, [InputTag(CONTEXT, each["context"])]))
        self.client.log_inputs(self.run_id, inputs)

    def model(self, record: dict[str, Any], exported: Path, key: str, registered: str | None) -> None:
        """Send the model of a `model` record, link it to the run, and make it a version of the registered model that the record names.

        registered: the only name that is taken; any other record's model is sent, and not registered.
        """
        from mlflow.entities import LoggedModelOutput

        run = self.client.get_run(self.run_id)
        tag = f"{key}-{record['step']}"
        tags = {RUN_KEY: tag} | {name: run.data.tags[name] for name in OF_MODEL if name in run.data.tags}
        # a lost answer may have left a duplicate, which is newer
        model, *duplicates = self._models_of(run.info.experiment_id, tag) or [
            self.client.create_logged_model(run.info.experiment_id, record["name"], self.run_id, tags, record["params"], record["type"])
        ]
        for duplicate in duplicates:
            self.client.delete_logged_model(duplicate.model_id)
        with tempfile.TemporaryDirectory() as place:
            of = {"run_id": self.run_id, "model_id": _known("model", model.model_id), "location": model.artifact_location}
            write_model(exported, record, Path(place), **of)
            names = [str(path.relative_to(place)) for path in Path(place).rglob("*")]
            files = self._files_at(model.artifact_location, names)
            files.log_artifacts(place)
            if folder := getattr(files, "artifact_dir", None):
                link_whole(exported, Path(folder, MODEL))
        outputs = run.outputs.model_outputs if run.outputs else []
        if model.model_id not in [output.model_id for output in outputs]:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, record["step"])])
        self.client.finalize_logged_model(model.model_id, "READY")
        if registered and record.get("register") == registered:
            self._register(registered, model)

    def _register(self, name: str, model: Any) -> None:
        """Make the model the newest version of a registered model, once."""
        with contextlib.suppress(Exception):  # it exists already, or the next call raises the reason
            self.client.create_registered_model(name)
        versions = [each for each in self.client.search_model_versions(f"name = '{name}'") if each.source == model.artifact_location]
        if not versions:
            versions = [self.client.create_model_version(name, model.artifact_location, self.run_id, model_id=model.model_id)]
        known = [{"name": name, "version": str(version.version)} for version in versions]
        self.client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(known)})

    def _models_of(self, experiment: str, tag: str) -> list[Any]:
        """Return the logged models of a tag, the oldest first."""
        found = self.client.search_logged_models([experiment], f"tags.`{RUN_KEY}` = '{tag}'")
        return sorted(found, key=lambda model: (model.creation_timestamp, model.model_id))

    def tags(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        if (note := values.get(NOTE, "")) and (RUN_PAGE in note or EXPERIMENT in note):
            experiment = self.client.get_run(self.run_id).info.experiment_id
            address = Pages().run(experiment, str(self.run_id)).partition("?")[0]
            values = values | {NOTE: note.replace(RUN_PAGE, address).replace(EXPERIMENT, experiment)}
        self._log(tags=[RunTag(name, value) for name, value in _tags(values).items()])

    def artifact(self, path: Path, folder: str = "", *, linked: bool = False) -> None:
        """Send a file; linked: whether a store on this file system may hold a link to it, because the file is never changed."""
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repo import verify_artifact_path

        try:
            verify_artifact_path(folder or None)
        except MlflowException as error:  # MLflow reports it as an internal error, like a failing store's
            raise RefusedError(f"{path.name}: {error}") from None
        self._place = self._place or self.client.get_run(self.run_id).info.artifact_uri
        files = self._files_at(self._place, [os.path.join(folder, path.name)])
        place = getattr(files, "artifact_dir", None)
        if not (linked and place and link_whole(path, Path(place, folder, path.name))):
            files.log_artifact(str(path), folder or None)

    def _files_at(self, location: str, names: Iterable[str]) -> Any:
        return files_at(self.uri, location, names, anywhere=self.artifacts_outside)

    def pages(self, view: str) -> tuple[str, str] | None:
        """Return the addresses in MLflow's UI of the run and of a view of its experiment's runs; None before the run exists there."""
        if self.run_id is None:
            return None
        pages, experiment = pages_of(self.uri), self.client.get_run(self.run_id).info.experiment_id
        return pages.run(experiment, self.run_id), pages.view(experiment, view)

    def end(self, status: str, milliseconds: int, key: str) -> None:
        """Close the run, and delete empty duplicates that a server created after we stopped waiting for its answer."""
        self.client.set_terminated(self.run_id, status, milliseconds)
        for duplicate in self._runs_of(key):
            data = self.client.get_run(duplicate).data
            if duplicate != self.run_id and not data.metrics and not data.params:
                self.client.delete_run(duplicate)

    @property
    def client(self) -> Any:
        if self._client is None:
            set_environment(self.uri, writes=True)
            if database := sqlite_file(self.uri):
                database.parent.mkdir(parents=True, exist_ok=True)
            with _lock_of(self.uri):
                if database and not database.exists():
                    # under another name first: if the process ends while MLflow makes it, MLflow could never open it again
                    draft = database.with_name(f"{UNFINISHED}{database.name}")
                    for ending in ("", *SQLITES):
                        draft.with_name(f"{draft.name}{ending}").unlink(missing_ok=True)
                    client_of(sqlite_uri(draft))
                    draft.replace(database)
                self._client = client_of(self.uri)
        return self._client

    def _experiment_id(self) -> str:
        """Return the experiment's id; create the experiment if it does not exist, with tags for the UI that are never changed later."""
        client = self.client
        with _lock_of(self.uri):
            if (found := client.get_experiment_by_name(self.experiment)) is None:
                database = sqlite_file(self.uri)
                place = (database.parent / "mlartifacts" / self.experiment).as_uri() if database else None
                try:
                    client.create_experiment(self.experiment, artifact_location=place)
                except Exception:
                    if client.get_experiment_by_name(self.experiment) is None:
                        raise
                found = client.get_experiment_by_name(self.experiment)
            number = _known("experiment", found and found.experiment_id)
            for name, value in experiment_tags(number).items():
                if name not in found.tags:
                    client.set_experiment_tag(number, name, value)
        return number

    def view(self, key: str, state: dict[str, Any]) -> None:
        """Store a view of the run's experiment, which `view_address` opens."""
        experiment = self.client.get_run(self.run_id).info.experiment_id
        self.client.set_experiment_tag(experiment, f"{VIEW}{key}", json.dumps(state))

    def _runs_of(self, key: str) -> list[str]:
        runs = self.client.search_runs([self._experiment_id()], f"tags.`{RUN_KEY}` = '{key}'")
        return [run.info.run_id for run in runs]

    def _log(self, **given: list[Any]) -> None:
        """Send metrics, params or tags in batches.

        Raises:
            RefusedError: the store refuses some; all the rest was stored.
        """
        refused: list[str] = []
        for kind, entities in given.items():
            most = 1000 if kind == "metrics" else 100
            for start in range(0, len(entities), most):
                refused += self._log_batch(kind, entities[start : start + most])
        if refused:
            raise RefusedError("; ".join(refused))

    def _log_batch(self, kind: str, entities: list[Any]) -> list[str]:
        """Send a batch, or each half of a refused batch; return the entities that are refused on their own, and why."""
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
        """Return whether a record failed because of its content, while the store accepts a tag.

        Python's errors, except the system's, mean a malformed record, or a server whose answer cannot be read.
        """
        from mlflow.exceptions import MlflowException

        if self.run_id is None:  # without a run the store cannot be tested by a tag
            return False
        if isinstance(error, RefusedError):
            return True
        answer = getattr(error, "response", None)
        status = error.get_http_status_code() if isinstance(error, MlflowException) else getattr(answer, "status_code", None)
        malformed = type(error).__module__ == "builtins" and not isinstance(error, (OSError, MemoryError))
        return (status in REFUSALS or malformed) and self.works()

    def works(self) -> bool:
        """Return whether the store accepts a tag of the run, with the value that it has."""
        with contextlib.suppress(Exception):
            key = self.client.get_run(self.run_id).data.tags[RUN_KEY]
            self.client.set_tag(self.run_id, RUN_KEY, key)
            return True
        return False


def _best_model(run: Any) -> str | None:
    """Return the id of a run's last model."""
    outputs = run.outputs
    return max(outputs.model_outputs, key=lambda output: output.step).model_id if outputs and outputs.model_outputs else None


def _held_out(run: Any) -> dict[str, str]:
    """Return name and digest of a run's held-out data, as a metric records them."""
    for each in run.inputs.dataset_inputs if run.inputs else []:
        if any(tag.key == CONTEXT and tag.value == "validation" for tag in each.tags):
            return {"dataset_name": each.dataset.name, "dataset_digest": each.dataset.digest}
    return {}


def set_environment(uri: str, *, writes: bool = False) -> None:
    """Set what MLflow reads of the environment, where it is not so yet; `writes`: for a store that is written to.

    Call this before another thread needs MLflow: C code that reads the environment while it changes may end the process.
    """
    wanted = dict.fromkeys(("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"), "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    if writes:
        # MLflow's own retries could create a run twice without our knowledge; callers retry instead
        wanted["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        if database := sqlite_file(uri):
            os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", (database.parent / "mlartifacts").as_uri())
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def client_of(uri: str) -> Any:
    """Return MLflow's client of a store that has answered a first request; raise as `refuse_links_to_write`."""
    set_environment(uri)
    if database := sqlite_file(uri):
        refuse_links_to_write(database)
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs the errors that it raises
    # by the driver's name, because MLflow makes a folder `a%25b` for an address `sqlite:///a%25b/mlflow.db`, whose folder is `a%b`
    client = MlflowClient(tracking_uri=uri.replace("sqlite:///", "sqlite+pysqlite:///", 1))
    client.search_experiments(max_results=1)
    return client


def open_client(uri: str) -> Any:
    """Return MLflow's client to read a store of runs.

    Raises:
        UserError: the store does not exist, or cannot be read.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    if (database := sqlite_file(uri)) and not database.is_file():
        raise UserError(f"tracking.uri={uri}: {database} does not exist; train first, or name the store of your runs.")
    try:
        return client_of(uri)
    except Exception as error:  # each kind of store fails in its own ways
        raise UserError(f"tracking.uri={uri}: cannot be read: {reason(error, uri)}") from None


def files_at(uri: str, location: str, names: Iterable[str], *, anywhere: bool) -> Any:
    """Return MLflow's access to files at a location, which a store names.

    It is opened by the location that was checked, not by a run's id, because an SQLite file can change a location by triggers.

    Args:
        uri: the store's address.
        location: the folder of the files.
        names: the files that will be written or read, relative to it.
        anywhere: whether they may be outside of the store's folder.

    Raises:
        RefusedError: they are.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if said := outside(uri, location, anywhere):
        raise RefusedError(said)
    found = get_artifact_repository(location, tracking_uri=uri)
    if (place := getattr(found, "artifact_dir", None)) and not anywhere and (said := leads_outside(uri, place, names)):
        raise RefusedError(said)
    return found


def reason(error: BaseException, uri: str) -> str:
    """Return in one line what went wrong: the system's message if a server was not reached, else the error."""
    if isinstance(error, (AnswerError, RefusedError, UserError)):
        return str(error)
    for each in _within(error, set()):
        # errors of the system, not of libraries around them, and not about a file
        if isinstance(each, OSError) and type(each).__module__ in ("builtins", "socket", "http.client", "ssl") and each.filename is None:
            return f"{masked(uri)} does not answer: {each.strerror or each}"
    lines = masked(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _within(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """Yield the error, and all errors that caused it."""
    seen.add(id(error))
    yield error
    for each in (error.__cause__, error.__context__, getattr(error, "reason", None), *error.args):
        if isinstance(each, BaseException) and id(each) not in seen:
            yield from _within(each, seen)


def _known(what: str, number: str | None) -> str:
    """Return an id that a store answered with; raise AnswerError if it is empty."""
    if not number:
        raise AnswerError(f"the store's answer has no id of the {what}; a proxy may have given it")
    return str(number)


def _tags(values: dict[str, str]) -> dict[str, str]:
    """Return a record's tags as MLflow takes them, without the one by which a run is found and deleted."""
    return {valid_name(name): valid_text(value, TAG_LENGTH) for name, value in values.items() if valid_name(name) != RUN_KEY}


@contextlib.contextmanager
def _lock_of(uri: str) -> Iterator[None]:
    """Let only one process at a time create or migrate an SQLite store, because MLflow's migration fails if two start it."""
    database = sqlite_file(uri)
    if database is None:
        yield
        return
    with locked(database.with_name(f"{database.name}{LOCK}")):
        yield

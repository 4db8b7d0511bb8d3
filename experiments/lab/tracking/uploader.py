"""Send a run folder's metrics.jsonl to MLflow in the background: training never waits for it and never fails with it."""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import entry_points
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lab.base.errors import UserError
from lab.base.files import read_text, try_lock, write_text
from lab.base.formats import MASK, markdown_code, masked, visible
from lab.base.paths import sqlite_uri
from lab.base.process import NOTHING, Background
from lab.base.records import NAME, identity_of, lines_of
from lab.config.schema import TrackingConfig
from lab.config.user import VARIABLES, chosen_uri, has_key, is_sealed, seal
from lab.tracking.store import NOTE, RefusedError, Store, reason, set_environment, valid_name
from lab.tracking.store_paths import refuse_foreign
from lab.tracking.views import RESULTS

STATE, LOCK = "tracking.json", "tracking.lock"
STATE_KINDS = {"uri": str, "experiment": str, "run_id": str, "offset": int, "key": str, "aside": list, "later": list, "seal": str}
SEALED = ("uri", "run_id", "key")
AFTERWARDS = ("artifact", "data", "model", "view")  # kinds of records that may arrive after those that follow them
TAGGED = ("start", "resume", "fork", "tags")  # kinds of records that hold tags
VARIABLE = VARIABLES["tracking_uri"]
SILENT_SECONDS = 2.0  # of waiting at the end, before a message is printed
BATCH = 50  # records whose metrics go in one request
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds between two looks at the file, and between two tries of a store that fails
WRITTEN_ONCE = "checkpoints/"  # the folder of files that are replaced, and never changed
RECORDS = {"kind": "artifact", "path": NAME, "folder": ""}  # sent at the run's end
ASIDE = 20  # how many reasons of refused records are kept
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")  # of MLflow's own stores
SLOWEST_ANSWER = 120.0  # seconds until a request, or making a new SQLite store on a busy machine, counts as hanging
Point = tuple[str, float, int, int]  # name, value, time in ms, step


class BusyError(Exception):
    """Another process is sending this run folder."""


class EarlyError(Exception):
    """The store does not have the run of the sweep yet, under which a job's run is nested."""


def tracking_uri(config: TrackingConfig, recorded: str | None = None) -> str:
    """Return the store's address, with its credentials.

    Raises:
        UserError: MLflow has no such stores, or as `completed`.
    """
    uri = completed(chosen_uri(config.uri, recorded))
    said, scheme = f"tracking.uri={masked(uri)}", uri.partition(":")[0].partition("+")[0].lower()
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise UserError(f"{said}: has no scheme; for a server http://{uri} is expected.")
    if scheme == "file" or (":" not in uri and uri != "databricks"):
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
            return uri
        folder = Path(unquote(urlsplit(uri).path))
        raise UserError(
            f"{said}: MLflow keeps no more stores in folders; a database is expected, such as {sqlite_uri(folder / 'mlflow.db')}. "
            "`mlflow migrate-filestore` makes one of a folder; MLFLOW_ALLOW_FILE_STORE=true goes on with the folder."
        )
    if not (scheme in SCHEMES or entry_points(group="mlflow.tracking_store", name=scheme)) or re.match("sqlite:(?!//)|https?:(?!//.)", uri):
        raise UserError(f"{said}: http://, https://, sqlite:///, postgresql://, mysql://, mssql:// or databricks is expected.")
    return uri


def checked_uri(config: TrackingConfig, recorded: str | None = None) -> str:
    """Return the store's address, as `tracking_uri`, if a run may be sent there.

    Raises:
        UserError: as `completed` and `refuse_foreign`.
    """
    uri = tracking_uri(config, recorded)
    refuse_foreign(uri, config)
    return uri


def completed(uri: str) -> str:
    """Replace the masked credentials of `uri` by those of the same address in the environment.

    Raises:
        UserError: the environment does not have this address.
    """
    if MASK not in uri:
        return uri
    given = os.environ.get(VARIABLE, "")
    if masked(given) == uri:
        return given
    now = f"it holds {masked(given)}" if given else "it is not set"
    raise UserError(
        f"tracking.uri={uri}: its credentials are in no file. Set {VARIABLE} to the whole address ({now}), or give it as tracking.uri=."
    )


def print_now(text: str) -> None:
    print(visible(text), flush=True)


class MlflowUploader(Background):
    """Send the records of a run folder to an MLflow store, in order, each until it is stored.

    tracking.json holds how far it has come, so that another uploader can continue there; a lock on tracking.lock allows one at a time.
    A record that a working store refuses is set aside and named, and the next ones are sent. Files, models, data and views at which a
    working store fails are sent again after the next records, so that a broken place for artifacts keeps no metrics back.

    Args:
        folder: the run folder.
        uri: the store's address.
        tracking: the experiment, the name in the model registry, and the seconds for which to retry after the run's end, counted from the
            store's first failure.
        own: whether this user made the run. A stranger's becomes a run of its own in the store, without models or views.
        say: prints messages for the user, each once.

    Attributes:
        place: the store's address without credentials, for files and messages.
        complete: whether all has been sent.
        aside: the refused records with reasons; they stay in the run's folder.
        later: the offsets of records that are sent again after the others.
        interrupted: whether a signal ended the wait for the rest.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        tracking: TrackingConfig,
        *,
        own: bool = True,
        say: Callable[[str], None] = print_now,
    ) -> None:
        super().__init__("mlflow")
        # MLflow imports pandas, polars where it is installed, whose import changes the environment, and IPython at its first request
        self.modules = ("pandas", "polars", *(["IPython"] if uri.startswith("http") else []))
        self.folder, self.uri, self.experiment, self.patience, self.say = folder, uri, tracking.experiment, tracking.patience_seconds, say
        self.place, self.own, self.registered = masked(uri), own, tracking.register
        self.ended, self.over = threading.Event(), threading.Event()  # nothing more will be written; nothing more will be sent
        self.complete = self.interrupted = False
        self.key = ""
        self.error: str | None = None
        self.told: set[str] = set()
        self.aside: list[str] = []
        self.later: list[int] = []
        self.store = Store(uri, tracking.experiment, artifacts_outside=tracking.artifacts_outside)
        self.writing, self.left = threading.Lock(), False
        self.offset = 0
        self.failures = 0  # in a row
        self.failing_since = 0.0
        self.progress = 0.0
        self.lock: Any = None

    @property
    def run_id(self) -> str | None:
        return self.store.run_id

    def start(self) -> None:
        set_environment(self.uri, writes=True)
        super().start()

    def close(self, waiting: AbstractContextManager[None] = NOTHING) -> str | None:
        """Wait until all has been sent, or nothing more for `patience` seconds; return what went wrong and what to do, else None.

        A signal ends the wait. waiting: what holds while this waits: there a signal must not be ignored.
        """
        closed = time.monotonic()
        self.ended.set()
        try:
            with waiting:
                if not self._over_within(SILENT_SECONDS):
                    why = f" ({self.error})" if self.error else ""
                    rest = "Ctrl-C ends the wait, and `uv run experiments/sync.py` sends the rest later"
                    self.say(f"waiting for MLflow at {self.place}{why}; {rest}")
                while not self._over_within(0.2) and time.monotonic() < max(closed, self.progress) + self.patience + SLOWEST_ANSWER:
                    pass
        except KeyboardInterrupt:
            self.interrupted = not self.complete
            with self.writing:  # the process may end soon, and must not do so while the thread writes a file
                self.left = True
        if self.complete:
            return None
        self.error = self.error or ("interrupted while it did not answer" if self.interrupted else "it does not answer")
        return f"{self.error}\nsend what is missing: uv run experiments/sync.py {os.path.relpath(self.folder)}"

    def _over_within(self, seconds: float) -> bool:
        """Return whether all sending is over within so many seconds. A signal may raise here: within `Event.wait` it would break a lock."""
        deadline = time.monotonic() + seconds
        while not self.over.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.over.is_set()

    def closed(self, waiting: AbstractContextManager[None] = NOTHING) -> str:
        """Close, and return a line for a table: where the run is, or why it is not complete. waiting: as of `close`."""
        problem = self.close(waiting)
        return f"incomplete: {problem}" if problem else f"{self.place}, run {self.run_id}{not_taken(self.aside)}"

    def pages(self, view: str = RESULTS) -> tuple[str, str] | None:
        """Return the addresses in MLflow's UI of the run and of a view of its experiment's runs, if all has been sent."""
        if self.complete:
            with contextlib.suppress(Exception):
                return self.store.pages(view)
        return None

    def end(self, status: str, error: str, seconds: float) -> None:
        """Send the run's end directly, if its folder cannot be written any more; call this after `close`."""
        with contextlib.suppress(Exception):
            if self.run_id is not None and self.over.is_set():
                self.store.tags({"error": masked(error)})
                self.store.end(status, int(seconds * 1000), self.key)

    def run(self) -> None:
        try:
            self._send_all()
        finally:
            if self.lock is not None:
                self.lock.close()  # this process may go on, and sync.py send the rest meanwhile
            self.over.set()

    def _send_all(self) -> None:
        while True:
            ending = self.ended.is_set()
            try:
                self.take()
                if not (sent := self._send_new()):
                    self._send_later()
                if not self.later:
                    if self.error and self.told:
                        self._tell("works again", "all that it missed has been sent")
                    self.error = None
                if ending and not sent:
                    self.complete = True
                    return
                pause = 0.0 if ending else FIRST_PAUSE
            except Exception as error:
                self._fails(error)
                pause = min(FIRST_PAUSE * 1.5**self.failures, LONGEST_PAUSE)
                if ending and time.monotonic() + pause > self.failing_since + self.patience:
                    return
            if ending:
                time.sleep(pause)
            else:
                self.ended.wait(pause)

    def take(self) -> None:
        """Take the folder's lock, and read how far it has been sent; do nothing if this was done before.

        Raises:
            BusyError: another process has the lock.
        """
        if self.lock is not None:
            return
        if (file := try_lock(self.folder / LOCK, needed=False)) is None:  # without locks both send: sending a record twice adds nothing
            raise BusyError(f"{self.folder} is being sent by another process")
        self.key = key_in_store(self.folder, own=self.own)
        state = read_state(self.folder)
        if not (is_own(state, self.folder) and masked(str(state.get("uri"))) == self.place and state.get("key") == self.key):
            state = {}  # the run is searched for by its key
        self.offset, self.store.run_id = state.get("offset", 0), state.get("run_id") or None
        self.aside, self.later = (
            list(state.get("aside", [])),
            [each for each in state.get("later", []) if type(each) is int and 0 <= each < self.offset],
        )
        self._advance(0)  # tells a later sync.py the store and experiment of the run
        self.lock = file

    def _fails(self, error: Exception) -> None:
        self.error = reason(error, self.uri)
        if self.failures == 0:
            self.failing_since = time.monotonic()
        self.failures += 1
        if not isinstance(error, (BusyError, EarlyError)) and not self.ended.is_set():
            self._tell("fails", f"{self.error}; the run goes on, and what is missing is sent as soon as that works")

    def _tell(self, what: str, more: str) -> None:
        """Print a message the first time only."""
        if what not in self.told:
            self.told.add(what)
            self.say(f"MLflow {what}: {more}")

    def _send_new(self) -> bool:
        """Send the records that were added to the file, metrics in batches; return whether there were any."""
        found = False
        for are_metrics, group in groupby(records_from(self.folder, self.offset), lambda pair: pair[0].get("kind") == "metrics"):
            while batch := list(islice(group, BATCH if are_metrics else 1)):
                found = True
                points: list[Point] = []
                for record, _ in batch:
                    self._try(record, partial(_add_points, points, record) if are_metrics else partial(self._send, record), may_wait=True)
                if points:
                    self._try({"kind": "metrics"}, partial(self.store.metrics, points))
                if self.later and batch[0][0].get("kind") == "summary":
                    self._leave_for_later()
                self._advance(sum(size for _, size in batch))
        return found

    def _leave_for_later(self) -> None:
        if self.offset not in self.later:  # a record that follows may fail, and this one come again
            self.later.append(self.offset)

    def _send_later(self) -> None:
        """Send again what the store failed to take, and a summary after that, because it names the model; raise the first error."""
        failed: Exception | None = None
        for offset in sorted(self.later):
            record, _ = next(records_from(self.folder, offset), ({}, 0))
            if failed and record.get("kind") == "summary":
                continue
            record = RECORDS if record.get("kind") == "end" else record
            try:
                self._try(record, partial(self._send, record))
            except Exception as error:
                failed = failed or error
                if not self.store.works():
                    break
            else:
                self.later.remove(offset)
                self._advance(0)
        if failed:
            raise failed

    def _try(self, record: dict[str, Any], send: Callable[[], None], *, may_wait: bool = False) -> None:
        """Send a record; set it aside if the store refuses it.

        may_wait: leave it for later if the store works, and fails at this kind of record alone.
        """
        try:
            send()
        except Exception as error:
            if not self.store.refuses(error):
                if not (may_wait and record.get("kind") in AFTERWARDS and self.store.works()):
                    raise
                self._leave_for_later()
                self._fails(error)
                return
            named = record.get("name", record.get("path"))
            what = f"a record of kind {record.get('kind')!r}{f' ({named})' if named else ''}: {reason(error, self.uri)}"
            if what not in self.aside and len(self.aside) < ASIDE:
                self.aside.append(what)
                self.say(f"MLflow does not take {what}; the rest is sent, and the run's folder has all")

    def _send(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if not self.own:
            record = record | {each: _harmless(record[each]) for each in ("tags", "values") if kind in TAGGED and each in record}
        if kind == "start":
            nesting = {} if self.run_id else self._nesting()
            self.store.open_run(record | {"tags": record["tags"] | nesting}, self.key)
            self._advance(0)
        elif kind == "resume":
            self.store.reopen_run(record["tags"])
        elif kind in ("tags", "fork"):
            self.store.tags(record["values" if kind == "tags" else "tags"])
        elif kind == "data":
            self.store.data(record["sets"])
        elif kind == "summary":
            self.store.summary(record["values"], int(record["time"] * 1000))
        elif kind in ("model", "view") and not self.own:
            raise RefusedError(
                "not sent of a run that you did not make: a model runs code when it is loaded, and views are the experiment's"
            )
        elif kind == "model":
            if path := self._file(record):
                self.store.model(record, path, self.key, self.registered)
        elif kind == "view":
            self.store.view(record["key"], record["state"])
        elif kind == "artifact":
            if path := self._file(record):
                self.store.artifact(path, record["folder"], linked=self.own and record["path"].startswith(WRITTEN_ONCE))
        elif kind == "end":
            self._try(RECORDS, partial(self._send, RECORDS), may_wait=True)
            self.store.end(record["status"], int(record["time"] * 1000), self.key)

    def _file(self, record: dict[str, Any]) -> Path | None:
        """Return the file that a record names; None if it no longer exists.

        Raises:
            RefusedError: it is outside of the run's folder (a record must not send other files of this machine), or cannot be read.
        """
        path = self.folder / record["path"]
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise RefusedError(f"{record['path']} is not in the run's folder")
        if path.exists() and not (path.is_file() and os.access(path, os.R_OK)):
            raise RefusedError(f"{record['path']} is not a file that can be read")
        return path if path.exists() else None

    def _nesting(self) -> dict[str, str]:
        """Return tags that nest the run of a sweep's job under the sweep's own run, which must exist already."""
        sweep = self.folder.absolute().parent
        if not (sweep / "sweep.yaml").is_file():
            return {}
        parent = read_state(sweep)
        if parent.get("uri") != self.place or not parent.get("run_id") or not is_own(parent, sweep):
            if not self.own:
                return {}
            raise EarlyError(f"the run of {sweep.name}, to be nested under, is not there yet")
        return {"mlflow.parentRunId": parent["run_id"], "sweep": sweep.name}

    def _advance(self, size: int) -> None:
        self.offset += size
        self.progress, self.failures = time.monotonic(), 0
        state: dict[str, Any] = {"uri": self.place, "experiment": self.experiment, "run_id": self.run_id, "offset": self.offset}
        state |= {"key": self.key} | {name: value for name, value in (("aside", self.aside), ("later", self.later)) if value}
        state["seal"] = seal(self.folder, *(state[name] for name in SEALED))
        with self.writing:
            if self.left:
                raise SystemExit  # it ends the thread
            write_text(self.folder / STATE, json.dumps(state))


def _harmless(tags: dict[str, str]) -> dict[str, str]:
    """Return a stranger's tags without those that MLflow acts on, such as the run under which one is nested.

    MLflow shows the description as Markdown, whose pictures a browser fetches from their address; so it becomes a block of code.
    """
    kept = {name: value for name, value in tags.items() if not valid_name(name).startswith("mlflow.")}
    return kept | ({NOTE: markdown_code(str(tags[NOTE]), "")} if NOTE in tags else {})


def not_taken(aside: list[str]) -> str:
    """Return a note of the refused records, to append to a message; empty if there are none."""
    return f"; not taken there, but in the run's folder: {'; '.join(aside)}" if aside else ""


def read_state(folder: Path) -> dict[str, Any]:
    """Return what has been sent of a run folder, and where: uri, experiment, run_id, offset, key, aside, later, seal; empty if nothing was.

    uri has no credentials; for key see `run_key`, for seal `is_own`.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        state = json.loads(read_text(folder / STATE))
        return {name: state[name] for name, kind in STATE_KINDS.items() if isinstance(state, dict) and isinstance(state.get(name), kind)}
    return {}


def run_key(folder: Path) -> str:
    """Return a run's identity, which does not depend on its path: a digest of its first record, or of the last that says it is a copy.

    The first record holds the time, host, command and settings.
    """
    return hashlib.sha256(identity_of(folder)).hexdigest()[:32]


def is_own(state: dict[str, Any], folder: Path) -> bool:
    """Return whether this user sent the folder: where to and as which run, says a seal that nobody else can make."""
    return is_sealed(state.get("seal"), folder, *(state.get(name) for name in SEALED))


def key_in_store(folder: Path, *, own: bool) -> str:
    """Return the key by which a store finds the run; a stranger's is none that their file can choose, such as that of a run of yours."""
    key = run_key(folder)
    return key if own or not has_key() else hashlib.sha256(f"{key} {seal(folder, key)}".encode()).hexdigest()[:32]


def is_sent(folder: Path, uri: str, *, own: bool = True) -> bool:
    """Return whether the store has all records of the folder."""
    state = read_state(folder)
    where = masked(str(state.get("uri"))) == masked(uri) and state.get("key") == key_in_store(folder, own=own)
    if not where or not is_own(state, folder) or "offset" not in state or state.get("later"):
        return False
    return not any(True for _ in records_from(folder, state["offset"]))


def _add_points(points: list[Point], record: dict[str, Any]) -> None:
    """Add the metrics of a record, either all or none.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError or ValueError: the record is malformed.
    """
    milliseconds, step = int(record["time"] * 1000), int(record["step"])
    if max(abs(milliseconds), abs(step)) >= 2**63:
        raise ValueError(f"step {step} and time {milliseconds} ms: 64 bits are expected")
    points += [(name, float(value), milliseconds, step) for name, value in record["values"].items()]


def records_from(folder: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (record, bytes) of each complete line that the file has now, from an offset on; an empty record for a damaged line."""
    path = folder / "metrics.jsonl"
    left = path.stat().st_size - start
    for line in lines_of(path, start):
        if left <= 0:
            return
        left -= len(line)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = {}
        yield (record if isinstance(record, dict) else {}), len(line)

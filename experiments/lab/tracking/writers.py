"""Send a run folder's metrics.jsonl to TensorBoard and Weights & Biases in the background: training never waits for them."""

import importlib.util
import json
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import read_text, write_text
from lab.base.formats import markdown_text, masked
from lab.base.process import NOTHING, Background
from lab.config.schema import TrackingConfig
from lab.tracking.uploader import print_now, records_from, run_key

MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # errors of a malformed record
PAUSE = 2.0  # seconds between two looks at the file
WANDB_SERVER = "https://api.wandb.ai"


class Writer:
    """A place that gets a run's figures beside its folder; a method whose figures it has no use for does nothing.

    place: where to find the run, for the final table.
    """

    place: str

    def scalars(self, values: dict[str, float], step: int, now: float) -> None:
        """Write points of the run's curves."""

    def summary(self, values: dict[str, float], step: int, now: float) -> None:
        """Write figures of the complete run."""

    def flush(self) -> None:
        """Save all that was written, so that it outlives this process."""

    def close(self, status: str) -> None:
        """Write how the run ended; a run that goes on is written to again."""


class TensorBoard(Writer):
    """Write an event file in the run's folder: scalars, the settings as text, and as hyper-parameters beside the best figures."""

    def __init__(self, folder: Path, start: dict[str, Any], project: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        goes_on, self.params = (folder / "tensorboard").exists(), start["params"]
        self.events = SummaryWriter(str(folder / "tensorboard"))
        if not goes_on:
            lines = [f"| {markdown_text(name)} | {markdown_text(str(value))} |" for name, value in self.params.items()]
            self.events.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]), 0, start.get("time"))
        self.best: dict[str, float] = {}
        self.place = f"tensorboard --logdir {os.path.relpath(folder.parent)}"

    def scalars(self, values: dict[str, float], step: int, now: float) -> None:
        for name, value in values.items():
            self.events.add_scalar(name, value, step, now)

    def summary(self, values: dict[str, float], step: int, now: float) -> None:
        self.scalars(values, step, now)
        self.best |= {name: value for name, value in values.items() if name.startswith("best_")}

    def flush(self) -> None:
        self.events.flush()

    def close(self, status: str) -> None:
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(self.params, self.best):
            self.events._get_file_writer().add_summary(summary)
        self.events.close()  # ends its thread, too; a later write opens it again


class Wandb(Writer):
    """Write a run in the project that MLflow's experiment names; its id is the run's key, so that a continued run goes on in it.

    W&B's service process has all records at once, so that `flush` does nothing; offline, it loses its last block if the run is killed.
    """

    def __init__(self, folder: Path, start: dict[str, Any], project: str) -> None:
        import wandb

        # the trainer itself handles the terminal and records the machine's load
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, reinit="create_new")
        given: dict[str, Any] = {"id": run_key(folder), "name": folder.name, "config": start["params"], "dir": str(folder)}
        self.run = wandb.init(project=project, resume="allow", settings=settings, **given)
        self.run.define_metric("*", step_metric="step")  # W&B's own step must never go back, but samples of the load have a separate count
        self.place = f"offline: wandb sync {os.path.relpath(Path(self.run.dir).parent)}" if self.run.offline else str(self.run.url)

    def scalars(self, values: dict[str, float], step: int, now: float) -> None:
        self.run.log(values | {"step": step})

    def summary(self, values: dict[str, float], step: int, now: float) -> None:
        self.run.summary.update(values)

    def close(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status != "FINISHED"))


WRITERS: dict[str, Callable[[Path, dict[str, Any], str], Writer]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_writers(config: TrackingConfig) -> None:
    """Raise UserError if a writer's package or login is missing."""
    for name in config.writers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking.writers=[{name}]: {name} is installed by: uv sync --extra writers")
    if "wandb" in config.writers and os.environ.get("WANDB_MODE", "online") == "online" and "WANDB_API_KEY" not in os.environ:
        from requests.utils import get_netrc_auth

        if get_netrc_auth(os.environ.get("WANDB_BASE_URL", WANDB_SERVER)) is None:
            raise UserError("tracking.writers=[wandb]: not logged in. Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline.")


class WriterThread(Background):
    """Send a run folder's records to a writer; `<name>.json` holds how far it has come, so that a continued run goes on there.

    Args:
        folder: the run folder, with its first record.
        name: a key of WRITERS.
        project: the project's name in Weights & Biases.
        say: prints messages for the user.
    """

    def __init__(self, folder: Path, name: str, project: str, *, say: Callable[[str], None] = print_now) -> None:
        super().__init__(name)
        self.folder, self.project, self.say = folder, project, say
        self.state = folder / f"{name}.json"
        self.ended = threading.Event()
        self.place = self.error = ""
        self.step = 0  # of the last points of curves

    def run(self) -> None:
        try:
            self._write_all()
        except Exception as error:
            self.error = masked(f"{type(error).__name__}: {error}")
            self.say(f"{self.name} fails: {self.error}; the run goes on, and `uv run experiments/sync.py` writes what is missing")

    def close(self, seconds: float, waiting: AbstractContextManager[None] = NOTHING) -> str:
        """Wait until all is written, for at most so many seconds; return where it is, or what went wrong, for a table.

        waiting: what holds while this waits, as of the uploader.
        """
        self.ended.set()
        try:
            with waiting:
                self.join(seconds)
        except KeyboardInterrupt:
            self.error = "interrupted"
        if self.is_alive() or self.error:
            missing = f"write what is missing: uv run experiments/sync.py {os.path.relpath(self.folder)}"
            return f"incomplete: {self.error or 'it does not answer'}\n{missing}"
        return self.place

    def is_behind(self) -> bool:
        """Return whether the folder holds records that were not written."""
        return self._offset() < (self.folder / "metrics.jsonl").stat().st_size

    def _offset(self) -> int:
        return int(json.loads(read_text(self.state))["offset"]) if self.state.is_file() else 0

    def _write_all(self) -> None:
        records = (record for record, _ in records_from(self.folder, 0))
        start, offset = next((record for record in records if record.get("kind") == "start"), None), self._offset()
        if start is None:
            return
        writer = WRITERS[self.name](self.folder, start, self.project)
        self.place = writer.place
        while True:
            ending = self.ended.is_set()
            written = offset
            for record, size in records_from(self.folder, offset):
                try:
                    self._take(writer, record)
                except MALFORMED as error:  # a bad record does not stop the next ones
                    said = masked(f"{type(error).__name__}: {error}")
                    self.say(f"{self.name} does not take a record of kind {record.get('kind')!r}: {said}")
                offset += size
            if offset > written:
                writer.flush()
                write_text(self.state, json.dumps({"offset": offset}))
            if ending:
                return
            self.ended.wait(PAUSE)

    def _take(self, writer: Writer, record: dict[str, Any]) -> None:
        """Write one record; raise one of MALFORMED if it is none."""
        kind, now = record.get("kind"), record.get("time", 0.0)
        if kind in ("metrics", "summary"):
            values, step = {name: float(value) for name, value in record["values"].items()}, record.get("step", self.step)
            if not any(name.startswith("system/") for name in values):  # samples of the load have their own count
                self.step = step
            (writer.scalars if kind == "metrics" else writer.summary)(values, step, now)
        elif kind == "end":
            writer.close(record["status"])

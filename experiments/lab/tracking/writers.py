"""TensorBoard and Weights & Biases, fed in the background from a run folder's metrics.jsonl: training never waits for them."""

import importlib.util
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lab.config.errors import UserError
from lab.config.schema import TrackingConfig
from lab.runs.files import write_whole
from lab.runs.formats import markdown_text
from lab.runs.masks import masked
from lab.tracking.uploader import print_now, records_from, run_key

MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)  # errors of a record that is not as it should be
PAUSE = 2.0  # seconds between two looks at the file
WANDB_SERVER = "https://api.wandb.ai"


class Writer(Protocol):
    place: str  # where the run is found, for the final table

    def take(self, record: dict[str, Any]) -> None:
        """One record of the run, in order."""
        ...

    def flush(self) -> None:
        """Let what was taken outlive this process."""
        ...


class TensorBoard:
    """An event file in the run's folder: scalars, the settings as text, and as hyper-parameters beside the best figures."""

    def __init__(self, folder: Path, start: dict[str, Any], project: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.events, self.params = SummaryWriter(str(folder / "tensorboard")), start["params"]
        self.best: dict[str, float] = {}
        self.step = 0
        self.place = f"tensorboard --logdir {os.path.relpath(folder.parent)}"

    def take(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        kind, now = record.get("kind"), record.get("time")
        if kind == "start":
            lines = [f"| {markdown_text(name)} | {markdown_text(str(value))} |" for name, value in self.params.items()]
            self.events.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]), 0, now)
        elif kind == "metrics":
            self.step = record["step"]
            for name, value in record["values"].items():
                self.events.add_scalar(name, float(value), self.step, now)
        elif kind == "summary":
            for name, value in record["values"].items():
                self.events.add_scalar(name, float(value), self.step, now)
            self.best |= {name: float(value) for name, value in record["values"].items() if name.startswith("best_")}
        elif kind == "end":
            for summary in hparams(self.params, self.best):
                self.events._get_file_writer().add_summary(summary)
            self.events.close()  # and with it its thread; what is written later opens it again

    def flush(self) -> None:
        self.events.flush()


class Wandb:
    """A run of the project that MLflow's experiment names. It has the run's own key as its id, so that a continued run goes on in it."""

    def __init__(self, folder: Path, start: dict[str, Any], project: str) -> None:
        import wandb

        # the terminal and the machine's load are the trainer's
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, reinit="create_new")
        given: dict[str, Any] = {"id": run_key(folder), "name": folder.name, "config": start["params"], "dir": str(folder)}
        self.run = wandb.init(project=project, resume="allow", settings=settings, **given)
        self.run.define_metric("*", step_metric="step")  # W&B's own step never goes back, while samples of the load count by themselves
        self.place = f"offline: wandb sync {os.path.relpath(Path(self.run.dir).parent)}" if self.run.offline else str(self.run.url)

    def take(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "metrics":
            self.run.log({name: float(value) for name, value in record["values"].items()} | {"step": record["step"]})
        elif kind == "summary":
            self.run.summary.update({name: float(value) for name, value in record["values"].items()})
        elif kind == "end":
            self.run.summary["status"] = record["status"]
            self.run.finish(exit_code=int(record["status"] != "FINISHED"))

    def flush(self) -> None:
        """Its service, a process of its own, has all that was logged; in offline mode it loses its last block where the run is killed."""


WRITERS: dict[str, Callable[[Path, dict[str, Any], str], Writer]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_writers(config: TrackingConfig) -> None:
    """Raise UserError where a writer's package or login is missing."""
    for name in config.writers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"tracking.writers=[{name}]: {name} is installed by: uv sync --extra writers")
    if "wandb" in config.writers and os.environ.get("WANDB_MODE", "online") == "online" and "WANDB_API_KEY" not in os.environ:
        from requests.utils import get_netrc_auth

        if get_netrc_auth(os.environ.get("WANDB_BASE_URL", WANDB_SERVER)) is None:
            raise UserError("tracking.writers=[wandb]: there is no login. Run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline.")


class WriterThread(threading.Thread):
    """Hands a run folder's records to a writer; how far it has come is kept in `<name>.json`, so that a continued run goes on there.

    Args:
        folder: the run folder, with its first record.
        name: of WRITERS.
        project: its name in Weights & Biases.
        say: takes what a person should know.
    """

    def __init__(self, folder: Path, name: str, project: str, *, say: Callable[[str], None] = print_now) -> None:
        super().__init__(name=name, daemon=True)
        self.folder, self.project, self.say = folder, project, say
        self.state = folder / f"{name}.json"
        self.ended = threading.Event()
        self.place = self.error = ""

    def run(self) -> None:
        try:
            self._write_all()
        except Exception as error:
            self.error = masked(f"{type(error).__name__}: {error}")
            self.say(f"{self.name} fails: {self.error}; the run goes on, and experiments/sync.py writes what is missing")

    def close(self, seconds: float) -> str:
        """Wait until all is written, for so many seconds at most; return where it is, or what went wrong, as a table shows it."""
        self.ended.set()
        try:
            self.join(seconds)
        except KeyboardInterrupt:
            self.error = "interrupted"
        if self.is_alive() or self.error:
            missing = f"write what is missing: uv run experiments/sync.py {os.path.relpath(self.folder)}"
            return f"incomplete: {self.error or 'it does not answer'}\n{missing}"
        return self.place

    def is_behind(self) -> bool:
        """Whether the folder holds what was not written."""
        return self._offset() < (self.folder / "metrics.jsonl").stat().st_size

    def _offset(self) -> int:
        return int(json.loads(self.state.read_text(encoding="utf-8"))["offset"]) if self.state.is_file() else 0

    def _keep(self, offset: int) -> None:
        write_whole(self.state, lambda file: file.write(json.dumps({"offset": offset}).encode()))

    def _write_all(self) -> None:
        records = records_from(self.folder, 0, (self.folder / "metrics.jsonl").stat().st_size)
        start, offset = next((record for record, _ in records if record.get("kind") == "start"), None), self._offset()
        if start is None:
            return
        writer = WRITERS[self.name](self.folder, start, self.project)
        self.place = writer.place
        while True:
            ending = self.ended.is_set()
            written = offset
            for record, size in records_from(self.folder, offset, (self.folder / "metrics.jsonl").stat().st_size):
                try:
                    writer.take(record)
                except MALFORMED as error:  # one bad record keeps no other back
                    self.say(
                        f"{self.name} does not take a record of kind {record.get('kind')!r}: {masked(f'{type(error).__name__}: {error}')}"
                    )
                offset += size
            if offset > written:
                writer.flush()
                self._keep(offset)
            if ending:
                return
            self.ended.wait(PAUSE)

"""Run one training, from checked settings to its end."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.base.errors import RankError
from lab.base.formats import masked, one_line
from lab.base.process import Stop, is_rank_zero, launched, started_by
from lab.base.records import History
from lab.config.schema import TrainConfig
from lab.config.settings import Settings, override_of
from lab.processes import distributed, rank_failures
from lab.processes.rank_failures import watched
from lab.registry import spec_of
from lab.run.active import Run, record_start
from lab.run.export import FAILED, check_export
from lab.run.folder import RunFolder
from lab.run.frames import frame_of, history_frame, in_short
from lab.run.machine import SystemSampler, describe, forget_peaks
from lab.run.resume import Earlier, load_state, recorded_store, restore
from lab.tasks.models import check_model
from lab.tracking.datasets import data_sets
from lab.tracking.uploader import checked_uri, read_state
from lab.tracking.views import pages_hint, rounded
from lab.tracking.writers import check_writers
from lab.training.assemble import assemble
from lab.training.console import LOG, Console
from lab.training.failures import explained
from lab.training.summary import delete_last, kept_on_disk, rows
from lab.training.trainer import Trainer


@dataclass(repr=False)
class TrainResult:
    """The result of a run.

    Attributes:
        status: FINISHED, KILLED (by a signal; `resume=` goes on) or FAILED.
        exit_status: the exit status for a process that only trains: 4 if all but an export succeeded.
        folder: the run's folder.
        values: the last value of each metric, such as `best_top1`, `val/loss` and `images_per_second`.
        classes: the classes' names.
        model: the model at the end, with averaged weights if there are any.
        failure: the error that ended the training.
    """

    status: str
    exit_status: int
    folder: Path | None = None
    values: dict[str, float] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    model: Any = None
    failure: BaseException | None = None

    def __repr__(self) -> str:
        best = {name: value for name, value in self.values.items() if name.startswith("best_")}
        return f"TrainResult({self.status}, {self.folder and os.path.relpath(self.folder)}, {in_short(best)})"

    @property
    def history(self) -> Any:
        """Return a pandas frame of the metrics: a row an update, a column a metric, nan where it was not recorded."""
        return self.folder and history_frame(self.folder)

    @property
    def metrics(self) -> Any:
        """Return a pandas frame with the last value of each metric."""
        return frame_of(self.values)

    @property
    def checkpoint(self) -> Path | None:
        """Return the best checkpoint, if the run has one."""
        path = self.folder and self.folder / "checkpoints" / "best.pt"
        return path if path and path.is_file() else None


def run_training(settings: Settings[TrainConfig], earlier: Earlier | None = None, callbacks: Sequence[Any] = ()) -> TrainResult:
    """Train from the beginning, or continue an earlier run; an error in training is in the result, and printed on stderr.

    Raises:
        UserError: a setting or the data is wrong, and nothing was started.
    """
    config = settings.config
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # trainer.deterministic needs this before CUDA starts

    check_writers(config.tracking)
    check_model(config.model)
    check_export(config)

    forget_peaks()
    with explained(config):
        resumed = earlier is not None and earlier.checkpoint is not None
        trainer = assemble(settings, callbacks=callbacks, resumed=resumed)
    earlier = distributed.broadcast(earlier)
    if not is_rank_zero():
        status = train_on_other_rank(trainer, earlier)
        return TrainResult("FAILED" if status else "FINISHED", status)
    run, name = _opened(settings, trainer, earlier)
    run.folder.record("data", sets=data_sets(config, trainer.data, train="training", val="validation", test="test"))
    sampler = SystemSampler(run.folder, config.tracking.system_seconds, trainer.device)
    sampler.start()
    console = Console(trainer.updates, done=trainer.done)
    console.log = run.folder.path / LOG
    data = trainer.data
    samples = f"{data.train.samples} training samples, {data.val.samples} held out{data.held_out and f' ({data.held_out})'}"
    samples += f", {data.test.samples} to test" if data.test is not None else ""
    console.say(f"{name}: {samples}, on {trainer.device}, loss by {trainer.kernels.backend}")
    for note in trainer.notes:
        console.say(one_line(note))
    console.say(kept_on_disk(trainer))
    if launched() > 1:
        console.say(trainer.parallel.description(config.data.batch_size * config.trainer.accumulate))
    if earlier:
        console.say(f"going on with {os.path.relpath(earlier.path)} after update {trainer.done} of {trainer.updates}")
        if any(metric.startswith("test/") for metric, _ in run.folder.history.values):
            console.say("warning: the test images were scored before; what is chosen by that score makes the next one flatter the model")
        if run.folder.copy_of:
            console.say(f"it is a copy of {run.folder.copy_of}: it gets a run of its own in MLflow")
    elif config.resume:
        console.say("resume=auto: no unfinished run has these settings; this is a new one")

    if run.uploader:
        run.uploader.say = console.say
    for writer in run.writers:
        writer.say = console.say
    with run.noted(), watched(run.abandon), explained(config, trainer.device, run.folder):
        trainer.fit(run.folder, console, run.stop)
        distributed.stop()
    run.stop.ignored = launched() > 1  # torchrun stops all processes when another one has failed
    with run.noted(run.status):
        console.stop_bar()
        sampler.stop()
    figures: dict[str, float] = {}
    if run.status != "KILLED":  # a killed run must end soon; it gets its figures when it is continued
        with run.noted(), console.busy("draws the results and exports the best model"):
            figures = trainer.finish() | trainer.kernels.counts() | {"seconds": run.seconds()}
    with run.noted(run.status):
        trainer.callbacks("on_end", trainer, run.status)
    values = trainer.values | figures
    table: dict[str, str] = {}
    with run.noted(run.status):
        table = rows(trainer, values) | trainer.unexported
        console.end_log(run.folder, f"{name}: {run.status.lower()}", table)
    with run.noted(run.status):
        if run.status == "FINISHED":  # any other run may go on, and MLflow keeps each value that it was given
            run.folder.summary(figures | rounded(values))
            delete_last(trainer)
    places = run.close(table)
    console.table(f"{name}: {run.status.lower()}", table | places)
    if run.uploader and (pages := run.uploader.pages()):
        console.say(f"in MLflow's UI{pages_hint(run.uploader.place)}: {pages[0]}")
        console.say(f"beside the experiment's other runs: {pages[1]}")
    if run.status == "KILLED":
        console.say(f"to go on: {started_by()} experiments/train.py {override_of('resume', places['run folder'])}")
    elif run.status == "FINISHED" and spec_of(config.task).predict is not None:
        console.say(f"to use the model: uv run experiments/predict.py {override_of('checkpoint', places['run folder'])} IMAGE ...")
    model = trainer.model if trainer.ema is None else trainer.ema.module
    status = run.exit_status() or (FAILED if trainer.unexported else 0)
    return TrainResult(run.status, status, run.folder.path, values, trainer.data.classes, model, run.failure)


def _opened(settings: Settings[TrainConfig], trainer: Any, earlier: Earlier | None) -> tuple[Any, str]:
    """Return the run, new or continued, and its name; restore the trainer if it is continued."""
    config = settings.config
    name = config.name or f"{config.loss.title}-{config.model.title}-{config.data.name}"
    tags = describe(trainer.device) | trainer.kernels.tags() | trainer.monitor.tags()
    if earlier is None:
        return Run.start("train", settings, name, config.trainer.runs, tags), name
    state = load_state(earlier, settings)
    recorded, store = read_state(earlier.path).get("uri"), recorded_store(earlier)
    uri = checked_uri(config.tracking, store) if config.tracking.enabled else None
    if uri and recorded and not store and recorded != masked(uri):
        trainer.notes.append(
            f"tracked at {masked(uri)}, not at {recorded} as its files say: you did not send this run there from its folder"
        )
    if earlier.foreign:
        said = "you did not make this run, or lack the key that signed it"
        trainer.notes.append(f"{os.path.relpath(earlier.path)}: {said}; trust=PATH takes it as yours, with its models in MLflow")
    stop = Stop(checkpoint_first=True)
    folder = RunFolder.reopen(earlier.path, trusted=earlier.trusted)
    try:
        if state is not None:
            restore(trainer, earlier, state)
    except BaseException:
        folder.release()
        raise
    if earlier.changed:
        folder.write_config(settings.tree(), signed=not earlier.foreign)
    if folder.history.start is None:  # it was killed before it wrote its first record
        record_start(folder, "train", settings, name, tags)
    else:
        folder.record("resume", step=trainer.done, tags={"resumed": f"after update {trainer.done}", **earlier.changed})
        folder.artifact(folder.path / "config.yaml")
    return Run(folder, config.tracking, uri, stop, own=not earlier.foreign), name


class NoFolder(RunFolder):
    """A folder that keeps nothing, because only the first rank writes."""

    def __init__(self) -> None:
        self.history = History()

    def record(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Any, folder: str = "", *, digest: bool = False) -> None:
        pass

    def tracked(self) -> dict[str, str]:
        return {}


def train_on_other_rank(trainer: Trainer, earlier: Earlier | None) -> int:
    """Run the training on this rank; return the exit status. The first rank reports how the run ended."""
    stop = Stop(checkpoint_first=True, quiet=True)
    try:
        with rank_failures.watched(lambda error: None):
            if earlier and (state := load_state(earlier)) is not None:
                restore(trainer, earlier, state)
            trainer.fit(NoFolder(), Console(trainer.updates, quiet=True), stop)
            distributed.stop()
    except rank_failures.TOGETHER:
        return 0
    except KeyboardInterrupt:
        return stop.status
    except RankError:
        return 1
    return 0

"""Score a saved model on a split of its data, or on other data."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.base.errors import UserError, unknown
from lab.base.formats import masked, one_line
from lab.base.paths import ROOT, absolute
from lab.config.help import EVALUATE_USAGE
from lab.config.schema import FolderConfig
from lab.config.settings import Settings, value_of
from lab.config.user import runs_folder
from lab.data.sets import Chained, Norm
from lab.run.active import Run
from lab.run.export import FAILED, check_export, export_again, reported
from lab.run.frames import frame_of, in_short, write_rows
from lab.run.machine import describe
from lab.run.saved import Saved, checkpoint_of, divided, load_weights, open_checkpoint, refuse_changed, settings_of
from lab.sweep.job import PLAN
from lab.tasks.inference import several_views
from lab.tracking.datasets import data_sets
from lab.tracking.uploader import tracking_uri
from lab.training.assemble import assemble
from lab.training.console import LOG, Console
from lab.training.failures import explained

NAMES = {"val": "held-out", "test": "test", "train": "training", "all": "overall"}


@dataclass(repr=False)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        status: FINISHED, KILLED (by a signal) or FAILED.
        exit_status: the exit status for a process that only evaluates: 4 if all but an export succeeded.
        folder: the evaluation's folder.
        values: the metrics, by name, such as top1 and loss.
        failure: the error that ended the evaluation.
    """

    status: str
    exit_status: int
    folder: Path
    values: dict[str, float] = field(default_factory=dict)
    failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"EvaluationResult({self.status}, {os.path.relpath(self.folder)}, {in_short(self.values)})"

    @property
    def metrics(self) -> Any:
        """Return a pandas frame with the value of each metric."""
        return frame_of(self.values)

    @property
    def predictions(self) -> Any:
        """Return a pandas frame with a row a sample; None of a detector, whose detections.json has them."""
        return _read(self.folder / "predictions.csv")

    @property
    def per_class(self) -> Any:
        """Return a pandas frame with the figures of each class or target; None if there are none."""
        return _read(self.folder / "per_class.csv")


def _read(path: Path) -> Any:
    import pandas

    names = dict.fromkeys(("sample", "class", "target", "true", "predicted"), str)
    return pandas.read_csv(path, dtype=names, keep_default_na=False, na_values=[""]) if path.is_file() else None


def asked_evaluation(overrides: Sequence[str]) -> tuple[Settings[Any], Callable[[], EvaluationResult]]:
    """Return the settings of the data and the model for the words of a command line, and a function that evaluates as they ask.

    Raises:
        UserError: a word is wrong, or the checkpoint cannot be read.
    """
    checkpoint, others = checkpoint_of(overrides, EVALUATE_USAGE)
    own, others = divided(others, ("split", "tta"))
    split = own.get("split", "val")
    if split not in NAMES:
        raise unknown(f"split={split}", split, NAMES)
    saved = open_checkpoint(checkpoint, others)
    settings, changed = settings_of(saved, others)
    data = settings.config.data
    if split != "test" and isinstance(data, FolderConfig) and data.test and value_of(others, "data.test") is None:
        # the other splits do not depend on it, and another data.root may lack it
        data.test = data.test if split == "all" and (absolute(data.root, ROOT / "data") / data.test).is_dir() else None
    if isinstance(data, FolderConfig) and data.classes is None:
        data.classes = list(saved.state["classes"])  # of which the folders may lack some
    return settings, partial(
        evaluate, settings, saved, split, changed, tta=own.get("tta"), export=any(each.startswith("export.") for each in others)
    )


def evaluate(settings: Settings[Any], saved: Saved, split: str, changed: list[str], *, tta: str | None, export: bool) -> EvaluationResult:
    """Score the checkpoint's weights (averaged ones if it has them) on a split; write a run as train.py does.

    Args:
        settings: of the data and the model.
        saved: the checkpoint.
        split: val, test, train, or all for the three together.
        changed: the model's own settings that were changed, in words.
        tta: views whose mean prediction is scored.
        export: whether to export the model, too, as config.export says.
    """
    config, state = settings.config, saved.state
    if export:
        check_export(config)
    with explained(config):
        trainer = assemble(settings, norm=Norm(**state["norm"]))
    task, data = trainer.task, trainer.data
    if data.classes != state["classes"]:
        said = f"data={config.data.name} has the classes {_listed(data.classes)}; the model knows {_listed(state['classes'])}."
        raise UserError(said + " data.classes=[NAME,NAME,...] names them all where the data lack some." * hasattr(config.data, "classes"))
    if split != "all":
        refuse_changed(state, config, data)
    parts = [split] if split != "all" else [name for name in ("train", "val", "test") if getattr(data, name) is not None]
    loaders = [_loader(data, part, config.data.name) for part in parts]
    loader = loaders[0] if split != "all" else _chained(loaders, config.data.name)
    load_weights(trainer.model, state)
    model = several_views(trainer.model, tta, task, config.task.name) if tta else trainer.model

    shown = saved.name if saved.name.startswith("runs:/") else os.path.relpath(saved.name)
    name = f"evaluate-{config.name or f'{config.loss.title}-{config.model.title}'}-{config.data.name}"
    tags = describe(trainer.device) | {"checkpoint": shown, "split": split} | ({"tta": tta} if tta else {}) | _training(settings, saved)
    run = Run.start("evaluate", settings, name, _runs(config.trainer.runs), tags)
    console = Console(1, "evaluation")
    console.log = run.folder.path / LOG
    console.say(f"{name}: {loader.samples} samples of split={split}{f', the mean of tta={tta}' if tta else ''} on {trainer.device}")
    if split == "all":
        console.say("split=all: where the model was trained on some of these samples, the figures are too good")
    for each in changed:
        console.say(one_line(f"changed: {each}"))
    for note in data.notes:
        console.say(one_line(note))
    run.folder.record("data", sets=data_sets(config, data, **dict.fromkeys(parts, "test")))
    table: dict[str, str] = {}
    values: dict[str, float] = {}
    unexported: dict[str, str] = {}
    with run.noted():
        rows: list[dict[str, Any]] = []

        def see(output: Any, batch: Any) -> None:
            said = task.samples(output, batch)
            rows.extend({"sample": loader.keys[i]} | each for i, each in zip(batch.index.tolist() if said else [], said, strict=True))

        with explained(config, trainer.device, run.folder):
            result = trainer.evaluate(model, loader, see)
        values = result.values
        run.folder.metrics(state["updates"], {f"{split}/{key}": value for key, value in result.values.items()})
        run.folder.evaluation(state["updates"], result.tree())
        for picture in task.pictures(result, run.folder.path):
            run.folder.artifact(picture, "pictures")
        for file, lines in (("predictions.csv", rows), ("per_class.csv", task.per_class(result))):
            if lines:
                run.folder.artifact(write_rows(run.folder.path / file, lines))
        if export:
            form = config.export.format
            with reported(run.folder, form, f"the model was not exported as {form}", console.say, unexported):
                export_again(run.folder, config, state, lambda: next(iter(loader)).images, console.say)
        figures = task.rows(result.values) | {"loss": f"{result.values['loss']:.4f}"}
        table = {key.replace("held-out", NAMES[split]): each for key, each in figures.items()} | unexported
        console.end_log(run.folder, name, table)
    console.stop_bar()
    console.table(f"{name}: {run.status.lower()}", table | run.close(table))
    status = run.exit_status() or (FAILED if unexported else 0)
    return EvaluationResult(run.status, status, run.folder.path, values, run.failure)


def _chained(loaders: list[Any], name: str) -> Any:
    if any(hasattr(loader, "file") for loader in loaders):
        raise UserError(f"split=all: data={name} has annotation files, which are scored one by one: split=train, val or test.")
    return Chained(loaders)


def _loader(data: Any, split: str, name: str) -> Any:
    """Return the loader of a split, without augmentation."""
    loader = data.plain and data.plain() if split == "train" else getattr(data, split)
    if loader is None:
        hint = "; data.test= names a folder or a share of them, data.test_annotations= a file of data=coco" if split == "test" else ""
        raise UserError(f"split={split}: data={name} has no such images{hint}.")
    return loader


def _training(settings: Settings[Any], saved: Saved) -> dict[str, str]:
    """Return tags that lead to the training run; evaluation is nested in it if both are in one store."""
    run_id = saved.run.get("run_id")
    if not run_id:
        return {}
    tracking = settings.config.tracking
    nested = tracking.enabled and masked(tracking_uri(tracking)) == saved.run.get("uri")
    return {"trained.run_id": run_id} | ({"mlflow.parentRunId": run_id} if nested else {})


def _runs(given: str | None) -> str | None:
    """Return the folder of runs; for a run of a sweep, the folder that holds the sweep."""
    folder = runs_folder(given)
    return str(folder.parent) if (folder / PLAN).is_file() else given


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} ({len(names)})"

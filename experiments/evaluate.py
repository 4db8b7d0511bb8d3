"""Score a saved model: `uv run experiments/evaluate.py checkpoint=runs/<run>`.

`checkpoint=` takes a run's folder, a checkpoint, a .safetensors file, or runs:/<MLflow run id>.
split=val scores held-out images, split=test those kept apart, split=train the training images without augmentation.
The run's own settings hold, but for those given here: `data=folder data.root=/path/to/images`, `trainer.device=cpu`. What belongs to the
model, such as the images' size and normalisation, is the checkpoint's, unless it is changed by name. `--cfg` prints the settings and stops.

Its run has predictions.csv, a row a sample (of a detector detections.json), and per_class.csv. MLflow nests it in the training's run.
"""

import csv
import io
import os
import sys
from pathlib import Path
from typing import Any

from lab.config.command import command
from lab.config.errors import UserError, unknown
from lab.config.help import own_help
from lab.config.settings import Settings, absolute
from lab.processes.ranks import refuse_several
from lab.runs.files import write_text
from lab.runs.formats import csv_row
from lab.runs.saved import Saved, checkpoint_of, load_weights, open_checkpoint, refuse_changed, settings_of

USAGE = "usage: experiments/evaluate.py checkpoint=RUN [split=val|test|train] [group=option ...] [group.setting=value ...] [--cfg]"
NAMES = {"val": "held-out", "test": "test", "train": "training"}


def main(argv: list[str]) -> int:
    try:
        asked = command(argv)
        if "--help" in asked.flags:
            print(own_help(USAGE, __doc__, asked.overrides))
            return 0
        refuse_several("experiments/evaluate.py")
        checkpoint, others = checkpoint_of(asked.overrides, USAGE)
        split = next((word.partition("=")[2] for word in reversed(others) if word.startswith("split=")), "val")
        if split not in NAMES:
            raise unknown(f"split={split}", split, NAMES)
        others = [word for word in others if not word.startswith("split=")]
        saved = open_checkpoint(checkpoint, others)
        settings, changed = settings_of(saved, others)
        if "--cfg" in asked.flags:
            print(settings.text(), end="")
            return 0
        return evaluate(settings, saved, split, changed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def evaluate(settings: Settings[Any], saved: Saved, split: str, changed: list[str]) -> int:
    """The split's metrics of the checkpoint's weights, its averaged ones if it has them: in a run folder and in MLflow as train.py's.

    `changed`: what the settings change of the model's own, in words.
    """
    from lab.data.sets import Norm
    from lab.runs.machine import describe
    from lab.runs.run import Run
    from lab.tracking.datasets import data_sets
    from lab.training.assemble import assemble
    from lab.training.console import Console

    config, state = settings.config, saved.state
    trainer = assemble(settings, norm=Norm(**state["norm"]))
    task, data = trainer.task, trainer.data
    if data.classes != state["classes"]:
        raise UserError(f"data={config.data.name} has the classes {_listed(data.classes)}; the model knows {_listed(state['classes'])}.")
    refuse_changed(state, config, data.train.samples)
    loader = _loader(data, split, config.data.name)
    load_weights(trainer.model, state)

    name = f"evaluate-{config.name or f'{config.loss.title}-{config.model.title}'}-{config.data.name}"
    tags = describe(trainer.device) | {"checkpoint": _shown(saved.name), "split": split} | _training(settings, saved)
    run = Run.start("evaluate", settings, name, _runs(config.trainer.runs), tags)
    console = Console(1, "evaluation")
    console.say(f"{name}: {loader.samples} samples of split={split} on {trainer.device}")
    for each in changed:
        console.say(f"changed: {each}")
    run.folder.record("data", sets=data_sets(config, data, **{split: "test"}))
    table: dict[str, str] = {}
    with run.noted():
        rows: list[dict[str, Any]] = []

        def see(output: Any, batch: Any) -> None:
            said = task.samples(output, batch)
            rows.extend({"sample": loader.keys[i]} | each for i, each in zip(batch.index.tolist() if said else [], said, strict=True))

        result = trainer.evaluate(trainer.model, loader, see)
        run.folder.metrics(state["updates"], {f"{split}/{key}": value for key, value in result.values.items()})
        run.folder.evaluation(state["updates"], result.tree())
        for picture in task.pictures(result, run.folder.path):
            run.folder.artifact(picture, "pictures")
        for file, lines in (("predictions.csv", rows), ("per_class.csv", task.per_class(result))):
            if lines:
                run.folder.artifact(_written(run.folder.path / file, lines))
        figures = task.rows(result.values) | {"loss": f"{result.values['loss']:.4f}"}
        table = {key.replace("held-out", NAMES[split]): each for key, each in figures.items()}
    console.stop_bar()
    console.table(f"{name}: {run.status.lower()}", table | run.close(table))
    return run.exit_status()


def _loader(data: Any, split: str, name: str) -> Any:
    """The split's samples as held-out ones are seen."""
    loader = data.plain and data.plain() if split == "train" else getattr(data, split)
    if loader is None:
        hint = "; data.test= names a folder or a share of them, data.test_annotations= a file of data=coco" if split == "test" else ""
        raise UserError(f"split={split}: data={name} has no such images{hint}.")
    return loader


def _training(settings: Settings[Any], saved: Saved) -> dict[str, str]:
    """Tags that lead to the training's run: nested in it, where both are in one store."""
    from lab.runs.masks import masked
    from lab.tracking.uploader import tracking_uri

    run_id = saved.run.get("run_id")
    if not run_id:
        return {}
    tracking = settings.config.tracking
    nested = tracking.enabled and masked(tracking_uri(tracking)) == saved.run.get("uri")
    return {"trained.run_id": run_id} | ({"mlflow.parentRunId": run_id} if nested else {})


def _runs(given: str | None) -> str | None:
    """The folder of runs; that of a sweep is left to the sweep's own."""
    from lab.sweep.job import PLAN

    folder = absolute(given, "runs")
    return str(folder.parent) if (folder / PLAN).is_file() else given


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    rows, text = [csv_row(row) for row in rows], io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return path


def _shown(name: str) -> str:
    return name if name.startswith("runs:/") else os.path.relpath(name)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} ({len(names)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

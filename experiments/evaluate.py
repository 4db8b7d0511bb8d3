"""Score a saved model on held-out data: `uv run experiments/evaluate.py checkpoint=runs/<run>/checkpoints/best.pt`.

The run's own settings hold, but for those given here: `data=folder data.root=/path/to/images`, `trainer.device=cpu`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.saved import checkpoint_of, load_checkpoint, without_teacher
from lab.settings import ROOT, Settings, absolute, reload

USAGE = "usage: experiments/evaluate.py checkpoint=PATH [group=option ...] [group.setting=value ...]"


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(f"{USAGE}\n\n{__doc__.strip()}")
        return 0
    try:
        path, others = checkpoint_of(words, USAGE)
        state = load_checkpoint(path)
        return evaluate(reload(without_teacher(state["config"]), others), state, path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def evaluate(settings: Settings[Any], state: dict[str, Any], path: Path) -> int:
    """The held-out metrics of the checkpoint's weights, its averaged ones if it has them: in a run folder and in MLflow as train.py's."""
    from lab.assemble import assemble
    from lab.console import Console
    from lab.machine import describe
    from lab.run_folder import RunFolder
    from lab.tracking import Feeder, tracking_uri

    config = settings.config
    trainer = assemble(settings)
    if trainer.data.classes != state["classes"]:
        raise UserError(
            f"data={config.data.name} has the classes {_listed(trainer.data.classes)}; the model knows {_listed(state['classes'])}."
        )
    trainer.model.load_state_dict(state["ema"] or state["model"])

    name = f"evaluate-{config.name or f'{config.loss.title}-{config.model.title}'}-{config.data.name}"
    folder = RunFolder(absolute(config.trainer.runs, ROOT / "runs"), name, settings.tree())
    tags = describe(trainer.device) | {"checkpoint": os.path.relpath(path)} | config.tracking.tags
    folder.record("start", name=name, params=settings.flat(), tags=tags)
    folder.artifact(folder.path / "config.yaml")
    feeder = None
    if config.tracking.enabled:
        feeder = Feeder(folder.path, tracking_uri(config.tracking), config.tracking.experiment, config.tracking.patience_seconds)
        feeder.start()
    console = Console(1, "evaluation")
    console.say(f"{name}: {trainer.data.val.samples} held-out samples on {trainer.device}")

    status = "FAILED"
    try:
        result = trainer.evaluate(trainer.model, trainer.data.val)
        folder.metrics(state["updates"], {f"val/{key}": value for key, value in result.values.items()})
        folder.record("evaluation", step=state["updates"], **result.tree())
        for picture in trainer.task.pictures(result, folder.path):
            folder.artifact(picture, "pictures")
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
    finally:
        console.stop_bar()
        folder.close(status)
        untracked = feeder.close() if feeder else None
    if status == "KILLED":
        return 130

    table = trainer.task.rows(result.values) | {"loss": f"{result.values['loss']:.4f}", "run folder": os.path.relpath(folder.path)}
    if feeder:
        table["MLflow"] = f"incomplete: {untracked}" if untracked else f"{feeder.uri}, run {feeder.run_id}"
    console.table(f"{name}: finished", table)
    return 0


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} ({len(names)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

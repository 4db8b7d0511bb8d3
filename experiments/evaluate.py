"""Score a saved model on held-out data: `uv run experiments/evaluate.py checkpoint=runs/<run>/checkpoints/best.pt`.

The run's own settings hold, but for those given here: `data=folder data.root=/path/to/images`, `trainer.device=cpu`. What belongs to the
model, such as the images' size and normalisation, is the checkpoint's, unless it is changed by name. `--cfg` prints the settings and stops.
"""

import os
import sys
from pathlib import Path
from typing import Any

from lab.config.errors import UserError
from lab.config.settings import Settings
from lab.runs.saved import checkpoint_of, load_checkpoint, load_weights, settings_of
from lab.train.ranks import refuse_several

USAGE = "usage: experiments/evaluate.py checkpoint=PATH [group=option ...] [group.setting=value ...] [--cfg]"


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(f"{USAGE}\n\n{__doc__.strip()}")
        return 0
    try:
        refuse_several("experiments/evaluate.py")
        path, others = checkpoint_of([word for word in words if word != "--cfg"], USAGE)
        state = load_checkpoint(path)
        settings, changed = settings_of(state, others)
        if "--cfg" in words:
            import yaml

            print(yaml.safe_dump(settings.tree(), sort_keys=False), end="")
            return 0
        return evaluate(settings, state, path, changed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def evaluate(settings: Settings[Any], state: dict[str, Any], path: Path, changed: list[str]) -> int:
    """The held-out metrics of the checkpoint's weights, its averaged ones if it has them: in a run folder and in MLflow as train.py's.

    `changed`: what the settings change of the model's own, in words.
    """
    from lab.data.sets import Norm
    from lab.runs.machine import describe
    from lab.runs.run import Run
    from lab.train.assemble import assemble
    from lab.train.console import Console

    config = settings.config
    trainer = assemble(settings, norm=Norm(**state["norm"]))
    if trainer.data.classes != state["classes"]:
        raise UserError(
            f"data={config.data.name} has the classes {_listed(trainer.data.classes)}; the model knows {_listed(state['classes'])}."
        )
    load_weights(trainer.model, state)

    name = f"evaluate-{config.name or f'{config.loss.title}-{config.model.title}'}-{config.data.name}"
    run = Run.start("evaluate", settings, name, config.trainer.runs, describe(trainer.device) | {"checkpoint": os.path.relpath(path)})
    console = Console(1, "evaluation")
    console.say(f"{name}: {trainer.data.val.samples} held-out samples on {trainer.device}")
    for each in changed:
        console.say(f"changed: {each}")
    table: dict[str, str] = {}
    with run.noted():
        result = trainer.evaluate(trainer.model, trainer.data.val)
        run.folder.metrics(state["updates"], {f"val/{key}": value for key, value in result.values.items()})
        run.folder.evaluation(state["updates"], result.tree())
        for picture in trainer.task.pictures(result, run.folder.path):
            run.folder.artifact(picture, "pictures")
        table = trainer.task.rows(result.values) | {"loss": f"{result.values['loss']:.4f}"}
    console.stop_bar()
    console.table(f"{name}: {run.status.lower()}", table | run.close())
    return run.exit_status()


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''} ({len(names)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The experiments as a library: `lab.train("loss=focal")` does what `experiments/train.py loss=focal` does."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.training.session import TrainResult

__all__ = ["train"]


def train(*overrides: str, config_dir: str | Path | None = None, callbacks: Sequence[Any] = ()) -> "TrainResult":
    """Train a model, and return what came of it; the run is in runs/ and in MLflow as any other.

    Args:
        overrides: as on the command line, such as "loss=focal", "trainer.epochs=3", "resume=runs/RUN".
        config_dir: a folder of settings of one's own for this training, as --config-dir.
        callbacks: objects with some of the methods of lab.training.callbacks.Callback, or such classes, beside those of
            trainer.callbacks.

    Returns:
        The run's folder, metrics, model and status; the status is KILLED after Ctrl-C, and `resume=` goes on.

    Raises:
        TypeError: an override is no string, or callbacks no list.
        UserError: a setting or the data is wrong.
        Exception: the training's own error; the run is FAILED.

    Afterwards generators, signal handlers, torch's modes and the environment are as they were.

    Examples:
        >>> result = lab.train("experiment=quick", "loss=focal")
        >>> result.values["best_top1"], result.checkpoint
    """
    from lab.config.command import command
    from lab.config.errors import UserError
    from lab.runs.resume import chosen
    from lab.runs.run import called_as
    from lab.training.session import run_training
    from lab.training.surroundings import left_as_found

    for each in overrides:
        if not isinstance(each, str):
            raise TypeError(f'overrides must be strings such as "loss=focal", got {each!r}')
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks must be a list, got {callbacks!r}")
    argv = list(overrides) if config_dir is None else [f"--config-dir={os.fspath(config_dir)}", *overrides]
    with left_as_found(), called_as("train.py", *argv):
        given = command(argv)
        if given.flags:
            raise UserError(f"{', '.join(given.flags)}: an option of the command line, experiments/train.py; lab.train takes settings.")
        settings, earlier = chosen(given.overrides)
        result = run_training(settings, earlier, callbacks)
    if result.failure is not None:
        raise result.failure
    return result

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
        overrides: words of the command line, such as "loss=focal", "trainer.epochs=3", "resume=runs/RUN".
        config_dir: a folder of settings of one's own, as --config-dir.
        callbacks: objects with some of the methods of lab.training.callbacks.Callback, beside those of trainer.callbacks.

    Returns:
        The run's folder, metrics, model and status; the status is KILLED after Ctrl-C, and `resume=` goes on.

    Raises:
        UserError: a setting or the data is wrong. Any other error: that of the training, whose run is FAILED.

    Example:
        >>> result = lab.train("experiment=quick", "loss=focal")
        >>> result.values["best_top1"], result.checkpoint
    """
    from lab.config.command import command
    from lab.runs.resume import chosen
    from lab.training.session import run_training
    from lab.training.stop import signals_given_back

    argv = list(overrides) if config_dir is None else [f"--config-dir={os.fspath(config_dir)}", *overrides]
    settings, earlier = chosen(command(argv).overrides)
    with signals_given_back():
        result = run_training(settings, earlier, callbacks)
    if result.failure is not None:
        raise result.failure
    return result

"""The experiments as a library: `lab.train("loss=focal")` does what `experiments/train.py loss=focal` does.

Its functions import what they need, because every script begins with this module, and torch takes seconds to load.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.base.errors import UserError
from lab.config.command import command

if TYPE_CHECKING:
    from lab.comparison.app import ComparisonResult
    from lab.results.evaluation import EvaluationResult
    from lab.training.session import TrainResult

__all__ = ["compare", "evaluate", "predict", "runs", "train"]


def train(*overrides: str, config_dir: str | Path | None = None, callbacks: Sequence[Any] = ()) -> "TrainResult":
    """Train a model and return its result; the run is written to runs/ and to MLflow, as for the command line.

    Args:
        overrides: as on the command line, such as "loss=focal", "trainer.epochs=3", "resume=runs/RUN".
        config_dir: a folder of your own settings for this training, as --config-dir.
        callbacks: objects or classes with some of the methods of lab.training.callbacks.Callback, in addition to those of
            trainer.callbacks.

    Returns:
        The run's folder, metrics, model and status; the status is KILLED after Ctrl-C, and `resume=` goes on.

    Raises:
        TypeError: an override is not a string, or callbacks is not a list.
        UserError: a setting or the data is wrong.
        Exception: the training's own error; the run is FAILED.

    Afterwards generators, signal handlers, torch's modes and the environment are as they were.

    Examples:
        >>> result = lab.train("experiment=quick", "loss=focal")
        >>> result.values["best_top1"], result.checkpoint
    """
    from lab.run.resume import chosen
    from lab.training.session import run_training

    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks must be a list, got {callbacks!r}")
    with _app("train", overrides, config_dir) as given:
        settings, earlier = chosen(given)
        result = run_training(settings, earlier, callbacks)
    if result.failure is not None:
        raise result.failure
    return result


def evaluate(
    checkpoint: "TrainResult | str | Path",
    *overrides: str,
    split: str = "val",
    tta: str | None = None,
    config_dir: str | Path | None = None,
) -> "EvaluationResult":
    """Score a saved model, as experiments/evaluate.py, and return its figures and predictions as pandas frames.

    Args:
        checkpoint: a result of `train`, a run's folder, a checkpoint, a .safetensors file, or runs:/ID of a run in MLflow.
        overrides: settings to change, such as "data=folder", "data.root=pictures".
        split: val, test, train, or all for the three together.
        tta: flip or five_crop, to score the mean prediction of several views.
        config_dir: as for `train`.

    Raises:
        UserError: the checkpoint cannot be read, or a setting or the data is wrong.
        Exception: the evaluation's own error; the run is FAILED.

    Examples:
        >>> found = lab.evaluate(result.folder, split="test")
        >>> found.metrics, found.predictions.query("correct == 0")
    """
    from lab.results.evaluation import asked_evaluation

    words = [_checkpoint(checkpoint), f"split={split}", *([f"tta={tta}"] if tta else []), *overrides]
    with _app("evaluate", words, config_dir) as given:
        _, score = asked_evaluation(given)
        result = score()
    if result.failure is not None:
        raise result.failure
    return result


def predict(
    checkpoint: "TrainResult | str | Path",
    images: Sequence[str | Path] | str | Path,
    *overrides: str,
    top: int | None = None,
    score: float | None = None,
) -> Any:
    """Predict what image files, or the images of folders, show; return a pandas frame with a row for each finding, and write nothing.

    Args:
        checkpoint: as for `evaluate`.
        images: paths of images, videos and folders of images.
        overrides: settings to change, such as "trainer.device=cpu".
        top: how many classes a classifier names; None: 5.
        score: the lowest score of a detection, or of one of an image's several labels; None: 0.3.

    Raises:
        UserError: the checkpoint or an image cannot be read, or a setting is wrong.

    Examples:
        >>> lab.predict("runs/RUN", ["photo.jpg", "pictures"]).groupby("image").first()
    """
    from lab.results.prediction import predicted_frame

    paths = [Path(each) for each in ([images] if isinstance(images, (str, os.PathLike)) else images)]
    own = [f"{name}={value}" for name, value in (("top", top), ("score", score)) if value is not None]
    with _app("predict", [_checkpoint(checkpoint), *own, *overrides]) as given:
        return predicted_frame(paths, given)


def runs(pattern: str | Path | None = None) -> Any:
    """Return a pandas frame with a row for each run folder that the pattern matches, the oldest first, also within sweeps.

    Without a pattern these are the runs where `lab.train` writes them by default: in LOSSFORGE_RUNS, the folder of the user's file,
    or runs/.

    Columns: name, app, status, seconds, each setting, and the last value of each metric; the index is the folder.

    Raises:
        UserError: no run matches, or a run's records are damaged.
    """
    from lab.run.frames import runs_frame

    return runs_frame(pattern)


def _checkpoint(given: Any) -> str:
    """Return the word of a command line that names what was given: a result of `train`, a path, or the word itself."""
    place = getattr(given, "folder", given)
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a result of lab.train, or the path of a run or checkpoint, got {type(given).__name__}")
    return f"checkpoint={os.fspath(place).removeprefix('checkpoint=')}"


def compare(*overrides: str) -> "ComparisonResult":
    """Compare finished runs, as experiments/compare.py, and return the tables as pandas frames.

    Args:
        overrides: as on the command line, such as "sweep=NAME", "baseline=loss=ce".

    Raises:
        UserError: no runs are found, or a setting is wrong.

    Examples:
        >>> lab.compare("where=data=digits", "baseline=loss=ce").cells
    """
    from lab.comparison.app import asked_comparison

    with _app("compare", overrides) as given:
        _, work = asked_comparison(given)
        result = work()
    if result.failure is not None:
        raise result.failure
    return result


@contextmanager
def _app(name: str, overrides: Sequence[str], config_dir: str | Path | None = None) -> Iterator[list[str]]:
    """Run an app inside the block, and leave the process as it was; yield the overrides without options."""
    from lab.run.active import called_as
    from lab.training.process_state import left_as_found

    for each in overrides:
        if not isinstance(each, str):
            raise TypeError(f'overrides must be strings such as "loss=focal", got {each!r}')
    argv = list(overrides) if config_dir is None else [f"--config-dir={os.fspath(config_dir)}", *overrides]
    with left_as_found(), called_as(f"{name}.py", *argv):
        given = command(argv)
        if given.flags:
            raise UserError(f"{', '.join(given.flags)}: an option of the command line; lab.{name} takes settings.")
        yield given.overrides

"""Predict what image files show, by a saved model."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from lab.base.errors import UserError, unknown
from lab.base.files import open_to_append, remove_unfinished, unwritable, write_whole
from lab.base.formats import one_line, shortened
from lab.base.paths import absolute
from lab.base.process import ABORTED, begin_work
from lab.config.help import PREDICT_USAGE
from lab.config.settings import groups
from lab.data.images.files import SUFFIXES, UNREADABLE, CorruptError, reason
from lab.data.images.pixels import read_image, shown
from lab.data.listing import hidden, kinds_of, passed_over
from lab.registry import spec_of
from lab.results.video import Frame, VideoFile, frames_of, is_video, opencv
from lab.run.machine import pick_device
from lab.run.predict import Prediction, draw, predictor
from lab.run.saved import checkpoint_of, divided, open_checkpoint, settings_of
from lab.training.failures import explained

OWN = ("out", "top", "score")
VIDEO = ".mp4"
LONGEST = 200  # bytes of a picture's name without its number and ending; a file system takes 255

Seen = tuple[Frame | None, Any, Prediction]  # a frame's place in its video; the image; what it shows
Write = Callable[[dict[str, Any]], None]  # writes a line of predictions.jsonl


@dataclass
class AskedPrediction:
    """What to predict.

    Args:
        settings: of the run.
        state: the run's checkpoint.
        changed: the run's own settings that were changed, in words.
        files: images and videos.
        missing: given paths that are neither a file nor a folder.
        out: the folder for pictures and predictions.
        top: how many classes a classifier names.
        score: the lowest score of a detection.
        passed: how many files of given folders are passed over, in words; empty if none are.
    """

    settings: Any
    state: dict[str, Any]
    changed: list[str]
    files: list[Path]
    missing: list[Path]
    out: Path
    top: int
    score: float
    passed: str = ""


def asked_prediction(given: list[Path], overrides: Sequence[str]) -> AskedPrediction:
    """Return what to predict.

    Args:
        given: files and folders of images.
        overrides: the checkpoint, this app's own settings and those of the run.

    Raises:
        UserError: a word is wrong, the checkpoint cannot be read, or no image is there.
    """
    checkpoint, others = checkpoint_of(overrides, PREDICT_USAGE)
    own, others = _own(others)
    top, score = _number("top", own.get("top", "5"), 1, 1000), _number("score", own.get("score", "0.3"), 0, 1)
    out = absolute(own.get("out"), Path("predictions").absolute())
    saved = open_checkpoint(checkpoint, others)
    settings, changed = settings_of(saved, others)
    task = settings.config.task
    for name in ("top", "score"):
        if name in own and name not in spec_of(task).read:
            raise UserError(f"{name}={own[name]}: has no effect on predictions of task={task.name}; leave it out.")
    channels = getattr(settings.config.data, "channels", None)
    files, missing, passed = images(given, out, *[".npy"] * bool(channels))
    for video in filter(is_video, files):
        opencv(video)
        if channels:
            raise UserError(f"{video}: is a video, whose frames have 3 channels of 8 bits; data.channels={channels} takes images alone.")
    return AskedPrediction(settings, saved.state, changed, files, missing, out, int(top), score, passed)


def _own(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments into this app's own, by name, and the run's settings."""
    own, others = divided(overrides, OWN)
    for word in others:
        name = word.partition("=")[0]
        if "." not in name and name.lstrip("+~") not in (*groups(), "trust"):
            raise unknown(word, name, ["checkpoint", *OWN, "trust", *groups()])
    return own, others


def images(given: list[Path], out: Path, *more: str) -> tuple[list[Path], list[Path], str]:
    """Find the images to predict.

    Args:
        given: files, folders that are searched recursively, and patterns of both, which a quoted word or Windows leaves to this app.
        out: the folder of this app's own pictures, which are left out.
        more: endings of files in folders that are taken beside those of images.

    Returns:
        The images, the given paths that do not exist, and how many files of folders are passed over, in words.

    Raises:
        UserError: no image is given.
    """
    kinds = (*SUFFIXES, *more)
    files: list[Path] = []
    missing: list[Path] = []
    passed: list[str] = []
    for path in _expanded(given):
        if os.path.isdir(path):
            inside = sorted(each for each in path.rglob("*") if each.is_file() and not hidden(each, path))
            seen = [each for each in inside if out not in each.absolute().parents]
            files += [each for each in seen if each.suffix.lower() in kinds]
            passed += [each.name for each in seen if each.suffix.lower() not in kinds]
        else:
            (files if os.path.isfile(path) else missing).append(path)
    said = passed_over(kinds_of(passed))
    if not files:
        raise UserError("\n".join(map(_absent, missing)) or f"no image was given{f', and {said}' if said else ''}.\n{PREDICT_USAGE}")
    return files, missing, said


def _expanded(given: list[Path]) -> Iterator[Path]:
    """Yield paths, and in place of a pattern such as "frames/**/*.png" what it matches; a path that exists is not taken for a pattern."""
    for path in given:
        found = [] if os.path.lexists(path) or not has_magic(str(path)) else sorted(glob(str(path), recursive=True))
        yield from map(Path, found) if found else [path]


def _absent(path: Path) -> str:
    return one_line(f"{path}: no such file or folder.")


def predicted(asked: AskedPrediction) -> Iterator[tuple[Path, Iterator[Seen]]]:
    """Load the model; return each file with an iterator over its image, or a video's frames.

    The iterator raises CorruptError if the file cannot be read.
    """
    config = asked.settings.config
    device = pick_device(config.trainer.device)
    with explained(config):
        predict_one = predictor(config, asked.state, device, top=asked.top, score=asked.score)
    begin_work()

    def seen(path: Path) -> Iterator[Seen]:
        for frame, image in _pictures(path, config.data):
            with explained(config):
                prediction = predict_one(image)
            yield frame, image, prediction

    return ((path, seen(path)) for path in asked.files)


def predicted_frame(paths: list[Path], overrides: Sequence[str]) -> Any:
    """Return a pandas frame with a row for each finding in the images, for the words of a command line; nothing is written.

    Raises:
        UserError: an image or the checkpoint cannot be read, or a setting is wrong.
    """
    import pandas

    asked = asked_prediction(paths, overrides)
    if asked.missing:
        raise UserError(f"{asked.missing[0]}: no such file or folder.")
    rows: list[dict[str, Any]] = []
    for path, seen in predicted(asked):
        try:
            for frame, _, found in seen:
                rows += [{"image": str(path)} | (frame.tree() if frame else {}) | each for each in found.tree()]
        except CorruptError as error:
            raise UserError(f"{path}: {error}") from None
    return pandas.DataFrame(rows)


def _pictures(path: Path, data: Any) -> Iterator[tuple[Frame | None, Any]]:
    if is_video(path):
        yield from frames_of(path)
        return
    try:
        image = read_image(path, getattr(data, "channels", None), deep=not hasattr(data, "channels"))
    except UNREADABLE as error:
        raise CorruptError(reason(error)) from None
    yield None, image


def predict(asked: AskedPrediction) -> int:
    """Write and print predictions; at the end name the paths of no image, and return 1 if there are any, 130 after Ctrl-C."""
    out = asked.out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {error.strerror}") from None
    remove_unfinished(out)
    said = out / "predictions.jsonl"
    faults = [_absent(path) for path in asked.missing]
    if asked.passed:
        print(one_line(asked.passed))
    interrupted, cut, done = False, "", set[str]()
    try:
        files = predicted(asked)
        said.unlink(missing_ok=True)
        with open_to_append(said) as lines:

            def write(line: dict[str, Any]) -> None:
                try:
                    lines.write(json.dumps(line).encode() + b"\n")
                except OSError as error:
                    raise unwritable(said, error) from None
                done.add(line["picture"])

            for number, (path, seen) in enumerate(files):
                video = is_video(path)
                drawn = out / f"{number:04d}-{shortened(path.stem, LONGEST)}{VIDEO if video else '.png'}"
                try:
                    cut = drawn.name if video else ""
                    (_write_video if video else _write_picture)(path, drawn, seen, write)
                    cut = ""
                except CorruptError as error:
                    faults.append(f"{path}: {error}")
    except KeyboardInterrupt:
        interrupted = True
    for fault in faults:
        print(one_line(f"error: {fault}"), file=sys.stderr)
    if interrupted:
        print(f"interrupted: {len(done - {cut})} of {len(asked.files)} images were predicted", file=sys.stderr)
        return ABORTED
    return int(bool(faults))


def _write_picture(path: Path, picture: Path, seen: Iterator[Seen], write: Write) -> None:
    for _, image, prediction in seen:
        write_whole(picture, partial(draw(shown(image), prediction).save, format="PNG"))
        write({"image": str(path), "found": prediction.tree(), "picture": picture.name})
        print(one_line(f"{path}: {prediction.line()}"))


def _write_video(path: Path, drawn: Path, seen: Iterator[Seen], write: Write) -> None:
    frames = 0
    with VideoFile(drawn) as video:
        for frame, image, prediction in seen:
            assert frame is not None
            video.add(draw(image, prediction), frame.rate)
            write({"image": str(path), **frame.tree(), "found": prediction.tree(), "picture": drawn.name})
            frames += 1
    print(one_line(f"{path}: {frames} frames"))


def _number(name: str, given: str, least: float, most: float) -> float:
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UserError(f"{name}={given}: a number from {least:g} to {most:g} is expected.")
    return value

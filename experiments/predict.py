"""Say what is in image files: `uv run experiments/predict.py checkpoint=runs/<run> pictures/*.png`.

`checkpoint=` takes a run's folder, a checkpoint, a .safetensors file, or runs:/<MLflow run id>.

The other words are image files, or folders of them and of further folders. Into the folder out= (predictions) go `predictions.jsonl`, a
line an image, and each image with what was found. top=5: how many classes a classifier names. score=0.3: the least that a detection has.
trainer.device=: where to compute.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lab.config.command import command
from lab.config.errors import UserError, unknown
from lab.config.help import own_help
from lab.config.settings import absolute, groups
from lab.processes.ranks import refuse_several
from lab.runs.saved import checkpoint_of, open_checkpoint, settings_of

USAGE = "usage: experiments/predict.py checkpoint=RUN [out=FOLDER] [top=N] [score=X] IMAGE ..."
OWN = ("out", "top", "score")
KINDS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def main(argv: list[str]) -> int:
    try:
        asked = command(argv)
        if "--help" in asked.flags:
            print(own_help(USAGE, __doc__, asked.overrides))
            return 0
        overrides = asked.overrides
        refuse_several("experiments/predict.py")
        given = [Path(word) for word in overrides if "=" not in word or Path(word).exists()]
        checkpoint, others = checkpoint_of([word for word in overrides if Path(word) not in given], USAGE)
        own, others = _own(others)
        top, score = _number("top", own.get("top", "5"), 1, 1000), _number("score", own.get("score", "0.3"), 0, 1)
        out = absolute(own.get("out"), Path("predictions").absolute())
        files = images(given, out)
        saved = open_checkpoint(checkpoint, others)
        settings, changed = settings_of(saved, others)
        for each in changed:
            print(f"changed: {each}")
        return predict(settings.config, saved.state, files, out, int(top), score)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _own(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """This app's own words by name, and the others, which are settings of the run."""
    own: dict[str, str] = {}
    others: list[str] = []
    for word in overrides:
        name, _, value = word.partition("=")
        if name in OWN:
            own[name] = value
        elif "." not in name and name.lstrip("+~") not in (*groups(), "trust"):
            raise unknown(word, name, ["checkpoint", *OWN, "trust", *groups()])
        else:
            others.append(word)
    return own, others


def images(given: list[Path], out: Path) -> list[Path]:
    """The files, and the images of folders and of the folders in them; what this app wrote into `out` is none of them.

    Raises:
        UserError: something is not there, or there is nothing.
    """
    from lab.data.images import hidden

    files: list[Path] = []
    for path in given:
        if path.is_dir():
            found = sorted(each for each in path.rglob("*") if each.suffix.lower() in KINDS and each.is_file() and not hidden(each, path))
            files += [each for each in found if out not in each.absolute().parents]
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path}: there is no such file or folder.")
    if not files:
        raise UserError(f"no image was given.\n{USAGE}")
    return files


def predict(config: Any, state: dict[str, Any], files: list[Path], out: Path, top: int, score: float) -> int:
    """Write and print what the model says; the status is 1 if a file could not be read, which stops no other."""
    from lab.data.images import UNREADABLE, read_rgb, reason
    from lab.runs.files import remove_unfinished, write_text, write_whole
    from lab.runs.machine import pick_device
    from lab.runs.predict import draw, predictor

    predicted = predictor(config, state, pick_device(config.trainer.device), top=top, score=score)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {error.strerror}") from None
    remove_unfinished(out)
    status, lines = 0, []
    for number, path in enumerate(files):
        try:
            image = read_rgb(path)
        except UNREADABLE as error:
            print(f"error: {path}: {reason(error)}", file=sys.stderr)
            status = 1
            continue
        prediction = predicted(image)
        picture = out / f"{number:04d}-{path.stem}.png"
        write_whole(picture, partial(draw(image, prediction).save, format="PNG"))
        lines.append(json.dumps({"image": str(path), "found": prediction.tree(), "picture": picture.name}))
        print(f"{path}: {prediction.line()}")
    write_text(out / "predictions.jsonl", "".join(f"{line}\n" for line in lines))
    return status


def _number(name: str, given: str, least: float, most: float) -> float:
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UserError(f"{name}={given}: a number from {least:g} to {most:g} is expected.")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Say what is in image files: `uv run experiments/predict.py checkpoint=runs/<run>/checkpoints/best.pt pictures/*.png`.

Words without `=` are image files, or folders of them. Into the folder out= (predictions) go `predictions.jsonl`, a line an image, and each
image with what was found. top=5: how many classes a classifier names. score=0.3: the least that a detection has. trainer.device=: where to
compute.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.ranks import refuse_several
from lab.saved import checkpoint_of, load_checkpoint
from lab.settings import absolute, reload

USAGE = "usage: experiments/predict.py checkpoint=PATH [out=FOLDER] [top=N] [score=X] IMAGE ..."
KINDS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(f"{USAGE}\n\n{(__doc__ or '').strip()}")
        return 0
    try:
        refuse_several("experiments/predict.py")
        path, others = checkpoint_of([word for word in words if "=" in word], USAGE)
        own = {name: value for name, _, value in (word.partition("=") for word in others) if name in ("out", "top", "score")}
        top, score = _number("top", own.get("top", "5"), 1, 1000), _number("score", own.get("score", "0.3"), 0, 1)
        files = images([Path(word) for word in words if "=" not in word])
        state = load_checkpoint(path)
        settings = reload(state["config"], [word for word in others if word.partition("=")[0] not in own])
        return predict(settings.config, state, files, absolute(own.get("out"), Path("predictions").absolute()), int(top), score)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def images(given: list[Path]) -> list[Path]:
    """The files, and the images of folders.

    Raises:
        UserError: something is not there, or there is nothing.
    """
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            files += sorted(each for each in path.iterdir() if each.suffix.lower() in KINDS)
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path}: there is no such file or folder.")
    if not files:
        raise UserError(f"no image was given.\n{USAGE}")
    return files


def predict(config: Any, state: dict[str, Any], files: list[Path], out: Path, top: int, score: float) -> int:
    """Write and print what the model says; the status is 1 if a file could not be read, which stops no other."""
    from lab.machine import pick_device
    from lab.predict import UNREADABLE, drawn, open_rgb, predictor

    say = predictor(config, state, pick_device(config.trainer.device), top=top, score=score)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {error.strerror}") from None
    status, lines = 0, []
    for number, path in enumerate(files):
        try:
            image = open_rgb(path)
        except UNREADABLE as error:
            print(f"error: {path}: cannot be read: {error}", file=sys.stderr)
            status = 1
            continue
        said = say(image)
        picture = out / f"{number:04d}-{path.stem}.png"
        drawn(image, said).save(picture)
        lines.append(json.dumps({"image": str(path), "found": said.tree(), "picture": picture.name}))
        print(f"{path}: {said.line()}")
    draft = out / ".predictions.jsonl"
    draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(draft, out / "predictions.jsonl")
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

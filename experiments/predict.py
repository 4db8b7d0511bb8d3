"""Predict what image files show: `uv run experiments/predict.py checkpoint=runs/<run> pictures/*.png`.

`checkpoint=` takes a run's folder, a checkpoint, a .safetensors file, or runs:/<MLflow run id>.

The other arguments are image files, folders of images, which are searched recursively, patterns such as "frames/**/*.png", or videos, for
which OpenCV must be installed: each becomes a video with the predictions drawn into its frames, and has a line a frame. A path that
does not exist or is not an image stops no other: it is named at the end, and the exit status is 1. The folder out= (predictions) receives
`predictions.jsonl`, with one line an image, and a copy of each image with the prediction drawn on it. top=5: how many classes a classifier
names. score=0.3: the lowest score of a detection that is shown. trainer.device=: the device to compute on.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import sys
from collections.abc import Callable
from typing import Any

from lab.base.formats import one_line
from lab.config.command import paths_among, run_app, say_loading
from lab.config.help import PREDICT_USAGE, own_help


def main(argv: list[str]) -> int:
    return run_app("predict", argv, lambda words: own_help(PREDICT_USAGE, __doc__, words), _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    say_loading()
    from lab.results.prediction import asked_prediction, predict  # they load torch, which --help does not need

    asked = asked_prediction(*paths_among(words))

    def work() -> int:
        for each in asked.changed:
            print(one_line(f"changed: {each}"))
        return predict(asked)

    return asked.settings, work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

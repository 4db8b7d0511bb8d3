"""Score a saved model: `uv run experiments/evaluate.py checkpoint=runs/<run>`.

`checkpoint=` takes a run's folder, a checkpoint, a .safetensors file, or runs:/<MLflow run id>.
tta=flip or tta=five_crop scores the mean prediction of each image and its mirror image, or of its corners and centre.
data.rect=true scores a detector on images at their own proportions, as YOLO's rect=True.
export.format=onnx writes the model as model.onnx, too, checked by ONNX Runtime; export.precision=fp16 and export.any_size=true change it.
split=val scores held-out images, split=test the test images, split=train the training images without augmentation, split=all every image.
The run's settings apply, except those given here: `data=folder data.root=/path/to/images`, `trainer.device=cpu`. Settings that belong to
the model, such as the images' size and normalisation, come from the checkpoint unless you name them. `--cfg` prints the settings and stops.

The new run's folder holds predictions.csv with one row a sample (detections.json for a detector), and per_class.csv. MLflow nests this run
in the training run.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import sys
from collections.abc import Callable
from typing import Any

from lab.config.command import run_app, say_loading
from lab.config.help import EVALUATE_USAGE, own_help


def main(argv: list[str]) -> int:
    return run_app("evaluate", argv, lambda words: own_help(EVALUATE_USAGE, __doc__, words), _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    say_loading()
    from lab.results.evaluation import asked_evaluation  # loads torch, which --help does not need

    settings, evaluate = asked_evaluation(words)
    return settings, lambda: evaluate().exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

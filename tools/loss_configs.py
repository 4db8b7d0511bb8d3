"""Write what the app reads of the losses, so that it need not import torch: their settings, and a file in conf/ for each.

Run `python tools/loss_configs.py` after a change of a signature; --check only says what is stale. A file in conf/ is made where it lacks:
it names the loss, and may set other values than the signature's defaults.
"""

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import write_or_check
from torch import Tensor

from lossforge.losses import checks
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.types import Range

MEANINGS = {
    "alpha": "weight of positives, 1 - alpha that of negatives; -1 or null: none",
    "tversky.alpha": "weight of false positives",
    "tversky.beta": "weight of false negatives",
    "focal_tversky.alpha": "weight of false positives",
    "focal_tversky.beta": "weight of false negatives",
    "focal_tversky.gamma": "exponent of 1 - the Tversky index",
    "softmax_focal.alpha": "factor of the loss; null: none",
    "varifocal.alpha": "factor of negatives",
    "beta": "exponent of the distance to the quality",
    "smooth_l1.beta": "distance at which the square becomes a line",
    "box_smooth_l1.beta": "distance at which the square becomes a line",
    "clip": "how far probabilities of negatives are shifted down; null: not",
    "delta": "distance at which the square becomes a line",
    "eps": "what keeps divisions finite for boxes without area",
    "asymmetric_single_label.eps": "share of label smoothing",
    "epsilon": "coefficient of the polynomial's first term",
    "gamma": "focusing exponent: the larger, the less easy examples count",
    "gamma_neg": "focusing exponent of negatives",
    "gamma_pos": "focusing exponent of positives",
    "iou_weighted": "weigh positives by their IoU",
    "label_smoothing": "share of the target that is spread over all classes",
    "lambda_ce": "factor of the cross entropy",
    "lambda_dice": "factor of the Dice loss",
    "order": "how many terms of the series of the logarithm",
    "q": "0: cross entropy, 1: mean absolute error",
    "scale": "factor of the logits",
    "smooth_dr": "what is added to the denominator",
    "smooth_nr": "what is added to the numerator",
    "smoothing": "share of the target that is spread",
    "softcap": "limit c of the logits, c tanh(z / c); null: none",
    "target_threshold": "targets above it are 1, others 0; null: as they are",
    "tau": "strength of the adjustment by the classes' shares",
    "z_loss": "coefficient of the squared log-sum-exp",
}
"""A hyper-parameter's line in the app's help, by its name, or by loss and name."""

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "experiments" / "lab" / "config" / "loss_settings.py"
HEAD = '''"""Written by tools/loss_configs.py from the signatures: a loss's input, the activation of its logits, its settings."""
# fmt: off
# ruff: noqa: E501

from typing import Any

from lab.config.fields import number

'''


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types of an annotation that a config can hold, with their ranges."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for each in typing.get_args(annotation):
            yield from members(each)
    elif annotation is not Tensor:
        yield annotation


def setting(loss: Loss, name: str) -> str:
    """Return a hyper-parameter as the field of a dataclass."""
    names, limits = [], ""
    for each in members(checks.signature(loss.function).parameters[name].annotation):
        plain, *ranges = typing.get_args(each) if typing.get_origin(each) is typing.Annotated else (each,)
        names.append("None" if plain is types.NoneType else plain.__name__)
        known = (found for found in ranges if isinstance(found, Range))
        limits += "".join(f", {k}={v:g}" for found in known for k, v in found._asdict().items() if v is not None)
    meaning = MEANINGS.get(f"{loss.name}.{name}") or MEANINGS[name]
    return f'"{name}": ({" | ".join(names)}, number({loss.hyper[name]!r}, "{meaning}"{limits}))'


def settings(loss: Loss) -> str:
    return f"{{{', '.join(setting(loss, name) for name in loss.hyper)}}}"


def activation(loss: Loss) -> str:
    """Return what the logits of a classifier mean that was trained with a loss."""
    return "softmax" if loss.template in ("rowwise", "overlap") or loss.given == "softmax" else "sigmoid"


def takes(loss: Loss) -> str | None:
    """Return what a loss is computed from: a model's logits, their softmax or sigmoid, or logits of regions; None if the app has it not."""
    return "regions" if loss.template == "overlap" else loss.given


def option(loss: Loss) -> str:
    """Return the name of a loss in its group of conf/."""
    return loss.name.removeprefix("box_") if loss.template == "boxes" else loss.name


def text() -> str:
    """Return the settings."""
    losses = [f'    "{loss.name}": ("{takes(loss)}", "{activation(loss)}", {settings(loss)}),\n' for loss in LOSSES.values() if takes(loss)]
    boxes = [f'    "{option(loss)}": {settings(loss)},\n' for loss in LOSSES.values() if loss.template == "boxes"]
    first = "LOSSES: dict[str, tuple[str, str, dict[str, tuple[Any, Any]]]] = {\n"
    return f"{HEAD}{first}{''.join(losses)}}}\nBOX_LOSSES: dict[str, dict[str, tuple[Any, Any]]] = {{\n{''.join(boxes)}}}\n"


def files() -> dict[Path, str]:
    """Return the settings, and the files that lack in conf/."""
    made = {SETTINGS: text()}
    for loss in LOSSES.values():
        group = "box_loss" if loss.template == "boxes" else "loss" if takes(loss) else None
        if group and not (path := ROOT / "conf" / group / f"{option(loss)}.yaml").is_file():
            made[path] = f"name: {option(loss)}\n"
    return made


if __name__ == "__main__":
    sys.exit(write_or_check(files()))

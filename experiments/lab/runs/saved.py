"""Checkpoints that train.py saved, for the apps that use them."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lab.config.choices import DATA
from lab.config.errors import UserError
from lab.config.schema import TrainConfig
from lab.config.settings import ROOT, Settings, absolute, flat, reload, resolved, value_of

MODEL_DATA = ("image_size", "crop_pct", "crop_mode", "interpolation", "shortest", "longest", "divisor")
"""Settings of data that belong to the model: how it sees an image."""
SPLIT = ("split_seed", "held_out", "folds", "fold")
"""Settings of data that say which images the model has not seen."""


def checkpoint_of(words: list[str], usage: str) -> tuple[Path, list[str]]:
    """The checkpoint that one of the words names, and the other words."""
    given = [word.partition("=")[2] for word in words if word.startswith("checkpoint=")]
    if len(given) != 1 or not given[0]:
        raise UserError(f"checkpoint= must be given once, such as checkpoint=runs/<run>/checkpoints/best.pt\n{usage}")
    return absolute(resolved("checkpoint=", given[0]), ROOT), [word for word in words if not word.startswith("checkpoint=")]


def settings_of(state: dict[str, Any], words: Sequence[str]) -> tuple[Settings[TrainConfig], list[str]]:
    """The settings of a checkpoint's run, but for what `words` change, and which of the model's own they change.

    Other data is chosen without what belongs to the model: `data=folder` leaves data.image_size as the run had it.

    Raises:
        UserError: a word is wrong, or would hold out images that the model was trained on.
    """
    tree = without_teacher(state["config"])
    data = tree["data"]
    chosen, sizes = value_of(words, "data"), {}
    if chosen == data["name"]:
        words = [word for word in words if word.lstrip("+").partition("=")[0] != "data"]
    elif chosen in DATA:
        sizes = _sizes(data, {item.name for item in fields(DATA[chosen])})
        words = [*(f"{name}={'null' if value is None else value}" for name, value in sizes.items()), *words]
    settings = reload(tree, words)
    ours, theirs = flat(tree) | {name: str(value) for name, value in sizes.items()}, settings.flat()
    _refuse_seen(ours, theirs)
    changed = [name for name in theirs if name in ours and theirs[name] != ours[name] and _is_models(name)]
    return settings, [f"{name}={theirs[name]} (the run had {ours[name]})" for name in changed]


def _refuse_seen(ours: dict[str, str], theirs: dict[str, str]) -> None:
    """Raise UserError where `theirs` hold out what a model was trained on by `ours`."""
    for name in (f"data.{each}" for each in SPLIT if ours["data.name"] == theirs["data.name"]):
        if ours.get(name) != theirs.get(name) and name in ours and name in theirs:
            raise UserError(
                f"{name}={theirs[name]}: the model was trained with {name}={ours[name]}; "
                "another split would hold out images that it has seen. Leave it out."
            )
    for held_out, trained in (("data.val", "data.train"), ("data.val_annotations", "data.train_annotations")):
        if theirs.get(held_out) == ours.get(trained) != ours.get(held_out) and theirs["data.root"] == ours["data.root"]:
            raise UserError(f"{held_out}={theirs[held_out]}: the model was trained on these images; held-out ones are expected.")


def _sizes(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Settings that give other data, which has those that are `known`, the sizes of the run's."""
    sizes = {name: data[name] for name in MODEL_DATA if name in data}
    if sizes.get("shortest", 0) is None:
        sizes["shortest"] = data.get("scene_pixels")  # scenes come in the size that the model is to see
    return {f"data.{name}": value for name, value in sizes.items() if name in known}


def _is_models(name: str) -> bool:
    group, _, rest = name.partition(".")
    return group in ("model", "loss", "box_loss", "task") or (group == "data" and rest in MODEL_DATA)


def without_teacher(tree: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, a student's as those of any classifier: it can be scored when its teacher's file is gone."""
    task = tree["task"]
    if task["name"] != "distillation":
        return tree
    return tree | {"task": {"name": "classification", "calibration_bins": task["calibration_bins"]}}


def load_checkpoint(path: Path, setting: str = "checkpoint") -> dict[str, Any]:
    """What train.py saved; `setting` has named it. Of safetensors there are the weights alone, as `model`.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    import pickle
    import zipfile

    from safetensors import SafetensorError

    from lab.runs import checkpoint

    if not path.is_file():
        raise UserError(f"{setting}={path}: there is no such file.")
    other = path.suffix == ".safetensors"
    if not other and not zipfile.is_zipfile(path):  # of which torch's unpickler would say anything
        raise UserError(f"{setting}={path}: cannot be read: it is no checkpoint, or only a part of one ({path.stat().st_size} bytes).")
    try:
        state = (checkpoint.load_weights if other else checkpoint.load)(path)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{setting}={path}: cannot be read: {reason}") from None
    if not isinstance(state, dict) or not {"config", "model", "classes", "norm", "updates"} <= set(state):
        raise UserError(f"{setting}={path}: is none that this version's train.py saved.")
    state["config"]["model"]["pretrained"] = False  # its weights are in the checkpoint
    return state


def load_weights(model: Any, state: dict[str, Any], setting: str = "checkpoint") -> None:
    """Put a checkpoint's weights into the model, its averaged ones if it has them.

    Raises:
        UserError: the model is another one.
    """
    try:
        model.load_state_dict(state["ema"] or state["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(
            f"{setting}: its weights do not fit the model that the settings describe ({lines[-1]}).\n"
            "Leave out what changes the model or the size of its images; the run's own settings fit."
        ) from None

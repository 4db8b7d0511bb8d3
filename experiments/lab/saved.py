"""Checkpoints that train.py saved, for the apps that use them."""

from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.settings import ROOT, absolute, resolved


def checkpoint_of(words: list[str], usage: str) -> tuple[Path, list[str]]:
    """The checkpoint that one of the words names, and the other words."""
    given = [word.partition("=")[2] for word in words if word.startswith("checkpoint=")]
    if len(given) != 1 or not given[0]:
        raise UserError(f"checkpoint= must be given once, such as checkpoint=runs/<run>/checkpoints/best.pt\n{usage}")
    return absolute(resolved("checkpoint=", given[0]), ROOT), [word for word in words if not word.startswith("checkpoint=")]


def without_teacher(tree: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, a student's as those of any classifier: it can be scored when its teacher's file is gone."""
    task = tree["task"]
    if task["name"] != "distillation":
        return tree
    return tree | {"task": {"name": "classification", "calibration_bins": task["calibration_bins"]}}


def load_checkpoint(path: Path, setting: str = "checkpoint") -> dict[str, Any]:
    """What train.py saved; `setting` has named it.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    import pickle

    from lab import checkpoint

    if not path.is_file():
        raise UserError(f"{setting}={path}: there is no such file.")
    try:
        state = checkpoint.load(path)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise UserError(f"{setting}={path}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not {"config", "model", "classes", "norm", "updates"} <= set(state):
        raise UserError(f"{setting}={path}: is none that this version's train.py saved.")
    state["config"]["model"]["pretrained"] = False  # its weights are in the checkpoint
    return state

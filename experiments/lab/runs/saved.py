"""Checkpoints that train.py saved, for the apps that use them: where they are, and what their settings become."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any

from lab.config.choices import DATA, TASKS
from lab.config.errors import UserError
from lab.config.schema import FolderConfig, TrackingConfig, TrainConfig
from lab.config.settings import ROOT, Settings, absolute, flat, given_names, reload, resolved, value_of
from lab.runs.files import sha256_of
from lab.runs.masks import masked
from lab.runs.origin import are_settings, checked, is_trusted, naming_code, origin
from lab.runs.records import NAME, read_history
from lab.tracking.uploader import read_state, tracking_uri

MODEL_DATA = ("image_size", "crop_pct", "crop_mode", "interpolation", "shortest", "longest", "divisor")
"""Settings of data that belong to the model: how it sees an image."""
SPLIT = ("split_seed", "held_out", "folds", "fold", "test")
"""Settings of data that say which images the model has not seen; a name of a folder is judged by where it leads."""
PARTS = {"folder": ("train", "val", "test"), "coco": ("train_annotations", "val_annotations", "test_annotations")}
"""Settings that name the folders or files of the training, the held-out and the test images."""
MLFLOW = "runs:/"


@dataclass
class Saved:
    """A checkpoint. run: uri and run_id of its training in MLflow, as far as they are known."""

    name: str
    state: dict[str, Any]
    run: dict[str, str]


def checkpoint_of(overrides: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """Take `checkpoint=` from the overrides; return what it names, and the others.

    Raises:
        UserError: it is not given once.
    """
    given = [word.partition("=")[2] for word in overrides if word.startswith("checkpoint=")]
    if len(given) != 1 or not given[0]:
        raise UserError(f"checkpoint= must be given once, such as checkpoint=runs/<run> or checkpoint=runs:/<MLflow run id>\n{usage}")
    return resolved("checkpoint=", given[0]), [word for word in overrides if not word.startswith("checkpoint=")]


def open_checkpoint(name: str, overrides: Sequence[str]) -> Saved:
    """Open a checkpoint, a .safetensors file, a run's folder, or runs:/ID with the id of a run in MLflow.

    Args:
        name: which of them.
        overrides: trainer.runs= and tracking.uri= among them say where the run of an id is looked for.

    Raises:
        UserError: there is nothing that can be read.
    """
    if not name.startswith(MLFLOW):
        return _in_folder(absolute(name, ROOT))
    run_id, _, artifact = name.removeprefix(MLFLOW).partition("/")
    if not artifact and (folder := _folder_of(run_id, value_of(overrides, "trainer.runs"))):
        return _in_folder(folder)
    return _from_store(name, run_id, artifact or "checkpoints/best.pt", value_of(overrides, "tracking.uri"))


def _in_folder(path: Path) -> Saved:
    """Open a checkpoint or a run's folder: its best epoch's weights, or the last ones before there is a best epoch."""
    if path.is_dir():
        found = [path / "checkpoints" / name for name in ("best.pt", "last.pt")]
        file = next((each for each in found if each.is_file()), None)
        if file is None:
            raise UserError(f"checkpoint={path}: has no {found[0].relative_to(path)}; a run's folder or a checkpoint is expected.")
        path = file
    folder = path.parent.parent
    state = load_checkpoint(path)
    digest = None
    with suppress(UserError):  # records that cannot be read hold no digest
        digest = read_history(folder).digests.get(str(path.relative_to(folder)))
    if digest and sha256_of(path) != digest:
        raise UserError(f"checkpoint={path}: is not the file whose digest {folder / NAME} holds: it is damaged, or another one.")
    return Saved(str(path), state, read_state(folder) or state.get("tracking") or {})


def _folder_of(run_id: str, runs: str | None) -> Path | None:
    """Find the folder under `runs`, or in a sweep's folder there, whose run has this id in MLflow."""
    root = absolute(runs, "runs")
    states = (path for pattern in ("*/tracking.json", "*/*/tracking.json") for path in root.glob(pattern))
    return next((path.parent for path in states if read_state(path.parent).get("run_id") == run_id), None)


def _from_store(name: str, run_id: str, artifact: str, uri: str | None) -> Saved:
    """Download a run's checkpoint from an MLflow store.

    Raises:
        UserError: the store has no such run, or the run no such artifact.
    """
    from lab.compare.runs import Store
    from lab.tracking.store import reason

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    place = tracking_uri(TrackingConfig(uri=uri))
    client = Store(place).client
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = Path(client.download_artifacts(run_id, artifact, folder))
        except Exception as error:  # each kind of store fails in its own ways
            raise UserError(f"checkpoint={name}: {masked(place)} has no {artifact} of such a run: {reason(error, place)}") from None
        return Saved(name, load_checkpoint(path), {"uri": masked(place), "run_id": run_id})


def settings_of(saved: Saved, overrides: Sequence[str]) -> tuple[Settings[TrainConfig], list[str]]:
    """Return the settings of a checkpoint's run under these overrides, and which of the model's own settings they change.

    Other data is chosen without what belongs to the model: `data=folder` leaves data.image_size as the run had it.

    Raises:
        UserError: an override is wrong, would score training images as held-out ones, or the file names code (lab.runs.origin).
    """
    what = f"checkpoint={saved.name}"
    trust = value_of(overrides, "trust")
    trusted = trust == saved.name if saved.name.startswith(MLFLOW) else is_trusted(trust, Path(saved.name))
    tree = without_teacher(checked(what, saved.state["config"], given_names(overrides), trusted, saved.state["origin"]))
    tree = tree | {"model": tree["model"] | {"pretrained": False, "weights": None}}  # its weights are in the checkpoint
    data = tree["data"]
    chosen, sizes = value_of(overrides, "data"), {}
    if chosen == data.get("name"):
        overrides = [word for word in overrides if word.lstrip("+").partition("=")[0] != "data"]
    elif chosen in DATA:
        sizes = _sizes(data, {item.name for item in fields(DATA[chosen])})
        overrides = [*(f"{name}={'null' if value is None else value}" for name, value in sizes.items()), *overrides]
    settings = reload_file(what, tree, overrides)
    _refuse_seen(data, settings.tree()["data"])
    ours, theirs = flat(tree) | {name: str(value) for name, value in sizes.items()}, settings.flat()
    changed = [name for name in theirs if name in ours and theirs[name] != ours[name] and _is_models(name)]
    return settings, [f"{name}={theirs[name]} (the run had {ours[name]})" for name in changed]


def reload_file(what: str, tree: dict[str, Any], overrides: Sequence[str]) -> Settings[TrainConfig]:
    """Return the settings that a file holds, changed by these overrides; `what` names the file where its settings are at fault.

    Raises:
        UserError: a setting of the file or an override is wrong.
    """
    try:
        return reload(tree, overrides)
    except Exception:
        if any(True for _ in naming_code(tree)):  # without the overrides that code would be loaded
            raise
        try:
            reload(tree, [])
        except Exception as error:  # of settings that are damaged or of another version, any
            reason = str(error).removeprefix("conf/ sets ") if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{what}: its settings cannot be used: {reason}") from None
        raise


def _refuse_seen(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise UserError where data `theirs` would score what a model has learned from, or was chosen by, with data `ours`."""
    if ours["name"] != theirs["name"]:
        return
    names: Sequence[str] = PARTS.get(ours["name"], ())
    mine, other = _places(ours), _places(theirs)
    if mine.get("train") == other.get("train"):
        for name in (each for each in SPLIT if each in ours and each not in names):
            if ours[name] != theirs[name]:
                raise UserError(
                    f"data.{name}={theirs[name]}: the model was trained with data.{name}={ours[name]}; "
                    "another split would hold out images that it has seen. Leave it out."
                )
    for part, setting in zip(("val", "test"), names[1:], strict=False):
        if part in other and other[part] == mine.get("train"):
            raise UserError(f"data.{setting}={theirs[setting]}: the model was trained on these images; held-out ones are expected.")
    if "test" in other and other["test"] == mine.get("val"):
        raise UserError(f"data.{names[2]}={theirs[names[2]]}: the best epoch was chosen by these images; split=val scores them.")


def _places(data: dict[str, Any]) -> dict[str, Path]:
    """Return where the parts of a data set lie, of those that are folders or files."""
    root = absolute(data.get("root"), ROOT / "data")
    names = dict(zip(("train", "val", "test"), PARTS.get(data["name"], ()), strict=False))
    places = {part: (root / data[name]).resolve() for part, name in names.items() if data.get(name)}
    if data["name"] == "folder" and data.get("val") is None and (root / "val").is_dir():
        places["val"] = (root / "val").resolve()
    return places


def refuse_changed(state: dict[str, Any], config: TrainConfig, samples: int) -> None:
    """Raise UserError where images came or went in a folder whose held-out ones are some of its own: others are held out now.

    samples: the number of training images that there are now.
    """
    data, known = config.data, state["config"]["data"]
    if not isinstance(data, FolderConfig) or known["name"] != "folder" or "samples" not in state:
        return
    mine, other = _places(known), _places({item.name: getattr(data, item.name) for item in fields(data)})
    if mine.get("train") == other["train"] and "val" not in other and samples != state["samples"]:
        raise UserError(
            f"data.train={data.train}: has {samples} images to train on, while the model was trained on {state['samples']}; "
            "with another number of images the split holds out ones that it has seen. Give held-out images by data.val=."
        )


def _sizes(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the settings that give other data, which has those that are `known`, the sizes of the run's."""
    sizes = {name: data[name] for name in MODEL_DATA if name in data}
    if sizes.get("shortest", 0) is None:
        sizes["shortest"] = data.get("scene_pixels")  # scenes come in the size that the model is to see
    return {f"data.{name}": value for name, value in sizes.items() if name in known}


def _is_models(name: str) -> bool:
    group, _, rest = name.partition(".")
    return group in ("model", "loss", "box_loss", "task") or (group == "data" and rest in MODEL_DATA)


def without_teacher(tree: dict[str, Any]) -> dict[str, Any]:
    """Give a model whose task needs more for training than for scoring the settings that it is scored with."""
    spec = next((each for name, each in TASKS.items() if name == tree["task"].get("name")), None)
    return tree if spec is None or spec.scored_as is None else tree | {"task": spec.scored_as(tree["task"])}


def _are_weights(value: Any) -> bool:
    from torch import Tensor

    return isinstance(value, dict) and all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())


def _is_norm(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"mean", "std"}
        and all(isinstance(each, (list, tuple)) and all(isinstance(number, (int, float)) for number in each) for each in value.values())
        and 0 < len(value["mean"]) == len(value["std"])
        and all(isfinite(number) for number in value["mean"])
        and all(0 < number < inf for number in value["std"])
    )


PARTS_OF_STATE: dict[str, Callable[[Any], bool]] = {
    "config": are_settings,
    "model": _are_weights,
    "ema": lambda value: value is None or _are_weights(value),
    "classes": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "norm": _is_norm,
    **dict.fromkeys(("updates", "samples", "epoch", "batch", "skipped", "count"), lambda value: isinstance(value, int)),
    **dict.fromkeys(("tracking", "values", "best", "clock", "launches", "nonfinite"), lambda value: isinstance(value, dict)),
}
"""What every checkpoint holds, and whether a value can be that."""


def read_checkpoint(path: Path, setting: str) -> dict[str, Any]:
    """Read a .pt or .safetensors file, which `setting` has named.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    import pickle
    import zipfile

    from lab.runs import checkpoint

    if not path.is_file():
        raise UserError(f"{setting}={path}: there is no such file.")
    other = path.suffix == ".safetensors"
    if not other and not zipfile.is_zipfile(path):  # torch's unpickler has no clear error for it
        raise UserError(f"{setting}={path}: cannot be read: it is no checkpoint, or only a part of one ({path.stat().st_size} bytes).")
    try:
        return (checkpoint.load_weights if other else checkpoint.load)(path)
    except UserError as error:
        raise UserError(f"{setting}={error}") from None
    except pickle.UnpicklingError:  # torch would advise to load it with the code that is in it
        raise UserError(f"{setting}={path}: holds something else than tensors and plain values, and is not read.") from None
    except Exception as error:  # what somebody altered makes torch and safetensors fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{setting}={path}: cannot be read: {reason}") from None


def load_checkpoint(path: Path, setting: str = "checkpoint") -> dict[str, Any]:
    """Load what train.py saved; `setting` has named it. Of safetensors there are the weights alone, as `model`.

    Returns:
        What was saved, and as `origin` who wrote its settings.

    Raises:
        UserError: there is no such file, or it is something else.
    """
    state = read_checkpoint(path, setting)
    if not isinstance(state, dict) or not {"config", "model", "classes", "norm", "updates"} <= set(state):
        raise UserError(f"{setting}={path}: is none that this version's train.py saved.")
    wrong = [name for name, fits in PARTS_OF_STATE.items() if name in state and not fits(state[name])]
    if wrong:
        raise UserError(f"{setting}={path}: is damaged: {', '.join(wrong)} in it are not what train.py saves.")
    return state | {"origin": origin(state["config"], state.get("signature"), path.parent.parent)}


def load_weights(model: Any, state: dict[str, Any], setting: str = "checkpoint") -> None:
    """Put a checkpoint's weights into the model, its averaged ones if it has them.

    Raises:
        UserError: the model is another one.
    """
    try:
        model.load_state_dict(state.get("ema") or state["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(
            f"{setting}: its weights do not fit the model that the settings describe ({lines[-1]}).\n"
            "Leave out what changes the model or the size of its images; the run's own settings fit."
        ) from None

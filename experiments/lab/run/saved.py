"""Checkpoints that train.py saved: find and open them, and get their settings, for other apps."""

import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import open_to_read, sha256_of
from lab.base.formats import masked
from lab.base.paths import ROOT, absolute
from lab.base.records import NAME, read_history
from lab.config.schema import SplitConfig, TrackingConfig, TrainConfig
from lab.config.settings import Settings, flat, given_names, quoted, reload, resolved, value_of
from lab.config.user import runs_folder
from lab.data.specs import SOURCES
from lab.data.split import held_out_by
from lab.registry import DATA, TASKS
from lab.run.trust import checked, is_trusted, naming_code, origin, own_place
from lab.tracking.store import RefusedError, files_at, open_client, reason
from lab.tracking.uploader import is_own, read_state, tracking_uri

MODEL_DATA = ("image_size", "crop_pct", "crop_mode", "interpolation", "channels", "val_transform", "shortest", "longest", "divisor", "rect")
"""Settings of data that belong to the model: how it sees an image."""
MLFLOW = "runs:/"


@dataclass
class Saved:
    """A checkpoint; run: uri and run_id of its training in MLflow, if they are known."""

    name: str
    state: dict[str, Any]
    run: dict[str, str]


def checkpoint_of(overrides: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """Take `checkpoint=` from the overrides; return its value, and the remaining overrides.

    Raises:
        UserError: it is not given exactly once.
    """
    given = [word for word in overrides if word.startswith("checkpoint=")]
    if len(given) != 1 or given == ["checkpoint="]:
        raise UserError(f"checkpoint= must be given once, such as checkpoint=runs/<run> or checkpoint=runs:/<MLflow run id>\n{usage}")
    own, others = divided(overrides, ["checkpoint"])
    return resolved("checkpoint=", own["checkpoint"]), others


def divided(overrides: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Divide overrides into an app's own, the last of each name, and the remaining ones."""
    own = [word for word in overrides if "=" in word and word.partition("=")[0] in names]
    return dict(word.split("=", 1) for word in own), [word for word in overrides if word not in own]


def open_checkpoint(name: str, overrides: Sequence[str]) -> Saved:
    """Open a checkpoint, a .safetensors file, a run's folder, or runs:/ID with the id of a run in MLflow.

    Args:
        name: the path or id.
        overrides: may hold trainer.runs= and tracking.uri=, the places to search for a run's id.

    Raises:
        UserError: the checkpoint cannot be found or read.
    """
    if not name.startswith(MLFLOW):
        return _in_folder(absolute(name, ROOT))
    run_id, _, artifact = name.removeprefix(MLFLOW).partition("/")
    if not artifact and (folder := _folder_of(run_id, value_of(overrides, "trainer.runs"))):
        return _in_folder(folder)
    anywhere = (value_of(overrides, "tracking.artifacts_outside") or "").lower() == "true"
    return _from_store(name, run_id, artifact or "checkpoints/best.pt", value_of(overrides, "tracking.uri"), anywhere)


def _in_folder(path: Path) -> Saved:
    """Open a checkpoint or a run's folder."""
    path = file_of(path, "checkpoint")
    folder = path.parent.parent
    state = load_checkpoint(path)
    digest = None
    with suppress(UserError):  # unreadable records hold no digest
        digest = read_history(folder).digests.get(str(path.relative_to(folder)))
    if digest and sha256_of(path) != digest:
        raise UserError(f"checkpoint={path}: is not the file whose digest {folder / NAME} holds: it is damaged, or another one.")
    sent = read_state(folder)
    run = sent if is_own(sent, folder) else own_place(state)
    return Saved(str(path), state, run)


def file_of(path: Path, setting: str) -> Path:
    """Return a file, or of a run's folder the best epoch's checkpoint, or the last one before a best epoch exists.

    Raises:
        UserError: the folder, the value of `setting`, has none.
    """
    if not path.is_dir():
        return path
    found = [path / "checkpoints" / name for name in ("best.pt", "last.pt")]
    file = next((each for each in found if each.is_file()), None)
    if file is None:
        raise UserError(f"{setting}={path}: has no {found[0].relative_to(path)}; a run's folder or a checkpoint is expected.")
    return file


def _folder_of(run_id: str, runs: str | None) -> Path | None:
    """Find the folder under `runs`, or in a sweep's folder there, that this user sent to MLflow as the run with this id."""
    root = runs_folder(runs)
    states = (path for pattern in ("*/tracking.json", "*/*/tracking.json") for path in root.glob(pattern))
    found = ((path.parent, read_state(path.parent)) for path in states)
    return next((folder for folder, state in found if state.get("run_id") == run_id and is_own(state, folder)), None)


def _from_store(name: str, run_id: str, artifact: str, uri: str | None, anywhere: bool) -> Saved:
    """Download a run's checkpoint from an MLflow store; `anywhere`: whether an SQLite store's files may be outside of its folder.

    Raises:
        UserError: the store has no such run, or the run no such artifact, or it is at a place that is refused.
    """
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    place = tracking_uri(TrackingConfig(uri=uri))
    client = open_client(place)
    with tempfile.TemporaryDirectory() as folder:
        try:
            location = client.get_run(run_id).info.artifact_uri
            path = Path(files_at(place, location, [artifact], anywhere=anywhere).download_artifacts(artifact, folder))
        except UserError:
            raise
        except RefusedError as error:
            raise UserError(f"checkpoint={name}: {masked(place)}: {error}") from None
        except Exception as error:  # each kind of store raises other errors
            raise UserError(f"checkpoint={name}: {masked(place)} has no {artifact} of such a run: {reason(error, place)}") from None
        return Saved(name, load_checkpoint(path), {"uri": masked(place), "run_id": run_id})


def settings_of(saved: Saved, overrides: Sequence[str]) -> tuple[Settings[TrainConfig], list[str]]:
    """Return the settings of a checkpoint's run under these overrides, and the model's own settings that they change, in words.

    Other data keeps the settings that belong to the model: `data=folder` leaves data.image_size as in the run.

    Raises:
        UserError: an override is wrong, would score training images as held-out ones, or the file names code (lab.run.trust).
    """
    what = f"checkpoint={saved.name}"
    trust = value_of(overrides, "trust")
    trusted = trust == saved.name if saved.name.startswith(MLFLOW) else is_trusted(trust, Path(saved.name))
    config = saved.state["config"]
    data = config["data"] | {name: None for name in ("sampler", "transform") if name in config["data"]}  # of training alone
    config = config | {"data": data}
    chosen, sizes = value_of(overrides, "data"), {}
    if chosen == data.get("name"):
        overrides = [word for word in overrides if word.lstrip("+").partition("=")[0] != "data"]
    given = given_names(overrides)
    if chosen in DATA and "data" in given:  # what belongs to the model stays, and it may name code
        given = given - {"data"} | {f"data.{name}" for name in data if name not in MODEL_DATA}
    tree = without_teacher(checked(what, config, given, trusted, saved.state["origin"]))
    tree = tree | {"model": tree["model"] | {"pretrained": False, "weights": None}}  # its weights are in the checkpoint
    data = tree["data"]
    if "data" in given_names(overrides) and chosen in DATA:
        sizes = _sizes(data, {item.name for item in fields(DATA[chosen])})
        texts = {name: "null" if value is None else quoted(value) if isinstance(value, str) else value for name, value in sizes.items()}
        overrides = [*(f"{name}={text}" for name, text in texts.items()), *overrides]
    settings = reload_file(what, tree, overrides)
    _refuse_seen(data, settings.tree()["data"])
    ours, theirs = flat(tree) | {name: str(value) for name, value in sizes.items()}, settings.flat()
    changed = [name for name in theirs if name in ours and theirs[name] != ours[name] and _is_models(name)]
    return settings, [f"{name}={theirs[name]} (the run had {ours[name]})" for name in changed]


def reload_file(what: str, tree: dict[str, Any], overrides: Sequence[str]) -> Settings[TrainConfig]:
    """Return the settings of a file, changed by these overrides; an error names the file by `what` if its settings cause it.

    Raises:
        UserError: a setting of the file or an override is wrong.
    """
    try:
        return reload(tree, overrides)
    except Exception:
        if any(True for _ in naming_code(tree)):  # a check without the overrides would load that code
            raise
        try:
            reload(tree, [])
        except Exception as error:  # damaged settings, or those of another version, can raise any error
            reason = str(error).removeprefix("conf/ sets ") if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{what}: its settings cannot be used: {reason}") from None
        raise


def _refuse_seen(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise UserError if data `theirs` would score images that the model was trained on, or chosen by, with data `ours`."""
    if ours["name"] != theirs["name"]:
        return
    spec = SOURCES[ours["name"]]
    mine, other = spec.places_of(ours), spec.places_of(theirs)
    if mine.get("train") == other.get("train"):
        for name in spec.divided_by:
            if ours.get(name, theirs[name]) != theirs[name]:  # damaged settings, or those of another version, may lack it
                raise UserError(
                    f"data.{name}={theirs[name]}: the model was trained with data.{name}={ours[name]}; "
                    "another split would hold out images that it has seen. Leave it out."
                )
    for part, setting in zip(("val", "test"), spec.parts[1:], strict=False):
        if other.get(part, set()) & mine.get("train", set()):
            raise UserError(f"data.{setting}={theirs[setting]}: the model was trained on these images; held-out ones are expected.")
    if other.get("test", set()) & mine.get("val", set()):
        raise UserError(f"data.{spec.parts[2]}={theirs[spec.parts[2]]}: the best epoch was chosen by these images; split=val scores them.")


def refuse_changed(state: dict[str, Any], config: TrainConfig, data: Any) -> None:
    """Raise UserError if images that a random split holds out of the training data are now others, because the data has changed.

    Args:
        state: the checkpoint.
        config: the settings, under which the data was opened.
        data: the opened data, a lab.data.sets.Data.
    """
    given, known = config.data, state["config"]["data"]
    at_random = isinstance(given, SplitConfig) and held_out_by(given) in data.held_out
    if known["name"] != given.name or not at_random or "samples" not in state:
        return
    spec = SOURCES[given.name]
    seen = spec.places_of(known).get("train")
    if not seen or seen != spec.places_of({item.name: getattr(given, item.name) for item in fields(given)})["train"]:
        return
    name, samples = (*spec.parts, *spec.files)[0], data.train.samples
    named = spec.has("val") or spec.has("split")
    remedy = "Name the held-out images by data.val= or data.split=." if named else "Let the data have held-out images of its own."
    said = f"data.{name}={getattr(given, name)}: has"
    if samples != state["samples"]:
        raise UserError(
            f"{said} {samples} images to train on, while the model was trained on {state['samples']}; with "
            f"another number of images the split holds out ones that it has seen. {remedy}"
        )
    if state.get("data") not in (None, data.identity("train")):
        raise UserError(f"{said} other images or labels than the model was trained on; the split holds out ones that it has seen. {remedy}")


def _sizes(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return overrides that give other data, whose settings are `known`, the image sizes of the run's data."""
    sizes = {name: data[name] for name in MODEL_DATA if name in data}
    if sizes.get("shortest", 0) is None:
        sizes["shortest"] = data.get("scene_pixels")  # scenes are drawn in the size that the model takes
    return {f"data.{name}": value for name, value in sizes.items() if name in known}


def _is_models(name: str) -> bool:
    group, _, rest = name.partition(".")
    return group in ("model", "loss", "box_loss", "task") or (group == "data" and rest in MODEL_DATA)


def without_teacher(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings to score a model with, without those that only its training needs, such as a teacher."""
    spec = next((each for name, each in TASKS.items() if name == tree["task"].get("name")), None)
    return tree if spec is None or spec.scored_as is None else tree | {"task": spec.scored_as(tree["task"])}


def read_checkpoint(path: Path, setting: str) -> dict[str, Any]:
    """Read a .pt or .safetensors file, the value of `setting`.

    Raises:
        UserError: the file does not exist, or cannot be read.
    """
    import pickle
    import zipfile

    from lab.run import checkpoint  # it loads torch, which train.py's --help does not need

    if not path.is_file():
        raise UserError(f"{setting}={path}: no such file.")
    other = path.suffix == ".safetensors"
    with open_to_read(path) as file:
        archive = file.read(4) == b"PK\3\4"  # by which torch takes a file for an archive
    if not other and not (archive and zipfile.is_zipfile(path)):  # torch's unpickler gives no clear error
        raise UserError(f"{setting}={path}: cannot be read: it is not a checkpoint, or only a part of one ({path.stat().st_size} bytes).")
    try:
        return (checkpoint.load_weights if other else checkpoint.load)(path)
    except UserError as error:
        raise UserError(f"{setting}={error}") from None
    except pickle.UnpicklingError:  # torch's message would advise to run the code in the file
        raise UserError(f"{setting}={path}: holds something else than tensors and plain values, and is not read.") from None
    except Exception as error:  # an altered file can raise any error of torch or safetensors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{setting}={path}: cannot be read: {reason}") from None


def load_checkpoint(path: Path, setting: str = "checkpoint") -> dict[str, Any]:
    """Load what train.py saved, the value of `setting`. A safetensors file has only the weights, as `model`.

    Returns:
        The saved state, with `origin`: who wrote its settings.

    Raises:
        UserError: the file does not exist, or train.py did not save it.
    """
    from lab.run.checkpoint_checks import fault  # it loads torch

    state = read_checkpoint(path, setting)
    if not isinstance(state, dict) or not {"config", "model", "classes", "norm", "updates"} <= set(state):
        raise UserError(f"{setting}={path}: is none that this version's train.py saved.")
    if wrong := fault(state):
        raise UserError(f"{setting}={path}: is damaged, or not of train.py: {wrong}.")
    return state | {"origin": origin(state["config"], state.get("signature"), path.parent.parent)}


def load_weights(model: Any, state: dict[str, Any], setting: str = "checkpoint") -> None:
    """Load a checkpoint's weights into the model, averaged ones if it has them.

    Raises:
        UserError: the weights do not fit the model, or are no numbers.
    """
    try:
        model.load_state_dict(state.get("ema") or state["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(
            f"{setting}: its weights do not fit the model that the settings describe ({lines[-1]}).\n"
            "Leave out what changes the model or the size of its images; the run's own settings fit."
        ) from None
    refuse_nan(model.state_dict(), setting)


def refuse_nan(weights: dict[str, Any], setting: str) -> None:
    """Raise UserError if a weight is nan, because a model of such weights says nothing of any image."""
    bad = [name for name, value in weights.items() if value.is_floating_point() and bool(value.isnan().any())]
    if bad:
        listed = f"{', '.join(bad[:3])}{', …' if len(bad) > 3 else ''}"
        raise UserError(
            f"{setting}: {len(bad)} of its {len(weights)} tensors hold nan ({listed}), so that the model can predict nothing.\n"
            "Its training has diverged, or the file was damaged. Take an earlier checkpoint, or train again with a lower optim.lr."
        )

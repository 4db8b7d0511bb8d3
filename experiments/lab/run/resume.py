"""Resume an interrupted run: find it, and check whether the given settings agree with its own."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.paths import ROOT, absolute
from lab.base.process import is_rank_zero
from lab.base.records import NAME, read_history
from lab.config.schema import AUTO, FITTED, TrainConfig, as_opened
from lab.config.settings import Settings, flat, given_names, load, reload, value_of
from lab.config.user import runs_folder
from lab.registry import DATA
from lab.run.folder import running
from lab.run.saved import load_checkpoint, reload_file
from lab.run.trust import Origin, are_settings, checked, is_foreign, is_trusted, origin_of, read_config, vouching
from lab.tracking.uploader import is_own, read_state

HARMLESS = (
    *("resume", "trust", "name", "tracking", "loss.fused_head"),
    *("data.root", "data.workers", "data.download", "data.check", "data.images_outside", "data.eval_batch_size"),
    *("trainer.runs", "trainer.device", "trainer.compile", "trainer.channels_last", "trainer.deterministic"),
    *("trainer.log_every", "trainer.eval_every", "trainer.timing_warmup", "trainer.max_nonfinite", "trainer.profile"),
    *("trainer.save_every", "trainer.save_updates", "trainer.save_minutes", "trainer.keep", "trainer.callbacks", "task.metrics"),
)
"""Settings, and groups of them, that a continued run may change: where and how it computes, records and saves, but not what it learns."""

LENGTHS = ("trainer.epochs", "trainer.max_updates", "trainer.patience")
"""These may grow."""


@dataclass
class Earlier:
    """A run to resume, as the first rank sends it to the other ranks: plain values, because generated settings cannot be pickled."""

    path: Path
    checkpoint: Path | None  # None if it was interrupted before the first one: it starts again in its folder
    changed: dict[str, str] = field(default_factory=dict)  # settings that were changed
    own: bool = False  # whether this user made the run in its folder
    foreign: bool = False  # whether a stranger made it, whom the user has not said to trust
    trusted: bool = False  # whether the user said to trust the folder


def chosen(overrides: list[str]) -> tuple[Settings[TrainConfig], Earlier | None]:
    """Return the settings, and the run to resume if `resume=` names or finds one."""
    resume = value_of(overrides, "resume")
    if resume is not None and resume != "auto":
        return named(resume, overrides)
    settings = load(overrides)
    return settings, newest(settings) if resume and is_rank_zero() else None


def named(given: str, overrides: list[str]) -> tuple[Settings[TrainConfig], Earlier]:
    """Return the settings of a run, changed by the other overrides, and the run; `given` names its folder or a checkpoint.

    Raises:
        UserError: it is not a run, it has ended, or a setting would change what it learns.
    """
    what = absolute(given, ROOT)
    path = what.parent.parent if what.is_file() else what
    tree = _config(path)
    if tree is None or not (path / NAME).is_file():
        raise UserError(f"resume={given}: a run's folder, such as runs/<run>, or one of its checkpoints is expected; {path} is none.")
    others = [word for word in overrides if not word.lstrip("+").startswith("resume=")]
    preset = load(others) if any(word.startswith("experiment=") for word in others) else None
    by, names, trusted = origin_of(path), given_names(others), is_trusted(value_of(others, "trust"), path)
    if preset:
        names |= {name for name, value in preset.flat().items() if flat(tree).get(name) == value}
    tree = checked(f"resume={given}", tree, names, trusted, by)
    settings = preset or reload_file(f"resume={given}", tree, others)
    before = flat(reload(tree, vouching(tree, others)).tree()) | flat(tree)
    changed = _changed(given, before, settings.flat())
    history = read_history(path)
    if history.start is not None and history.start.get("app") != "train":
        raise UserError(f"resume={given}: is a run of {history.start.get('app')}.py; only train.py's go on.")
    if history.status == "FINISHED" and not set(changed) & set(LENGTHS):
        raise UserError(f"resume={given}: the run is finished. A larger trainer.epochs= trains it for longer.")
    checkpoint = what if what.is_file() else _last(path)
    if history.status == "FINISHED" and checkpoint is None:
        raise UserError(f"resume={given}: the run has finished and keeps no last.pt (trainer.keep=best), by which it could go on.")
    return settings, Earlier(path, checkpoint, changed, by is Origin.HERE, is_foreign(by, trusted=trusted), trusted)


def newest(settings: Settings[TrainConfig]) -> Earlier | None:
    """Return the newest unfinished run under trainer.runs with these settings on which no process works."""
    wanted = settings.tree()
    runs = runs_folder(settings.config.trainer.runs)
    for path in sorted(runs.iterdir() if runs.is_dir() else [], reverse=True):
        tree = _config(path)
        if tree is None or _identity(tree) != _identity(as_opened(wanted, tree)) or running(path):
            continue
        history = read_history(path)
        if history.start is not None and history.start.get("app") == "train" and history.status != "FINISHED":
            by = origin_of(path)
            trusted = is_trusted(settings.config.trust, path)
            foreign = is_foreign(by, trusted=trusted)
            return Earlier(path, _last(path), own=by is Origin.HERE, foreign=foreign, trusted=trusted)
    return None


def recorded_store(earlier: Earlier) -> str | None:
    """Return the store that a run is recorded in, if this user sent it there; not the checkpoint's, which another person may put in."""
    state = read_state(earlier.path)
    return state.get("uri") if earlier.own and is_own(state, earlier.path) else None


def load_state(earlier: Earlier, settings: Settings[TrainConfig] | None = None) -> dict[str, Any] | None:
    """Return the contents of the run's checkpoint.

    Args:
        earlier: the run.
        settings: the settings of the continued run; None if they have already been compared.

    Raises:
        UserError: the checkpoint cannot be read or continued, or its settings differ from config.yaml beside it.
    """
    if earlier.checkpoint is None:
        return None
    state = load_checkpoint(earlier.checkpoint, "resume")
    if not {"optimizer", "rng", "batch"} <= set(state):
        raise UserError(f"resume={earlier.checkpoint}: has the weights alone; last.pt beside it has all that is needed to go on.")
    if settings is not None:
        now, saved = settings.flat(), flat(state["config"])
        _changed(str(earlier.checkpoint), {name: saved.get(name, value) for name, value in now.items()} | saved, now)
    return state


def restore(trainer: Any, earlier: Earlier, state: dict[str, Any]) -> None:
    """Restore the trainer's state from a checkpoint.

    Raises:
        UserError: the contents of the checkpoint do not fit the run.
    """
    try:
        trainer.restore(state)
    except UserError:
        raise
    except Exception as error:  # an altered part can raise any error of torch or Python
        reason = (str(error).strip().splitlines() or [""])[-1].strip()[:300]
        raise UserError(
            f"resume={earlier.checkpoint}: is damaged, or of another version: {type(error).__name__}: {reason}\n"
            "Take another checkpoint of the run, or begin it anew without resume=."
        ) from error


def _config(path: Path) -> dict[str, Any] | None:
    tree = read_config(path)
    return tree if are_settings(tree) else None


def _last(path: Path) -> Path | None:
    last = path / "checkpoints" / "last.pt"
    return last if last.is_file() else None


def _identity(tree: dict[str, Any]) -> dict[str, str]:
    """Return the settings that are equal in runs that are the same run."""
    return {name: value for name, value in flat(tree).items() if name == "name" or not _harmless(name)}


def _harmless(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in HARMLESS)


def _moved(before: dict[str, str], now: dict[str, str]) -> set[str]:
    """Return the data's settings that name a file by its whole path, where it has the same name in another folder."""
    schema = DATA.get(now.get("data.name", ""))
    paths = [f"data.{item.name}" for item in fields(schema) if item.metadata.get("path") == "always"] if schema else []
    given = [name for name in paths if "None" not in (before.get(name, "None"), now.get(name, "None"))]
    return {name for name in given if Path(before[name]).name == Path(now[name]).name}


def _changed(given: str, before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    opened = [f"data.{name}" for name in FITTED if now.get(f"data.{name}") == AUTO]
    changed = {name: now.get(name, "nothing") for name in {**before, **now} if now.get(name) != before.get(name) and name not in opened}
    moved = _moved(before, now)
    refused = [
        name for name in changed if name not in moved and not _harmless(name) and not (name in LENGTHS and _longer(before[name], now[name]))
    ]
    if refused:
        lines = [f"  {name}={changed[name]}, while the run has {before.get(name, 'none')}" for name in refused]
        raise UserError(
            f"resume={given}: these settings would change what the run learns:\n"
            + "\n".join(lines)
            + f"\nLeave them as they were, or start a run of its own without resume=. Only {', '.join(LENGTHS)} may grow."
        )
    return {name: value for name, value in changed.items() if name not in ("resume", "name")}


def _longer(before: str, now: str) -> bool:
    limits = [float("inf") if value == "None" else int(value) for value in (before, now)]
    return limits[1] > limits[0]

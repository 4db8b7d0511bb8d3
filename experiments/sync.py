"""Send to MLflow the records it lacks: `uv run experiments/sync.py` for all runs, or `uv run experiments/sync.py runs/<run> ...` for these.

Each run is sent to the store and experiment in its settings, unless `tracking.uri=` or `tracking.experiment=` name another; the address's
password is taken from MLFLOW_TRACKING_URI. Records that have arrived are not sent again. A run that is still training is left to its own
process; one whose process was killed becomes KILLED; a copy of a run's folder is skipped until `resume=` makes it a run of its own.
TensorBoard and Weights & Biases get the records they lack of a run with `tracking.writers`. A sweep's folder stands for its own run
and its jobs' runs. A run with `tracking=none` is sent only if it is named. `trainer.runs=` is the folder to search for runs; with
`tracking.patience_seconds=` a store that fails is tried again for that long. A run that you did not make gets a run of its own, without
models, unless `trust=` names its folder.
"""

if __name__ == "__main__":
    from lab.base.process import start_script

    start_script()

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.base.errors import UserError
from lab.base.files import refuse_links
from lab.base.formats import masked, visible
from lab.base.process import ABORTED, begin_work
from lab.base.records import NAME, read_history
from lab.config.command import paths_among, run_app
from lab.config.help import settings_text
from lab.config.schema import TrackingConfig
from lab.config.settings import TRAIN, load
from lab.config.user import runs_folder
from lab.run.folder import copied_from, end_if_killed, running
from lab.run.trust import Origin, is_foreign, is_trusted, origin_of, read_config
from lab.sweep.plan import with_runs
from lab.tracking.store_paths import refuse_foreign
from lab.tracking.uploader import (
    BusyError,
    MlflowUploader,
    chosen_uri,
    completed,
    is_own,
    is_sent,
    not_taken,
    read_state,
    run_key,
    tracking_uri,
)
from lab.tracking.writers import WriterThread


def main(argv: list[str]) -> int:
    return run_app("sync", argv, lambda words: f"{__doc__}\nsettings:\n{settings_text(TRAIN, ['tracking', 'trainer.runs'])}", _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    named, given = paths_among(words)
    settings = load(given)
    folders = checked(named) if named else sorted(file.parent for file in runs_folder(settings.config.trainer.runs).glob(f"*/{NAME}"))
    runs = [run for folder in folders for run in with_runs(folder)]
    chosen, config = {word.partition("=")[0] for word in given}, settings.config
    return settings, lambda: sync_all(runs, config.tracking, chosen, named=bool(named), trust=config.trust)


def sync_all(runs: list[Path], config: TrackingConfig, chosen: set[str], *, named: bool, trust: str | None = None) -> int:
    """Send run folders one after the other; return the exit status.

    Args:
        runs: the run folders.
        config: the settings of tracking.
        chosen: the names of the settings that were given.
        named: whether the folders were given by name.
        trust: a folder whose runs are taken as the user's own.
    """
    incomplete = 0
    begin_work()
    for run in runs:
        try:
            incomplete += sync(run, config, chosen, named=named, trusted=is_trusted(trust, run))
        except UserError as error:
            print(visible(f"{run}: incomplete: {error}"), flush=True)
            incomplete += 1
        except KeyboardInterrupt:
            print("interrupted: not all runs were looked at")
            return ABORTED
    print(f"{incomplete} of {len(runs)} runs are incomplete" if incomplete else "nothing is missing")
    return int(incomplete > 0)


def checked(folders: list[Path]) -> list[Path]:
    for folder in folders:
        if not (folder / NAME).is_file():
            raise UserError(f"{folder}: is not a run folder: it holds no metrics.jsonl; give one or more, such as runs/*, or none for all.")
    return folders


def sync(folder: Path, config: TrackingConfig, chosen: set[str], *, named: bool, trusted: bool = False) -> int:
    """Send one run folder; return 1 where something is still missing afterwards.

    Raises:
        UserError: the store's credentials are missing, or it is refused.
        KeyboardInterrupt: it was interrupted.
    """
    if not trusted:
        refuse_links(folder)
    state = read_state(folder)
    found = (read_config(folder) or {}).get("tracking")
    settings: dict[str, Any] = found if isinstance(found, dict) else {}
    if not named and not settings.get("enabled", True):
        return 0
    with contextlib.suppress(UserError):  # a record that cannot be read does not stop other runs from being sent
        if original := copied_from(folder, read_history(folder)):
            said = f"left alone: it is a copy of {original}, whose run in MLflow it would change; resume= gives it one of its own"
            print(visible(f"{folder}: {said}"))
            return 0
        if end_if_killed(folder):
            print(f"{folder}: its process was killed: the run is marked KILLED")
    by = origin_of(folder)
    if by is not Origin.STRANGER:
        _write_rest(folder, settings)
    sealed = is_own(state, folder)
    own = not is_foreign(by, trusted=trusted) or (sealed and state.get("key") == run_key(folder))
    meant = {name: state.get(name) or settings.get(name) for name in ("uri", "experiment")}
    ours = completed(chosen_uri(config.uri))
    if "tracking.uri" in chosen or not meant["uri"] or meant["uri"] == masked(ours):
        uri = tracking_uri(config)
    elif sealed or (by is not Origin.STRANGER and meant["uri"] == settings.get("uri")):
        uri = completed(meant["uri"])
    else:
        raise UserError(f"its files name the store {meant['uri']}, without your signature for this folder: say where to, tracking.uri=.")
    experiment = (meant["experiment"] if (sealed or own) and "tracking.experiment" not in chosen else None) or config.experiment
    if is_sent(folder, uri, own=own):
        if named:
            print(visible(f"{folder}: complete, run {state.get('run_id')}{not_taken(state.get('aside', []))}"))
        return 0
    patience = config.patience_seconds if "tracking.patience_seconds" in chosen else 0.0
    register = config.register or (settings.get("register") if by is not Origin.STRANGER else None)
    tracking = replace(config, experiment=experiment, patience_seconds=patience, register=register)
    refuse_foreign(uri, tracking)
    uploader = MlflowUploader(folder, uri, tracking, own=own)
    try:
        uploader.take()
    except BusyError:
        print(f"{folder}: left to the process that is sending it")
        return 0
    uploader.start()
    problem = uploader.close()
    said = f"incomplete: {uploader.error}" if problem else f"complete, run {uploader.run_id}{not_taken(uploader.aside)}"
    print(visible(f"{folder}: {said}"), flush=True)
    if uploader.interrupted:
        raise KeyboardInterrupt
    return int(problem is not None)


def _write_rest(folder: Path, settings: dict[str, Any]) -> None:
    """Send TensorBoard and Weights & Biases the records they lack of a run that asked for them, if no process is writing to it."""
    for name in settings.get("writers", []):
        writer = WriterThread(folder, name, settings["experiment"])
        if writer.is_behind() and not running(folder):
            writer.start()
            print(f"{folder}: {name}: {writer.close(settings['patience_seconds'])}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Send to MLflow what it missed: `uv run experiments/sync.py` for all runs, or `uv run experiments/sync.py runs/<run> ...` for these.

Each run goes to the store and experiment that it was meant for, unless `tracking.uri=` or `tracking.experiment=` say otherwise. What has
arrived already is not sent again; a run that is still training is left to its own process. A sweep's folder stands for its own run and
those in it. A run with `tracking=none` is sent only if it is named. `trainer.runs=` is where all runs are looked for; with
`tracking.patience_seconds=` a store that fails is tried for so long.
"""

import sys
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.run_record import with_runs
from lab.schema import TrackingConfig, TrainConfig
from lab.settings import ROOT, absolute, load


def main(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(__doc__)
        return 0
    try:
        given = [word for word in words if "=" in word]
        named = [Path(word) for word in words if "=" not in word]
        config = load(given).config
        folders = checked(named) if named else all_runs(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen = {word.partition("=")[0] for word in given}
    runs = [run for folder in folders for run in with_runs(folder)]
    incomplete = sum(sync(run, config.tracking, chosen, named=bool(named)) for run in runs)
    print(f"{incomplete} of {len(runs)} runs are incomplete" if incomplete else "nothing is missing")
    return int(incomplete > 0)


def checked(folders: list[Path]) -> list[Path]:
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder}: is no run folder: it holds no metrics.jsonl; give one or more, such as runs/*, or none for all.")
    return folders


def all_runs(config: TrainConfig) -> list[Path]:
    runs = absolute(config.trainer.runs, ROOT / "runs")
    return sorted(file.parent for file in runs.glob("*/metrics.jsonl"))


def sync(folder: Path, config: TrackingConfig, chosen: set[str], *, named: bool) -> int:
    """Send one run folder; return 1 where something is still missing afterwards."""
    import yaml

    from lab.tracking import BusyError, Feeder, is_sent, read_state, tracking_uri

    state = read_state(folder)
    settings: dict[str, Any] = {}
    if (file := folder / "config.yaml").is_file():
        settings = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("tracking") or {}
    if not named and not settings.get("enabled", True):
        return 0
    meant = {name: state.get(name) or settings.get(name) for name in ("uri", "experiment")}
    uri = (None if "tracking.uri" in chosen else meant["uri"]) or tracking_uri(config)
    experiment = (None if "tracking.experiment" in chosen else meant["experiment"]) or config.experiment
    if is_sent(folder, uri):
        if named:
            print(f"{folder}: complete, run {state.get('run_id')}")
        return 0
    patience = config.patience_seconds if "tracking.patience_seconds" in chosen else 0.0
    feeder = Feeder(folder, uri, experiment, patience)
    try:
        feeder.take()
    except BusyError:
        print(f"{folder}: left to the process that is sending it")
        return 0
    feeder.start()
    problem = feeder.close()
    print(f"{folder}: {f'incomplete: {feeder.error}' if problem else f'complete, run {feeder.run_id}'}", flush=True)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The folders of a sweep's runs."""

from pathlib import Path
from typing import Any

from lab.base.records import NAME, History, read_history
from lab.run.origin import are_settings, read_config

BESIDE = ("name", "tracking", "resume", "trust")  # settings that do not change what a run computes; neither does trainer.runs


def runs_of(sweep: Path, name: str, tree: dict[str, Any]) -> list[History]:
    """Return the runs in a sweep's folder that have the settings `tree`, the oldest first; `name` is part of their folders' names."""
    wanted = essence(tree)
    folders = sorted(folder for folder in sweep.glob(f"*-{name}*") if (folder / NAME).is_file())
    return [
        read_history(folder)
        for folder in folders
        if are_settings(given := read_config(folder)) and essence(given) == wanted  # type: ignore[arg-type]  # checked before
    ]


def essence(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what a run computes."""
    kept = {key: value for key, value in tree.items() if key not in BESIDE}
    kept["trainer"] = {key: value for key, value in tree["trainer"].items() if key != "runs"}
    return kept


def with_runs(folder: Path) -> list[Path]:
    """Return a run's folder, or a sweep's folder followed by those of its runs."""
    return [folder, *sorted(path.parent for path in folder.glob(f"*/{NAME}"))]

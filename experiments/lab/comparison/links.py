"""The view of MLflow's UI that lists a comparison's runs."""

import hashlib
import json
from typing import Any

from lab.comparison.grid import is_beside, varying
from lab.comparison.results import BEST, LOSS_TIME, SPEED, Comparison
from lab.tracking.views import view

FIRST_SETTINGS = ("loss.name", "model.name", "seed")
MOST_SETTINGS = 12  # beside these


def view_of(found: Comparison) -> tuple[str, dict[str, Any]]:
    """Return the key of a view of only these runs, and the view: the compared figures, and the settings that differ."""
    runs = found.grid.runs
    ids = [run.id for run in runs]
    key = f"compare-{hashlib.sha256(json.dumps([found.metric, *sorted(ids)]).encode()).hexdigest()[:8]}"
    figures = dict.fromkeys([found.metric, f"val/{found.short}", f"{BEST}loss", SPEED, found.memory, LOSS_TIME])
    there = [name for name in figures if any(name in run.metrics for run in runs)]
    differing = varying(runs, [])
    first = [name for name in FIRST_SETTINGS if name in differing]
    others = sorted(name for name in differing if not is_beside(name, [*FIRST_SETTINGS, "loss", "model"]))[:MOST_SETTINGS]
    return key, view(first, there, others, runs=ids, order=found.metric, rising=not found.higher)

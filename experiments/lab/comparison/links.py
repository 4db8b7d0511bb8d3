"""Pages of MLflow's UI that show a comparison's runs."""

import hashlib
import json
from fnmatch import fnmatchcase
from typing import Any

from lab.comparison.grid import BESIDE
from lab.comparison.results import BEST, LOSS_TIME, SPEED, Comparison
from lab.tracking.views import Pages, view

FIRST_SETTINGS = ("loss.name", "model.name", "seed")
MOST_SETTINGS = 12  # beside these


class Links:
    """Addresses of pages that show a comparison.

    Args:
        found: the comparison.
        pages: the pages of MLflow's UI.
        kept: whether the comparison and its view are logged.

    key: of the view in MLflow that lists only these runs, with the compared figures and the settings that differ.
    table: that view's address; None if it is not kept, or if the runs belong to several experiments, because a view shows one.
    comparison: the address of MLflow's own page, with every setting and metric.
    """

    def __init__(self, found: Comparison, pages: Pages, *, kept: bool) -> None:
        self.found, self.pages = found, pages
        ids, experiments = [run.id for run in found.runs], list(dict.fromkeys(run.experiment_id for run in found.runs))
        self.key = f"compare-{hashlib.sha256(json.dumps([found.metric, *sorted(ids)]).encode()).hexdigest()[:8]}"
        self.comparison = pages.comparison(ids, experiments)
        self.table = pages.view(experiments[0], self.key) if kept and len(experiments) == 1 else None

    def view(self) -> dict[str, Any]:
        found, runs = self.found, self.found.runs
        figures = dict.fromkeys([found.metric, f"val/{found.short}", f"{BEST}loss", SPEED, found.memory, LOSS_TIME])
        there = [name for name in figures if any(name in run.metrics for run in runs)]
        differing = self._differing()
        first = [name for name in FIRST_SETTINGS if name in differing]
        others = [name for name in differing if name not in FIRST_SETTINGS][:MOST_SETTINGS]
        return view(first, there, others, runs=[run.id for run in runs], order=found.metric, rising=not found.higher)

    def _differing(self) -> list[str]:
        """Return the settings that differ between the runs that have them."""
        names = {name for run in self.found.runs for name in run.settings} - {"loss", "model"}
        asked = sorted(name for name in names if name in FIRST_SETTINGS or not any(fnmatchcase(name, each) for each in BESIDE))
        return [name for name in asked if len({run.settings[name] for run in self.found.runs if name in run.settings}) > 1]

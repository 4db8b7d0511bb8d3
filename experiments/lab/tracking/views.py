"""Pages of MLflow's UI: their addresses, and views of an experiment's runs with useful columns.

The UI has no setting for the first columns of a list of runs: they are data set, source and models, and no figure. Only a view that is
stored as a tag of the experiment, as the UI's "Share" button does, has its own columns and filter; an address opens it. This tag is not
documented, so a test reads the views in a browser; a UI that does not know it shows its own columns. A page is shown for language models
unless its address says that it is about training.

The list writes a metric with all its digits, and nests the jobs of a sweep in a closed row where it is sorted by its own column of dates.
So a run's main figures are stored a second time, rounded, and a view is sorted by another name of the date.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

VIEW = "mlflow.sharedViewState."  # prefix of the tag's name; the view's key, which is in the address, follows
RESULTS = "results"
TRAINING = "workflowType=machine_learning"
SHOWN = "result/"  # prefix of the rounded figures
COSTS = {"images_s": ("images_per_second",), "peak_mib": ("train/peak_allocated_mib", "train/peak_process_mib"), "loss_ms": ("loss_ms",)}
SCORES = ("top1", "map", "miou", "r2", "recall1", "accuracy", "loss")
FIGURES = {f"{SHOWN}{name}": (f"best_{name}",) for name in SCORES} | {f"{SHOWN}{name}": sources for name, sources in COSTS.items()}
"""The rounded figures, and the metrics that they come from: the first that a run has."""
DIGITS = 3
DATE = "attributes.`Created`"  # MLflow's server takes it for start_time, and its UI nests no rows under it
SETTINGS = ("loss.name", "model.name")
FIRST_COLUMNS = ("attributes.`Run Name`", "runDateAndNestInfo")
LAST_COLUMNS = ("attributes.`Dataset`", "attributes.`Models`")


@dataclass(frozen=True)
class Pages:
    """Addresses of pages; base: the UI's address with a slash at its end, empty for links between its own pages."""

    base: str = ""

    def run(self, experiment: str, run: str) -> str:
        return f"{self.base}#/experiments/{experiment}/runs/{run}?{TRAINING}"

    def view(self, experiment: str, key: str) -> str:
        """Return the address of a stored view of the runs."""
        return f"{self.base}#/experiments/{experiment}/runs?viewStateShareKey={key}&{TRAINING}"

    def charts(self, experiment: str, key: str) -> str:
        """Return the address of the charts of a stored view's runs."""
        return f"{self.view(experiment, key)}&compareRunsMode=CHART"


def pages_of(uri: str, ui: str | None = None) -> Pages:
    """Return the pages of the UI at `ui` if given, else at the tracking server, else where `mlflow ui` listens."""
    if ui is None and uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        ui = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without name and password, because users pass addresses on
    return Pages(f"{(ui or 'http://127.0.0.1:5000').rstrip('/')}/")


def pages_hint(uri: str) -> str:
    """Return how to start a UI for a store that has none."""
    return "" if uri.startswith("http") else f" (uv run mlflow ui --backend-store-uri {uri})"


def experiment_tags(experiment: str) -> dict[str, str]:
    """Return tags of an experiment of training runs."""
    note = (
        f"**[Results]({Pages().view(experiment, RESULTS)})**: the runs with their best figures, speed, memory and time of the loss. "
        "`uv run experiments/compare.py` compares losses over seeds."
    )
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": note,
        f"{VIEW}{RESULTS}": json.dumps(view(SETTINGS, list(FIGURES))),
    }


def rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that views show, from a run's metrics."""
    found = {name: next((metrics[each] for each in sources if each in metrics), None) for name, sources in FIGURES.items()}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in found.items() if value is not None}


def shown(metric: str) -> str:
    """Return the rounded figure of a metric, or the metric itself if it has none."""
    return next((name for name, sources in FIGURES.items() if metric in sources), metric)


def view(
    params: Sequence[str],
    metrics: Sequence[str],
    more_params: Sequence[str] = (),
    *,
    runs: Sequence[str] = (),
    sweep: str | None = None,
    order: str | None = None,
    rising: bool = False,
) -> dict[str, Any]:
    """Return a view of runs with columns of these params and metrics from left to right, in the form that MLflow 3.17's UI stores.

    Args:
        params: the first columns.
        metrics: the columns after them.
        more_params: the columns after the metrics.
        runs: ids of the runs that it shows; empty for all training runs.
        sweep: the sweep whose training runs it shows; None for those of all.
        order: the metric by which the runs are sorted; None for the newest first.
        rising: whether the lowest value comes first.
    """
    groups = (("params", params), ("metrics", metrics), ("params", more_params))
    columns = {f"{kind}.`{name}`": name for kind, names in groups for name in names}
    chosen = ", ".join(f"'{each}'" for each in runs)
    trainings = "params.`model.name` LIKE '%'" + (f" AND tags.sweep = '{sweep}'" if sweep else "")
    return {
        "searchFilter": f"attributes.run_id IN ({chosen})" if chosen else trainings,
        "orderByKey": f"metrics.`{order}`" if order else DATE,
        "orderByAsc": rising,
        "selectedColumns": [*columns, *LAST_COLUMNS],
        "columnOrder": [*FIRST_COLUMNS, *columns, *LAST_COLUMNS],
        "columnWidths": {"runDateAndNestInfo": 140, LAST_COLUMNS[0]: 240}
        | {key: (20 if key.startswith("metrics") else 32) + 7 * len(name) for key, name in columns.items()},
    }

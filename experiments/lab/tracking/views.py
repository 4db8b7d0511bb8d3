"""Pages of MLflow's UI: their addresses, and views of an experiment's runs whose columns say something.

The UI has no setting for the columns that a list of runs begins with: they are data set, source and models. A view that is kept as a tag of
the experiment, as the UI's own "Share" button does, has the columns and the filter that it says; an address opens it. A page whose address
does not say that it is about trainings is shown as one of language models.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

VIEW = "mlflow.sharedViewState."  # begins the tag's name; a key, which the address names, ends it
RESULTS = "results"
TRAINING = "workflowType=machine_learning"
FIGURES = (
    *("best_top1", "best_map", "best_loss", "images_per_second"),
    *("train/peak_allocated_mib", "train/peak_process_mib", "train/loss_ms"),
)
SETTINGS = ("loss.name", "model.name")
FIRST_COLUMNS = ("attributes.`Run Name`", "runDateAndNestInfo")
LAST_COLUMNS = ("attributes.`Dataset`", "attributes.`Models`")


@dataclass(frozen=True)
class Pages:
    """base: the UI's address; empty for links from one of its own pages to another."""

    base: str = ""

    def run(self, experiment: str, run: str) -> str:
        return f"{self._experiment(experiment)}/runs/{run}?{TRAINING}"

    def view(self, experiment: str, key: str) -> str:
        """Of the runs, as a kept view shows them."""
        return f"{self._experiment(experiment)}/runs?viewStateShareKey={key}&{TRAINING}"

    def comparison(self, runs: Sequence[str], experiments: Sequence[str]) -> str:
        """Of these runs side by side, with all of their params and metrics."""
        return f"{self._root}compare-runs?runs={_json(runs)}&experiments={_json(experiments)}&{TRAINING}"

    def _experiment(self, experiment: str) -> str:
        return f"{self._root}experiments/{experiment}"

    @property
    def _root(self) -> str:
        return f"{self.base}/#/" if self.base else "#/"


def pages_of(uri: str, ui: str | None = None) -> Pages:
    """The UI at `ui` where it is given, else the tracking server itself, else where `mlflow ui` listens."""
    if ui is None and uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        ui = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # an address is passed on: no name and password
    return Pages((ui or "http://127.0.0.1:5000").rstrip("/"))


def pages_hint(uri: str) -> str:
    """How to start a UI for a store that is none itself."""
    return "" if uri.startswith("http") else f" (mlflow ui --backend-store-uri {uri})"


def experiment_tags(experiment: str) -> dict[str, str]:
    """Tags of an experiment of trainings."""
    note = (
        f"**[Results]({Pages().view(experiment, RESULTS)})**: the runs with their best figures, speed, memory and time of the loss. "
        "`experiments/compare.py` compares losses over seeds."
    )
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": note,
        f"{VIEW}{RESULTS}": json.dumps(view(SETTINGS, FIGURES)),
    }


def view(
    params: Sequence[str],
    metrics: Sequence[str],
    more_params: Sequence[str] = (),
    *,
    runs: Sequence[str] = (),
    order: str | None = None,
    rising: bool = False,
) -> dict[str, Any]:
    """A table of runs with columns of these params and metrics from left to right, in the form that MLflow 3.17's UI keeps.

    Args:
        params: the first columns.
        metrics: those after them.
        more_params: those after the metrics.
        runs: ids of the only ones that it shows; none for all trainings.
        order: the metric by which the runs are in order; None for the newest first.
        rising: whether its lowest value comes first.
    """
    groups = (("params", params), ("metrics", metrics), ("params", more_params))
    columns = {f"{kind}.`{name}`": name for kind, names in groups for name in names}
    chosen = ", ".join(f"'{each}'" for each in runs)
    return {
        "searchFilter": f"attributes.run_id IN ({chosen})" if chosen else "params.`model.name` LIKE '%'",
        "orderByKey": f"metrics.`{order}`" if order else "attributes.start_time",
        "orderByAsc": rising,
        "selectedColumns": [*columns, *LAST_COLUMNS],
        "columnOrder": [*FIRST_COLUMNS, *columns, *LAST_COLUMNS],
        "columnWidths": {"runDateAndNestInfo": 140, LAST_COLUMNS[0]: 240} | {key: 30 + 7 * len(name) for key, name in columns.items()},
    }


def _json(values: Sequence[str]) -> str:
    return quote(json.dumps(list(values), separators=(",", ":")))

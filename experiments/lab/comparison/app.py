"""Compare finished runs: from the store to tables, pictures and a page."""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.base.files import write_text
from lab.base.formats import markdown_text, masked, one_line
from lab.base.process import Stop
from lab.comparison.page import lead, page, view_of
from lab.comparison.pictures import PICTURES, save
from lab.comparison.results import Comparison, compare_runs
from lab.comparison.runs import COMPARE, CompareConfig, Store, as_hydra, select
from lab.comparison.tables import cells_csv, figures, markdown, runs_csv, sheets, terminal
from lab.config.settings import Settings, load_for
from lab.config.user import runs_folder
from lab.run.active import Run, record_start
from lab.run.folder import RunFolder
from lab.tracking.store import NOTE
from lab.tracking.store_paths import refuse_foreign
from lab.tracking.uploader import tracking_uri
from lab.tracking.views import pages_hint, pages_of
from lab.training.console import Console

PAGE = "comparison.html"


@dataclass(repr=False)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        folder: the folder with the page, the tables and the pictures.
        notes: what to know of it, in words.
        exit_status: the exit status for a process that only compares.
        failure: what ended the comparison before its end.
    """

    folder: Path
    notes: list[str] = field(default_factory=list)
    exit_status: int = 0
    failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"ComparisonResult({os.path.relpath(self.page)}, {len(self.cells)} cells of {len(self.runs)} runs)"

    @property
    def page(self) -> Path:
        """Return the page's path."""
        return self.folder / PAGE

    @property
    def cells(self) -> Any:
        """Return a pandas frame with a row a cell: its mean, interval, and tested difference to the baseline."""
        return self._read("comparison.csv")

    @property
    def runs(self) -> Any:
        """Return a pandas frame with a row a run."""
        return self._read("runs.csv")

    def _read(self, name: str) -> Any:
        import pandas

        return pandas.read_csv(self.folder / name)


def asked_comparison(words: Sequence[str]) -> tuple[Settings[CompareConfig], Callable[[], ComparisonResult]]:
    """Return the settings for the words of a command line, and a function that compares as they ask."""
    settings = load_for(COMPARE, [as_hydra(word) for word in words])
    return settings, lambda: compare(settings, words)


def compare(settings: Settings[CompareConfig], overrides: Sequence[str]) -> ComparisonResult:
    """Run one comparison, from the store to the page."""
    config = settings.config
    uri = tracking_uri(config.tracking)
    store = Store(uri)
    runs, experiments, notes = select(store, config)
    found = compare_runs(runs, config, store)
    found.notes[:0] = notes
    tracking = replace(config.tracking, experiment=next(iter(experiments.values())), writers=[])
    if tracking.enabled:
        refuse_foreign(uri, tracking)
    averaged, pages = found.grid.runs, pages_of(uri, config.ui)
    ids = list(dict.fromkeys(run.experiment_id for run in averaged))
    view = view_of(found) if tracking.enabled and len(ids) == 1 else None  # a view shows the runs of one experiment
    table, charts = (pages.view(ids[0], view[0]), pages.charts(ids[0], view[0])) if view else (None, None)
    links = {"Runs, figures and settings that differ": table, "Charts of the runs": charts} if view else {}

    name = config.name or f"compare-{found.short}"
    said = shlex.join(["experiments/compare.py", *overrides])
    stop = Stop(checkpoint_first=False)
    folder = RunFolder(runs_folder(config.runs), name, settings.tree(), "runs")
    tags = {"compare": f"{len(averaged)} runs", "command": said, NOTE: description(found)}
    record_start(folder, "compare", settings, name, tags)
    run = Run(folder, tracking, uri if tracking.enabled else None, stop)
    made = {"experiment": ", ".join(experiments.values()), "command": masked(said), "made": time.strftime("%Y-%m-%d %H:%M")}
    with run.noted():
        write(found, folder, page(found, pages, links, made))
        if view:
            folder.record("view", key=view[0], state=view[1])
        console = Console(1)
        for sheet in sheets(found):
            console.show(terminal(sheet))
        for note in found.notes:
            console.say(one_line(note))
    places = run.close()
    if run.status != "FINISHED":
        return ComparisonResult(folder.path, list(found.notes), run.exit_status(), run.failure or KeyboardInterrupt())
    places.pop("run folder")
    console.table(lead(found), {"page": os.path.relpath(folder.path / PAGE)} | places)
    if table and run.uploader and run.uploader.complete:
        hint = "" if config.ui else pages_hint(masked(uri))
        console.say(f"the runs, their figures and the settings that differ in MLflow's UI{hint}: {table}")
        console.say(f"as charts: {charts}")
    return ComparisonResult(folder.path, list(found.notes), run.exit_status())


def write(found: Comparison, folder: RunFolder, html: str) -> None:
    """Write the comparison's files into its run folder."""
    for file, text in (
        (PAGE, html),
        ("comparison.md", markdown(found)),
        ("comparison.csv", cells_csv(found)),
        ("runs.csv", runs_csv(found)),
    ):
        write_text(folder.path / file, text)
        folder.artifact(folder.path / file)
    for name, picture in PICTURES.items():
        if save(partial(picture, found), path := folder.path / f"{name}.svg"):
            folder.artifact(path, "pictures")
    folder.summary(figures(found))


def description(found: Comparison) -> str:
    """Return the text for MLflow's page of the run: with the tables if they fit, because a tag holds 8000 characters."""
    first = markdown_text(lead(found))
    text = f"{first}\n\n{markdown(found)}"
    return text if len(text) < 8000 else first

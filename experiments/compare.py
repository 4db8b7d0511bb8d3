"""Compare finished runs: `uv run experiments/compare.py sweep=<name> baseline=loss=ce`.

A table of loss × model with intervals over seeds, tested differences to a baseline, costs and pictures: on the terminal, as CSV and
Markdown, as one HTML page, and in MLflow. `--help` lists the settings.
"""

import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from lab.compare.schema import COMPARE, CompareConfig, as_hydra
from lab.config.command import command
from lab.config.errors import UserError
from lab.config.help import settings_text
from lab.config.settings import Settings, absolute, load_for
from lab.runs.formats import markdown_text
from lab.runs.masks import masked
from lab.tracking.store import NOTE

if TYPE_CHECKING:
    from lab.compare.links import Links
    from lab.compare.results import Comparison
    from lab.runs.folder import RunFolder

PAGE = "comparison.html"
HELP = """usage: experiments/compare.py [setting=value ...]
       --cfg            print the resolved settings and stop
       --help           this text

settings, each with its default and what it takes; names and values may be globs, and several stand with commas between:
{settings}

Runs that differ in more than rows, columns and their seed get rows of their own.

examples:
  experiments/compare.py
  experiments/compare.py where=data=digits,trainer.epochs=8 baseline=loss=ce
  experiments/compare.py rows=loss.gamma columns=model where=loss=focal baseline=loss.gamma=0.0 metric=val/loss
  experiments/compare.py experiment=mine tag=host:gpu* goal=min ui=http://127.0.0.1:5000"""


def main(argv: list[str]) -> int:
    try:
        given = command(argv)
        overrides = [as_hydra(word) for word in given.overrides]
        if "--help" in given.flags:
            print(HELP.format(settings=settings_text(COMPARE, overrides)))
            return 0
        settings = load_for(COMPARE, overrides)
        if "--cfg" in given.flags:
            print(settings.text(), end="")
            return 0
        return compare(settings, given.overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def compare(settings: Settings[CompareConfig], overrides: list[str]) -> int:
    """One comparison, from the store to the page."""
    config = settings.config

    from lab.compare.links import Links
    from lab.compare.page import lead
    from lab.compare.results import compare_runs
    from lab.compare.runs import Store, select
    from lab.compare.tables import sheets, terminal
    from lab.runs.folder import RunFolder
    from lab.runs.run import source_tags
    from lab.tracking.uploader import MlflowUploader, tracking_uri
    from lab.tracking.views import pages_hint, pages_of
    from lab.training.console import Console

    uri = tracking_uri(config.tracking)
    store = Store(uri)
    runs, experiments = select(store, config)
    found = compare_runs(runs, config, store)
    links = Links(found, pages_of(uri, config.ui), kept=config.tracking.enabled)

    name = config.name or f"compare-{found.short}"
    said = shlex.join(["experiments/compare.py", *overrides])
    folder = RunFolder(absolute(config.runs, "runs"), name, settings.tree(), "runs")
    tags = {"compare": f"{len(found.runs)} runs", "command": said, NOTE: description(found)}
    tags |= source_tags("compare") | config.tracking.tags
    folder.record("start", app="compare", name=name, params=settings.flat(), tags=tags)
    made = {"experiment": ", ".join(experiments.values()), "command": masked(said), "made": time.strftime("%Y-%m-%d %H:%M")}
    write(found, folder, links, made)
    if links.table:
        folder.record("view", key=links.key, state=links.view())
    folder.close("FINISHED")
    uploader = None
    if config.tracking.enabled:
        uploader = MlflowUploader(folder.path, uri, next(iter(experiments.values())), config.tracking.patience_seconds)
        uploader.start()

    console = Console(1)
    for sheet in sheets(found):
        console.show(terminal(sheet))
    for note in found.notes:
        console.say(note)
    rows = {"page": os.path.relpath(folder.path / PAGE)}
    if uploader:
        rows["MLflow"] = uploader.closed()
    console.table(lead(found), rows)
    hint = "" if config.ui else pages_hint(masked(uri))
    if uploader and uploader.complete and links.table:
        console.say(f"the runs, their figures and the settings that differ in MLflow's UI{hint}: {links.table}")
    console.say(f"with every setting and metric: {links.comparison}")
    return 130 if uploader and uploader.interrupted else 0


def write(found: "Comparison", folder: "RunFolder", links: "Links", made: dict[str, str]) -> None:
    """The comparison's files, into its run folder."""
    from lab.compare.page import page
    from lab.compare.pictures import pictures, save
    from lab.compare.tables import cells_csv, figures, markdown, runs_csv
    from lab.runs.files import write_text

    for file, text in (
        (PAGE, page(found, links, made)),
        ("comparison.md", markdown(found)),
        ("comparison.csv", cells_csv(found)),
        ("runs.csv", runs_csv(found)),
    ):
        write_text(folder.path / file, text)
        folder.artifact(folder.path / file)
    for file, picture in pictures(found).items():
        save(picture, folder.path / f"{file}.svg")
        folder.artifact(folder.path / f"{file}.svg", "pictures")
    folder.artifact(folder.path / "config.yaml")
    folder.summary(figures(found))


def description(found: "Comparison") -> str:
    """The tables, for MLflow's page of the run; a tag holds 8000 characters, and a table that is cut off reads badly."""
    from lab.compare.page import lead
    from lab.compare.tables import markdown

    first = markdown_text(lead(found))
    text = f"{first}\n\n{markdown(found)}"
    return text if len(text) < 8000 else first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

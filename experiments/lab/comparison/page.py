"""A comparison as one self-contained HTML page, in which nothing is fetched, and the view of MLflow's UI that lists its runs."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from lab.comparison.grid import Line, is_beside, varying
from lab.comparison.pictures import PICTURES, colors, curves_picture, inline
from lab.comparison.results import BEST, LOSS_TIME, SPEED, Comparison, counted, some
from lab.comparison.tables import MARKS, mean, names, number, same_seeds, scores, sheets
from lab.tracking.views import Pages, shown, view

TEMPLATE = Path(__file__).with_name("compare.html.j2")


def page(found: Comparison, pages: Pages, links: dict[str, str | None], made: dict[str, str]) -> str:
    """Return the page's HTML.

    Args:
        found: the comparison.
        pages: the pages of MLflow's UI.
        links: addresses of all runs in MLflow's UI, by their texts.
        made: how it was made, as name: text.
    """
    from jinja2 import Environment

    columns = [column.label for column in found.grid.columns]
    curves = [inline(partial(curves_picture, found, label), f"curves-{label}") for label in columns]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=headline(found),
        same=same_seeds(found),
        lead=lead(found),
        found=found,
        names=names(found),
        marks=MARKS,
        mean=partial(mean, found),
        number=partial(number, found),
        scores=scores(found),
        tables=sheets(found)[1:],
        swatches=colors(found),
        drawn={name: inline(partial(picture, found), name) for name, picture in PICTURES.items() if name != "curves"},
        curves=list(filter(None, curves)),
        pages=pages,
        links=links,
        made=made,
    )


def headline(found: Comparison) -> str:
    """Return the values of rows and columns, without the settings by which rows were divided further, so that it fits a line."""
    return " × ".join(some(list(dict.fromkeys(line.title for line in lines))) for lines in (found.grid.rows, found.grid.columns))


def _kind(lines: list[Line]) -> str:
    """Return what rows or columns are: a loss or a model each, or settings of any kind."""
    name = lines[0].names[0]
    return name if len(lines[0].settings) == 1 and name in ("loss", "model") else "setting"


def lead(found: Comparison) -> str:
    """Summarise the comparison in one sentence."""
    same = same_seeds(found)
    size = " × ".join(counted(len(lines), _kind(lines)) for lines in (found.grid.rows, found.grid.columns))
    seeds = f"{counted(same, 'seed')} of each" if same else "seeds vary"
    return f"{size}, {seeds}: {counted(len(found.grid.runs), 'run')}, judged by {found.title}."


FIRST_SETTINGS = ("loss.name", "model.name", "seed")
MOST_SETTINGS = 12  # beside these


def view_of(found: Comparison) -> tuple[str, dict[str, Any]]:
    """Return the key of a view of only these runs, and the view: the compared figures, and the settings that differ."""
    runs = found.grid.runs
    ids = [run.id for run in runs]
    key = f"compare-{hashlib.sha256(json.dumps([found.metric, *sorted(ids)]).encode()).hexdigest()[:8]}"
    known = {name for run in runs for name in run.metrics}
    figures = [found.metric, f"{BEST}loss", SPEED, found.memory, LOSS_TIME]
    there = [name for name in dict.fromkeys(shown(each) if shown(each) in known else each for each in figures) if name in known]
    differing = varying(runs, [])
    first = [name for name in FIRST_SETTINGS if name in differing]
    others = sorted(name for name in differing if not is_beside(name, [*FIRST_SETTINGS, "loss", "model"]))[:MOST_SETTINGS]
    return key, view(first, there, others, runs=ids, order=found.metric, rising=not found.higher)

"""A comparison as one self-contained HTML page: pictures and style are in it, and nothing is fetched."""

from pathlib import Path
from typing import Any

from lab.comparison.links import Links
from lab.comparison.pictures import colors, curves_picture, inline, pictures
from lab.comparison.results import Comparison, Result, counted, some
from lab.comparison.tables import MARKS, mean, names, number, same_seeds, scores, sheets

TEMPLATE = Path(__file__).with_name("compare.html.j2")


def page(found: Comparison, links: Links, made: dict[str, str]) -> str:
    """Return the page's HTML.

    Args:
        made: how it was made, as name: text.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=headline(found),
        same=same_seeds(found),
        lead=lead(found),
        found=found,
        names=names(found),
        scores=scores(found),
        matrix=_matrix(found),
        tables=sheets(found)[1:],
        swatches=colors(found),
        drawn={name: inline(picture, name) for name, picture in pictures(found).items() if name != "curves"},
        curves=_curves(found),
        seeds=_seeds(found, links),
        links={"Runs, figures and settings that differ": links.table, "All settings and metrics side by side": links.comparison},
        shared=found.shared,
        made=made,
    )


def headline(found: Comparison) -> str:
    return " × ".join(some([line.label for line in lines]) for lines in (found.grid.rows, found.grid.columns))


def lead(found: Comparison) -> str:
    """Summarise the comparison in one sentence."""
    (row, column), same = names(found), same_seeds(found)
    size = f"{counted(len(found.grid.rows), row)} × {counted(len(found.grid.columns), column)}"
    seeds = f"{counted(same, 'seed')} of each" if same else "seeds vary"
    return f"{size}, {seeds}: {counted(len(found.runs), 'run')}, judged by {found.title}."


def _matrix(found: Comparison) -> list[dict[str, Any]]:
    return [
        {"label": row.label, "cells": [_cell(found, found.result(found.grid.cell(row, column))) for column in found.grid.columns]}
        for row in found.grid.rows
    ]


def _cell(found: Comparison, each: Result | None) -> dict[str, Any] | None:
    if each is None:
        return None
    difference = mean(found, each.difference.of, "+") if each.difference else ""
    text = {"mean": mean(found, each.score), "n": each.score.n, "best": each.best, "difference": difference}
    return text | {"verdict": each.verdict.replace(" ", "-"), "mark": MARKS[each.verdict]}


def _curves(found: Comparison) -> list[str]:
    drawn = [(label, curves_picture(found, label)) for label in (column.label for column in found.grid.columns)]
    return [inline(picture, f"curves-{label}") for label, picture in drawn if picture is not None]


def _seeds(found: Comparison, links: Links) -> list[dict[str, str]]:
    return [
        {
            "row": each.row,
            "column": each.column,
            "seed": " ".join(seed),
            "value": number(found, run.metrics[found.metric]),
            "name": run.name,
            "link": links.pages.run(run.experiment_id, run.id),
        }
        for each in found.results
        for seed, run in each.cell.runs.items()
    ]

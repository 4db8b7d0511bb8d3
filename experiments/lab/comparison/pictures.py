"""Pictures of a comparison: curves over updates, differences with their intervals, accuracy against speed and memory."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.base.files import save_figure
from lab.comparison.results import Comparison

# of middle lightness, to be distinct on white and on black; grey is the baseline's
COLORS = ("#3b82c4", "#e0662e", "#2a9d62", "#b14fb5", "#b8860b", "#d1495b", "#1a9aa8", "#7a5ad1", "#8c564b", "#6b8e23")
GREY = "#858585"
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
INK, PAPER = "#010203", "#ffffff"  # replaced on the page, whose colours follow the reader's


def colors(found: Comparison) -> dict[str, str]:
    """Return a colour for each row."""
    based = {cell.baseline.row.label for cell in found.grid.cells if cell.baseline is not None and cell.baseline.row != cell.row}
    others = [row.label for row in found.grid.rows if row.label not in based]
    return dict.fromkeys(based, GREY) | {label: COLORS[i % len(COLORS)] for i, label in enumerate(others)}


def curves_picture(found: Comparison, only: str | None = None) -> Any:
    """Draw the metric over updates: the mean, and a band from the lowest to the highest seed.

    There is a panel for each column, or for `only` one. Like the other functions it returns a figure, or None if it has no data.
    """
    columns = [column.label for column in found.grid.columns if only in (None, column.label)]
    columns = [label for label in columns if any(cell.curve for cell in found.grid.cells if cell.column.label == label)]
    if not columns:
        return None
    wide = min(3, len(columns))
    high = -(-len(columns) // wide)

    figure = _figure(4.6 * wide, 3.5 * high + (0.5 if only is None else 0))
    panels = list(figure.subplots(high, wide, squeeze=False).flat)
    for axes, column in zip(panels, columns, strict=False):
        _curves(axes, found, column)
    for axes in panels[len(columns) :]:
        axes.set_visible(False)
    if only is None:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=9)
    return figure


def differences_picture(found: Comparison) -> Any:
    """Draw each paired difference with its interval, beside zero."""
    columns = [column.label for column in found.grid.columns]
    shown = [(cell, cell.difference) for cell in found.grid.cells if cell.difference]
    shown.sort(key=lambda pair: columns.index(pair[0].column.label))
    if not shown:
        return None
    several = len(columns) > 1
    scale = 100 if found.percent else 1

    figure = _figure(5, 1 + 0.36 * len(shown))
    axes, color = figure.subplots(), colors(found)
    for place, (cell, difference) in enumerate(shown):
        shade, of = color[cell.row.label], difference.of
        style = {"color": shade, "marker": "o", "markersize": 6, "capsize": 3, "linewidth": 1.6}
        half = None if of.half is None else scale * of.half
        axes.errorbar(scale * of.mean, place, xerr=half, mfc=shade if difference.verdict in ("better", "worse") else PAPER, **style)
    axes.axvline(0, color=GREY, linewidth=1, linestyle="--")
    labels = [f"{cell.row.label} · {cell.column.label}" if several else cell.row.label for cell, _ in shown]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    unit, side = ", points" if found.percent else "", "right" if found.higher else "left"
    axes.set_xlabel(f"difference to {found.baseline}{unit} ({side} is better)")
    axes.grid(axis="x")
    return figure


def tradeoff_picture(found: Comparison) -> Any:
    """Draw the metric against images/s; a point's area is its memory, its marker the column."""
    shown = [cell for cell in found.grid.cells if "images/s" in cell.costs and "peak MiB" in cell.costs]
    if not shown:
        return None
    largest = max(cell.costs["peak MiB"].mean for cell in shown)
    scale = 100 if found.percent else 1

    figure = _figure(5, 4 + 0.22 * -(-(len(found.grid.rows) + len(found.grid.columns) + 2) // 3))
    axes, color = figure.subplots(), colors(found)
    columns = [column.label for column in found.grid.columns]
    for cell in shown:
        speed, memory, score, shade = cell.costs["images/s"], cell.costs["peak MiB"], cell.score, color[cell.row.label]
        lines = {"color": shade, "linewidth": 0.8, "alpha": 0.6, "zorder": 1}
        axes.plot([speed.least, speed.most], [scale * score.mean] * 2, **lines)
        axes.plot([speed.mean] * 2, [scale * score.least, scale * score.most], **lines)
        marker = MARKERS[columns.index(cell.column.label) % len(MARKERS)]
        style = {"s": 40 + 360 * memory.mean / largest, "marker": marker, "alpha": 0.75, "edgecolors": shade}
        axes.scatter(speed.mean, scale * score.mean, c=shade, linewidths=1, **style)
    axes.set(xlabel="images/s", ylabel=_label(found))
    axes.grid()
    axes.margins(0.12)
    _legend(figure, found, color, columns, largest)
    return figure


PICTURES: dict[str, Callable[[Comparison], Any]] = {
    "curves": curves_picture,
    "differences": differences_picture,
    "tradeoff": tradeoff_picture,
}


def save(picture: Callable[[], Any], path: Path) -> bool:
    """Write a picture as a file, ink on white paper, if it has data; return whether it has."""
    with _style(path.stem):
        if figure := picture():
            save_figure(figure, path, dpi=110, metadata={"Date": None})
        return bool(figure)


def inline(picture: Callable[[], Any], name: str) -> str:
    """Return an <svg> element that takes its colours of ink and paper from the page around it; empty if the picture has no data."""
    out = io.StringIO()
    with _style(name):
        if not (figure := picture()):
            return ""
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    # the page takes the size from the viewBox; metadata holds addresses that look like something to fetch
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def _curves(axes: Any, found: Comparison, column: str) -> None:
    scale, color = 100 if found.percent else 1, colors(found)
    for cell in found.grid.cells:
        if cell.column.label == column and cell.curve:
            steps, label = [point.step for point in cell.curve], cell.row.label
            axes.plot(steps, [scale * point.mean for point in cell.curve], color=color[label], linewidth=1.8, label=label)
            if cell.score.n > 1:
                low, high = ([scale * getattr(point, name) for point in cell.curve] for name in ("low", "high"))
                axes.fill_between(steps, low, high, color=color[label], alpha=0.18, linewidth=0)
    axes.set(xlabel="updates", ylabel=_label(found), title=column)
    axes.grid()


def _legend(figure: Any, found: Comparison, color: dict[str, str], columns: list[str], largest: float) -> None:
    from matplotlib.lines import Line2D

    def dot(label: str, shade: str, marker: str, area: float) -> Any:
        return Line2D([], [], linestyle="none", marker=marker, color=shade, markersize=area**0.5, alpha=0.75, label=label)

    handles = [dot(row.label, color[row.label], "o", 70) for row in found.grid.rows]
    handles += [dot(label, GREY, MARKERS[i % len(MARKERS)], 70) for i, label in enumerate(columns)] if len(columns) > 1 else []
    handles += [dot(f"{share * largest:,.0f} MiB", GREY, "o", 40 + 360 * share) for share in (0.25, 1.0)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False, fontsize=9)


def _label(found: Comparison) -> str:
    return found.title.partition(",")[0] + (", %" if found.percent else "")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style(name: str) -> Any:
    import matplotlib

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    paper = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    settings: Any = {"svg.hashsalt": f"lossforge-{name}", "svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": GREY, "grid.alpha": 0.25}
    return matplotlib.rc_context(settings | dict.fromkeys(ink, INK) | dict.fromkeys(paper, PAPER))

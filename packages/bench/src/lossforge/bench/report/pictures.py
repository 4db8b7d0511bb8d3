"""Pictures of a report: time against the floor, memory, and scaling."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lossforge.bench.report import Report, Row

COLORS = {
    "lossforge": "#d62728",
    "lossforge-backward": "#ff9896",
    "lossforge-inplace": "#8c1d1d",
    "torch": "#7f7f7f",
    "torch.compile": "#1f77b4",
    "torchvision": "#9467bd",
    "timm": "#8c564b",
    "liger": "#2ca02c",
    "quack": "#ff7f0e",
}
AXES = {
    "over-N": ("rows of 32000 classes, bf16", 0),
    "over-V": ("classes of 4096 rows, bf16", 1),
    "over-n": ("anchors of 80 classes, fp32", 0),
}


@dataclass(frozen=True)
class Curves:
    """The losses of each training, by contender, and where they come from."""

    commit: str
    date: str
    runs: list[dict[str, Any]]


def curves_of(path: Path, part: str = "curves") -> Curves:
    """Read the trainings of a file of results that have a loss for each step."""
    found = json.loads(path.read_text(encoding="utf-8"))[part]
    return Curves(found["commit"], found["date"], [run for run in found["runs"] if "losses" in run])


def curves_digest(curves: Curves) -> str:
    return hashlib.sha256(repr(curves).encode()).hexdigest()[:16]


def curves_picture(curves: Curves, path: Path) -> None:
    """Draw the losses of all trainings over each other, and beside them how far each is from the first contender's of its case."""
    figure = _figure((9, 3.6))
    whole, apart = figure.subplots(1, 2)
    first: dict[str, list[float]] = {}
    named = set[str]()
    for run in curves.runs:
        name, losses = run["contender"], run["losses"]
        stock = first.setdefault(run["case"], losses)
        style = {"color": COLORS.get(name, COLORS["torch"]), "linewidth": 2.5 if name == "lossforge" else 1.2, "alpha": 0.8}
        if name not in named:
            style["label"] = name
        named.add(name)
        steps = range(1, 1 + len(losses))
        whole.plot(steps, losses, **style)
        if losses is not stock:
            apart.plot(steps, [each - other for each, other in zip(losses, stock, strict=True)], **style)
    whole.set(xlabel="step", ylabel="loss")
    apart.set(xlabel="step", ylabel=f"loss, less {curves.runs[0]['contender']}'s with the same seed")
    for axes in (whole, apart):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, path, curves_digest(curves))


def digest(report: Report, rows: list[Row]) -> str:
    """Hash the rows of a picture in a few letters. A picture file with another hash is out of date."""
    drawn = [(r.label, r.contender, r.status, r.ms, r.floor_ms, r.peak_mib) for r in rows]
    return hashlib.sha256(repr((report.commit, report.date, drawn)).encode()).hexdigest()[:16]


def time_picture(report: Report, path: Path) -> None:
    """Draw every case's time on the device over its floor: 1 is as fast as the bytes allow."""
    rows = [r for r in main_rows(report) if r.share()]
    _dots(report, rows, lambda r: 1 / (r.share() or math.nan), "time over the limit of memory (forward + backward)", path)


def memory_picture(report: Report, path: Path) -> None:
    rows = [r for r in main_rows(report) if r.peak_mib]
    _dots(report, rows, lambda r: r.peak_mib or math.nan, "peak memory beyond the inputs, MiB", path)


def main_rows(report: Report) -> list[Row]:
    return [r for r in report.rows if r.suite in ("table", "variants")]


def scaling_rows(report: Report) -> list[Row]:
    return [r for r in report.rows if r.suite == "scaling"]


def _dots(report: Report, rows: list[Row], value: Callable[[Row], float], label: str, path: Path) -> None:
    cases = list(dict.fromkeys(r.label for r in rows))
    figure = _figure((9, 1.2 + 0.28 * len(cases)))
    axes = figure.subplots()
    for name, color in COLORS.items():
        points = [(value(r), cases.index(r.label)) for r in rows if r.contender == name]
        if points:
            ours = name == "lossforge"
            axes.scatter(*zip(*points, strict=True), s=60 if ours else 28, c=color, label=name, zorder=3 if ours else 2)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.grid(alpha=0.3, which="both", axis="x")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, 1 + 1.6 / (4 + len(cases))), ncols=5, frameon=False)
    _save(figure, path, digest(report, main_rows(report)))


def scaling_picture(report: Report, path: Path) -> None:
    """Draw time over N, over V and over the number of anchors, with the floor."""
    rows = scaling_rows(report)
    kinds = [kind for kind in AXES if any(r.use == kind for r in rows)]
    figure = _figure((4.6 * max(1, len(kinds)), 4.2))
    for axes, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds, strict=False):
        label, dim = AXES[kind]
        for name, color in COLORS.items():
            line = sorted((r.shape[dim], r.ms) for r in rows if r.use == kind and r.contender == name and r.ms)
            if line:
                width = 2.5 if name == "lossforge" else 1.2
                axes.plot(*zip(*line, strict=True), color=color, label=name, marker="o", markersize=3, linewidth=width)
        floor = sorted({(r.shape[dim], r.floor_ms) for r in rows if r.use == kind and r.contender == "lossforge" and r.floor_ms})
        if floor:
            axes.plot(*zip(*floor, strict=True), "k--", linewidth=1, label="limit of memory")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=label,
            ylabel="ms, forward + backward",
            title="focal" if kind == "over-n" else "cross entropy",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, path, digest(report, rows))


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, path: Path, drawn_from: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "lossforge", "svg.fonttype": "none", "font.family": "sans-serif"}):
        metadata = {"Date": None, "Description": drawn_from} if path.suffix == ".svg" else {"Description": drawn_from}
        figure.savefig(path, dpi=110, metadata=metadata)

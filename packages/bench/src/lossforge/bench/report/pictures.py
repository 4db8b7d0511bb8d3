"""Pictures of a report: time against the floor, memory, and scaling."""

import hashlib
import math
from collections.abc import Callable
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


def digest(report: Report, rows: list[Row]) -> str:
    """Hash the rows of a picture in a few letters. A picture file with another hash is out of date."""
    drawn = [(r.label, r.contender, r.status, r.device_ms, r.floor_ms, r.peak_mib) for r in rows]
    return hashlib.sha256(repr((report.commit, report.date, drawn)).encode()).hexdigest()[:16]


def time_picture(report: Report, path: Path) -> None:
    """Draw every case's time on the device over its floor: 1 is as fast as the bytes allow."""
    rows = [r for r in main_rows(report) if r.share()]
    _dots(report, rows, lambda r: 1 / (r.share() or math.nan), "time over the floor (forward + backward)", path)


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


HEADLINE = {
    "cross entropy\n8192×128256, bf16": "ce 8192x128256 bf16",
    "focal, RetinaNet\n1.9 M anchors, fp32": "focal class index 16x120087x80 fp32",
    "asymmetric\n4096×9605, fp32": "asymmetric 4096x9605 fp32",
    "KL of two models\n8192×32000, bf16": "kl 8192x32000 bf16",
    "GIoU\n4.2 M pairs, fp32": "giou 4194304x4 fp32",
    "Dice, 21 classes\n8×512×512, fp32": "dice 8x21x512x512 fp32",
}


def headline_rows(report: Report) -> list[Row]:
    return [r for r in report.rows if r.label in HEADLINE.values() and r.contender in COLORS]


def headline_picture(report: Report, path: Path) -> None:
    """Draw time and memory of six cases, as multiples of ours, one above the other so that a phone shows them large enough to read."""
    figure = _figure((5.4, 8.2))
    parts = (
        ("time, forward + backward: times ours", lambda r: r.device_ms),
        ("peak memory beyond the inputs: times ours", lambda r: r.peak_mib),
    )
    for axes, (title, value) in zip(figure.subplots(2, 1), parts, strict=True):
        for place, label in enumerate(HEADLINE.values()):
            by = {r.contender: r for r in headline_rows(report) if r.label == label and r.device_ms}
            peers = [by[name] for name in ("torchvision", "timm", "liger", "quack") if name in by]
            best = min(peers, key=lambda r: r.device_ms or math.inf, default=None)
            bars = [
                ("lossforge", by["lossforge"]),
                ("torch", by.get("torch")),
                ("torch.compile", by.get("torch.compile")),
                ("best peer", best),
            ]
            for offset, (name, row) in enumerate(bars):
                if row is None or not value(row):
                    continue
                times = value(row) / value(by["lossforge"])
                y = place + 0.2 * (offset - 1.5)
                color = COLORS["quack"] if name == "best peer" else COLORS[name]
                axes.barh(y, times, height=0.18, color=color, label=name if place == 0 else None)
                axes.text(times, y, f" {times:.1f}" + (f" {row.contender}" if name == "best peer" else ""), va="center", fontsize=8)
        axes.set_yticks(range(len(HEADLINE)), list(HEADLINE), fontsize=9)
        axes.set(xscale="log", title=title)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(right=axes.get_xlim()[1] * 2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    _save(figure, path, digest(report, headline_rows(report)))


def scaling_picture(report: Report, path: Path) -> None:
    """Draw time over N, over V and over the number of anchors, with the floor."""
    rows = scaling_rows(report)
    kinds = [kind for kind in AXES if any(r.use == kind for r in rows)]
    figure = _figure((4.6 * max(1, len(kinds)), 4.2))
    for axes, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds, strict=False):
        label, dim = AXES[kind]
        for name, color in COLORS.items():
            line = sorted((r.shape[dim], r.device_ms) for r in rows if r.use == kind and r.contender == name and r.device_ms)
            if line:
                width = 2.5 if name == "lossforge" else 1.2
                axes.plot(*zip(*line, strict=True), color=color, label=name, marker="o", markersize=3, linewidth=width)
        floor = sorted({(r.shape[dim], r.floor_ms) for r in rows if r.use == kind and r.contender == "lossforge" and r.floor_ms})
        if floor:
            axes.plot(*zip(*floor, strict=True), "k--", linewidth=1, label="floor")
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

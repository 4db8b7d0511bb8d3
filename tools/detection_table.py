"""The README's tables of detectors, from what tools/measure_detection.py found."""

import json
from pathlib import Path
from typing import Any

from lossforge.bench.report import tables

LEARNED = ("`uv run experiments/train.py`", "mAP", "mAP50", "mAP75", "loss, ms", "step, ms", "peak MiB", "s", "loss computed by")
STEP = ("loss", "step, ms", "loss, ms", "peak MiB", "off by, of float64")


def section(path: Path) -> str:
    """Markdown of the parts that were measured; a part may be of a run of its own."""
    found = json.loads(path.read_text(encoding="utf-8"))
    said = []
    places: dict[str, list[str]] = {}
    for part in ("tables", "more", "large"):
        if part in found:
            places.setdefault(provenance(found[part]), []).append(part)
    for place, parts in places.items():
        said += [
            f"{place}; made by `python tools/measure_detection.py`. Digits in scenes: held-out mAP after the last "
            "epoch. A step's loss, forward and backward, and a whole step in ms; the most memory that was allocated; seconds of the run, "
            "which draws the scenes where it is the first to need them.",
            tables.markdown(LEARNED, [learned_row(each, part) for part in parts for each in found[part]["runs"]]),
        ]
    if "retinanet" in found:
        said += [
            f"{provenance(found['retinanet'])}. RetinaNet-resnet50 in one trainer under ours and under torchvision's own matching and "
            "loss: 16 images of 800×1344 at random with 12 to 28 boxes each, bf16. The loss's value is compared with torchvision's in "
            "float64 of the same outputs.",
            tables.markdown(STEP, [step_row(each) for each in found["retinanet"]["runs"]]),
        ]
    return "\n\n".join(said)


def provenance(about: dict[str, Any]) -> str:
    """Where a part was measured."""
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "torchvision", "triton"))
    place = about["gpu"] if about["gpu"].endswith("CPU cores") else f"One {about['gpu']}"
    return f"{place}, {versions}, commit {about['commit']}, {about['date']}"


def learned_row(run: dict[str, Any], part: str) -> list[str]:
    words = run["command"] if part == "large" else f"task=detection {run['command']}"
    figures = [f"{run[name]:.3f}" for name in ("map", "map50", "map75")]
    costs = [number(run["loss_ms"], 2), number(run["step_ms"], 1), number(run["peak_mib"], 0), number(run["seconds"], 0)]
    return [f"`{words}`", *figures, *costs, run["backend"]]


def step_row(run: dict[str, Any]) -> list[str]:
    name = f"`{run['loss']}`" if "=" in run["loss"] else run["loss"]
    costs = [number(run["step_ms"], 1), number(run["loss_ms"], 2), number(run["peak_mib"], 0)]
    return [name, *costs, f"{run['difference']:.1e}"]


def number(value: float | None, digits: int) -> str:
    """Nothing where it was not measured."""
    return "" if value is None else f"{value:,.{digits}f}"

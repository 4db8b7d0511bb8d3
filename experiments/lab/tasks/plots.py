"""Pictures of an evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lab.base.files import save_figure
from lab.tasks.classification.metrics import ClassificationResult


class Calibrated(Protocol):
    values: dict[str, float]  # ece among them
    calibration: list[list[float]]  # for each bin: samples, sum of outcomes, sum of predictions


def confusion_picture(result: ClassificationResult, classes: list[str], path: Path) -> None:
    """Draw the confusion matrix of a classifier."""
    matrix_picture(result.confusion, classes, f"top-1 {result.values['top1']:.2%} of {result.values['samples']:.0f}", path)


def matrix_picture(counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, path: Path) -> None:
    """Draw a confusion matrix: rows are true classes, colours are shares of a row, numbers are counts."""
    from matplotlib.figure import Figure

    shares = [[n / max(sum(row), 1) for n in row] for row in counts]
    size = min(4 + 0.4 * len(classes), 16)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= 30:
        axes.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axes.set_yticks(range(len(classes)), classes)
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                if n:
                    axes.text(j, i, str(n), ha="center", va="center", fontsize=8, color="white" if shares[i][j] > 0.5 else "black")
    axes.set(xlabel="guess", ylabel="true class", title=title)
    figure.colorbar(picture, shrink=0.7, label="share of the true class")
    save_figure(figure, path, dpi=110)


def calibration_picture(result: Calibrated, path: Path, came: str = "accuracy", expected: str = "confidence") -> None:
    """Draw outcomes against predictions, a bar for each bin, and how many samples each bin holds."""
    from matplotlib.figure import Figure

    bins = len(result.calibration)
    width = 1 / bins
    left = [i * width for i in range(bins)]
    accuracy = [right / count if count else 0 for count, right, _ in result.calibration]
    figure = Figure(figsize=(6, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    upper.bar(left, accuracy, width, align="edge", edgecolor="white")
    upper.plot([0, 1], [0, 1], "--", color="grey")
    upper.set(ylabel=came, xlim=(0, 1), ylim=(0, 1), title=f"expected calibration error {result.values['ece']:.4f}")
    lower.bar(left, [count for count, _, _ in result.calibration], width, align="edge", edgecolor="white")
    lower.set(xlabel=expected, ylabel="samples")
    save_figure(figure, path, dpi=110)


def average_precision_picture(precision: dict[str, float], path: Path) -> None:
    """Draw the average precision, a bar for each class."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, min(2 + 0.25 * len(precision), 16)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(precision), list(precision.values()))
    axes.invert_yaxis()
    known = [value for value in precision.values() if value == value]
    axes.set(xlim=(0, 1), xlabel="average precision", title=f"mAP {sum(known) / max(len(known), 1):.4f}")
    save_figure(figure, path, dpi=110)

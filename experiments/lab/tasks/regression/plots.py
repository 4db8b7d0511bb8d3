"""The picture of an evaluation of numbers."""

from pathlib import Path

from lab.base.files import save_figure
from lab.tasks.regression.metrics import RegressionResult

MOST = 12  # targets that are drawn
POINTS = 5000  # samples that are drawn of each


def residual_picture(result: RegressionResult, names: list[str], path: Path) -> None:
    """Draw for each target its predictions beside the true values, and the distribution of the residuals."""
    from matplotlib.figure import Figure

    shown = names[:MOST]
    figure = Figure(figsize=(9, 3.4 * len(shown)), layout="constrained")
    step = -(-len(result.target) // POINTS)
    for (left, right), number in zip(figure.subplots(len(shown), 2, squeeze=False), range(len(shown)), strict=True):
        true, said = (values[::step, number].tolist() for values in (result.target, result.prediction))
        residual = (result.prediction[:, number] - result.target[:, number]).tolist()
        lowest, highest = min(true + said), max(true + said)
        left.plot([lowest, highest], [lowest, highest], "--", color="grey")
        left.scatter(true, said, s=6, alpha=0.5)
        figures = " · ".join(f"{title} {result.figures[key][number]:.4g}" for key, title in (("r2", "R²"), ("mae", "MAE")))
        left.set(xlabel=f"true {shown[number]}", ylabel="predicted", title=figures)
        right.locator_params(axis="x", nbins=6)  # long numbers would overlap
        right.hist(residual, bins=40)
        right.axvline(0, linestyle="--", color="grey")
        right.set(xlabel=f"residual of {shown[number]}: predicted - true", ylabel="samples")
    save_figure(figure, path, dpi=110)

"""A learning-rate range test: the rate rises over a short run, and the loss over it suggests a rate."""

import math
from pathlib import Path
from typing import Any

from lab.base.files import save_figure

DIVERGED = 4.0
"""The test ends where the smoothed loss is this many times its lowest value."""
SMOOTHING = 0.9
LEAST = 10  # updates before the test may end


class LrRange:
    """A callback of a run with `optim.schedule.name=range`; it needs the loss of each update (`trainer.log_every=1`).

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, arXiv 1506.01186, section 3.3.
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []  # smoothed
        self.average = 0.0

    def on_report(self, trainer: Any, values: dict[str, float]) -> None:
        """Keep the window's loss beside the rate that its update had, and end the run where the loss has diverged."""
        loss = values["train/loss"]
        if math.isfinite(loss):
            self.average = SMOOTHING * self.average + (1 - SMOOTHING) * loss
            self.rates.append(self.rate)
            self.losses.append(self.average / (1 - SMOOTHING ** (len(self.losses) + 1)))
        if not math.isfinite(loss) or (len(self.losses) >= LEAST and self.losses[-1] > DIVERGED * min(self.losses)):
            trainer.updates = trainer.done

    def on_before_update(self, trainer: Any) -> None:
        """Keep the rate of the coming update."""
        self.rate = trainer.updater.lr

    def on_end(self, trainer: Any, status: str) -> None:
        """Draw the picture, and say the rate."""
        if not hasattr(trainer, "folder") or not hasattr(trainer.folder, "path"):
            return
        if len(self.losses) < LEAST:
            few = f"a range test needs {LEAST} updates of a finite loss, and had {len(self.losses)}"
            trainer.console.say(f"no learning rate is suggested: {few}. Leave trainer.epochs out, or lower warmup_lr.")
            return
        rate = suggestion(self.rates, self.losses)
        path = trainer.folder.path / "lr_range.png"
        range_picture(self.rates, self.losses, rate, path)
        trainer.folder.artifact(path, "pictures")
        trainer.values["suggested_lr"] = rate
        trainer.folder.summary({"suggested_lr": rate})
        trainer.console.say(f"suggested: optim.lr={rate:.2g}, where the loss falls the fastest ({path.name} of the run's folder)")


def suggestion(rates: list[float], losses: list[float]) -> float:
    """Return the rate where the smoothed loss falls the fastest over the logarithm of the rate, before its lowest value."""
    lowest = max(losses.index(min(losses)), 1)
    slopes = [(losses[i + 1] - losses[i]) / math.log(rates[i + 1] / rates[i]) for i in range(lowest) if rates[i + 1] > rates[i]]
    return rates[slopes.index(min(slopes))] if slopes else rates[0]


def range_picture(rates: list[float], losses: list[float], rate: float, path: Path) -> None:
    """Draw the smoothed loss over the rate, with the suggestion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(rates, losses)
    axes.axvline(rate, linestyle="--", color="grey", label=f"suggested: {rate:.2g}")
    axes.set(xlabel="learning rate", ylabel="smoothed training loss", title="learning-rate range test")
    axes.legend()
    save_figure(figure, path, dpi=110)

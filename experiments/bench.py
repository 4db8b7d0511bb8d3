"""Measure losses against what people use today: `uv run experiments/bench.py loss=ce dtype=bf16 contenders=lossforge,torch`.

Every word is a setting; a filter takes names or globs, several with commas. `--help` lists them.
"""

if __name__ == "__main__":
    from lab.aborted import end_at_ctrl_c

    end_at_ctrl_c()

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.base.errors import UserError, unknown
from lab.bench.table import metrics, table, write_pictures
from lab.config.command import run_app
from lab.config.help import settings_text
from lab.config.schema import BenchConfig
from lab.config.settings import BENCH, Settings, load_for
from lossforge.bench.cases import CASES, CONTENDERS, DTYPES, FUSED, SUITES, Case, UnknownNameError, matching, select

FILTERS = ("suite", "loss", "shape", "dtype", "contenders")
CHANGE_FIGURES = (*FILTERS, "milliseconds", "seed", "forward", "graphs")
"""Settings that a report keeps, because they change its figures; the rest are paths and names of one machine."""


def main(argv: list[str]) -> int:
    return run_app("bench", argv, lambda words: help_text(), _asked)


def _asked(words: list[str]) -> tuple[Any, Callable[[], int]]:
    settings = load_for(BENCH, [as_list(word) for word in words])
    cases, names = chosen(settings.config)
    return settings, lambda: bench(settings, cases, names)


def as_list(word: str) -> str:
    """Rewrite `loss=ce,focal` as a list in Hydra's grammar."""
    name, _, value = word.partition("=")
    return f"{name}=[{value}]" if name in FILTERS and value and value[0] not in "['\"" else word


def chosen(config: BenchConfig) -> tuple[list[Case], list[str]]:
    """Return the cases and contenders that pass the filters."""
    try:
        names = matching("contenders", config.contenders, CONTENDERS)
        return select(config.suite, config.loss, config.shape, config.dtype), [name for name in CONTENDERS if name in names]
    except UnknownNameError as error:
        raise unknown(f"{error.what}={error.got}", error.got, error.choices, show=100) from None


def bench(settings: Settings[BenchConfig], cases: list[Case], names: list[str]) -> int:
    """Run one benchmark, from checked settings to the final table."""
    began, config = time.monotonic(), settings.config

    # these load torch, which --help and a wrong setting do not need
    from lab.bench.profile import profile
    from lab.run.machine import describe, pick_device
    from lab.run.run import Run
    from lab.training.console import Console, clock
    from lossforge.bench.run import cases_for

    device = pick_device(config.device, "device")
    if config.mode == "profile" and any(case.suite in FUSED for case in cases):
        raise UserError(f"mode=profile has no suite={', '.join(FUSED)}: most of their kernels are matrix products.")
    if device.type != "cuda":
        if config.mode == "profile":
            raise UserError("mode=profile needs a CUDA GPU: without one there are no kernels to look at.")
        if not config.contenders:
            names = [name for name in names if name != "torch.compile"]  # its compiler takes minutes there
    cases = cases_for(device, cases)
    name = config.name or f"bench-{config.mode}"
    run = Run.start("bench", settings, name, config.runs, describe(device), setting="runs")
    console = Console(len(cases), "cases")

    with run.noted():
        if config.mode == "profile":
            profile(cases, names, device, config.seed, run.folder, console)
        else:
            measure(settings, cases, names, device, run.folder, console)
    console.stop_bar()
    console.table(f"{name}: {run.status.lower()}", run.close() | {"time": clock(time.monotonic() - began)})
    return run.exit_status()


def measure(settings: Settings[BenchConfig], cases: list[Case], names: list[str], device: Any, folder: Any, console: Any) -> None:
    """Measure case by case; save after each one, so that an interruption loses no finished case."""
    from lossforge.bench.measure import Measurement
    from lossforge.bench.run import WITHOUT_GPU, current_commit, new_report, run

    began, config = time.monotonic(), settings.config
    if device.type != "cuda":
        console.say(WITHOUT_GPU)
    report = new_report(device, config.commit or current_commit(), {name: settings.tree()[name] for name in CHANGE_FIGURES})
    how = Measurement(config.milliseconds, config.seed, config.graphs, config.forward)

    def save() -> None:
        report.seconds = time.monotonic() - began
        report.save(folder.path / "report.json")
        if config.out:
            report.save(Path(config.out))

    def progress(done: int, rows: list[Any]) -> None:
        save()  # a library may replace the signal handlers, and then the process ends without a warning
        console.finished(done, summary(rows))

    try:
        run(report, cases, names, device, how, progress)
    finally:
        save()
        folder.artifact(folder.path / "report.json")
        folder.metrics(0, metrics(report))
    write_pictures(report, folder)
    console.stop_bar()
    console.show(table(report))


def summary(rows: list[Any]) -> str:
    """Summarise a case in one line: each contender's time."""
    figures = [f"{row.contender} {row.ms:.3f}" if row.ms is not None else f"{row.contender}: {row.status}" for row in rows]
    return f"{rows[0].label} · ms: {' · '.join(figures)}" if rows else "no contender"


def help_text() -> str:
    def names(found: Any) -> str:
        return ", ".join(dict.fromkeys(found))

    return "\n".join(
        [
            "usage: experiments/bench.py [filter=name,glob*,... ...] [setting=value ...]",
            "       --cfg            print the resolved settings and stop",
            "       --help           this text",
            "",
            "filters:",
            f"  suite       {names(SUITES)}",
            f"  loss        {names(c.loss for c in CASES)}",
            f"  shape       {names(c.use for c in CASES)};",
            f"              {names(c.size for c in CASES if c.suite != 'scaling')}",
            f"  dtype       {names(DTYPES)}",
            f"  contenders  {names(CONTENDERS)}",
            "",
            "settings, each with its value and what it takes:",
            settings_text(BENCH, []),
            "",
            "examples:",
            "  experiments/bench.py loss=ce dtype=bf16 contenders=lossforge*,torch",
            "  experiments/bench.py suite=scaling",
            "  experiments/bench.py mode=profile loss=focal",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

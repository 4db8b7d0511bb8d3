"""A benchmark as a run: measured or profiled, with its report on the terminal, in the run's folder and as metrics."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from lab.base.errors import UserError
from lab.base.files import write_whole
from lab.config.schema import BenchConfig
from lab.config.settings import Settings
from lab.run.active import Run
from lab.run.folder import RunFolder
from lab.run.machine import describe, pick_device
from lab.training.console import Console, clock
from lossforge.bench.cases import FUSED, Case
from lossforge.bench.contenders import Contender, contenders
from lossforge.bench.measure import Measurement
from lossforge.bench.profiling import Kernel, profile_call
from lossforge.bench.report import Report, Row
from lossforge.bench.report.pictures import main_rows, memory_picture, scaling_picture, scaling_rows, time_picture
from lossforge.bench.run import WITHOUT_GPU, cases_for, current_commit, new_report, run

CHANGE_FIGURES = ("suite", "loss", "shape", "dtype", "contenders", "milliseconds", "seed", "forward")
"""Settings that a report keeps, because they change its figures; the rest are paths and names of one machine."""


def bench(settings: Settings[BenchConfig], cases: list[Case], names: list[str]) -> int:
    """Run one benchmark, from checked settings to the final table."""
    began, config = time.monotonic(), settings.config

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
    began, config = time.monotonic(), settings.config
    if device.type != "cuda":
        console.say(WITHOUT_GPU)
    report = new_report(device, config.commit or current_commit(), {name: settings.tree()[name] for name in CHANGE_FIGURES})
    how = Measurement(config.milliseconds, config.seed, config.forward)

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
    return f"{rows[0].label} · ms: {' · '.join(figures)}" if rows else "nothing was measured"


def profile(cases: list[Case], names: list[str], device: torch.device, seed: int, folder: RunFolder, console: Console) -> None:
    """Profile our contenders only; write one trace for each case and contender, for chrome://tracing or Perfetto."""
    ours = {name for name in names if name.startswith("lossforge")}
    for done, case in enumerate(cases, start=1):
        for contender in contenders(case, device, ours):
            trace = folder.path / f"{case.key.replace(' ', '_')}-{contender.name}.json"
            found = write_whole(trace, partial(_trace, contender, case, device, seed))
            folder.artifact(trace, "traces")
            label = f"{case.key}/{contender.name}"
            folder.metrics(0, {f"{label}/{k.name[:80]}/us": k.microseconds for k in found if k.name.isidentifier()})
            console.show(kernel_table(label, found))
        console.finished(done, f"{case.key}: profiled")
        torch.cuda.empty_cache()


def _trace(contender: Contender, case: Case, device: torch.device, seed: int, file: IO[bytes]) -> list[Kernel]:
    return profile_call(contender, case, device, seed, Path(file.name))


def kernel_table(title: str, kernels: list[Kernel]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("kernel", max_width=60)
    for name in ("µs", "launches", "grid", "block", "registers", "shared B", "spills"):
        table.add_column(name, justify="right")
    for k in kernels:
        spilled = "" if k.spills is None else str(k.spills)
        figures = (f"{k.microseconds:.1f}", f"{k.launches:g}", k.grid, k.block, str(k.registers), str(k.shared_bytes), spilled)
        table.add_row(k.name[:60], *figures)
    return table


FIGURES = ("ms", "idle_ms", "forward_ms", "peak_mib", "host_us", "first_ms", "value_error", "gradient_error")


def metrics(report: Report) -> dict[str, float]:
    """Return every figure as case/contender/figure, and the machine's rates."""
    values = {
        f"{row.label}/{row.contender}/{name}": float(value)
        for row in report.rows
        for name, value in (*((name, getattr(row, name)) for name in FIGURES), ("share", row.share()))
        if value is not None
    }
    for name in ("copy_bytes_per_second", "read_bytes_per_second"):
        if (rate := getattr(report, name)) is not None:
            values[f"machine/{name}"] = rate
    return values


def table(report: Report) -> Any:
    from rich.table import Table

    rate = f", copy {report.copy_bytes_per_second / 1e12:.2f} TB/s" if report.copy_bytes_per_second else ""
    found = Table(title=f"{report.gpu if report.gpu != 'none' else 'wall-clock times on CPU'}{rate}", title_justify="left")
    found.add_column("case")
    found.add_column("by")
    for name in ("fwd+bwd ms", "±", "of limit", "idle ms", "fwd ms", "of limit", "MiB", "host µs", "first ms"):
        found.add_column(name, justify="right")
    last = ""
    for row in report.rows:
        if row.label != last and last:
            found.add_section()
        found.add_row(row.label if row.label != last else "", row.contender, *cells(row))
        last = row.label
    return found


def cells(row: Row) -> list[str]:
    if row.ms is None:
        return [row.status]
    spread = (row.high_ms - row.low_ms) / 2 / row.ms if row.high_ms is not None and row.low_ms is not None else None
    return [
        _text(row.ms, "{:.3f}"),
        _text(spread, "{:.1%}"),
        _text(row.share(), "{:.0%}"),
        _text(row.idle_ms, "{:.3f}"),
        _text(row.forward_ms, "{:.3f}"),
        _text(row.forward_share(), "{:.0%}"),
        _text(row.peak_mib, "{:,.0f}"),
        _text(row.host_us, "{:.0f}"),
        _text(row.first_ms, "{:,.0f}"),
    ]


def write_pictures(report: Report, folder: RunFolder) -> None:
    """Write the pictures for which the report has figures."""
    for name, draw, rows in (
        ("time.png", time_picture, [r for r in main_rows(report) if r.share()]),
        ("memory.png", memory_picture, [r for r in main_rows(report) if r.peak_mib]),
        ("scaling.png", scaling_picture, [r for r in scaling_rows(report) if r.ms]),
    ):
        if rows:
            write_whole(folder.path / name, partial(_draw, draw, report))
            folder.artifact(folder.path / name, "pictures")


def _draw(draw: Callable[[Report, Path], None], report: Report, file: IO[bytes]) -> None:
    draw(report, Path(file.name))


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)

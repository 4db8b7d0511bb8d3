"""A report of lossforge.bench on the terminal, in a run folder, and as metrics."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from lab.base.files import write_whole
from lab.run.folder import RunFolder
from lossforge.bench.report import Report, Row
from lossforge.bench.report.pictures import main_rows, memory_picture, scaling_picture, scaling_rows, time_picture

FIGURES = ("ms", "forward_ms", "graph_ms", "peak_mib", "host_us", "first_ms", "value_error", "gradient_error")


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
    found.add_column("contender")
    for name in ("fwd+bwd ms", "±", "of floor", "fwd ms", "of floor", "graph ms", "MiB", "host µs", "first ms"):
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
        _text(row.forward_ms, "{:.3f}"),
        _text(row.forward_share(), "{:.0%}"),
        _text(row.graph_ms, "{:.3f}") or row.graph_status,
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

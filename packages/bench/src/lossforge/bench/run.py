"""Measure cases: correctness first, then every figure that this machine can give."""

import math
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lossforge.bench import check, measure
from lossforge.bench.cases import CPU_ELEMENTS, Case
from lossforge.bench.check import OF_LAYER, OF_LOGITS, Reference
from lossforge.bench.contenders import DISTRIBUTIONS, PARTS, Contender, contenders
from lossforge.bench.inputs import least_bytes, make_inputs
from lossforge.bench.measure import Measurement, Times
from lossforge.bench.record import Inputs
from lossforge.bench.report import Report, Row

HOST_BOUND_MS, LONG = 0.05, 20
"""A case whose floor is below this time is bound by the host when called back to back, so that its host time is measured, unless a call
takes LONG times as long."""
TIMED = {"ms": measure.back_to_back, "idle_ms": measure.idle}
"""How a call is timed for each of its figures."""
WITHOUT_GPU = (
    "No CUDA GPU: wall-clock times of the plain-torch path on shapes cut to at most 2^18 elements. Not measured: the kernels, time on the "
    "device, shares of the floor, memory, host time."
)


Progress = Callable[[int, list[Row]], None]


def new_report(device: torch.device, commit: str, settings: dict[str, Any]) -> Report:
    """Return a report without rows: where its figures come from, and on a GPU its copy and read rates."""
    report = Report(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        versions=_versions(device),
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        settings=settings,
    )
    if device.type == "cuda":
        report.copy_bytes_per_second = measure.copy_rate(device)
        report.read_bytes_per_second = measure.read_rate(device)
        torch.cuda.empty_cache()
    return report


def cases_for(device: torch.device, cases: Sequence[Case]) -> list[Case]:
    """Return the cases as this device measures them: without a GPU shortened, and without those that then are equal."""
    if device.type == "cuda":
        return list(cases)
    return list({(case.suite, case.key): case for case in (case.cut(CPU_ELEMENTS) for case in cases)}.values())


def run(report: Report, cases: Sequence[Case], names: Sequence[str], device: torch.device, how: Measurement, progress: Progress) -> None:
    """Measure the cases and add their rows to the report after each one. `progress` gets how many are done, and the last one's rows."""
    for done, case in enumerate(cases, start=1):
        rows = measure_case(case, names, device, report, how)
        report.rows += rows
        progress(done, rows)


@dataclass
class _Turn:
    """A contender that is measured in turns with the others of its case.

    Attributes:
        row: its row of the report.
        figures: what makes one value of each figure, by the name of its field.
        values: what was found so far.
    """

    row: Row
    figures: dict[str, Callable[[], float]]
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_case(
    case: Case,
    names: Sequence[str],
    device: torch.device,
    report: Report,
    how: Measurement,
    begin: Callable[[str], object] = lambda name: None,
    broken: Collection[str] = (),
) -> list[Row]:
    """Measure every contender of a case, all of them in turns. A contender that refuses or fails has a row that says so.

    Args:
        case: what is computed.
        names: of the contenders.
        device: where.
        report: whose rates the floors are computed from.
        how: to measure.
        begin: gets the name of each contender before it is called.
        broken: contenders that brought a process down, and are not called again.
    """
    inputs = make_inputs(case, device, how.seed)
    exact = check.reference(case, inputs)
    rows, turns, called = [], [], []
    for contender in contenders(case, device, set(names)):
        row = Row.of(case, contender.name)
        rows.append(row)
        if report.copy_bytes_per_second and report.read_bytes_per_second and not case.fused:
            row.floor_ms = least_bytes(case, inputs, contender.floor) / report.copy_bytes_per_second * 1e3
            row.forward_floor_ms = least_bytes(case, inputs, "forward") / report.read_bytes_per_second * 1e3
        if reason := "failed: brought its process down" if contender.name in broken else contender.refuses:
            row.status = reason
            continue
        if case.fused:
            _free(device)
        begin(contender.name)
        try:
            if figures := _prepare(row, contender, case, inputs, exact, how):
                turns.append(_Turn(row, figures))
                called.append(contender)
        except Exception as error:
            row.fail(error)
        inputs.clear()
    _take_turns(turns, how.milliseconds, begin)
    for turn, contender in zip(turns, called, strict=True):
        if turn.row.status == "ok" and how.recompile and (case.other or case.suite == "small") and not contender.destroys:
            _recompile(turn.row, contender, case, inputs, exact)
    inputs.clear()
    del inputs, exact, turns
    _free(device)
    return rows


def _take_turns(turns: Sequence[_Turn], milliseconds: float, begin: Callable[[str], object]) -> None:
    """Measure round after round, for about `milliseconds` a figure, and write medians and quantiles into the rows."""
    began, rounds, seconds = time.perf_counter(), 0, milliseconds / 1e3 * sum(len(turn.figures) for turn in turns)
    while rounds < measure.LEAST or (time.perf_counter() - began < seconds and rounds < measure.MOST):
        for turn in (turn for turn in turns if turn.row.status == "ok"):
            begin(turn.row.contender)
            try:
                for name, once in turn.figures.items():
                    turn.values[name].append(once())
            except Exception as error:
                turn.row.fail(error)
        rounds += 1
    for turn in (turn for turn in turns if turn.row.status == "ok"):
        for name, values in turn.values.items():
            turn.row.put(name, Times.of(values))


def _free(device: torch.device) -> None:
    """Release memory, so that the next contender does not reuse it. A GPU that an earlier contender crashed is left as it is."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _prepare(
    row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference, how: Measurement
) -> dict[str, Callable[[], float]]:
    """Check a contender and its memory, and return what measures its times; nothing where it is wrong."""
    given, device = check.fresh(contender, inputs), inputs.x.device

    def step() -> None:
        inputs.clear()
        check.step(contender, case, given, exact.upstream)

    def forward() -> None:
        with torch.no_grad():
            contender.call(given, **case.options)

    def reset() -> None:
        """Clear the gradients and restore overwritten logits. Calls back to back are not restored between: their time is the same."""
        inputs.clear()
        if contender.destroys:
            with torch.no_grad():
                given.x.copy_(inputs.x)

    row.first_ms = measure.idle(step, device)
    reset()
    if contender.name not in PARTS:
        found = check.errors(contender, case, inputs, exact)
        for figure, what in zip(("value_error", "gradient_error", "weight_error"), OF_LAYER if case.fused else OF_LOGITS, strict=False):
            setattr(row, figure, found[what] if math.isfinite(found.get(what, math.nan)) else None)
        if fault := check.fault(case, found):
            row.status = fault
            return {}
    reset()
    if device.type == "cuda":
        row.peak_mib = measure.peak_mebibytes(step, device)
    figures: dict[str, Callable[[], float]] = {name: partial(once, step, device, reset) for name, once in TIMED.items()}
    if how.forward and not case.fused:
        figures["forward_ms"] = partial(measure.back_to_back, forward, device, reset)
    if row.floor_ms is not None and row.floor_ms < HOST_BOUND_MS and measure.idle(step, device, reset) < LONG * HOST_BOUND_MS:
        figures["host_us"] = partial(measure.host_microseconds, step)
    return figures


def _recompile(row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference) -> None:
    """Count compilations at two other batch sizes, one of them odd, and with other values of the options."""
    n = len(inputs.x)
    with measure.compilations() as names:
        for rows in (n // 2, n - 1):
            check.step(contender, case, inputs.rows(0, rows), None if exact.upstream is None else exact.upstream[:rows])
    row.recompiled_batch = len(names)
    if not case.other:
        return
    with measure.compilations() as names:
        inputs.clear()
        check.step(contender, replace(case, options=case.options | case.other), inputs, exact.upstream)
    row.recompiled_options = len(names)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("triton", *DISTRIBUTIONS.values(), "liger-kernel-nightly", "nvidia-cutlass-dsl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if device.type == "cuda" and (driver := _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")):
        found["driver"] = driver.splitlines()[0]
    return found


def current_commit() -> str:
    return _output("git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError:
        return ""

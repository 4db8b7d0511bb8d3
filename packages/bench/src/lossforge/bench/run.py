"""Measure cases: correctness first, then every figure that this machine can give."""

import math
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
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
from lossforge.bench.measure import Measurement
from lossforge.bench.record import Inputs
from lossforge.bench.report import Report, Row, said

HOST_BOUND_MS = 0.05
"""A case whose floor is below this time is bound by the host when called back to back, so that its host time is measured, unless the device
takes LONG times as long."""
LONG = 20
WITHOUT_GPU = (
    "No CUDA GPU: wall-clock times of the plain-torch path on shapes cut to at most 2^18 elements. Not measured: the kernels, time on the "
    "device, shares of the floor, memory, host time, CUDA graphs."
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


def measure_case(
    case: Case,
    names: Sequence[str],
    device: torch.device,
    report: Report,
    how: Measurement,
    begin: Callable[[str], object] = lambda name: None,
) -> list[Row]:
    """Measure every contender of a case. `begin` gets the name of each contender before it is called."""
    inputs = make_inputs(case, device, how.seed)
    exact = check.reference(case, inputs)
    rows = []
    for contender in contenders(case, device, set(names)):
        row = Row.of(case, contender.name)
        if report.copy_bytes_per_second and report.read_bytes_per_second and not case.fused:
            row.floor_ms = least_bytes(case, inputs, contender.floor) / report.copy_bytes_per_second * 1e3
            row.forward_floor_ms = least_bytes(case, inputs, "forward") / report.read_bytes_per_second * 1e3
        if not contender.installed:
            row.status = "not installed"
        else:
            if case.fused:
                _free(device)
            begin(contender.name)
            try:
                _measure(row, contender, case, inputs, exact, how)
            except Exception as error:
                row.fail(error)
        inputs.clear()
        rows.append(row)
    del inputs, exact
    _free(device)
    return rows


def _free(device: torch.device) -> None:
    """Release memory, so that the next contender does not reuse it. A GPU that an earlier contender crashed is left as it is."""
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()


def _measure(row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference, how: Measurement) -> None:
    given, device = check.fresh(contender, inputs), inputs.x.device

    def step() -> None:
        check.step(contender, case, given, exact.upstream)

    def reset() -> None:
        """Clear the gradients, so that none add up, and restore overwritten logits, so that no contender runs on zeros."""
        inputs.clear()
        if contender.destroys:
            with torch.no_grad():
                given.x.copy_(inputs.x)

    row.first_ms = measure.first_milliseconds(step, device)
    reset()
    if contender.name not in PARTS:
        found = check.errors(contender, case, inputs, exact)
        for figure, what in zip(("value_error", "gradient_error", "weight_error"), OF_LAYER if case.fused else OF_LOGITS, strict=False):
            setattr(row, figure, found[what] if math.isfinite(found.get(what, math.nan)) else None)
        if fault := check.fault(case, found):
            row.status = fault
            return
    reset()
    if device.type == "cuda":
        row.peak_mib = measure.peak_mebibytes(step, device)
        reset()
    row.put("ms", "", measure.times(step, device, how.milliseconds, reset))
    if not case.fused:
        _measure_more(row, contender, case, inputs, given, exact, how)


def _measure_more(row: Row, contender: Contender, case: Case, inputs: Inputs, given: Inputs, exact: Reference, how: Measurement) -> None:
    """Measure forward alone, the host's time, a CUDA graph and compilations. given: what the contender is called with."""
    device = inputs.x.device

    def step() -> None:
        inputs.clear()
        check.step(contender, case, given, exact.upstream)

    def forward() -> None:
        with torch.no_grad():
            contender.call(given, **case.options)

    def reset() -> None:
        if contender.destroys:
            with torch.no_grad():
                given.x.copy_(inputs.x)

    if how.forward:
        reset()
        forward()
        row.put("ms", "forward_", measure.times(forward, device, how.milliseconds, reset))
    if device.type == "cuda":
        reset()
        if row.floor_ms is not None and row.ms is not None and row.floor_ms < HOST_BOUND_MS and row.ms < LONG * HOST_BOUND_MS:
            row.put("us", "host_", measure.host_microseconds(step))
        if how.graphs:
            _replay(row, contender, case, inputs, exact, how)
    if how.recompile and (case.other or case.suite == "small") and not contender.destroys:
        _recompile(row, contender, case, inputs, exact)


def _replay(row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference, how: Measurement) -> None:
    """Capture forward and backward on the stream that the logits were made on, because autograd runs a node on the stream it recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs.clear()
        step = partial(check.step, contender, case, check.fresh(contender, inputs), exact.upstream)
        try:
            if measure.waits(step):
                row.graph_status = "waits for the device"
                return
            graph = measure.graph_of(step, inputs.clear)
        except Exception as error:
            row.graph_status = said(error)
            return
        row.put("ms", "graph_", measure.times(graph.replay, inputs.x.device, how.milliseconds))
    torch.cuda.current_stream().wait_stream(stream)


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
    for name in ("triton", *DISTRIBUTIONS.values(), "nvidia-cutlass-dsl"):
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

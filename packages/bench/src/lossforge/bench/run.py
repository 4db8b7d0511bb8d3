"""Measure cases: correctness first, then every figure that this machine can give."""

import os
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lossforge.bench import check, linear, measure
from lossforge.bench.cases import CPU_ELEMENTS, FUSED, Case
from lossforge.bench.check import Reference
from lossforge.bench.contenders import DISTRIBUTIONS, Contender, contenders
from lossforge.bench.inputs import Inputs, least_bytes, make_inputs
from lossforge.bench.measure import Measurement
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
        rows = (linear.measure_case if case.suite in FUSED else measure_case)(case, names, device, report, how)
        report.rows += rows
        progress(done, rows)


def measure_case(case: Case, names: Sequence[str], device: torch.device, report: Report, how: Measurement) -> list[Row]:
    inputs = make_inputs(case, device, how.seed)
    exact = check.reference(case, inputs)
    rows = []
    for contender in contenders(case, device, set(names)):
        row = Row(case.suite, case.loss, case.variant, case.use, list(case.shape), case.dtype, contender.name)
        if report.copy_bytes_per_second and report.read_bytes_per_second:
            row.floor_ms = least_bytes(case, inputs, contender.floor) / report.copy_bytes_per_second * 1e3
            row.forward_floor_ms = least_bytes(case, inputs, "forward") / report.read_bytes_per_second * 1e3
        if not contender.installed:
            row.status = "not installed"
        else:
            try:
                _measure(row, contender, case, inputs, exact, how)
            except Exception as error:
                row.fail(error)
        inputs.x.grad = None
        rows.append(row)
    del inputs, exact
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return rows


def _measure(row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference, how: Measurement) -> None:
    x, device, others = check.fresh(contender, inputs), inputs.x.device, inputs.others

    def step() -> None:
        check.step(contender, case, x, others, exact.upstream)

    def reset() -> None:
        """Clear the gradient, so that none add up, and restore overwritten logits, so that no contender runs on zeros."""
        x_leaf.grad = None
        if contender.destroys:
            with torch.no_grad():
                x.copy_(inputs.x)

    x_leaf = x if x.is_leaf else inputs.x
    row.first_ms = measure.first_milliseconds(step, device)
    reset()
    row.value_error, row.gradient_error, worst = (None if e != e else e for e in check.errors(contender, case, inputs, exact))
    numbers = [float("nan") if e is None else e for e in (row.value_error, row.gradient_error, worst)]
    if fault := check.fault(case, *numbers):
        row.status = fault
        return
    reset()
    if device.type == "cuda":
        row.peak_mib = measure.peak_mebibytes(step, device)
    row.put("ms", "", measure.times(step, device, how.milliseconds, reset))
    if how.forward:

        def forward() -> None:
            with torch.no_grad():
                check.call(contender, case, x, others)

        reset()
        forward()
        row.put("ms", "forward_", measure.times(forward, device, how.milliseconds, reset))
    if device.type == "cuda":
        reset()
        if row.floor_ms is not None and row.ms is not None and row.floor_ms < HOST_BOUND_MS and row.ms < LONG * HOST_BOUND_MS:

            def plain() -> None:
                x_leaf.grad = None
                step()

            row.put("us", "host_", measure.host_microseconds(plain))
        if how.graphs:
            _replay(row, contender, case, inputs, exact, how)
    if how.recompile and (case.other or case.suite == "small") and not contender.destroys:
        _recompile(row, contender, case, inputs, exact)


def _replay(row: Row, contender: Contender, case: Case, inputs: Inputs, exact: Reference, how: Measurement) -> None:
    """Capture forward and backward on the stream that the logits were made on, because autograd runs a node on the stream it recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = check.fresh(contender, inputs)

        def step() -> None:
            check.step(contender, case, x, inputs.others, exact.upstream)

        def reset() -> None:
            inputs.x.grad = None

        try:
            if measure.waits(step):
                row.graph_status = "waits for the device"
                return
            graph = measure.graph_of(step, reset)
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
            part = inputs.rows(0, rows)
            check.step(contender, case, part.x, part.others, None if exact.upstream is None else exact.upstream[:rows])
    row.recompiled_batch = len(names)
    if not case.other:
        return
    with measure.compilations() as names:
        inputs.x.grad = None
        other = Case(case.suite, case.loss, case.use, case.shape, case.dtype, case.inputs, case.variant, case.options | case.other)
        check.step(contender, other, inputs.x, inputs.others, exact.upstream)
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

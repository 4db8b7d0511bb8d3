"""Measure a fused case: correctness first, then time and memory of forward and backward."""

import math
from collections.abc import Callable, Sequence

import torch

from lossforge.bench import measure
from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.linear import check
from lossforge.bench.linear.contenders import contenders
from lossforge.bench.linear.inputs import LinearInputs, make_inputs
from lossforge.bench.measure import Measurement
from lossforge.bench.report import Report, Row

PARTS = ("products", "products-weight", "products-backward", "objective")
"""Contenders that compute a part of the loss, which no error is known of."""


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
        _free(device)
        row = Row(case.suite, case.loss, case.variant, case.use, list(case.shape), case.dtype, contender.name)
        if not contender.installed:
            row.status = "not installed"
        else:
            begin(contender.name)
            try:
                _measure(row, contender, inputs, exact, how)
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
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return


def _measure(row: Row, contender: Contender, inputs: LinearInputs, exact: check.Reference, how: Measurement) -> None:
    device = inputs.input.device

    def step() -> None:
        check.step(contender, inputs)

    row.first_ms = measure.first_milliseconds(step, device)
    if contender.name not in PARTS:
        found = check.errors(contender, inputs, exact)
        known = [e if math.isfinite(e) else None for e in found] + [None, None]
        row.value_error, row.gradient_error, row.weight_error = known[:3]
        if fault := check.fault(found):
            row.status = fault
            return
    inputs.clear()
    if device.type == "cuda":
        row.peak_mib = measure.peak_mebibytes(step, device)
        inputs.clear()
    row.put("ms", "", measure.times(step, device, how.milliseconds, inputs.clear))

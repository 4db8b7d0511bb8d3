"""Measure what is not a loss of one tensor of logits or boxes: problems that contenders solve, each compared before it is timed."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossforge.bench import measure
from lossforge.bench.report import write_text
from lossforge.bench.run import current_commit, new_report

MILLISECONDS = 200.0
SLOW = 0.5
"""Seconds beyond which a call is timed once."""
MOST = {torch.float32: 1e-4, torch.float64: 1e-4}
"""The largest relative error of value and gradients by dtype, beyond which no time is reported."""
MOST_OF_HALF = 3e-2
Found = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """What is computed, by whom.

    Attributes:
        name: of the problem, with its sizes.
        contenders: each one's call, by name. The first is the one that the others are compared with.
        agrees: from two results to how far they agree. A result that is not a tensor is not compared: it follows other rules.
        leaves: tensors that the calls take and whose gradients are wanted: then a call returns a loss, and forward and backward are
            measured. Value and gradients are compared with the first contender's in float64.
        least_bytes: the fewest bytes between memory and chip, 0 where they are not the limit.
    """

    name: str
    contenders: dict[str, Found]
    agrees: Callable[[Any, Any], float] | None = None
    leaves: tuple[Tensor, ...] = ()
    least_bytes: int = 0

    def call(self, name: str) -> Callable[[], Any]:
        """Return the call to measure: forward, and backward where leaves are given."""
        contender = self.contenders[name]
        if not self.leaves:
            return contender
        leaves = [leaf.detach().requires_grad_() for leaf in self.leaves]
        return lambda: graded(contender, leaves)

    def exact(self) -> Any:
        """Return what contenders are compared with, of the same random numbers."""
        torch.manual_seed(0)
        first = next(iter(self.contenders.values()))
        return graded(first, [leaf.detach().double().requires_grad_() for leaf in self.leaves]) if self.leaves else first()

    def compared(self, found: Any, exact: Any) -> dict[str, Any]:
        """Return how far a contender's result is from the exact one.

        Raises:
            ArithmeticError: value or gradients are wrong.
        """
        if self.leaves:
            errors = [relative(right, got) for right, got in zip(exact, found, strict=True)]
            most = MOST.get(self.leaves[0].dtype, MOST_OF_HALF)
            if not all(error <= most for error in errors):
                raise ArithmeticError(f"off by {errors}, more than {most}")
            return {"errors": errors}
        return {"agrees": self.agrees(exact, found)} if self.agrees and isinstance(found, Tensor) else {}


def graded(call: Found, leaves: list[Tensor]) -> list[Tensor]:
    value: Tensor = call(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def relative(exact: Tensor, found: Tensor) -> float:
    """Return the norm of the difference, relative to that of `exact`."""
    return ((exact.double() - found.double()).norm() / exact.double().norm()).item()


Makers = Iterable[Callable[[], Problem]]


def rows(problems: Makers, device: torch.device, milliseconds: float, compiled: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a row for each problem and contender. compiled: measure torch.compile, too."""
    rate = measure.copy_rate(device) if device.type == "cuda" else None
    for make in problems:
        torch.manual_seed(0)
        problem, exact = make(), None
        for name in problem.contenders:
            if name == "torch.compile" and not compiled:
                continue
            row: dict[str, Any] = {"problem": problem.name, "contender": name}
            if rate and problem.least_bytes:
                row["floor_ms"] = problem.least_bytes / rate * 1e3
            try:
                exact = problem.exact() if exact is None else exact
                row |= measured(problem, name, exact, device, milliseconds)
            except Exception as error:  # the other contenders are still wanted
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            yield row


def measured(problem: Problem, name: str, exact: Any, device: torch.device, milliseconds: float) -> dict[str, Any]:
    """Return a contender's agreement, then its time, memory, waits for the device and operations."""
    call = problem.call(name)
    torch.manual_seed(0)
    row = problem.compared(call(), exact)
    seconds = measure.idle(call, device) / 1e3
    slow = seconds > SLOW
    times = measure.Times.of([seconds * 1e3]) if slow else measure.times(call, device, milliseconds)
    row |= {"ms": times.median, "low": times.low, "high": times.high}
    if device.type == "cuda" and not slow:
        row |= {"peak_mib": measure.peak_mebibytes(call, device), "waits": measure.waits(call)}
        row["host_us"] = statistics.median(measure.host_microseconds(call, 20) for _ in range(6))
    if name != "torch.compile" and not slow:
        row["operations"] = measure.operations(call)
    return row


def main(arguments: list[str], problems: Callable[[torch.device], Makers]) -> None:
    """Print a row for each problem and contender; write all of them into the file that `arguments` names."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    made = new_report(device, current_commit(), {})
    source = {"gpu": made.gpu, "versions": made.versions, "commit": made.commit, "date": made.date}
    report: dict[str, Any] = {**source, "timing": "back to back, one contender after another", "rows": []}
    for row in rows(problems(device), device, MILLISECONDS, compiled=device.type == "cuda"):
        report["rows"].append(row)
        print(f"{time.monotonic() - began:6.1f} s  {json.dumps(row)}", flush=True)
        if arguments:
            write_text(Path(arguments[0]), json.dumps(report, indent=1) + "\n")

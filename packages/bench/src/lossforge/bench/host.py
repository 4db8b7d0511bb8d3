"""`python -m lossforge.bench.host`: where the host's time goes in a forward and backward too small to keep the GPU busy.

Each stage is a function. Its time excludes the stages that it calls. Reading the clock adds about 0.2 µs a stage, so the last lines give
the time of the call without stages, beside torch eager, measured back to back as `measure.host_microseconds` does.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lossforge.bench.cases import Case, select
from lossforge.bench.contenders import Contender, contenders
from lossforge.bench.inputs import make_inputs
from lossforge.bench.measure import host_microseconds
from lossforge.bench.record import Inputs
from lossforge.kernels import plans
from lossforge.kernels.engine import launch
from lossforge.losses.engine import autograd
from lossforge.losses.engine import calls as run

STAGES: dict[str, list[tuple[Any, str]]] = {
    "key of the call": [(run, "_key")],
    "autograd.Function, gradient's memory": [(autograd.LossFunction, "forward")],
    "plan": [(plans.Plan, "__call__")],
    "memory for sums": [(launch, "new_sums")],
    "launches": [(launch.Step, "start")],
    "scaling of the gradient": [(autograd, "scaled")],
}
CALL, ENGINE = "recognising the call", "autograd engine"


class Clock:
    """Measures the time spent in each stage, without the stages within it."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.inner = [0]  # time within each running stage's inner stages; forward and backward threads take turns

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.inner.append(0)
            start = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - start
                self.spent[stage] = self.spent.get(stage, 0) + took - self.inner.pop()
                self.inner[-1] += took

        return call


def breakdown(contender: Contender, case: Case, inputs: Inputs, calls: int) -> dict[str, float]:
    """Measure each stage of forward and backward, in microseconds a call."""
    clock = Clock()
    before = [(owner, name, getattr(owner, name)) for functions in STAGES.values() for owner, name in functions]
    forward = clock.timed(CALL, contender.call)

    def call() -> None:
        inputs.clear()
        value = forward(inputs, **case.options)
        clock.timed(ENGINE, value.backward)()

    try:
        for stage, functions in STAGES.items():
            for owner, name in functions:
                setattr(owner, name, clock.timed(stage, getattr(owner, name)))
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        clock.spent.clear()
        for i in range(calls):
            call()
            if i % 100 == 99:
                torch.cuda.synchronize()  # so that the GPU's queue never fills
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
    return {stage: ns / calls / 1e3 for stage, ns in clock.spent.items()}


def report(case: Case, device: torch.device, calls: int = 2000) -> None:
    inputs = make_inputs(case, device)
    print(f"{case.key}, microseconds")
    for contender in contenders(case, device, {"lossforge", "torch"}):
        if contender.name == "lossforge":
            for stage, spent in sorted(breakdown(contender, case, inputs, calls).items(), key=lambda item: -item[1]):
                print(f"  {stage:38s} {spent:7.1f}")

        def call(contender: Contender = contender) -> None:
            inputs.clear()
            contender.call(inputs, **case.options).backward()

        print(f"  {contender.name:38s} {statistics.median(host_microseconds(call) for _ in range(6)):7.1f}  whole")


def main() -> int:
    if not torch.cuda.is_available():
        print("No CUDA GPU here: the host's time of launches cannot be measured.", file=sys.stderr)
        return 1
    for case in select(suite=["small"]):
        report(case, torch.device("cuda", torch.cuda.current_device()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure a call: back to back, from an idle host, and the host's own time; memory; compilations."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
CALLS = 8
"""Calls on a GPU without a wait between them."""
LEAST, MOST = 3, 200
"""The fewest and the most values of a figure."""
Nothing = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """How to measure.

    Attributes:
        milliseconds: how long to repeat for one figure.
        seed: of the random tensors.
        forward: whether to time forward without backward.
        recompile: whether to count compilations at other batch sizes and options.
    """

    milliseconds: float = 80.0
    seed: int = 0
    forward: bool = True
    recompile: bool = True


@dataclass(frozen=True)
class Times:
    """Median, and 20 % and 80 % quantiles, over several values, in milliseconds."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Times":
        low, *_, high = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else [*values] * 2
        return cls(statistics.median(values), low, high, len(values))


def times(call: Nothing, device: torch.device, milliseconds: float) -> Times:
    """Measure a call back to back for about `milliseconds`."""
    values: list[float] = []
    began = time.perf_counter()
    while len(values) < LEAST or ((time.perf_counter() - began) * 1e3 < milliseconds and len(values) < MOST):
        values.append(back_to_back(call, device))
    return Times.of(values)


def back_to_back(call: Nothing, device: torch.device, before: Nothing = lambda: None) -> float:
    """Return the milliseconds of one of CALLS calls without a wait between them; without a GPU, those of one call.

    `before` runs first and is not timed. The device sleeps while the host enqueues all of them, so that the host's own time does not
    count, unless a call waits for the device. It then computes one call that is not timed, so that clocks and power are steady.
    """
    before()
    if device.type != "cuda":
        return idle(call, device)
    synchronize(device)
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    torch.cuda._sleep(int(min(1.5 * (CALLS + 1) * host, 2e-2) * 2e9))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / CALLS


def idle(call: Nothing, device: torch.device, before: Nothing = lambda: None) -> float:
    """Return the milliseconds of one call on the host's clock, from an idle device until it is done. `before` runs first, not timed."""
    before()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def host_microseconds(call: Nothing, calls: int = 200) -> float:
    """Return the wall time of a call in microseconds, over `calls` calls between two synchronisations."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls * 1e6


def peak_mebibytes(call: Nothing, device: torch.device) -> float:
    """Return the most memory allocated during the call, beyond what was allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def waits(call: Nothing) -> int:
    """Count how often the call waits for the device."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in said)


class _Counted(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(call: Nothing) -> int:
    """Count the operations of a call that reach torch's dispatcher, views too."""
    with _Counted() as counted:
        call()
    return counted.count


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect a name for each Triton kernel and each torch.compile graph that is compiled within the context."""
    from torch._dynamo.utils import counters
    from triton import knobs

    names: list[str] = []
    earlier = knobs.compilation.listener

    def listener(*, src: Any, **others: Any) -> None:
        names.append(src.name)

    graphs = counters["stats"]["unique_graphs"]
    knobs.compilation.listener = listener
    try:
        yield names
    finally:
        knobs.compilation.listener = earlier
        names += ["graph"] * (counters["stats"]["unique_graphs"] - graphs)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """Measure a copy far larger than the caches, in bytes a second, read plus written: the ceiling for work that moves bytes."""
    source = torch.randn(2**29, device=device)
    return 2 * source.nbytes / times(partial(torch.empty_like(source).copy_, source), device, 200).median * 1e3


def read_rate(device: torch.device) -> float:
    """Measure a sum far larger than the caches, in bytes a second: the ceiling for work that only reads."""
    source = torch.randn(2**29, device=device)
    return source.nbytes / times(source.sum, device, 200).median * 1e3

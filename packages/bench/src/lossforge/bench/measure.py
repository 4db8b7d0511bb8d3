"""Measure a call: time on the device, on the host, and replayed from a CUDA graph; memory; compilations."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
Nothing = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """How to measure.

    Attributes:
        milliseconds: how long to repeat for one figure.
        seed: of the random tensors.
        graphs: whether to replay from a CUDA graph.
        forward: whether to time forward without backward.
        recompile: whether to count compilations at other batch sizes and options.
    """

    milliseconds: float = 80.0
    seed: int = 0
    graphs: bool = True
    forward: bool = True
    recompile: bool = True


@dataclass(frozen=True)
class Times:
    """Median, and 20 % and 80 % quantiles, over several calls, in milliseconds."""

    median: float
    low: float
    high: float
    calls: int

    @classmethod
    def of(cls, values: list[float]) -> "Times":
        low, *_, high = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 2
        return cls(statistics.median(values), low, high, len(values))


def times(call: Nothing, device: torch.device, milliseconds: float, before: Nothing = lambda: None) -> Times:
    """Time calls for about `milliseconds`. `before` runs before each one and is not timed."""
    return (_device_times if device.type == "cuda" else _wall_times)(call, before, milliseconds)


def _device_times(call: Nothing, before: Nothing, milliseconds: float) -> Times:
    """Time each call by CUDA events, with the L2 cache flushed before it.

    The device sleeps before each call for as long as the host takes to enqueue it. So the host's own time does not count, unless the call
    waits for the device.
    """
    flush = torch.empty(256 * MIB, dtype=torch.int8, device="cuda")
    before()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    cycles = int(min(1.5 * host, 2e-3) * 2e9)
    count = max(5, min(200, round(milliseconds / 1e3 / max(whole, 1e-5))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for _ in range(max(1, count // 4)):
        before()
        call()
    for start, end in events:
        before()
        flush.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return Times.of([start.elapsed_time(end) for start, end in events])


def _wall_times(call: Nothing, before: Nothing, milliseconds: float) -> Times:
    values: list[float] = []
    before()
    call()
    while (sum(values) < milliseconds and len(values) < 200) or len(values) < 3:
        before()
        began = time.perf_counter()
        call()
        values.append((time.perf_counter() - began) * 1e3)
    return Times.of(values)


def first_milliseconds(call: Nothing, device: torch.device) -> float:
    """Measure the wall time of the first call until the device is done, compilation included."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def host_microseconds(call: Nothing, calls: int = 200) -> Times:
    """Measure the wall time of a call in microseconds, five times, over `calls` calls back to back between two synchronisations."""

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls * 1e6

    once()
    return Times.of([once() for _ in range(5)])


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


def graph_of(call: Nothing, before: Nothing) -> torch.cuda.CUDAGraph:
    """Capture the call on the current stream, after `before`. What it allocates stays in the graph's own memory."""
    call()
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph


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
    target = torch.empty_like(source)
    return 2 * source.nbytes / _steady_seconds(lambda: target.copy_(source))


def read_rate(device: torch.device) -> float:
    """Measure a sum far larger than the caches, in bytes a second: the ceiling for work that only reads."""
    source = torch.randn(2**29, device=device)
    return source.nbytes / _steady_seconds(source.sum)


def _steady_seconds(call: Nothing) -> float:
    """Measure seconds a call. The first call loads the kernel; its time decides how many follow."""
    call()
    return _device_times(call, lambda: None, 200).median / 1e3

"""Profile a call: every kernel it launches, with time, grid, registers and spills."""

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lossforge.bench import check
from lossforge.bench.cases import Case
from lossforge.bench.contenders import Contender
from lossforge.bench.inputs import make_inputs

CALLS = 5


@dataclass(frozen=True)
class Kernel:
    """A kernel of a call.

    Attributes:
        name: as the profiler prints it.
        microseconds: mean time of one launch.
        launches: how many a call makes.
        grid: programs in each dimension.
        block: threads in each dimension.
        registers: of one thread.
        shared_bytes: shared memory of one program.
        spills: registers kept in memory; None if Triton did not compile the kernel.
    """

    name: str
    microseconds: float
    launches: float
    grid: str
    block: str
    registers: int
    shared_bytes: int
    spills: int | None


def profile_call(contender: Contender, case: Case, device: torch.device, seed: int, trace: Path) -> list[Kernel]:
    """Write the trace of a few forwards and backwards, and list their kernels, the longest first."""
    from torch.profiler import ProfilerActivity, profile, record_function

    inputs = make_inputs(case, device, seed)
    upstream = check.upstream_of(case, inputs)

    def step() -> None:
        inputs.clear()
        given = check.fresh(contender, inputs)
        with record_function(f"{case.key} {contender.name}"):
            check.step(contender, case, given, upstream)

    for _ in range(2):
        step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(trace))
    return kernels_of(json.loads(trace.read_text(encoding="utf-8")), spills())


def kernels_of(trace: dict[str, Any], spilled: dict[str, int]) -> list[Kernel]:
    """Read the kernels from a trace that torch's profiler wrote, over CALLS calls."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            events[event["name"]].append(event)
    found = []
    for name, each in events.items():
        about = each[0]["args"]
        found.append(
            Kernel(
                name,
                sum(e["dur"] for e in each) / len(each),
                len(each) / CALLS,
                "×".join(map(str, about.get("grid", []))),
                "×".join(map(str, about.get("block", []))),
                int(about.get("registers per thread", 0)),
                int(about.get("shared memory", 0)),
                spilled.get(name),
            )
        )
    return sorted(found, key=lambda k: -k.microseconds * k.launches)


def spills() -> dict[str, int]:
    """Return, for each of our kernels, the most registers that a compiled variant spills."""
    from triton import JITFunction

    most: dict[str, int] = {}
    ours = [module for name, module in sys.modules.items() if name.startswith("lossforge.kernels.")]
    for module in ours:
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                for cache, *_ in value.device_caches.values():
                    for compiled in cache.values():
                        count = getattr(compiled, "n_spills", None)
                        if count is not None:
                            most[compiled.name] = max(most.get(compiled.name, 0), count)
    return most

"""What measurements share: what was asked for, where a figure comes from, the file of results, and one training."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from lab.base.files import write_text

ROOT = Path(__file__).resolve().parents[1]
COSTS = {name: name for name in ("step_ms", "images_per_second", "data_wait_share")}
COSTS |= {"loss_ms": "train/loss_ms", "data_wait_ms": "train/data_wait_ms", "peak_mib": "train/peak_allocated_mib"}
"""The costs of a training, and what train.py calls them."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for. out: the file of results. parts, losses, settings: see `measurements/measure.py WHAT --help`."""

    out: Path
    commit: str
    small: bool = False
    parts: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def saved(self) -> dict[str, Any]:
        """Return what the file of results holds already."""
        return json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}

    def save(self, found: dict[str, Any]) -> None:
        write_text(self.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    def source(self, *libraries: str) -> dict[str, str]:
        """Return where the figures come from: GPU, versions, commit and date."""
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} CPU cores"
        versions = {name: import_module(name).__version__ for name in ("torch", *libraries)}
        return {"gpu": gpu, **versions, "commit": self.commit, "date": datetime.now(UTC).date().isoformat()}


def installed(*names: str) -> dict[str, str]:
    """Return the versions of the libraries that are installed here."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def measure_parts(
    request: Request, parts: Mapping[str, Callable[[], Iterable[dict[str, Any]]]], about: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the parts that were asked for, and write the file after each row; return all rows, and the parts that failed."""
    found, rows, failed = request.saved(), list[dict[str, Any]](), []
    for part in request.parts or parts:
        began, runs = time.monotonic(), []
        try:
            for row in parts[part]():
                runs.append(row)
                found[part] = {**about, "runs": runs}
                print(json.dumps(row), flush=True)
                request.save(found)
        except Exception:  # the other parts are still wanted
            traceback.print_exc()
            failed.append(part)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        rows += runs
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return rows, failed


@dataclass(frozen=True)
class Training:
    """A training that has ended: its folder, its records and its wall time."""

    folder: Path
    records: list[dict[str, Any]]
    seconds: float

    @property
    def values(self) -> list[dict[str, float]]:
        return [record["values"] for record in self.records if record["kind"] in ("metrics", "summary")]

    @property
    def backend(self) -> str:
        return next(record for record in self.records if record["kind"] == "start")["tags"]["loss.backend"]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None where the run was too short to have it, or had no GPU."""
        return next((each[name] for each in reversed(self.values) if name in each), None)

    def costs(self) -> dict[str, float | None]:
        return {name: self.last(theirs) for name, theirs in COSTS.items()} | {"seconds": self.seconds}


def train(command: str, *more: str, own_process: bool = False, runs: Path | None = None) -> Training:
    """Run train.py, in this process or in a new one. runs: a folder in which the run's stays."""
    with tempfile.TemporaryDirectory() if runs is None else nullcontext(tempfile.mkdtemp(dir=runs)) as place:
        words = [*command.split(), *more, f"trainer.runs={place}", "tracking=none"]
        began = time.monotonic()
        if own_process:
            status = subprocess.run([sys.executable, str(ROOT / "experiments/train.py"), *words]).returncode
        else:
            from train import main

            free_memory()
            status = main(words)
        seconds = time.monotonic() - began
        if status:
            raise RuntimeError(f"{command}: status {status}")
        (file,) = Path(place).glob("*/metrics.jsonl")
        return Training(file.parent, [json.loads(line) for line in file.read_text().splitlines()], seconds)


def free_memory() -> None:
    """Free what an earlier measurement held, and count the peak of memory from now on."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float | None:
    """Return the most memory that was allocated on the GPU; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def launched(work: Callable[..., Any], processes: int, *given: Any, threads: int = 8) -> Any:
    """Run `work` in processes as torchrun starts them, each with so many threads, and return what the first one returns."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    alone = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
    return elastic_launch(LaunchConfig(nproc_per_node=processes, **alone), work)(*given)[0]


def processes(request: Request, small: int = 2) -> int:
    """Return how many processes measure: one a GPU, or a few on the CPU."""
    import torch

    return small if request.small else torch.cuda.device_count()


def largest(value: float) -> float:
    """Return the largest of the processes' values."""
    from lab.processes.distributed import gathered

    return max(gathered(value))


class Timer:
    """Measures milliseconds between marks, on a GPU by events."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def between(self) -> list[float]:
        from lossforge.bench.measure import synchronize

        synchronize(self.device)
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) if self.device.type == "cuda" else 1e3 * (b - a) for a, b in pairs]


def groups(trainer: Any) -> Iterator[Any]:
    """Yield the batches of each update, epoch after epoch."""
    while True:
        yield from trainer.groups()


def window(trainer: Any, batches: Iterator[Any], updates: int) -> dict[str, float]:
    """Train for some updates, and return what the trainer's clock reads, and the images a second of this process."""
    from lossforge.bench.measure import synchronize

    trainer.clock.restart()
    images = 0
    for group in islice(batches, updates):
        trainer.update(group)
        images += sum(map(len, group))
    synchronize(trainer.device)
    found = {name.removeprefix("train/"): value for name, value in trainer.clock.read(images).items()}
    return found | {"images_per_second": images / updates / found["step_ms"] * 1e3}


def relative(found: Any, exact: Any) -> float:
    """Return the norm of a tensor's difference, relative to the exact one's."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two lists."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))

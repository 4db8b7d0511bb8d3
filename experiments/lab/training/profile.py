"""Trace time and memory of a few updates."""

import contextlib
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lab.base.files import write_text, write_whole
from lab.run.folder import RunFolder

TRACED = 3  # updates
FOLDER, TRACE, TABLE, SNAPSHOT = "profile", "trace.json.gz", "operators.txt", "memory_snapshot.pickle"


class Profile:
    """Trace the last updates of the warm-up, so that the run's rates do not include them.

    `trace.json.gz` is a Chrome trace, for ui.perfetto.dev: operators, kernels, and allocated bytes. `operators.txt`
    sums it up by operator. On a GPU `memory_snapshot.pickle` has each allocation with its stack, for pytorch.org/memory_viz.

    Args:
        folder: the run's folder, which gets the files as artifacts.
        device: the device of the updates.
        warmup: the number of updates that rates do not include.
    """

    def __init__(self, folder: RunFolder, device: torch.device, warmup: int) -> None:
        self.folder, self.place = folder, folder.path / FOLDER
        self.cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        before = max(warmup - TRACED - 1, 1)
        self.first, self.last = before + 1, before + 1 + TRACED
        self.updates = 0
        plan = schedule(wait=before, warmup=1, active=TRACED, repeat=1)
        self.profiler: Any = profile(
            activities=activities, schedule=plan, on_trace_ready=self._write, profile_memory=True, record_shapes=True, acc_events=True
        )
        self.profiler.start()

    def updated(self) -> None:
        """Call after each update."""
        if self.profiler is None:
            return
        self.updates += 1
        if self.cuda and self.updates == self.first:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self.profiler.step()
        if self.updates >= self.last:
            self.close()

    def close(self) -> None:
        """End the trace; write it as far as it has come."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.stop()

    def _write(self, traced: Any) -> None:
        self.place.mkdir(exist_ok=True)
        write_whole(self.place / TRACE, lambda file: traced.export_chrome_trace(file.name))
        longest = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=longest, row_limit=40, max_name_column_width=80)
        write_text(self.place / TABLE, table)
        for name in (TRACE, TABLE):
            self.folder.artifact(self.place / name, FOLDER)
        if self.cuda:
            with contextlib.suppress(RuntimeError):  # a torch build without this feature
                write_whole(self.place / SNAPSHOT, lambda file: torch.cuda.memory._dump_snapshot(file.name))
                torch.cuda.memory._record_memory_history(enabled=None)
                self.folder.artifact(self.place / SNAPSHOT, FOLDER)

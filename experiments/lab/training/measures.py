"""Measure times without a host synchronisation a step, and count the kernels of the loss."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from statistics import median
from typing import Any, TypeVar

import torch

from lab.config.loss_schema import LossConfig
from lab.tasks.losses import has_kernels

Item = TypeVar("Item")


class Clock:
    """Measure a window of updates: from one reading of the device's counters to the next.

    The rates do not include the first `warmup` updates of a process.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.cuda, self.warmup = device.type == "cuda", warmup
        self.updates = self.timed_updates = 0
        self.timed_images = self.timed_seconds = self.timed_waited = 0.0
        self.loss_ms: list[float] = []  # of each window that was reported
        self.update_ms: list[float] = []  # of each window after the warm-up
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self.began = time.perf_counter()
        self.waited = 0.0
        self.window_updates = 0
        self.loss_marks: list[tuple[Any, Any]] = []

    def state(self) -> dict[str, Any]:
        """Return the totals and the open window."""
        names = ("loss_ms", "update_ms", "timed_updates", "timed_images", "timed_seconds", "timed_waited", "window_updates", "waited")
        return {name: copy(getattr(self, name)) for name in names} | {"window_seconds": time.perf_counter() - self.began}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name != "window_seconds":
                setattr(self, name, copy(value))
        self.began = time.perf_counter() - state["window_seconds"]

    def waiting(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and measure the time of waiting for them."""
        source = iter(items)
        while True:
            start = time.perf_counter()
            item = next(source, None)
            self.waited += time.perf_counter() - start
            if item is None:
                return
            yield item

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Mark the loss's forward and backward, in the first updates of a window only."""
        if len(self.loss_marks) >= 8:
            yield
            return
        start = self._mark()
        yield
        self.loss_marks.append((start, self._mark()))

    def updated(self) -> None:
        self.updates += 1
        self.window_updates += 1

    def read(self, images: float) -> dict[str, float]:
        """Return the figures of the window that ends here, with `images` trained on; call this after waiting for the device.

        train/data_wait_share is the share of a step's time in which the host waited for the next batch. A GPU that still had work did
        not wait then, so that the share is an upper bound of its lost time.
        """
        seconds = time.perf_counter() - self.began
        count = max(self.window_updates, 1)
        marks = [start.elapsed_time(end) if self.cuda else (end - start) * 1e3 for start, end in self.loss_marks]
        values = {
            "train/step_ms": seconds / count * 1e3,
            "train/data_wait_ms": self.waited / count * 1e3,
            "train/data_wait_share": self.waited / seconds,
        }
        if marks:
            values["train/loss_ms"] = median(marks)
        if self.updates - self.window_updates >= self.warmup:
            values["train/images_per_second"] = images / seconds
            self.timed_seconds += seconds
            self.timed_waited += self.waited
            self.timed_images += images
            self.timed_updates += self.window_updates
        self.restart()
        return values

    def overall(self) -> dict[str, float]:
        """Return the median time of the loss and, of a run longer than its warm-up, that of an update, and rates without evaluation."""
        values = {name: median(times) for name, times in (("loss_ms", self.loss_ms), ("update_ms", self.update_ms)) if times}
        if not self.timed_seconds:
            return values
        return values | {
            "images_per_second": self.timed_images / self.timed_seconds,
            "step_ms": self.timed_seconds / self.timed_updates * 1e3,
            "data_wait_share": self.timed_waited / self.timed_seconds,
        }

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class KernelsUsed:
    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self.lossforge = config.implementation == "lossforge" and has_kernels(config)
        self.backend = "torch's own loss" if has_kernels(config) else "plain torch, without kernels"
        if self.lossforge:
            from lossforge.losses import backend

            self.backend = backend(torch.zeros(1, device=device))
        self.before = self._launches()

    def state(self) -> dict[str, int]:
        """Return the launches of each kernel since the run's start."""
        return dict(self._launches() - self.before)

    def load_state(self, state: dict[str, int]) -> None:
        """Continue counting from the launches of the run's earlier processes."""
        self.before = self._launches()
        self.before.subtract(state)

    def counts(self) -> dict[str, float]:
        """Return the launches since the run's start, in total and by kernel."""
        launches = self.state()
        by_kernel = {f"loss_launches_{name}": float(count) for name, count in launches.items()}
        return {"loss_launches": float(sum(launches.values())), **by_kernel}

    def tags(self) -> dict[str, str]:
        return {"loss.backend": self.backend}

    def summary(self) -> str:
        launches = self.counts()["loss_launches"]
        return f"{self.backend}, {launches:.0f} kernel launches" if launches else self.backend

    def _launches(self) -> Counter[str]:
        if not self.lossforge:
            return Counter()
        from lossforge.kernels import launch_counts

        return Counter(launch_counts())

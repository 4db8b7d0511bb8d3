"""Random numbers that a resumed run repeats: seeds, and states of generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info


def seed_of(*numbers: int) -> int:
    """Mix numbers, such as a run's seed, an epoch and a batch, into a seed below 2⁶³; similar numbers give unrelated seeds."""
    return int(numpy.random.SeedSequence(numbers).generate_state(1, numpy.uint64)[0] >> 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's CPU generators inside the block; restore their states after it.

    Worker processes of a loader do not restore them, because that takes longer than some augmentations.
    """
    before = None if get_worker_info() else host_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    # torch.manual_seed would seed the GPU's generator as well
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if before:
            set_host_state(before)


def host_state() -> dict[str, Any]:
    """Return the states of the CPU's global generators, as tensors and plain values."""
    kind, key, place, gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(numpy.asarray(key).astype(numpy.int64)), place, gauss, cached),
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: dict[str, Any]) -> None:
    version, key, gauss = state["python"]
    random.setstate((version, tuple(key), gauss))
    kind, array, *rest = state["numpy"]
    numpy.random.set_state((kind, array.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])

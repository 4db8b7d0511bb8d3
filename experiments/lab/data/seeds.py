"""Randomness that a continued run repeats: seeds of what is drawn anew, states of what goes on."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def seed_of(*numbers: int) -> int:
    """A seed below 2⁶³ that belongs to these numbers, such as a run's seed, an epoch and a batch; near numbers give unrelated ones."""
    return int(numpy.random.SeedSequence(numbers).generate_state(1, numpy.uint64)[0] >> 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's generators of the CPU begin at `seed`; outside, they go on as if nothing had been drawn."""
    before = host_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    # torch.manual_seed would seed the GPU's generator as well
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_host_state(before)


def host_state() -> dict[str, Any]:
    """Where the CPU's global generators are, as tensors and plain values."""
    kind, words, place, gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(numpy.asarray(words).astype(numpy.int64)), place, gauss, cached),
        "torch": torch.get_rng_state(),
    }


def set_host_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, array, *rest = state["numpy"]
    numpy.random.set_state((kind, array.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])

"""Epochs of training data: from any batch on, without a wait between them, the same however they are made."""

import itertools
import os
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lab.data.loading import MOST_WORKERS, Epochs, SeededBatches, number_of_workers
from lab.data.samples import Annotations
from lab.data.sets import MemoryLoader, Norm, Split

SAMPLES, BATCH = 22, 4  # six batches, the last one of two


class Told(Dataset):
    """Each sample tells its place and seed, in a file too, which all workers write."""

    def __init__(self, path):
        self.path = path

    def __getitem__(self, place):
        with open(self.path, "a") as file:
            file.write("x")
        return place


@pytest.fixture(params=[0, 2], ids=["no workers", "two workers"])
def epochs(request, tmp_path):
    sampler = SeededBatches(SAMPLES, BATCH, seed=7)
    loader = DataLoader(
        Told(tmp_path / "made"),
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=request.param,
        persistent_workers=request.param > 0,
        generator=torch.Generator(),
    )
    return Epochs(loader, sampler)


def epoch_of(number):
    """The batches of one epoch."""
    sampler = SeededBatches(SAMPLES, BATCH, seed=7)
    sampler.begin(number)
    return list(islice(sampler, len(sampler)))


def test_epochs_follow_each_other(epochs):
    for number in (1, 2, 3):
        batches = list(epochs)
        assert batches == epoch_of(number)
        assert sorted(position for batch in batches for position, _ in batch) == list(range(SAMPLES))
    assert epoch_of(1) != epoch_of(2)


def test_any_batch_can_be_the_first(epochs):
    epochs.begin(3, 4)
    assert list(epochs) == epoch_of(3)[4:]
    assert list(epochs) == epoch_of(4)
    epochs.begin(2)
    assert list(islice(epochs, 3)) == epoch_of(2)[:3]
    epochs.begin(2)
    assert list(epochs) == epoch_of(2)


def test_what_comes_next_is_asked_for_without_a_new_beginning(epochs):
    taken = list(islice(epochs, 2))
    coming = epochs.coming
    epochs.begin(1, 2)
    assert taken + list(epochs) == epoch_of(1)
    epochs.begin(2, 0)
    assert list(epochs) == epoch_of(2)
    assert epochs.coming is coming


def test_workers_begin_the_next_epoch_before_it_is_asked_for(tmp_path):
    sampler = SeededBatches(SAMPLES, BATCH, seed=7)
    loader = DataLoader(Told(tmp_path / "made"), batch_sampler=sampler, collate_fn=list, num_workers=2, generator=torch.Generator())
    epochs = Epochs(loader, sampler)
    list(epochs)
    made = 0
    deadline = time.monotonic() + 600
    while made < SAMPLES + BATCH and time.monotonic() < deadline:
        time.sleep(0.01)
        made = (tmp_path / "made").stat().st_size
    assert made >= SAMPLES + BATCH
    assert list(epochs) == epoch_of(2)


def test_held_out_data_is_read_once_through():
    sampler = SeededBatches(SAMPLES, BATCH, seed=None)
    batches = list(sampler)
    assert [position for batch in batches for position, _ in batch] == list(range(SAMPLES))
    assert batches == list(sampler)


def nudge(images, generator):
    return images + torch.rand(images.shape, generator=generator, device=images.device)


WEIGHT = torch.arange(SAMPLES) / 2


@pytest.fixture(params=[1, 4, 6, 16])
def begun(request, monkeypatch):
    """Return a function that makes a loader at a batch of an epoch; it makes so many batches together."""
    monkeypatch.setattr(MemoryLoader, "TOGETHER", request.param)
    split = Split(torch.arange(SAMPLES * 12, dtype=torch.float32).view(SAMPLES, 3, 2, 2), torch.arange(SAMPLES), [])
    norm = Norm([0.0] * 3, [1.0] * 3)

    def begun(epoch, batch):
        loader = MemoryLoader(split, Annotations(weight=WEIGHT), BATCH, torch.device("cpu"), norm).shuffled(3, nudge)
        loader.begin(epoch, batch)
        return loader

    return begun


def test_batches_made_together_are_the_epochs_samples_in_another_order_each_time(begun):
    """From any batch on, with their targets and weights."""
    loader = begun(1, 0)
    first = list(loader)
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 4, 2]
    for batch in first + list(loader):
        assert torch.equal(batch.index, batch.target)
        assert torch.equal(batch.weight, WEIGHT[batch.index])
    first, second = list(loader), list(loader)
    assert sorted(int(i) for batch in second for i in batch.index) == list(range(SAMPLES))
    assert not torch.equal(first[0].index, second[0].index)
    loader = begun(1, 0)
    _, second, third = (list(loader) for _ in range(3))
    for epoch, at in itertools.product((2, 3), range(6)):
        again = list(begun(epoch, at))
        assert len(again) == 6 - at
        for ours, theirs in zip(again, (second, third)[epoch - 2][at:], strict=True):
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.index, theirs.index)


def test_batches_made_together_are_augmented_pixel_by_pixel(begun):
    for batch in begun(1, 0):
        moved = batch.images - torch.arange(SAMPLES * 12, dtype=torch.float32).view(SAMPLES, 3, 2, 2)[batch.index]
        assert moved.min() >= 0
        assert len(moved.unique()) > moved.numel() // 2  # pixels move by different numbers
        assert moved.max() < 1


def test_large_batches_are_made_alone(monkeypatch):
    monkeypatch.setattr(MemoryLoader, "ELEMENTS", 2 * BATCH * 12 + 1)
    made = []
    split = Split(torch.zeros(SAMPLES, 3, 2, 2), torch.arange(SAMPLES), [])
    loader = MemoryLoader(split, Annotations(), BATCH, torch.device("cpu"), Norm([0.0] * 3, [1.0] * 3))
    loader.shuffled(0, lambda images, _: made.append(len(images)) or images)
    assert sum(len(batch) for batch in loader) == SAMPLES
    assert made == [8, 8, 6]


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [number_of_workers(wanted) for wanted in (None, 0, 5, 40)] == [12, 0, 5, 12]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert number_of_workers(None) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(256)))
    assert number_of_workers(None) == MOST_WORKERS

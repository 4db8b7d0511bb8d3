"""Train on photos on disk by the app and by timm's own parts, as timm's train.py joins them, and compare images a second.

Both take the same files, augmentation, batch, workers, precision and memory format, with and without torch.compile. `loop` rows train on
batches that are read once and stay on the device: what the loop alone reaches. `disk` rows read and augment; where they are far below,
the processes that read are the limit. Both warm up and are timed in turns, by the same clock; a row holds every turn and their median.
Each model, with and without torch.compile, is a part of two to three minutes.
"""

import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measuring import Request, free_memory, groups, peak_mib
from PIL import Image

from lossforge.bench.measure import synchronize

PARTS = {
    "resnet50": ("resnet50", False),
    "vit_small": ("vit_small_patch16_224", False),
    "resnet50_compiled": ("resnet50", True),
    "vit_small_compiled": ("vit_small_patch16_224", True),
}
"""By name: a model of timm's, and whether it is compiled."""
APP = """data=folder data.color_jitter=0 data.interpolation=bilinear data.normalization=model model=timm loss=ce optim=sgd optim.lr=0.01
trainer.epochs=1000 trainer.amp=bf16 trainer.channels_last=true tracking=none"""
PIXELS, CLASSES, LINKS, HELD_ON_DEVICE, TURNS = 224, 10, 40, 4, 3
QUIET_SECONDS = 2.0
"""Until the processes that read have filled their queues, which are shorter than the warm-up: those of one must not slow the other."""
Step = Callable[[Any], int]
Trained = tuple[Iterator[Any], Step, torch.device]


def draw(folder: Path, count: int) -> None:
    """Write `count` photos for training, each LINKS times so that all is measured within an epoch, and two of each class held out."""
    places = [folder / ("train" if n < count else "val") / f"class{n % CLASSES}" / f"{n}.jpg" for n in range(count + 2 * CLASSES)]
    for parent in {place.parent for place in places}:
        parent.mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(photo, places, range(len(places)), chunksize=16))
    for place in places[:count]:
        for number in range(1, LINKS):
            os.link(place, place.with_stem(f"{place.stem}-{number}"))


def photo(place: Path, seed: int) -> None:
    """Write a JPEG file of 500 × 375 pixels, with noise of several scales."""
    random = np.random.default_rng(seed)
    coarse = [random.integers(0, 80, (375 // scale, 500 // scale, 3), dtype=np.uint8) for scale in (1, 8, 64)]
    pixels = np.sum([np.asarray(Image.fromarray(each).resize((500, 375))) for each in coarse], 0)
    Image.fromarray(pixels.astype(np.uint8)).save(place, quality=85)


def app(words: list[str]) -> Trained:
    """Return the app's batches, and an update by one of them."""
    from lab.config.settings import load
    from lab.training.assemble import assemble

    trainer = assemble(load(words))
    trainer.model.train()

    def step(group: Any) -> int:
        trainer.update(group)
        return sum(len(batch) for batch in group)

    return groups(trainer), step, trainer.device


def timm_parts(model: str, pixels: int, folder: Path, batch: int, workers: int, compiled: bool) -> Trained:
    """Return the same of timm's: its data set, loader with prefetching, model, optimiser, and the body of its loop."""
    from timm import create_model
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = create_model(model, num_classes=CLASSES).train().to(device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it without a device
    optimizer = create_optimizer_v2(network, opt="sgd", lr=0.01, momentum=0.9, weight_decay=5e-4)
    forward = torch.compile(network) if compiled else network
    how: dict[str, Any] = {"num_workers": workers, "color_jitter": None, "interpolation": "bilinear", "pin_memory": True, "device": device}
    how |= {"use_prefetcher": device.type == "cuda", "persistent_workers": workers > 0}
    loader = create_loader(create_dataset("", root=str(folder / "train")), (3, pixels, pixels), batch, is_training=True, **how)

    def step(given: tuple[torch.Tensor, torch.Tensor]) -> int:
        images, target = (each.to(device) for each in given)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as timm's loop does, for its mean
        return len(images)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    return endless(), step, device


def begun(make: Callable[[], Trained], updates: int) -> tuple[Trained, float | None]:
    """Return a training after its first updates, and the most memory it took, in MiB."""
    free_memory()
    before = torch.cuda.memory_allocated() / 2**20
    batches, step, device = make()
    for given in itertools.islice(batches, updates):
        step(given)
    most = peak_mib()
    return (batches, step, device), None if most is None else most - before


def in_turns(turns: int, warmup: int, updates: int, both: Mapping[str, Trained], quiet: float) -> dict[str, list[float]]:
    """Return images a second of each of several trainings, as often as there are turns. quiet: seconds to wait before each turn."""
    found: dict[str, list[float]] = {name: [] for name in both}
    for _, (name, (batches, step, device)) in itertools.product(range(turns), both.items()):
        time.sleep(quiet)
        for given in itertools.islice(batches, warmup):
            step(given)
        synchronize(device)
        began = time.perf_counter()
        images = sum([step(given) for given in itertools.islice(batches, updates)])
        synchronize(device)
        found[name].append(images / (time.perf_counter() - began))
    return found


def throughput(request: Request) -> int:
    batch, warmup, updates, count, pixels = (4, 1, 2, 40, 64) if request.small else (256, 40, 40, 2048, PIXELS)
    workers, turns, quiet = (0, 1, 0.0) if request.small else (max(1, (os.cpu_count() or 2) - 1), TURNS, QUIET_SECONDS)
    about, found = request.source("timm", "triton") | {"workers": workers, "batch": batch}, request.saved()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        draw(folder, count)
        for part in request.parts or [*PARTS][: 1 if request.small else None]:
            model, compiled = PARTS[part]
            model = "test_resnet" if request.small else model
            words = [*APP.split(), f"data.root={folder}", f"model.name={model}", f"data.image_size={pixels}"]
            words += [f"data.batch_size={batch}", f"data.workers={workers}", f"trainer.compile={str(compiled).lower()}"]
            begin = {
                "lossforge": functools.partial(app, words),
                "timm": functools.partial(timm_parts, model, pixels, folder, batch, workers, compiled),
            }
            both, peaks = {}, {}
            for name, make in begin.items():
                both[name], peaks[name] = begun(make, warmup)
            disk = in_turns(turns, warmup, updates, both, quiet)
            held = {
                name: (itertools.cycle([*itertools.islice(batches, HELD_ON_DEVICE)]), *others) for name, (batches, *others) in both.items()
            }
            time.sleep(quiet)
            loop = in_turns(turns, warmup // 8, updates, held, 0)
            rows = [
                {"by": name, "data": data, "images_per_second": statistics.median(each), "turns": each, "peak_mib": peaks[name]}
                for name in both
                for data, each in (("disk", disk[name]), ("loop", loop[name]))
            ]
            print(*rows, sep="\n", flush=True)
            found[part] = about | {"model": model, "compiled": compiled, "rows": rows}
            request.save(found)
            del both, held
    return 0

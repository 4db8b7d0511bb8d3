"""A run that does not fit says so, with the figures and the settings that would take less, and changes none of them."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from lab.config.settings import load
from lab.training import failures

TINY = ["model=tiny_resnet", "loss.implementation=torch", "tracking=none"]

LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, "experiments")
import train
from {module} import {owner} as owner
inner = owner.{function}
def limited(*given):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 512 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return inner(*given)
owner.{function} = limited
sys.exit(train.main(sys.argv[1:]))
"""


def run_limited(clone, module, owner, function, *words):
    """A run that from a function on gets 512 MiB, and not a byte more."""
    script = LIMITED.format(module=module, owner=owner, function=function)
    command = [sys.executable, "-c", script, *TINY, "trainer.device=cpu", *words]
    env = clone.env | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=clone.path, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def starved(new_clone):
    """Train in too little memory; return the run's folder, and what it said."""
    clone = new_clone()
    words = ["data.image_size=160", "data.batch_size=1437", "data.augment=false", "trainer.accumulate=3", "trainer.ema=0.9"]
    status, output, errors = run_limited(clone, "lab.training.trainer", "Trainer", "fit", *words)
    assert status == 1, output + errors
    (folder,) = clone.run_folders()
    return folder, errors


def test_a_batch_that_the_machine_cannot_hold_ends_in_a_message_and_the_run_as_failed(starved):
    """Settings that take less are named, and none of the run's own has changed."""
    _, errors = starved
    assert "the machine's memory is exhausted (training)" in errors
    assert "you tried to allocate" in errors
    assert "Traceback" not in errors
    folder, _ = starved
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records[-1]["status"] == "FAILED"
    assert any("can't allocate memory" in record["values"].get("error", "") for record in records if "values" in record)
    assert "batch_size: 1437" in (folder / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("settings", ["data.batch_size=719 trainer.accumulate=6", "data.image_size=80", "trainer.ema=null"])
def test_settings_that_take_less_memory_are_named(starved, settings):
    assert settings in starved[1]


@pytest.mark.slow
def test_data_that_the_machine_cannot_hold(clone):
    """1437 images of 1024² float32 are 6 GB; they are made before there is a run folder."""
    status, output, errors = run_limited(clone, "lab.tasks.classification", "task", "load_data", "data.image_size=1024")
    assert status == 1, output + errors
    assert "the machine's memory is exhausted (before the first update)" in errors
    assert "data.image_size=512" in errors
    assert "Traceback" not in errors
    assert not (clone.path / "runs").exists()


OF_64_MB = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]


@pytest.mark.slow
def test_batches_that_shared_memory_cannot_hold(clone):
    """Two workers make batches of 100 MB in 64 MB, which is all that a container has."""
    if subprocess.run([*OF_64_MB, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a /dev/shm of 64 MB")
    images = clone.path / "data" / "images"
    images.mkdir(parents=True)
    side, count = 2048, 8
    boxes = {"images": [], "categories": [{"id": 1, "name": "bee"}], "annotations": []}
    for number in range(count):
        Image.new("RGB", (side, side)).save(images / f"{number}.png")
        boxes["images"].append({"id": number, "file_name": f"{number}.png", "width": side, "height": side})
        of = {"id": number, "image_id": number, "category_id": 1, "bbox": [10, 10, 100, 100], "area": 10000, "iscrowd": 0}
        boxes["annotations"].append(of)
    (images.parent / "boxes.json").write_text(json.dumps(boxes), encoding="utf-8")
    words = ["task=detection", "model=yolo_tiny", "data=coco", f"data.root={images.parent}", "data.shortest=null", "data.longest=null"]
    words += [f"data.{part}_images=images" for part in ("train", "val")]
    words += [f"data.{part}_annotations=boxes.json" for part in ("train", "val")]
    words += [f"data.batch_size={count}", "data.workers=2", "data.augment=false", "trainer.device=cpu", "tracking=none"]
    command = [*OF_64_MB, sys.executable, "experiments/train.py", *words]
    done = subprocess.run(command, cwd=clone.path, env=clone.env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: shared memory is exhausted (training)" in done.stderr
    assert "unable to allocate shared memory" in done.stderr
    assert "docker run --shm-size=8g" in done.stderr
    assert "data.workers=0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (MemoryError(), "host"),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), "host"),
        (
            RuntimeError(
                "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that ... insufficient shared memory (shm)"
            ),
            "shared",
        ),
        (RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"), "shared"),
        (RuntimeError("DataLoader worker (pid 12) exited unexpectedly"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu"),
    ],
)
def test_which_memory(error, where):
    assert failures.out_of_memory(error) == where


def test_only_what_the_run_has_not_done_yet_is_proposed():
    config = load(["model=tiny_resnet", "data.batch_size=1", "trainer.amp=bf16", "optim=sgd"]).config
    assert [setting for setting, _ in failures.remedies(config, "gpu", "training")] == ["model=..."]
    config = load(["model=tiny_resnet", "data.eval_batch_size=100"]).config
    assert failures.remedies(config, "gpu", "evaluation")[0][0] == "data.eval_batch_size=50"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_batch_that_the_gpu_cannot_hold(clone):
    total = torch.cuda.get_device_properties(0).total_memory
    size = 64
    while 1437 * 32 * size**2 * 4 < total:  # the stem's first activations alone
        size += 64
    done = clone.run(*TINY, f"data.image_size={size}", "data.batch_size=1437", "data.augment=false", "trainer.device=cuda", timeout=600)
    assert done.status == 1, done.output
    assert "the GPU's memory is exhausted" in done.output
    assert "CUDA out of memory" in done.output
    assert "data.batch_size=719 trainer.accumulate=2" in done.output
    assert "trainer.amp=bf16" in done.output
    assert "Traceback" not in done.output
    (folder,) = clone.run_folders()
    assert "CUDA memory summary" in (folder / "memory_summary.txt").read_text(encoding="utf-8")

"""A run that does not fit says so, with the figures and the settings that would take less, and changes none of them."""

import json
import subprocess
import sys

import pytest
import torch

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
    done = subprocess.run(command, cwd=clone.path, env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


def test_a_batch_that_the_machine_cannot_hold(clone):
    words = ["data.image_size=160", "data.batch_size=1437", "data.augment=false", "trainer.accumulate=3", "trainer.ema=0.9"]
    status, output, errors = run_limited(clone, "lab.training.trainer", "Trainer", "fit", *words)
    assert status == 1, output + errors
    assert "the machine's memory is exhausted (training)" in errors
    assert "you tried to allocate" in errors
    assert "data.batch_size=719 trainer.accumulate=6" in errors
    assert "data.image_size=80" in errors
    assert "trainer.ema=null" in errors
    assert "Traceback" not in errors
    (folder,) = clone.run_folders()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records[-1]["status"] == "FAILED"
    assert any("can't allocate memory" in record["values"].get("error", "") for record in records if "values" in record)
    assert "batch_size: 1437" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_data_that_the_machine_cannot_hold(clone):
    """1437 images of 1024² float32 are 6 GB; they are made before there is a run folder."""
    status, output, errors = run_limited(clone, "lab.tasks.classification", "task", "load_data", "data.image_size=1024")
    assert status == 1, output + errors
    assert "the machine's memory is exhausted (before the first update)" in errors
    assert "data.image_size=512" in errors
    assert "Traceback" not in errors
    assert not (clone.path / "runs").exists()


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

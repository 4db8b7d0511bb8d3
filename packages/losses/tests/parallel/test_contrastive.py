"""Contrastive losses whose features are spread over processes. Each start of processes, which takes seconds, runs many cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lossforge.losses.engine.parallel.contrastive import device_of_exchange


def test_sizes_are_exchanged_on_the_device_of_the_features():
    cpu, gpu, meta = map(torch.device, ("cpu", "cuda:1", "meta"))
    for backends, given, wanted in (
        ("cpu:gloo,cuda:nccl", [cpu, gpu], gpu),
        ("cpu:gloo,cuda:nccl", [cpu, cpu], cpu),
        ("cpu:gloo,cuda:gloo", [meta, gpu], gpu),
        ("cpu:gloo,cuda:gloo", [meta], cpu),
        ("cuda:nccl", [cpu, meta, gpu], gpu),
    ):
        assert device_of_exchange(backends, given) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layouts", "interpreted"),
    [(2, ("uneven", "open_clip"), True), (4, ("equal", "uneven", "one without", "open_clip"), False)],
)
def test_against_the_loss_of_all_features(processes, layouts, interpreted):
    worker = Path(__file__).with_name("spread_features.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(worker), *layouts]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted and torch.cuda.device_count() < processes else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-6000:]}"
    assert done.stdout.count("every process agrees") == processes

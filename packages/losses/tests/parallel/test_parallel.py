"""Losses whose classes are spread over processes. Each start of processes, which takes seconds, runs many cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lossforge.losses import cross_entropy, linear_cross_entropy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layouts", "interpreted"),
    [(2, ("uneven", "dtensors", "three products"), True), (4, ("equal", "padded", "padding alone", "fsdp"), False)],
)
def test_against_the_loss_of_all_classes(processes, layouts, interpreted):
    worker = Path(__file__).with_name("several_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(worker), *layouts]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted and torch.cuda.device_count() < processes else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-6000:]}"
    assert done.stdout.count("every process agrees") == processes


def test_a_group_that_is_none_is_refused():
    x, target = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup or a DeviceMesh of one dimension, got int"):
        cross_entropy(x, target, group=3)
    with pytest.raises(ValueError, match=r"classes needs group, .*, got classes=6 alone"):
        cross_entropy(x, target, classes=6)
    with pytest.raises(ValueError, match="classes needs group"):
        linear_cross_entropy(x, torch.randn(5, 6), target, classes=5)

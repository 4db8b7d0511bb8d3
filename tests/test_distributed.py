"""Two real processes under torchrun, over gloo: what they train is what one process trains on the whole batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import SCENES, VIT, assembled, evaluated, updated

from lab import distributed
from lab.errors import UserError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# losses of float32, summed in another order
LOSS = {"rtol": 1e-5, "atol": 1e-6}
# and weights after four steps at a learning rate of 1e-1
WEIGHT = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both ranks kept of each case, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("distributed_worker.py")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW", "PYTEST"))} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*TORCHRUN, str(worker), str(folder)], capture_output=True, text=True, timeout=400, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)] for name in CASES}
    return kept | {"folder": folder, "output": done.stdout}

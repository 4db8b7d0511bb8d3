"""Contrastive losses whose features are spread over processes. Each start of processes, which takes seconds, runs many cases."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lossforge import losses
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.engine.parallel.agreement import device_of_exchange


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


def test_every_loss_that_takes_a_group_is_compared_and_listed():
    signatures = {name: inspect.signature(getattr(losses, name)) for name in (*DECLARED, "mean_center", "sinkhorn_center")}
    taking = {name for name, s in signatures.items() if "group" in s.parameters and "ProcessGroup" in str(s.parameters["group"].annotation)}
    taking.remove("linear_cosine_distance")  # which refuses it
    here = Path(__file__).parent
    workers, pages = (
        "".join(place.read_text("utf-8") for place in places)
        for places in (here.glob("s*_*.py"), [here.parents[3] / "docs/use_with" / name for name in ("ddp.md", "dtensor.md")])
    )
    assert len(taking) > 20
    assert {name for name in taking if f"L.{name}" not in workers} == set()
    assert {name for name in taking if f"`{name}`" not in pages} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layouts", "interpreted"),
    [(2, ("uneven", "open_clip"), True), (3, ("equal", "uneven", "one without", "open_clip"), False)],
)
def test_against_the_loss_of_all_features(processes, layouts, interpreted):
    worker = Path(__file__).with_name("spread_features.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(worker), *layouts]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_INTERPRET"))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted and torch.cuda.device_count() < processes else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-6000:]}"
    assert done.stdout.count("every process agrees") == processes

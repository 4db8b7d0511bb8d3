"""The cases are right before they are fast; measuring says so where it cannot."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lossforge.bench.__main__ import error, measured
from lossforge.bench.cases import cases, small_cases
from lossforge.bench.measure import milliseconds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [*cases(), *small_cases()]


def shrunk(case):
    """The same case with at most 24 a dimension, in float32."""
    return replace(case, shape=tuple(min(n, 24) for n in case.shape), dtype=torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.shape} {c.dtype}")
def test_every_contender_computes_the_loss(case):
    case = shrunk(case)
    x = torch.randn(case.shape, device=DEVICE, requires_grad=True)
    target = case.target(x.detach())
    for contender in case.contenders.values():
        assert error(case, contender, x, target) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="speed and memory are measured on a GPU")
def test_a_wrong_contender_gets_no_speed():
    case = shrunk(CASES[0])
    judge = case.contenders["torch"]
    wrong, right = measured(replace(case, contenders={"wrong": lambda x, t: judge(x, t) * 1.01, "torch": judge}), DEVICE, 1e12, host=False)
    assert wrong["error"] > 5e-3
    assert "ms" not in wrong
    assert right["ms"] > 0


def test_milliseconds():
    x = torch.randn(1000, 1000, device=DEVICE, requires_grad=True)
    assert 0 < milliseconds(lambda: x.square().sum().backward(), x) < 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there to measure")
def test_without_a_gpu_it_says_what_it_cannot_measure():
    done = subprocess.run([sys.executable, "-m", "lossforge.bench", "figures.json"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No CUDA GPU here" in done.stderr

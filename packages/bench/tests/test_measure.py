import time

import pytest
import torch

from lossforge.bench import measure
from lossforge.bench.measure import Times

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_quantiles():
    found = Times.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (found.median, found.low, found.high, found.count) == (3.5, 2.0, 5.0, 6)
    assert Times.of([2.0]) == Times(2.0, 2.0, 2.0, 1)


@pytest.mark.parametrize("once", [measure.back_to_back, measure.idle])
def test_what_runs_before_a_call_is_not_timed(once):
    assert 1.0 <= once(lambda: time.sleep(0.001), CPU, before=lambda: time.sleep(0.02)) < 15


def test_a_figure_has_several_values():
    found = measure.times(lambda: time.sleep(0.001), CPU, 1.0)
    assert found.high >= found.median >= found.low >= 1.0
    assert found.count == measure.LEAST
    assert measure.times(lambda: None, CPU, 1e3).count == measure.MOST


def test_a_graph_of_torch_compile_is_counted():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with measure.compilations() as names:
        compiled(torch.ones(3))
    assert names == ["graph"]
    with measure.compilations() as names:
        compiled(torch.ones(3))
    assert names == []


@pytest.mark.gpu
@needs_gpu
def test_device_time_leaves_out_the_host():
    x = torch.randn(1000, device="cuda")

    def call():
        time.sleep(0.0005)
        x.mul_(1.0)

    assert measure.back_to_back(call, x.device) < 0.1
    assert measure.idle(call, x.device) > 0.5
    assert measure.host_microseconds(call, 10) > 500


@pytest.mark.gpu
@needs_gpu
def test_peak_and_waiting():
    x = torch.randn(2**20, device="cuda")
    assert measure.peak_mebibytes(lambda: x * 2, x.device) == 4.0
    assert measure.waits(lambda: [x.sum().item() for _ in range(3)]) == 3
    assert measure.waits(lambda: x.sum()) == 0


def test_operations_of_forward_and_backward():
    x = torch.randn(3)
    assert measure.operations(lambda: x.exp().sum()) == 2
    leaf = x.requires_grad_()
    assert measure.operations(lambda: leaf.exp().sum().backward()) > measure.operations(lambda: leaf.exp().sum())


@pytest.mark.gpu
@needs_gpu
def test_rates():
    device = torch.device("cuda")
    assert 1e11 < measure.copy_rate(device) < 2e13
    assert 1e11 < measure.read_rate(device) < 2e13

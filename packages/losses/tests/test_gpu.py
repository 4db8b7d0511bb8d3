"""What only a GPU can show: no synchronisation, graph capture, no recompilation, memory, size, devices, the interpreter's warning."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from lossforge import losses as L
from lossforge.kernels import launch_counts
from lossforge.kernels.boxes.boxes import boxes_kernel
from lossforge.kernels.classes.divergence.kernel import divergence_backward_kernel, divergence_kernel
from lossforge.kernels.classes.rowwise.kernel import rowwise_backward_kernel, rowwise_kernel
from lossforge.kernels.classes.rowwise.resident import resident_kernel
from lossforge.kernels.classes.topk import topk_kernel
from lossforge.kernels.elements.elementwise.kernel import elementwise_kernel
from lossforge.kernels.engine.reduce import count_kernel
from lossforge.kernels.features.sinkhorn import sinkhorn_columns_kernel, sinkhorn_rows_kernel
from lossforge.kernels.masks.overlap.backward import overlap_backward_kernel
from lossforge.kernels.masks.overlap.kernel import overlap_kernel
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error, run, samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
MIB = 2**20


@pytest.fixture(autouse=True)
def _no_poison():
    """Memory and synchronisation are measured here: without torch filling what it allocates."""
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()


@EACH
def test_runs_on_the_kernels(loss):
    before = sum(launch_counts().values())
    sample = next(samples(loss, "cuda"))
    run(loss.function, sample, reduction="mean")
    assert L.backend(sample.x) == "triton"
    assert sum(launch_counts().values()) > before


@pytest.mark.parametrize("mode", ["forward", "backward"])
@EACH
def test_no_host_synchronisation(loss, mode):
    for sample in samples(loss, "cuda"):
        x = (sample.x.detach() * 1).requires_grad_()
        upstream = torch.full((), 3.0, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            value = loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode)
            value.backward(upstream, retain_graph=True)
            value.backward(upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["forward", "backward"])
@EACH
def test_cuda_graph(loss, mode):
    """Captured forward and backward, replayed on new data, on two streams at once."""
    for sample in samples(loss, "cuda"):
        if sample.name not in ("dense", "class index", "many classes", "mixup pair", "probabilities", "pairs"):
            continue
        graphs = []
        for _ in range(2):
            x = sample.x.detach().clone().requires_grad_()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode).backward()
            torch.cuda.current_stream().wait_stream(stream)
            x.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value = loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode)
                value.backward()
            graphs.append((graph, x, value))
        streams = [torch.cuda.Stream() for _ in graphs]
        for turn in range(3):
            for i, (_, x, _) in enumerate(graphs):
                data, size = torch.rand_like(x), 0.5 + i / 4 + turn / 8
                with torch.no_grad():
                    x.copy_((sample.x + 0.1 * data if loss.template.name in ("boxes", "rotated") else data) * size)
            torch.cuda.synchronize()
            for (graph, _, _), stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for _, x, value in graphs:
                exact = run(
                    loss.reference, type(sample)("", x.detach(), sample.target, sample.kwargs), dtype=torch.float64, reduction="mean"
                )
                assert error(value, exact.value) < 3e-6
                # an edge's length within a box that is nearly parallel to it is a quotient by a small sine
                assert error(x.grad, exact.gradient) < (1e-5 if loss.name == "rotated_iou" else 3e-6)


def test_reduce_overhead_mode():
    torch._dynamo.reset()
    layer = torch.nn.Linear(64, 1000, device="cuda")
    target = torch.randint(0, 1000, (256,), device="cuda")

    def step(x):
        return L.cross_entropy(layer(x), target)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        x = torch.randn(256, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        layer.zero_grad()
        value = compiled(x)
        value.backward()
        got = value.item(), layer.weight.grad.clone()
        layer.zero_grad()
        expected = torch.nn.functional.cross_entropy(layer(x), target)
        expected.backward()
        assert abs(got[0] - expected.item()) < 1e-4
        torch.testing.assert_close(got[1], layer.weight.grad, rtol=1e-3, atol=1e-5)


def compiled_variants() -> int:
    kernels = (boxes_kernel, elementwise_kernel, rowwise_kernel, rowwise_backward_kernel, resident_kernel, count_kernel)
    kernels += (overlap_kernel, overlap_backward_kernel)
    kernels += (divergence_kernel, divergence_backward_kernel, topk_kernel, sinkhorn_columns_kernel, sinkhorn_rows_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def hyper(loss, step):
    return {k: v * (0.9 + step / 50) for k, v in loss.hyper.items() if v and isinstance(v, float)}


def of_rows(loss, rows, step, mode):
    boxes = loss.template.name == "boxes"
    x = torch.rand(rows, 4 if boxes else 48, device="cuda", requires_grad=True)
    target = torch.rand(rows, 4, device="cuda") if boxes else torch.randint(0, 48, (rows,), device="cuda")
    loss.function(x, target, reduction="mean", gradient=mode, **hyper(loss, step)).backward()


def of_teacher(loss, classes, rows, step, mode):
    x, teacher = torch.randn(rows, classes, device="cuda", requires_grad=True), torch.randn(rows, classes, device="cuda")
    loss.function(x, teacher, gradient=mode, weight=torch.rand(rows, device="cuda"), **hyper(loss, step)).backward()


def of_topk(rows, step, mode):
    x = torch.randn(rows, 20_480, device="cuda", requires_grad=True)
    values, indices = torch.randn(rows, 500, device="cuda").log_softmax(1).topk(16, 1)
    L.topk_kl_div_with_logits(x, values, indices, 1.0 + step / 10, gradient=mode).backward()


def of_long_rows(rows, step, mode):
    x = torch.randn(rows, 33_000, device="cuda", requires_grad=True)
    L.cross_entropy(x, torch.randint(0, 33_000, (rows,), device="cuda"), label_smoothing=0.1 + step / 10, gradient=mode).backward()


VARIED = {
    **{  # in rows of one tile and of several
        f"{loss.name}, {classes} classes": partial(of_teacher, loss, classes)
        for loss in LOSSES.values()
        if loss.template.name == "divergence"
        for classes in (48, 20_480)
    },
    "topk": of_topk,
    "long rows": of_long_rows,
    "sinkhorn": lambda rows, step, mode: L.sinkhorn_center(torch.randn(rows, 1000, device="cuda"), 0.05 + rows / 1e4),
}


def check_variants(call):
    counts = []
    for step in range(4):
        for rows in (64 + 16 * step, 33 + 2 * step):
            for mode in ("forward", "backward"):
                call(rows, step, mode)
            counts.append(compiled_variants())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.template.by_rows], ids=lambda loss: loss.name)
def test_no_recompilation(loss):
    """Over the number of rows, be it a multiple of 16 or odd, and over hyper-parameters."""
    check_variants(partial(of_rows, loss))


@pytest.mark.parametrize("name", VARIED)
def test_no_recompilation_of_others(name):
    check_variants(VARIED[name])


def peak(call) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


@pytest.mark.large
@pytest.mark.parametrize(("options", "allowed"), [({}, 1.0), ({"gradient": "backward"}, 1.0), ({"inplace": True}, 0.0)], ids=str)
def test_peak_memory(options, allowed):
    """One gradient beside the logits, or none where it takes their memory; rows and parts add under 1 %."""
    x = torch.randn(4096, 32_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32_000, (4096,), device="cuda")
    size = x.numel() * 2 / MIB
    logits = x * 1
    edge = get_gradient_edge(logits)  # a loss that overwrites the logits takes their place in the graph
    used = peak(lambda: torch.autograd.grad(L.cross_entropy(logits, target, **options), edge))
    assert used <= allowed * size + 0.01 * size
    with torch.no_grad():
        assert peak(lambda: L.cross_entropy(x, target)) <= 0.01 * size
    teacher = torch.randn_like(x)
    logits = x * 1
    edge = get_gradient_edge(logits)
    used = peak(lambda: torch.autograd.grad(L.kl_div_with_logits(logits, teacher, **options), edge))
    assert used <= allowed * size + 0.01 * size
    del logits
    x = torch.randn(2**26, device="cuda", requires_grad=True)
    y = torch.rand(2**26, device="cuda")
    size = x.numel() * 4 / MIB
    logits = x * 1
    edge = get_gradient_edge(logits)
    used = peak(lambda: torch.autograd.grad(L.sigmoid_focal_loss(logits, y, reduction="sum", **options), edge))
    assert used <= allowed * size + 0.01 * size


@pytest.mark.large
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_more_than_two_to_the_31_elements(mode):
    n = 2**31 + 4096
    x = torch.empty(n, device="cuda", dtype=torch.bfloat16).uniform_(-2, 2).requires_grad_()
    y = torch.zeros(1, device="cuda", dtype=torch.bfloat16).expand(n)
    (g,) = torch.autograd.grad(L.l1_loss(x, y, reduction="sum", gradient=mode), x)
    assert torch.equal(g[-8192:], x.detach()[-8192:].sign())
    assert torch.equal(g[2**31 - 4096 : 2**31 + 4096], x.detach()[2**31 - 4096 : 2**31 + 4096].sign())
    del x, y, g
    rows, classes = 2**16 + 3, 2**15 + 8
    x = torch.empty(rows, classes, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    value = L.cross_entropy(x, target, reduction="sum", gradient=mode)
    (g,) = torch.autograd.grad(value, x)
    for part in (slice(0, 4), slice(-4, None)):
        exact = x.detach()[part].double().requires_grad_()
        torch.nn.functional.cross_entropy(exact, target[part], reduction="sum").backward()
        assert error(g[part], exact.grad) < 2.0**-8


@pytest.mark.large
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_more_than_two_to_the_31_coordinates_of_boxes(mode):
    n = 2**29 + 1000
    memory = torch.empty(n, 4, device="cuda", dtype=torch.bfloat16).uniform_()
    memory[:, 2:] += 1
    boxes1, boxes2 = memory.requires_grad_(), memory.detach()[-1:].expand(n, 4)
    (g,) = torch.autograd.grad(L.generalized_box_iou_loss(boxes1, boxes2, "sum", gradient=mode), boxes1)
    for part in (slice(0, 500), slice(2**29 - 500, 2**29 + 500), slice(-500, None)):
        exact = memory.detach()[part].double().requires_grad_()
        L.generalized_box_iou_loss(exact, boxes2[part].double(), "sum").backward()
        assert error(g[part], exact.grad) < 2.0**-8


@pytest.mark.parametrize("second", [False, True])
def test_peak_memory_of_boxes(second):
    """The gradients and nothing of a pair's beside them."""
    boxes1 = torch.rand(2**22, 4, device="cuda", requires_grad=True)
    boxes2 = torch.rand(2**22, 4, device="cuda", requires_grad=second)
    leaves = [boxes1, boxes2] if second else [boxes1]
    used = peak(lambda: torch.autograd.grad(L.generalized_box_iou_loss(boxes1, boxes2, "mean"), leaves))
    assert used <= len(leaves) * 64 + 1


def test_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(8, 10, device="cuda:1", requires_grad=True)
    target = torch.arange(8, device="cuda:1")
    assert torch.cuda.current_device() == 0
    value = L.cross_entropy(x, target)
    value.backward()
    exact = torch.nn.functional.cross_entropy(x.detach().double(), target)
    assert value.device == x.device
    assert error(value, exact) < 3e-6


def test_validate_raises_on_cuda():
    target = torch.tensor([1, 7, 2], device="cuda")
    with pytest.raises(IndexError, match="target must hold 0 to 4, or -100 where ignored, got 7 at row 1"):
        L.cross_entropy(torch.randn(3, 5, device="cuda"), target, validate=True)


def test_interpreted_cuda_tensors_warn_once():
    program = (
        "import warnings, torch; from lossforge.losses import cross_entropy\n"
        "x, t = torch.randn(3, 5, device='cuda'), torch.tensor([0, 1, 2], device='cuda')\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    a, b = cross_entropy(x, t), cross_entropy(x, t)\n"
        "torch.testing.assert_close(a, torch.nn.functional.cross_entropy(x, t))\n"
        "print(sum('INTERPRETER' in str(w.message) for w in seen))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"

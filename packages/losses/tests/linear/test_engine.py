"""How fused losses are computed: chunks, memory, products, precision, and nothing that the host waits for."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from linear_calls import FUSED, Watched, exactly, gradients, indices, launches_of, layer, normal, teacher_layer

from lossforge import kernels
from lossforge import losses as L
from lossforge.kernels.call import FROM_WEIGHT, Head
from lossforge.kernels.plans import PLANS, Plan
from lossforge.losses.engine.calls import CallPlan
from lossforge.losses.engine.linear import engine
from lossforge.losses.testing import error

EACH = pytest.mark.parametrize("loss", FUSED, ids=lambda loss: loss.name)
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
GIB = 2**30


@pytest.fixture(params=["kernels", "torch"])
def way(request, monkeypatch):
    """By the kernels, or as where none runs."""
    if request.param == "torch":
        monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    return request.param


@pytest.fixture
def watched(monkeypatch):
    """Watches a call as it runs without a mode, whose operators would hide what they do."""
    for module in ("calls", "gradients"):
        monkeypatch.setattr(f"lossforge.losses.engine.{module}.plain", lambda *tensors: True)
    return Watched()


@MODES
@EACH
def test_chunks_change_nothing(loss, mode, way, device):
    """One row a chunk, a number that divides the rows or does not, all of them, and more; twice the same bits."""
    leaves, targets = layer(8, device), loss.targets(8, device)
    exact = exactly(loss, leaves, *targets)
    for chunk in (1, 3, 4, 8, 50, None):
        first, second = (gradients(loss.ours, leaves, *targets, gradient=mode, chunk=chunk) for _ in range(2))
        for got, again, right in zip(first, second, exact, strict=True):
            assert error(got, right) < 5e-6, chunk
            assert torch.equal(got, again)


@pytest.fixture
def a_call(monkeypatch):
    """Makes a call of rows and classes in half precision, or in float32. free: bytes of a GPU, of all that it has; without it on a CPU."""

    def make(rows, classes, half=True, free=None, chunk=0, teacher=None, whole=0):
        monkeypatch.setattr(engine, "free_memory", lambda device: free)
        monkeypatch.setattr(engine, "whole_memory", lambda device: whole)
        size, dtype = (2, torch.bfloat16) if half else (4, torch.float32)
        x = SimpleNamespace(shape=(rows, 8), element_size=lambda: size, is_cuda=free is not None, is_meta=False, device="cuda", dtype=dtype)
        return SimpleNamespace(
            x=SimpleNamespace(input=x, weight=SimpleNamespace(shape=(classes, 8)), chunk=chunk, logits=FROM_WEIGHT),
            target=teacher and Head(x, x),
        )

    return make


@pytest.mark.parametrize(
    ("rows", "classes", "options", "spare", "saved", "expected"),
    [
        (8192, 128256, {"free": 100 * GIB}, 0, 0, 4096),  # 1 GiB of logits
        (8192, 128256, {"free": 2 * GIB}, 0, 0, 2048),  # a quarter of what is free
        (8192, 128256, {}, 0, 0, 1024),  # 256 MiB on a CPU
        (8192, 128256, {}, 128256 * 4096 * 2, 0, 4096),  # in the memory of the weight's gradient
        (8192, 128256, {}, 128256 * 4096 * 2, 128256 * 4096 * 4, 8192),  # all, in the memory of the sum that one chunk needs not
        (8192, 128256, {"teacher": True}, 128256 * 4096 * 2, 128256 * 4096 * 4, 4096),  # whose logits one chunk would double
        (8192, 128256, {}, 128256 * 4095 * 2, 128256 * 4095 * 4, 2752),
        (8192, 151936, {"free": 100 * GIB}, 151936 * 1024 * 2, 151936 * 1024 * 4, 2752),
        (4096, 151936, {"free": 100 * GIB}, 151936 * 1024 * 2, 151936 * 1024 * 4, 4096),  # in that of the sum and of the chunk beside it
        (8200, 128256, {"free": 100 * GIB}, 0, 0, 4160),  # as even as multiples of 64 let
        (1000, 2**22, {"half": False}, 0, 0, 64),  # no fewer
        (100, 10, {"half": False}, 0, 0, 100),
        (100, 10, {"half": False, "chunk": 7}, 0, 0, 7),
        (100, 10, {"half": False, "chunk": 200}, 0, 0, 100),
        (0, 10, {"half": False}, 0, 0, 1),
    ],
)
def test_rows_a_group(rows, classes, options, spare, saved, expected, a_call):
    assert engine.rows_a_group(a_call(rows, classes, **options), spare, saved, False) == expected


@pytest.mark.parametrize(
    ("whole", "free", "expected"),
    [(140, 100, 14720), (140, 8, 8192), (80, 60, 10240), (24, 20, 4096)],  # a 32nd of the GPU, a quarter of what is free, 1 GiB
)
@pytest.mark.parametrize("wide", [False, True])
def test_rows_a_group_of_exponentials(wide, whole, free, expected, a_call):
    """As many as of a gradient beside logits in float32."""
    call = a_call(2**17, 128256, whole=whole * GIB, free=free * GIB)
    assert engine.rows_a_group(call, 0, 0, wide, not wide) == pytest.approx(expected, rel=0.15)
    assert engine.rows_a_group(call, 0, 0, False) < 4200


@pytest.mark.parametrize(
    ("accumulate", "together", "expected"),
    [
        (1, 1, (8192, 8192, False)),  # all, in the memory of the sum of 4 bytes that one chunk needs not
        (0, 1, (1024, 1024, False)),  # a sum in half precision
        (0, 1000, (1000, 1000, False)),
        (0, 300, (900, 900, False)),
        (0, 2000, (0, 0, False)),
    ],
)
def test_rows_of_chunks(accumulate, together, expected, a_call):
    call = a_call(8192, 128256)
    call.x.accumulate = accumulate
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert engine.rows_of_chunks(call, weight, False, together) == expected
    assert engine.rows_of_chunks(call, None, False, together) == engine.rows_of_chunks(a_call(8192, 128256), None, False, together)


@pytest.mark.parametrize(
    ("rows", "classes", "features", "options", "together", "expected"),
    [
        (8192, 151936, 4096, {}, 1, (1024, 8192, False)),  # 1 GiB of logits; the gradient of all is no larger than a sum of the weight's
        (8192, 128256, 4096, {"teacher": True}, 1, (2048, 8192, False)),
        (8192, 151936, 1024, {}, 1, (1024, 8192, False)),  # a 32nd of the GPU has room for all
        (2**15, 151936, 1024, {}, 1, (1024, 11264, True)),  # and for a third
        (8192, 151936, 1024, {"whole": 24 * GIB}, 1, (1024, 3072, True)),  # in 1 GiB
        (4096, 151936, 1024, {"whole": 24 * GIB}, 1, (1024, 4096, False)),  # that and a sum of the weight's
        (8192, 151936, 1024, {"free": 2 * GIB}, 1, (512, 1536, True)),  # in a quarter of what is free
        (8192, 151936, 4096, {}, 1000, (1000, 8192, False)),
        (8192, 151936, 1024, {"whole": 24 * GIB}, 300, (900, 2700, True)),
        (8192, 151936, 4096, {}, 1025, (0, 0, False)),
        (4096, 32000, 2048, {}, 1, (4096, 4096, False)),
        (100, 10, 8, {"chunk": 7}, 1, (7, 7, True)),
        (0, 10, 8, {}, 1, (1, 1, False)),
    ],
)
def test_rows_of_float32(rows, classes, features, options, together, expected, a_call):
    """Chunks of logits in float32 beside the gradient of a group, whose products are one each."""
    call = a_call(rows, classes, **{"free": 100 * GIB, "whole": 140 * GIB, **options})
    call.x.accumulate = 1
    weight = torch.empty(classes, features, dtype=torch.bfloat16, device="meta")
    assert engine.rows_of_chunks(call, weight, True, together) == expected
    assert engine.rows_of_chunks(call, None, True, together) == (expected[0], expected[0], False)


@pytest.mark.parametrize(
    ("rows", "classes", "options", "expected"),
    [
        (8192, 128256, {"free": 100 * GIB}, 32064),  # 0.5 GiB of logits
        (8192, 128256, {"free": 2 * GIB}, 16064),
        (8192, 50257, {}, 7232),  # 128 MiB on a CPU
        (2**20, 2**21, {}, 64),  # no fewer
        (100, 1000, {"half": False}, 1000),
        (9, 37, {"half": False, "chunk": 3}, 16),  # the memory of 3 rows, in multiples of 8
        (9, 37, {"half": False, "chunk": 200}, 37),
        (0, 10, {"half": False}, 10),
    ],
)
def test_classes_a_chunk(rows, classes, options, expected, a_call):
    assert engine.classes_a_chunk(a_call(rows, classes, **options)) == expected


@MODES
@EACH
def test_a_frozen_head_has_no_gradient_in_memory(loss, mode, watched, device):
    """Nor a sum of it over chunks: no tensor is as large as the head, of which the one that is trained makes some."""
    most = {}
    for trained in (True, False):
        x, w, b = layer(16, device, hidden=64, classes=96)
        w.requires_grad_(trained)
        watched.most, watched.given = 0, {w.data_ptr()}
        with watched:
            gradients(loss.ours, [x, w, b], *loss.targets(16, device, 96), gradient=mode, chunk=8)
        most[trained] = watched.most
    assert most[True] >= w.nbytes > most[False]


@pytest.mark.parametrize("options", [{}, {"hard_weight": 0.4, "outputs": ("entropy",)}], ids=["soft", "hard and soft, entropy"])
def test_products_of_distillation(options, watched, device):
    """Two give the logits of student and teacher, two the gradients, whatever is computed from the logits."""
    (x, w, b), (labels, hidden) = layer(9, device), (indices(9, device), normal(9, 5, device=device))
    with watched:
        found = L.linear_kl_div(x, w, teacher_layer(hidden), b, labels=labels, gradient="forward", **options)
        (found.loss if options else found).backward()
    assert watched.products == 4


@MODES
@EACH
def test_no_tensor_holds_all_logits(loss, mode, way, watched, device):
    """In forward and in backward, nor the logits of a teacher that is a layer."""
    rows, classes = 256, 32
    leaves, targets = layer(rows, device, hidden=4, classes=classes), loss.targets(rows, device, classes)
    with watched:
        gradients(loss.ours, leaves, *targets, gradient=mode, chunk=32)
    assert watched.products == {"forward": 3, "backward": 4}[mode] * 8 + (loss.name == "kl") * {"forward": 8, "backward": 16}[mode]
    assert watched.most <= rows * classes  # a quarter of the bytes of all


def ranges(monkeypatch):
    """Which classes backward takes at a time."""
    seen, add = [], engine.GradientsByClasses.add

    def observed(self, start, end, logits):
        seen.append((start, end))
        add(self, start, end, logits)

    monkeypatch.setattr(engine.GradientsByClasses, "add", observed)
    return seen


@pytest.mark.parametrize("loss", [loss for loss in FUSED if loss.name in ("ce", "kl")], ids=lambda loss: loss.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_by_classes(loss, dtype, watched, device, monkeypatch):
    """Where there are more classes than rows: neither all logits nor a sum of the weight's gradient beside it."""
    rows, hidden, classes = 32, 16, 301
    leaves = layer(rows, device, dtype, hidden, classes)
    targets = [t.to(dtype) if t.is_floating_point() else t for t in loss.targets(rows, device, classes)]
    seen = ranges(monkeypatch)
    with watched:
        found = gradients(loss.ours, leaves, *targets, gradient="backward", chunk=8, logits="weight")
    assert seen == [(0, 80), (80, 160), (160, 240), (240, 301)]
    assert watched.most < rows * classes * dtype.itemsize == classes * 2 * hidden * dtype.itemsize
    for got, right in zip(found, exactly(loss, leaves, *targets), strict=True):
        assert error(got, right) < (5e-6 if dtype == torch.float32 else 2e-2)


def test_backward_by_rows(device, monkeypatch):
    """Where there are more rows than classes, the weight is frozen, one chunk holds all, or no kernel runs."""
    seen, loss = ranges(monkeypatch), FUSED[0]

    def taken(rows, chunk, frozen=False):
        leaves = [t.detach().requires_grad_(not frozen or i != 1) for i, t in enumerate(layer(rows, device))]
        targets = loss.targets(rows, device)
        found = gradients(loss.ours, leaves, *targets, gradient="backward", chunk=chunk)
        for got, right in zip(found, exactly(loss, leaves, *targets), strict=True):
            assert error(got, right) < 5e-6
        return len(seen)

    assert [taken(20, 3), taken(9, 3, frozen=True), taken(9, 50), taken(9, 3)] == [0, 0, 0, 2]
    monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    assert taken(9, 3) == 2


@pytest.mark.parametrize("function", [L.linear_cross_entropy, L.linear_selective_log_softmax, L.linear_entropy], ids=lambda f: f.__name__)
def test_no_tensor_holds_all_logits_of_results_a_row(function, watched, device):
    rows, classes = 256, 32
    (x, w, b), (target,) = layer(rows, device, hidden=4, classes=classes), FUSED[0].targets(rows, device, classes)
    with watched:
        if function is L.linear_entropy:
            value = function(x, w, b, chunk=32)
        else:
            value = function(x, w, target, b, chunk=32, **({"reduction": "none"} if function is L.linear_cross_entropy else {}))
        value.sum().backward()
    assert watched.most <= rows * classes  # a quarter of the bytes of all


@pytest.mark.parametrize("wanted", ["", "x", "w", "b", "xw", "xb", "wb", "xwb"])
@MODES
def test_what_is_not_needed_is_not_computed(wanted, mode, watched, device):
    """Frozen weights, inputs and biases: right gradients of the others, by no more products than they take."""
    loss = FUSED[0]
    leaves = [t.detach().requires_grad_(name in wanted) for t, name in zip(layer(9, device), "xwb", strict=True)]
    targets = loss.targets(9, device)
    with watched:
        value = loss.ours(*leaves, *targets, gradient=mode, chunk=3)
        if wanted:
            value.backward()
    chunks = 2 if mode == "backward" and "w" in wanted else 3  # of classes, where the weight's gradient would be summed
    assert watched.products == 3 + chunks * ((mode == "backward" and bool(wanted)) + ("x" in wanted) + ("w" in wanted))
    assert value.requires_grad == bool(wanted)
    if wanted:
        exact = iter(exactly(loss, leaves, *targets, upstream=1.0)[1:])
        assert all(error(t.grad, next(exact)) < 5e-6 for t in leaves if t.requires_grad)
    assert [t.grad is not None for t in leaves] == [name in wanted for name in "xwb"]


@MODES
@EACH
def test_the_host_waits_for_nothing(loss, mode, watched, device, monkeypatch):
    """No value is read on the host, but by checks of class indices and log-probabilities, which CUDA tensors are spared."""
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    monkeypatch.setattr("lossforge.losses.base.checks.to_read", lambda *args: False)
    leaves, targets = layer(9, device), loss.targets(9, device)
    with watched:
        gradients(loss.ours, leaves, *targets, gradient=mode, chunk=4)
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal"} & {*watched.names}


@MODES
@EACH
def test_float64(loss, mode, device):
    """Computed and summed in float64, in chunks too; so is a divergence of a float32 student from a float64 teacher."""
    leaves, targets = layer(9, device, torch.float64), [t.double() if t.is_floating_point() else t for t in loss.targets(9, device)]
    options = {"gradient": mode, "chunk": 4, "reduction": "mean"}
    found = gradients(loss.ours, leaves, *targets, **options)
    assert {t.dtype for t in found} == {torch.float64}
    for got, right in zip(found, exactly(loss, leaves, *targets), strict=True):
        assert error(got, right) < 1e-13
    if loss.name in ("kl", "topk"):
        value = loss.ours(*[t.float() for t in leaves], *targets, **options)
        assert value.dtype == torch.float64
        assert error(value, found[0]) < 1e-6


@MODES
def test_float64_weights(mode, device):
    """The means divide by sums of float64 weights, of classes and of a divergence's rows."""
    (x, w, b), (target,), (teacher,) = layer(9, device, torch.float64), FUSED[0].targets(9, device), FUSED[2].targets(9, device)
    of_classes, of_rows = torch.rand(11, device=device).double().exp(), torch.rand(9, device=device).double().exp()
    options = {"gradient": mode, "chunk": 4}
    value = L.linear_cross_entropy(x, w, target, b, loss_weight=of_classes, **options)
    assert error(value, F.cross_entropy(F.linear(x, w, b), target, of_classes)) < 1e-14
    value = FUSED[2].ours(x, w, b, teacher.double(), loss_weight=of_rows, reduction="mean", **options)
    each = FUSED[2].ours(x, w, b, teacher.double(), reduction="none")
    assert error(value, (each * of_rows).sum() / of_rows.sum()) < 1e-14


@MODES
@EACH
@pytest.mark.parametrize("classes", [11, 40])
def test_logits_of_half_precision_kept_in_float32(classes, loss, mode, way, device):
    """Values as of float32, and gradients that are rounded once; with the logits' own dtype values are a hundred times further off."""
    leaves = layer(8, device, torch.bfloat16, classes=classes)
    targets = [t.bfloat16() if t.is_floating_point() else t for t in loss.targets(8, device, classes)]
    exact = exactly(loss, leaves, *targets)
    for chunk in (3, None):
        found, rounded = (
            gradients(loss.ours, leaves, *targets, gradient=mode, chunk=chunk, logits=dtype) for dtype in ("float32", "weight")
        )
        # a teacher's input, which is the target, is of bfloat16, as is its weight
        assert error(found[0], exact[0]) < (2e-3 if loss.name == "kl" else 1e-5)
        for got, also, right in zip(found[1:], rounded[1:], exact[1:], strict=True):
            assert error(got, right) < 1.2e-2
            assert error(got, right) < 1.5 * error(also, right) + 4e-3


@EACH
@pytest.mark.parametrize(
    ("rows", "hidden", "expected", "places"),
    [
        (8, 6, (2, 8, False), (True, False)),  # all rows' gradient; the logits lie where the weight's gradient will
        (24, 6, (2, 4, True), (False, True)),  # the gradient of a group lies there
        (8, 2, (2, 4, True), (False, False)),  # where there is too little room for either
    ],
)
def test_groups_of_chunks(rows, hidden, expected, places, loss, way, device, monkeypatch):
    """Logits in float32 of two rows at a time, and products of what several such chunks give."""
    monkeypatch.setattr(engine, "ALIGNED", 1)
    monkeypatch.setattr(engine, "MEMORY", 150 if device == "cuda" else 4 * 150)  # 11 classes: 64 bytes a row, and 32 of the gradient
    monkeypatch.setattr(engine, "whole_memory", lambda device: 0)
    PLANS.clear()  # a plan made with more memory would be followed
    seen, memory = [], engine.Gradients.memory

    def observed(self):
        found = memory(self)
        place = self.weight.untyped_storage().data_ptr()
        seen.append(((self.rows, self.group, self.summed), tuple(t.untyped_storage().data_ptr() == place for t in found)))
        return found

    monkeypatch.setattr(engine.Gradients, "memory", observed)
    leaves = layer(rows, device, torch.bfloat16, hidden, 11)
    targets = [t.bfloat16() if t.is_floating_point() else t for t in loss.targets(rows, device, 11)]
    found = gradients(loss.ours, leaves, *targets, gradient="forward", logits="float32")
    PLANS.clear()
    assert seen == [(expected, places)]
    for got, right in zip(found, exactly(loss, leaves, *targets), strict=True):
        assert error(got, right) < 1.2e-2


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def steep(rows, hidden, classes, device, dtype):
    """Input, weight and bias whose logits have a standard deviation of 24, and class indices. Rounded logits are off by up to 0.25."""
    x, w, b = normal(rows, hidden, seed=1) * 24 / hidden**0.5, normal(classes, hidden, seed=2), normal(classes, seed=3)
    return [t.to(device, dtype).requires_grad_() for t in (x, w, b)], indices(rows, device, classes)


EXACT = {
    "plain": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, **mode),
    "bias": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, b, **mode),
    "smoothing": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, b, label_smoothing=0.1, **mode),
    "further results": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, outputs=("entropy", "log_p2"), **mode).loss,
    "probabilities": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, F.one_hot(t.clamp(0), len(w)).to(x.dtype), **mode),
    "a pair of classes": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, target_b=t.flip(0), lam=0.3, **mode),
    "each row": lambda x, w, b, t, **mode: L.linear_cross_entropy(x, w, t, reduction="none").sum(),
    "focal": lambda x, w, b, t, **mode: L.fuse_linear(L.sigmoid_focal_loss)(x, w, t.clamp(-2), reduction="mean", **mode),
    "kl": lambda x, w, b, t, **mode: L.linear_kl_div(x, w, normal(len(x), len(w), device=x.device).to(x.dtype), **mode),
    "js": lambda x, w, b, t, **mode: L.linear_js_div(x, w, normal(len(x), len(w), device=x.device).to(x.dtype), **mode),
    "cosine": lambda x, w, b, t, **mode: L.linear_cosine_distance(x, w, normal(len(x), len(w), device=x.device).to(x.dtype), **mode),
    "draft": lambda x, w, b, t, **mode: L.linear_draft_loss(x, w, normal(len(x), len(w), device=x.device).to(x.dtype), **mode),
    "total variation": lambda x, w, b, t, **mode: L.linear_total_variation(
        x, w, normal(len(x), len(w), device=x.device).to(x.dtype), **mode
    ),
}


@HALF
@MODES
@pytest.mark.parametrize("call", EXACT.values(), ids=EXACT)
def test_logits_are_not_rounded_by_default(call, mode, dtype, way, device):
    """As near to float64 as logits of float32 are, for all options. Rounded logits give errors from 1e-2 on."""
    (x, w, b), target = steep(40, 64, 200, device, dtype)
    loss = functools.partial(call, t=target, gradient=mode)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.autograd.grad(loss(*wide), wide[:2])
    found = torch.autograd.grad(loss(x, w, b), (x, w))
    for got, right in zip(found, exact, strict=True):
        assert error(got, right) < 6e-3


def test_a_written_gradient_is_multiplied_in_float32(way, device):
    """By a gradient scaler's factor that float16 does not hold."""
    leaves, target = [t.detach() / 8 for t in layer(16, device)], FUSED[0].targets(16, device)
    half = [t.half().requires_grad_() for t in leaves]
    exact = exactly(FUSED[0], half, *target, upstream=2.0**17)
    found = gradients(FUSED[0].ours, half, *target, gradient="forward", chunk=4, upstream=2.0**17)
    for got, right in zip(found, exact, strict=True):
        assert error(got, right) < 4e-3


def test_an_unknown_dtype_of_logits_is_refused(device):
    leaves, targets = layer(8, device), FUSED[0].targets(8, device)
    with pytest.raises(ValueError, match="logits must be"):
        FUSED[0].ours(*leaves, *targets, logits="bfloat16")


def of_bfloat16(rows, hidden, classes, device):
    """Input and weight whose logits differ in size as those of a model, and class indices."""
    x, w, _ = layer(rows, device, torch.bfloat16, hidden, classes)
    return [x.detach().requires_grad_(), (w.detach() * 0.3).requires_grad_()], torch.randint(0, classes, (rows,), device=device)


@pytest.mark.parametrize(
    ("accumulate", "chunks", "allowed"),
    [("float32", 1, 1.05), ("float32", 16, 1.05), ("float32", 64, 1.05), ("weight", 1, 1.05), ("weight", 4, 1.3)],
)
@MODES
def test_precision_of_sums_over_chunks(accumulate, chunks, allowed, mode, device, monkeypatch):
    """The error against float64 beside that of one unfused computation, whose products sum in float32."""
    if device == "cpu":  # the interpreter truncates where hardware and torch round
        monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    leaves, target = of_bfloat16(1024, 64, 512, device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    unfused = torch.autograd.grad(F.cross_entropy(F.linear(*leaves).float(), target), leaves)
    value = L.linear_cross_entropy(*leaves, target, chunk=1024 // chunks, accumulate=accumulate, gradient=mode)
    for got, plain, right in zip(torch.autograd.grad(value, leaves), unfused, exact, strict=True):
        assert error(got, right) <= allowed * error(plain, right)


def test_precision_of_a_sum_over_chunks_of_classes(device):
    """The input's gradient is summed in float32, and rounded once: 512 chunks of classes cost no digit beside one chunk."""
    leaves, target = of_bfloat16(32, 64, 4096, device)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    (exact,) = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide[:1])
    errors = []
    for chunk in (1, None):
        value = L.linear_cross_entropy(*leaves, target, chunk=chunk, gradient="backward", logits="weight")
        errors.append(error(torch.autograd.grad(value, leaves[:1])[0], exact))
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("logits", [None, "weight"])
@pytest.mark.parametrize(
    ("dtype", "accumulate", "chunk", "shared"),
    [
        (torch.bfloat16, None, 4, True),  # 4 × 11, on a GPU 4 × 16: no more than the gradient's 11 × 6
        (torch.bfloat16, "float32", 3, True),
        (torch.bfloat16, "float32", 7, False),
        (torch.bfloat16, "weight", 5, False),
        (torch.bfloat16, "float32", 20, False),  # one chunk sums nothing
        (torch.float32, "float32", 5, False),
    ],
)
@MODES
def test_a_chunk_lies_in_the_memory_of_the_weights_gradient(dtype, accumulate, chunk, shared, logits, mode, device, monkeypatch):
    """The gradient of its logits, and the logits themselves where they have the same dtype."""
    seen, memory = [], engine.Gradients.memory

    def observed(self):
        found = memory(self)
        if self.weight is not None:
            assert self.summed == (chunk < 20 and dtype == torch.bfloat16 and accumulate != "weight")
            seen.append([t.untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr() for t in found])
        return found

    monkeypatch.setattr(engine.Gradients, "memory", observed)
    loss, leaves = FUSED[0], layer(20, device, dtype)
    targets = loss.targets(20, device)
    found = gradients(loss.ours, leaves, *targets, gradient=mode, chunk=chunk, accumulate=accumulate, logits=logits)
    assert seen == [[shared and (logits == "weight" or dtype == torch.float32), shared]]
    for got, right in zip(found, exactly(loss, leaves, *targets), strict=True):
        assert error(got, right) < (5e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a CUDA GPU")
@pytest.mark.parametrize("accumulate", ["float32", "weight"])
@MODES
@EACH
def test_peak_memory(loss, mode, accumulate):
    """The gradients, the sum of the weight's, and the logits of a chunk: nothing like the logits of all rows."""
    torch.use_deterministic_algorithms(False)
    rows, hidden, classes, chunk = 8192, 256, 32_000, 512
    x, w, b = layer(rows, "cuda", torch.bfloat16, hidden, classes)
    targets = [t.bfloat16() if t.is_floating_point() else t for t in loss.targets(rows, "cuda", classes)]
    gradients(loss.ours, [x, w, b], *targets, gradient=mode, accumulate=accumulate, chunk=chunk)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(loss.ours, [x, w, b], *targets, gradient=mode, accumulate=accumulate, chunk=chunk)
    used = torch.cuda.max_memory_allocated() - before
    logits = chunk * classes * (6 + 4 * (loss.name == "kl"))
    given = 2 * (w.numel() + x.numel() + b.numel()) + (4 * w.numel() if accumulate == "float32" else 0)
    assert used <= 1.05 * (logits + given) + 2**20 * 16
    assert used < rows * classes * 2 * (2 if loss.name == "kl" else 1) / 3  # a third of all logits, of the teacher's too


@EACH
@MODES
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("given", [{}, {"reduction": "none"}, {"accumulate": "weight"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponentials", [False, True])
def test_an_equal_call_is_made_by_its_plan(loss, mode, chunk, given, dtype, exponentials, device, monkeypatch):
    """It has the bits of a call that is made anew: every product, copy and sum is a step of the plan."""
    if exponentials:
        launches_of("linear_finish_kernel", device, monkeypatch)
        monkeypatch.setattr(kernels.load("linear.launch"), "WORK", 0)
    mode = "backward" if given.get("reduction") == "none" else mode

    def call(seed):
        leaves = [t.detach().mul(1 + seed / 4).requires_grad_() for t in layer(10, device, dtype, hidden=8)]
        targets = [t - seed if t.is_floating_point() else t.roll(seed, 0) for t in loss.targets(10, device)]
        return gradients(loss.ours, leaves, *targets, gradient=mode, chunk=chunk, **given)

    PLANS.clear()
    expected = call(1)
    launches = [plan for plan in PLANS.values() if not isinstance(plan, CallPlan)]
    assert launches
    assert all(isinstance(plan, Plan) for plan in launches), "a launch that cannot be recorded"
    PLANS.clear()
    call(0)
    number = len(PLANS)
    assert all(a.equal(b) for a, b in zip(call(1), expected, strict=True))
    assert len(PLANS) == number

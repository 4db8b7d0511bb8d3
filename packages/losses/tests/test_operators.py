"""The losses as PyTorch operators: opcheck, compile, export, torch.func, forward mode, saved graphs, autocast, data parallel."""

import copy
import gc
import inspect
import io
import math
import weakref

import pytest
import torch
import torch._dynamo.testing
from loss_calls import Operators
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lossforge.losses
from lossforge.losses import BCEWithLogitsLoss, MSELoss, cross_entropy, plain_torch, sigmoid_focal_loss
from lossforge.losses.engine.linear.engine import FUSED
from lossforge.losses.registry import LOSSES
from lossforge.losses.templates import TEMPLATES
from lossforge.losses.testing import Sample, error, has_inplace, plain_sample, run, samples

EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
BY_ROWS = pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.template.by_rows], ids=lambda loss: loss.name)
COMPILED = {"pairs", "dense", "class index", "class index, middle dimension", "class index, scores", "diagonal, a shard", "mixup pair"}
COMPILED |= {"image", "probabilities", "class weights and smoothing", "labels"}
FIRST = {loss.template: loss for loss in reversed(LOSSES.values())}


def traced_samples(loss, device, all_cases):
    """Samples to trace: of every loss the plain one; with all cases of a template's first loss, and on a GPU of all, those of each kind."""
    every = all_cases and (torch.cuda.is_available() or loss is FIRST[loss.template])
    plain = plain_sample(loss, device).name
    for sample in samples(loss, device):
        if sample.name == plain or (every and sample.name in COMPILED):
            yield sample


def operator_call(call, calls=1) -> tuple[str, tuple]:
    """Name and arguments of the last of so many operator calls that `call` makes."""
    with Operators() as operators:
        call()
    assert len(operators.seen) == calls
    return operators.seen[-1]


@pytest.mark.each("template", ci=True)
@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.has_kernel], ids=lambda loss: loss.name)
def test_opcheck(loss, device, all_cases):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for sample in traced_samples(loss, device, all_cases):
        if sample.x.numel() > 300:
            continue
        x = sample.x.detach().requires_grad_()
        for mode in ("forward", "backward") if all_cases or loss is FIRST[loss.template] else ("forward",):
            calls = 2 if loss.name == "ohem_ce" else 1  # it chooses rows by their losses
            name, args = operator_call(lambda: loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode), calls)  # noqa: B023
            result = torch.library.opcheck(getattr(torch.ops.lossforge, name).default, args, test_utils=tests)
            assert set(result.values()) == {"SUCCESS"}, (sample.name, result)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_opcheck_of_numbers_in_a_vector(mode, device):
    """As a graph calls an operator whose hyper-parameters are 0-d tensors: nan in their places, and the same value and gradient."""
    x, target = torch.randn(4, 5, device=device, requires_grad=True), torch.rand(4, 5, device=device)
    name, args = operator_call(lambda: sigmoid_focal_loss(x, target, 0.5, 1.5, reduction="mean", gradient=mode))
    operator, numbers = getattr(torch.ops.lossforge, name).default, torch.tensor([1.5, 0.5], dtype=torch.float64)
    assert args[0] is None
    assert args.count([1.5, 0.5]) == 1
    given = (numbers, *[[math.nan] * 2 if v == [1.5, 0.5] else v for v in args[1:]])
    result = torch.library.opcheck(operator, given)
    assert set(result.values()) == {"SUCCESS"}, result
    found, expected = (operator(*each)[0] for each in (given, args))
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(value, x)[0] for value in (found, expected)))


@pytest.mark.parametrize("name", ["written", "task_aligned_assign", "hungarian_assign"])
def test_operators_of_plain_torch_run_on_any_device(name):
    """torch.compile calls them on devices without our kernels, too."""
    for device in ("CPU", "CUDA", "MPS", "XPU"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"lossforge::{name}", device)


def test_schemas_match_their_arguments():
    for template in (*TEMPLATES.values(), *FUSED.values()):
        fields = ["numbers", "loss", *template.fields()]
        arguments = [a.name for a in getattr(torch.ops.lossforge, template.name).default._schema.arguments]
        wanted = [f"want_{name}" for name in template.differentiable]
        assert arguments == [*fields, *wanted, "keep"]
        arguments = [a.name for a in getattr(torch.ops.lossforge, f"{template.name}_backward").default._schema.arguments]
        assert arguments[: len(fields)] == fields
        assert arguments[-len(wanted) :] == wanted


@pytest.mark.each("template")
@EACH
def test_compile_without_graph_breaks(loss, device, all_cases):
    """fullgraph, and no recompilation when the number of rows or a hyper-parameter changes."""
    torch._dynamo.reset()
    for sample in traced_samples(loss, device, all_cases):

        def call(x, target, upstream, /, **kwargs):
            return (loss.function(x, target, **kwargs, reduction="mean") * upstream).sum()

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for upstream in (2.0, 3.0):
            x = sample.x.detach().requires_grad_()
            compiled(x, sample.target, upstream, **sample.kwargs).backward()
            exact = run(loss.reference, sample, dtype=torch.float64, reduction="mean")
            assert error(x.grad, exact.gradient * upstream) < 3e-6, sample.name


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@EACH
def test_jit_trace_of_plain_torch(loss, device, all_cases):
    for sample in traced_samples(loss, device, all_cases):

        def call(x, target):
            value = loss.function(x, target, **sample.kwargs, reduction="mean")  # noqa: B023
            return value if isinstance(value, torch.Tensor) else value.loss

        with plain_torch():
            traced = torch.jit.trace(call, (sample.x, sample.target), check_trace=False)
            torch.jit.save(traced, io.BytesIO())
            other = sample.x * 0.5
            torch.testing.assert_close(traced(other, sample.target), call(other, sample.target), equal_nan=True)


@pytest.mark.each
@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lossforge.losses.poly_cross_entropy, {"epsilon": 1.0, "label_smoothing": 0.1}),
        (lossforge.losses.asymmetric_loss_single_label, {"eps": 0.1}),
        (lossforge.losses.smoothed_binary_cross_entropy, {"smoothing": 0.1}),
        (lossforge.losses.multilabel_soft_margin_loss, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_compile_with_numbers_that_follow_from_the_classes(function, given):
    """The numbers are guarded to the last bit, where sizes are symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, target: function(x, target, **given), fullgraph=True, dynamic=True, backend="aot_eager")
    for classes in (9, 7, 49):
        x = torch.randn(5, classes)
        target = (torch.rand(5, classes) > 0.5).float() if "multilabel" in function.__name__ else torch.arange(5)
        torch.testing.assert_close(compiled(x, target), function(x, target, **given), rtol=1e-6, atol=0)


@pytest.mark.each
@pytest.mark.parametrize(
    "module",
    [
        BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])),
        BCEWithLogitsLoss(weight=torch.tensor([[1.0, 2.0, 0.5, 3.0, 1.5]])),
        MSELoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])),
    ],
    ids=["pos_weight", "weight", "weight of mse"],
)
def test_compile_with_buffers_of_known_sizes(module, device):
    """A module's buffers have sizes that are constants of the graph, and broadcast to sizes that it traces."""
    torch._dynamo.reset()
    module = copy.deepcopy(module).to(device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 7):
        x, target = torch.randn(rows, 5, device=device), torch.rand(rows, 5, device=device)
        assert error(compiled(x, target), module(x, target)) < 1e-6


@pytest.mark.each("template", ci=True)
@BY_ROWS
def test_compile_does_not_recompile(loss, device):
    """Over the number of rows, and over λ or a normalizer as a tensor; as everywhere in torch, other numbers are constants of the graph."""
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    sample = plain_sample(loss, device)
    x, target = sample.x, sample.target
    if not target.is_floating_point():
        x, target = x[target >= 0], target[target >= 0]

    def call(x, t, number):
        paired = not t.is_floating_point() and "target_b" not in loss.without
        tensors = {"target_b": t.flip(0), "lam": number} if paired else {"normalizer": number}
        return loss.function(x, t, **tensors, reduction="mean")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiles)
    frames = []
    for rows in (3, 4, 5, 6):
        compiled(x[:rows].detach().requires_grad_(), target[:rows], torch.tensor(rows / 10, device=device)).backward()
        frames.append(compiles.frame_count)
    assert len(set(frames)) == 1


@pytest.mark.each("template", ci=True)
@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if has_inplace(loss)], ids=lambda loss: loss.name)
def test_compile_inplace(loss, device):
    """Nothing is overwritten in a compiled graph, whatever the shape: the same value and gradient, at the second shape and the third."""
    torch._dynamo.reset()
    sample = plain_sample(loss, device)
    compiled = torch.compile(
        lambda x, t, **kwargs: loss.function(x * 2, t, **kwargs, reduction="sum", inplace=True), fullgraph=True, backend="aot_eager"
    )
    for rows in (len(sample.x), len(sample.x) - 1, len(sample.x) - 2):
        kwargs = {k: v[:rows] if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
        part = Sample("rows", sample.x[:rows], sample.target[:rows], kwargs)
        x = (part.x / 2).requires_grad_()
        compiled(x, part.target, **kwargs).backward()
        exact = run(loss.reference, part, dtype=torch.float64, reduction="sum")
        assert error(x.grad, 2 * exact.gradient) < 3e-6, rows


@pytest.mark.each("template", ci=True)
@BY_ROWS
def test_compile_refuses_an_index_out_of_range(loss, device):
    """As the call that is not compiled: an IndexError that names value and row, on CUDA where it is asked for."""
    torch._dynamo.reset()
    sample = plain_sample(loss, device)
    compiled = torch.compile(
        lambda x, t: loss.function(x, t, **sample.kwargs, reduction="sum", validate=True), fullgraph=True, backend="aot_eager"
    )
    compiled(sample.x, sample.target)
    target = sample.target.clone()
    target[1] = 1000
    with pytest.raises(IndexError, match="got 1000 at row"):
        compiled(sample.x, target)


@pytest.mark.each("template")
@EACH
def test_fake_tensors(loss, device):
    """Shapes and dtypes without values, class indices too, as in torch's own tools."""
    sample = plain_sample(loss, device)
    real = run(loss.function, sample, reduction="mean")
    mode = FakeTensorMode()
    x, target = mode.from_tensor(sample.x.detach()).requires_grad_(), mode.from_tensor(sample.target)
    fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in sample.kwargs.items()}
    with mode:
        value = loss.function(x, target, **fake, reduction="mean")
        (gradient,) = torch.autograd.grad(value, x)
    assert isinstance(value, FakeTensor)
    assert (value.shape, value.dtype) == (real.value.shape, real.value.dtype)
    assert (gradient.shape, gradient.dtype) == (real.gradient.shape, real.gradient.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ce", "focal", "giou"])
def test_inductor(name, device):
    """Around the operator, whichever template: compiled code before and after it."""
    loss = LOSSES[name]
    torch._dynamo.reset()
    sample = plain_sample(loss, device)
    x = sample.x.detach().requires_grad_()
    compiled = torch.compile(lambda x: loss.function(x.sin().abs(), sample.target, reduction="sum") * 2, fullgraph=True)
    compiled(x).backward()
    wide = sample.x.detach().double().requires_grad_()
    (loss.reference(wide.sin().abs(), sample.target, reduction="sum") * 2).backward()
    assert error(x.grad, wide.grad) < 1e-5


@EACH
def test_export(loss, device):
    class Model(torch.nn.Module):
        def forward(self, x, target):
            return loss.function(x * 2, target, **sample.kwargs, reduction="mean")

    sample = plain_sample(loss, device)
    x = sample.x / 2
    program = torch.export.export(Model(), (x, sample.target))
    assert any("lossforge" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x, sample.target), Model()(x, sample.target))


@pytest.mark.each("template")
@EACH
def test_torch_func(loss, device):
    sample = plain_sample(loss, device)
    alone = {"per_image": True} if "per_image" in inspect.signature(loss.function).parameters else {}

    def call(x, target, /, **kwargs):
        return loss.function(x, target, **kwargs, **alone, reduction="sum")

    exact = run(loss.reference, sample, dtype=torch.float64, reduction="sum", **alone)
    assert error(torch.func.grad(call)(sample.x, sample.target, **sample.kwargs), exact.gradient) < 3e-6

    def gradient(x, target, *rest):
        return torch.func.grad(call)(x, target, **dict(zip(sample.kwargs, rest, strict=True)))

    rows = [t.unsqueeze(1) for t in (sample.x, sample.target, *sample.kwargs.values())]
    per_sample = torch.func.vmap(gradient)(*rows).squeeze(1)
    assert error(per_sample, exact.gradient) < 3e-6
    direction = torch.rand_like(sample.x)
    value, slope = torch.func.jvp(lambda x: call(x, sample.target, **sample.kwargs), (sample.x,), (direction,))
    assert error(value, exact.value) < 3e-6
    assert error(slope, (direction * exact.gradient).sum()) < 1e-5
    assert slope.dtype == value.dtype
    compiled = torch.compile(torch.func.grad(call), backend="aot_eager")(sample.x, sample.target, **sample.kwargs)
    assert error(compiled, exact.gradient) < 3e-6


@EACH
def test_forward_mode(loss, device):
    sample = plain_sample(loss, device)
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="sum")
    direction = torch.rand_like(sample.x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(sample.x, direction)
        value = loss.function(dual, sample.target, **sample.kwargs, reduction="sum")
        slope = torch.autograd.forward_ad.unpack_dual(value).tangent
    assert slope is not None
    assert slope.dtype == value.dtype
    assert error(slope, (direction * exact.gradient).sum()) < 1e-5


@pytest.mark.each("template")
@EACH
def test_autocast_takes_half_precision_logits(loss, device):
    sample = plain_sample(loss, device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        ours = run(loss.function, sample, reduction="mean")
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="mean")
    assert ours.value.dtype == torch.float32
    assert ours.gradient.dtype == torch.bfloat16
    assert error(ours.value, exact.value) < 3e-6


def test_backward_operators_refuse_to_be_differentiated(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2], device=device)
    args = [
        None,
        "cross_entropy",
        x,
        target,
        *[None] * 8,
        [],
        -100,
        0.0,
        1.0,
        None,
        1.0,
        *[0.0] * 7,
        1.0,
        "mean",
        False,
        False,
        [False] * 7,
    ]
    out = torch.ops.lossforge.rowwise(*args, False, True)
    g = torch.ops.lossforge.rowwise_backward(*args, out[8], out[9], out[3], torch.ones((), device=device), None, None, None, True)
    with pytest.raises(RuntimeError, match="rowwise_backward cannot be differentiated"):
        g.sum().backward()


def test_checkpointing_and_saved_tensor_hooks(device):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4, 0], device=device)
    (expected,) = torch.autograd.grad(cross_entropy(x * 2, target), x)
    value = torch.utils.checkpoint.checkpoint(lambda x: cross_entropy(x * 2, target), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected)
    with torch.autograd.graph.save_on_cpu():
        value = cross_entropy(x * 2, target, gradient="backward")
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected)


def test_graph_is_freed_without_the_garbage_collector(device):
    """A gradient written in forward makes no cycle: memory goes when the loss goes."""
    gc.disable()
    try:
        x = torch.randn(6, 5, device=device, requires_grad=True)
        logits = x * 2
        value = cross_entropy(logits, torch.zeros(6, dtype=torch.long, device=device))
        once = weakref.ref(value.grad_fn.precomputed[0])
        del value, logits
        assert once() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_refused_call_under_compile_spoils_no_later_one(device):
    torch._dynamo.reset()
    x, target = torch.randn(4, 5, device=device), torch.tensor([0, 1, 2, 3], device=device)
    compiled = torch.compile(lossforge.losses.cross_entropy, backend="eager")
    with pytest.raises(ValueError, match=r"target must have shape \(4,\), got \(3,\)"):
        compiled(x, target[:3])
    torch.testing.assert_close(compiled(x, target), lossforge.losses.cross_entropy(x, target))
    other = torch.compile(lossforge.losses.dice_loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(other(x, target), lossforge.losses.dice_loss(x, target))
    torch._dynamo.reset()


def test_losses_compile_whole_where_torch_has_a_default_device(device):
    """Dynamo follows no Tensor.unflatten there."""
    torch._dynamo.reset()
    a, others, labels = torch.randn(6, 2, 8, device=device), torch.randn(6, 3, 8, device=device), torch.arange(6, device=device) % 3
    calls = [
        lambda: lossforge.losses.info_nce_loss(a[:, 0], a[:, 1], others),
        lambda: lossforge.losses.supervised_contrastive_loss(a, labels, reduction="none"),
    ]
    torch.set_default_device(device)
    try:
        for call in calls:
            torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(), call())
    finally:
        torch.set_default_device(None)
        torch._dynamo.reset()

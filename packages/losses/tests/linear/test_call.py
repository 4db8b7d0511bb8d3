"""Fused losses under what torch does with a function: compile, export, transforms, graphs walked again, autocast, several processes."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import triton
import triton.language as tl
from linear_calls import CLASSES, FUSED, exactly, gradients, indices, layer, normal
from loss_calls import Operators
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from lossforge import losses as L
from lossforge.losses.testing import error

EACH = pytest.mark.parametrize("loss", FUSED, ids=lambda loss: loss.name)
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
BOUND = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@L.rowwise
@triton.jit
def generalized(nll):
    return 1.0 - tl.exp(-0.7 * nll)


@L.elementwise(hyper={"delta": 1.0})
@triton.jit
def charbonnier(x, y, delta):
    return tl.sqrt((x - y) * (x - y) + delta * delta) - delta


def agree(found, exact, bound=5e-6):
    assert len(found) == len(exact)
    for got, right in zip(found, exact, strict=True):
        assert error(got, right) < bound


@EACH
@MODES
def test_opcheck(loss, mode, device):
    """The operators of each template and of their backwards, with what a call gives them."""
    leaves, targets = layer(5, device), loss.targets(5, device)
    with Operators() as operators:
        gradients(loss.ours, leaves, *targets, gradient=mode, chunk=2)
    seen = [each for each in operators.seen if each[0].startswith("linear_")]
    assert [name for name, _ in seen] == [seen[0][0], f"{seen[0][0]}_backward"][: 1 + (mode == "backward")]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for i, (name, args) in enumerate(seen):
        result = torch.library.opcheck(getattr(torch.ops.lossforge, name).default, args, test_utils=tests[: 2 if i else 4])
        assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.each
@EACH
@pytest.mark.parametrize("mode", [None, "forward", "backward"])
@pytest.mark.parametrize("by", ["kernels", "torch", "float64"])
def test_compile(loss, mode, by, device, monkeypatch):
    """Without a graph break; for a third number of rows nothing is compiled. Where no kernel runs, the unfused computation is."""
    if by == "torch":
        monkeypatch.setattr("lossforge.losses.base.state.TRITON", False)
    dtype = torch.float64 if by == "float64" else torch.float32
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *given: loss.ours(*given, gradient=mode, chunk=4), fullgraph=True, backend=compiles)
    frames = []
    for rows in (9, 7, 6, 12):
        leaves = layer(rows, device, dtype)
        targets = [t.to(dtype) if t.is_floating_point() else t for t in loss.targets(rows, device)]
        agree(gradients(compiled, leaves, *targets), exactly(loss, leaves, *targets), BOUND[dtype])
        frames.append(compiles.frame_count)
    assert frames[-1] == frames[1] <= 2


def graphs_of(function, *given):
    """Return a compiled function, and where the arguments of the operators in its graphs are entered: of forward, then of backward."""
    calls = []

    def enter(graph, inputs):
        calls.append([node.args for node in graph.graph.nodes if "lossforge.linear_" in str(node.target)])
        return graph

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=enter, bw_compiler=enter)), calls


@EACH
@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.float32, "backward")]
)
def test_a_graph_takes_three_products(loss, dtype, mode, device):
    """The gradients are written in the operator of forward, and backward multiplies them, as often as it is called; float16 takes four."""
    compiled, calls = graphs_of(lambda *given: loss.ours(*given, gradient=mode, chunk=4))
    leaves = layer(9, device, dtype, hidden=8)
    targets = [t.to(dtype) if t.is_floating_point() else t for t in loss.targets(9, device)]
    value = compiled(*leaves, *targets)
    first, second = (torch.autograd.grad(value, leaves, torch.tensor(n, device=device), retain_graph=True) for n in (3.0, 1.0))
    in_forward = mode is None and dtype != torch.float16
    assert [len(each) for each in calls] == [1, 0 if in_forward else 1]
    expected = gradients(loss.ours, leaves, *targets, upstream=1.0, chunk=4, gradient="forward" if in_forward else "backward")
    assert all(map(torch.equal, (value, *second), expected))
    agree((value, *first), exactly(loss, leaves, *targets), {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype])


@pytest.mark.parametrize(("outputs", "four"), [((), False), (("lse",), True), (("correct",), False)])
def test_a_graph_whose_further_results_may_be_differentiated_takes_four_products(outputs, four, device):
    """It gives each a gradient, of 0 where none arrives: what forward wrote would be of no use, so it writes none."""
    compiled, calls = graphs_of(lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b, outputs=outputs))
    leaves, target = layer(9, device), indices(9, device)
    found = compiled(*leaves, target)
    found = torch.autograd.grad(found[0] if outputs else found, leaves)
    assert len(calls[1]) == four
    assert calls[0][0][-4:-1] == (not four,) * 3  # which gradients forward writes
    agree(found, gradients(lambda x, w, b: L.linear_cross_entropy(x, w, target, b), leaves, upstream=1.0)[1:])


@pytest.mark.parametrize("around", ["checkpoint", "body"])
def test_a_compiled_step_with_checkpoints(around, device):
    """Activation checkpointing of the loss itself, and of the layers before it."""
    leaves, target = layer(9, device), indices(9, device)
    body = torch.nn.Linear(6, 6, device=device)

    def loss(x, w, b):
        return L.linear_cross_entropy(x, w, target, b)

    def step(x, w, b):
        if around == "checkpoint":
            return checkpoint(loss, body(x), w, b, use_reentrant=False)
        return loss(checkpoint(body, x, use_reentrant=False), w, b)

    compiled, _ = graphs_of(step)
    agree(gradients(compiled, leaves), gradients(lambda x, w, b: loss(body(x), w, b), leaves))


def test_compile_without_ignored_rows(device):
    """A known number of rows that are not ignored needs no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, b, t: L.linear_cross_entropy(x, w, t, b, valid=7, chunk=4), fullgraph=True, backend="aot_eager")
    leaves, target = layer(9, device), indices(9, device)
    agree(gradients(compiled, leaves, target), gradients(lambda x, w, b: L.linear_cross_entropy(x, w, target, b), leaves))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_compile_results_of_rows(several, device):
    """Log-probabilities and entropies, whose temperature may be a tensor that the graph reads."""
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def ours(x, w, b, index, temperature):
        found = L.linear_selective_log_softmax(x, w, index, b, temperature=temperature, outputs=("entropy",), chunk=4)
        return found.logps.sum() + (found.entropy * L.linear_entropy(x, w, b, chunk=4)).sum()

    compiled, frames = torch.compile(ours, fullgraph=True, backend=compiles), []
    for rows, temperature in ((9, 1.5), (7, 1.5), (8, 2.5), (6, 3.5)):
        leaves, index = layer(rows, device), indices(rows, device)
        index = torch.stack([index, index.clamp(0, 3)], -1) if several else index
        found = gradients(compiled, leaves, index, torch.tensor(temperature))
        agree(found, gradients(lambda *given: ours(*given, index, temperature), leaves))  # noqa: B023
        frames.append(compiles.frame_count)
    assert frames[-1] == frames[1] <= 2


@EACH
def test_torch_func(loss, device):
    """grad, vmap over rows and jvp are those of the unfused computation."""
    leaves, targets = [t.detach() for t in layer(7, device)], loss.targets(7, device)

    def ours(*given):
        return loss.ours(*given, reduction="sum", chunk=4)

    def theirs(x, w, b, *given):  # with reduction "sum"
        with L.plain_torch():
            return ours(x, w, b, *given)

    every = 0, 1, 2
    exact = torch.func.grad(theirs, every)(*leaves, *targets)
    agree(torch.func.grad(ours, every)(*leaves, *targets), exact)
    rows = torch.func.vmap(torch.func.grad(ours), in_dims=(0, None, None, *(0 for _ in targets)))
    found = rows(leaves[0].unsqueeze(1), *leaves[1:], *[t.unsqueeze(1) for t in targets])
    assert error(found.squeeze(1), exact[0]) < 5e-6
    directions = [normal(*t.shape, device=device, seed=9) for t in leaves]
    value, slope = torch.func.jvp(lambda *given: ours(*given, *targets), tuple(leaves), tuple(directions))
    right = sum((d.double() * g.double()).sum() for d, g in zip(directions, exact, strict=True))
    assert error(slope, right) < 1e-5
    assert slope.dtype == value.dtype


@EACH
def test_double_backward_and_forward_mode(loss, device):
    leaves, targets = layer(7, device), loss.targets(7, device)
    found = []
    for function, dtype in ((loss.ours, torch.float32), (loss.unfused, torch.float64)):
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        others = [t.to(dtype) if t.is_floating_point() else t for t in targets]
        once = torch.autograd.grad(function(*given, *others) * 3, given, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), given)
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t.detach(), t.detach().cos()) for t in given]
            slope = torch.autograd.forward_ad.unpack_dual(function(*duals, *others)).tangent
        found.append([*once, *twice, slope])
    agree(*found, 1e-4)


@MODES
@EACH
def test_retained_graph(loss, mode, device):
    """Walked four times with other upstream gradients, the same bits as in a graph of its own; what was handed out does not change."""
    leaves, targets = layer(9, device), loss.targets(9, device)
    value = loss.ours(*leaves, *targets, gradient=mode, chunk=4)
    kept = [(u, torch.autograd.grad(value, leaves, torch.full_like(value, u), retain_graph=True)) for u in (3.0, 1.0, -2.0, 3.0)]
    for upstream, found in kept:
        agree(found, exactly(loss, leaves, *targets, upstream=upstream)[1:])
    _, *alone = gradients(loss.ours, leaves, *targets, gradient=mode, chunk=4)
    assert all(map(torch.equal, kept[0][1], alone))
    assert all(map(torch.equal, [-2 * g for g in kept[1][1]], kept[2][1]))
    assert all(map(torch.equal, kept[0][1], kept[3][1]))


@pytest.mark.parametrize("reentrant", [False, True])
@EACH
def test_checkpointing(loss, reentrant, device):
    leaves, targets = layer(7, device), loss.targets(7, device)
    expected = gradients(loss.ours, leaves, *targets, chunk=4)

    def step(*given):
        return checkpoint(lambda *each: loss.ours(*each, chunk=4), *given, use_reentrant=reentrant)

    value = step(*leaves, *targets)
    value.backward(torch.full_like(value, 3.0))
    for got, right in zip([value, *[t.grad for t in leaves]], expected, strict=True):
        assert torch.equal(got, right)
    with torch.autograd.graph.save_on_cpu():
        value = loss.ours(*leaves, *targets, chunk=4, gradient="backward")
    agree(torch.autograd.grad(value, leaves), [t / 3 for t in expected[1:]])


@MODES
@EACH
def test_autocast(loss, mode, device):
    """The products in autocast's dtype, as those of torch.nn.functional.linear, the gradients in that of the parameters."""
    leaves, targets = layer(64, device), loss.targets(64, device)
    exact = exactly(loss, leaves, *targets)
    for change in (lambda t: t, torch.Tensor.bfloat16):  # an input that the layers before it gave is of autocast's dtype
        given = [change(leaves[0].detach()).requires_grad_(), *leaves[1:]]
        with torch.autocast(device, torch.bfloat16):
            found = gradients(loss.ours, given, *targets, gradient=mode, chunk=16)
            plain = gradients(loss.unfused, given, *targets)
        assert found[0].dtype == torch.float32
        assert [t.dtype for t in found[1:]] == [t.dtype for t in given]
        for got, theirs, right in zip(found, plain, exact, strict=True):
            roundings = 2 if mode == "forward" else 1  # written for an upstream of 1, then multiplied
            assert error(got, right) < 2 * error(theirs, right) + roundings * 2.0**-9


def test_a_call_that_is_kept_follows_autocast(device):
    (x, w, b), target = layer(64, device), normal(64, CLASSES, device=device).softmax(1)  # indices would be checked at each call
    wide, cast = [], []
    for _ in range(2):
        wide.append(L.linear_cross_entropy(x, w, target, b))
        with torch.autocast(device, torch.bfloat16):
            cast.append(L.linear_cross_entropy(x, w, target, b))
    assert torch.equal(*wide)
    assert torch.equal(*cast)
    assert wide[0] != cast[0]


@EACH
def test_scaled_float16(loss, device):
    """Small gradients are not rounded to 0 before the scale of a gradient scaler arrives."""
    leaves = layer(64, device, torch.float16)
    leaves[0] = (leaves[0].detach() * 1e-4).requires_grad_()
    targets = [t.half() if t.is_floating_point() else t for t in loss.targets(64, device)]
    scale = 2.0**14
    found = gradients(loss.ours, leaves, *targets, chunk=16, upstream=scale)
    assert [t.dtype for t in found] == [torch.float32, *[torch.float16] * 3]
    agree(found, exactly(loss, leaves, *targets, upstream=scale), BOUND[torch.float16])


def layouts(device):
    """Inputs (9, 6) or (3, 3, 6) and weights, as views of memory in other orders and of other strides."""
    x, w = (normal(rows, 6, device=device, seed=i) for i, rows in enumerate((9, CLASSES)))
    return {
        "transposed input": (x.t().contiguous().t(), w),
        "sliced input": (normal(9, 12, device=device)[:, ::2], w),
        "hidden of the tokens but the last": (normal(3, 4, 6, device=device)[:, :-1], w),
        "sequences last": (x.view(3, 3, 6).transpose(0, 1), w),
        "expanded input": (x[:1].expand(9, 6), w),
        "transposed weight": (x, w.t().contiguous().t()),
        "sliced weight": (x, normal(CLASSES, 12, device=device)[:, ::2]),
        "columns of a wider weight": (x, normal(CLASSES, 10, device=device)[:, 2:8]),
        "every other class": (x, normal(2 * CLASSES, 6, device=device)[::2]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", layouts("cpu"))
@MODES
def test_layouts(name, dtype, mode, device):
    """Any strides of input and weight, in views that require grad and of tensors that do; inputs are not written."""
    x, w = layouts(device)[name]
    b, target = normal(CLASSES, device=device, seed=4).to(dtype).requires_grad_(), indices(9, device).view(x.shape[:-1])
    flat = target.flatten()
    for accumulate in ("float32", "weight") if dtype == torch.bfloat16 else (None,):
        leaves = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device) for t in (x, w)]
        leaves = [(t.to(dtype) if 0 in t.stride() else own.copy_(t)).requires_grad_() for own, t in zip(leaves, (x, w), strict=True)]
        before = [t.detach().clone() for t in leaves]
        value = L.linear_cross_entropy(*leaves, target, b, gradient=mode, chunk=4, accumulate=accumulate)
        found = [value, *torch.autograd.grad(value, (*leaves, b))]
        wide = [t.detach().double().requires_grad_() for t in (*leaves, b)]
        exact = F.cross_entropy(F.linear(*wide).flatten(0, -2), flat)
        agree(found, [exact, *torch.autograd.grad(exact, wide)], BOUND[dtype])
        assert all(map(torch.equal, leaves, before))


def test_views_of_what_requires_grad(device):
    """Hidden states sliced out of a model's, a weight tied to an embedding and no bias: the gradients reach what they are views of."""
    hidden, table, tokens = normal(2, 5, 6, device=device), normal(CLASSES + 3, 6, device=device, seed=1), indices(8, device).view(2, 4)
    found = []
    for fused, dtype in ((True, torch.float32), (False, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, table)]
        x, w = (leaves[0] + F.embedding(tokens.clamp(min=0)[:, :1], leaves[1]))[:, :-1], leaves[1][:CLASSES]
        value = L.linear_cross_entropy(x, w, tokens, chunk=3) if fused else F.cross_entropy(F.linear(x, w).mT, tokens)
        found.append([value, *torch.autograd.grad(value, leaves)])
    agree(*found)


@MODES
def test_further_outputs(mode, device):
    """Every return_… and its gradient, alone and together."""
    leaves, target = layer(9, device), indices(9, device)
    given = {
        "z_loss": 0.1,
        "label_smoothing": 0.1,
        "loss_weight": normal(CLASSES, device=device, seed=3).exp(),
        "softcap": 5.0,
        "scale": 0.7,
    }
    plain = {"weight" if k == "loss_weight" else k: v.double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    wide = [t.detach().double().requires_grad_() for t in leaves]
    outputs = {"outputs": ("z_loss", "lse", "entropy", "correct")}
    for reduction in ("mean", "sum", "none"):
        when = "backward" if reduction == "none" else mode
        found = L.linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction, gradient=when, chunk=4, **given, **outputs)
        exact = L.cross_entropy(F.linear(*wide), target, reduction=reduction, **plain, **outputs)
        assert torch.equal(found.correct, exact.correct)
        for names in (["loss"], ["z_loss"], ["lse"], ["entropy"], ["loss", "z_loss", "lse", "entropy"]):
            results = []
            for out, of in ((found, leaves), (exact, wide)):
                total = sum((getattr(out, name).square() * (i + 1)).sum() for i, name in enumerate(names))
                results.append([total, *torch.autograd.grad(total, of, retain_graph=True)])
            agree(*results)


@MODES
@pytest.mark.parametrize("normalizer", [3, torch.tensor(2.5)], ids=str)
@EACH
def test_normalizers(loss, normalizer, mode, device):
    leaves, targets = layer(9, device), loss.targets(9, device)
    normalizer = normalizer.to(device) if isinstance(normalizer, torch.Tensor) else normalizer
    summed = gradients(loss.ours, leaves, *targets, reduction="sum", chunk=4)
    found = gradients(loss.ours, leaves, *targets, reduction="mean", normalizer=normalizer, gradient=mode, chunk=4)
    agree(found, [t / normalizer for t in summed])


@pytest.mark.parametrize("skip", [{}, {"skip_ignored": True}, {"valid": 3}], ids=["all", "skipped", "valid"])
@MODES
@EACH
def test_nothing_counts(loss, mode, skip, device):
    """All rows ignored, and no rows: nan or 0, and gradients of 0."""
    leaves = layer(9, device)
    if loss.name in ("kl", "topk"):
        ignored = {"labels": torch.full((9,), -100, device=device), "reduction": "mean"}
        targets = loss.targets(9, device)
    else:
        ignored, targets = {}, (torch.full((9,), -2 if loss.name == "focal" else -100, device=device),)
    for empty, expected in (("nan", torch.nan), ("zero", 0.0)):
        value, *found = gradients(loss.ours, leaves, *targets, gradient=mode, chunk=4, empty=empty, **ignored, **skip)
        assert error(value, torch.tensor(expected, device=device)) == 0
        assert all((t == 0).all() for t in found)
    if not skip:
        value, *found = gradients(loss.ours, layer(0, device), *loss.targets(0, device), gradient=mode)
        assert value.isnan()
        assert all((t == 0).all() for t in found)


@pytest.mark.parametrize(("rows", "hidden", "classes"), [(5, 6, 1), (5, 1, 7), (1, 6, 7), (1, 1, 1), (70, 3, 13)])
@MODES
@EACH
def test_sizes(loss, rows, hidden, classes, mode, device):
    """One class, one hidden number, one row, and class counts that are no multiple of 8; without a bias."""
    x, w, _ = layer(rows, device, hidden=hidden, classes=classes)
    targets = loss.targets(rows, device, classes)
    if not targets[0].is_floating_point():
        targets = (targets[0].clamp(min=0),)
    found = gradients(loss.ours, [x, w, None], *targets, gradient=mode, chunk=64)
    agree(found, exactly(loss, [x, w, None], *targets), 1e-5)


@MODES
@pytest.mark.parametrize("index", [CLASSES, -3, 2**33])
def test_index_out_of_range_is_nan_in_its_row_alone(index, mode, device, monkeypatch):
    """What a CUDA call gives without validate; on CPU the check is taken away to see the kernels."""
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    (x, w, b), target = layer(9, device), indices(9, device).clamp(min=0)
    bad = torch.arange(9, device=device) == 4
    target[bad] = index
    for call in (
        lambda: L.linear_cross_entropy(x, w, target, b, chunk=4, reduction="none"),
        lambda: L.linear_selective_log_softmax(x, w, target, b, chunk=4),
        lambda: L.linear_selective_log_softmax(x, w, torch.stack([target, target.clamp(0, 3)], -1), b, chunk=4)[:, 0],
    ):
        assert torch.equal(call().isnan(), bad)
    for function in (L.linear_cross_entropy, L.fuse_linear(L.sigmoid_focal_loss)):
        value = function(x, w, target, bias=b, chunk=4, reduction="sum", gradient=mode)
        (g,) = torch.autograd.grad(value, x)
        assert value.isnan()
        assert torch.equal(g.isnan().any(1), bad)
    with pytest.raises(IndexError, match="target must hold") if device == "cpu" else pytest.raises(IndexError):
        monkeypatch.undo()
        L.linear_cross_entropy(x, w, target, b, validate=True)


@pytest.mark.parametrize("mode", [None, "forward", "backward"])
def test_what_else_requires_grad(mode, device):
    """Class weights, soft targets and teachers get the gradient of the unfused computation."""
    leaves = layer(9, device)
    hidden, weight = normal(9, 5, device=device, seed=3), normal(CLASSES, 5, device=device, seed=4)
    q, c = normal(9, CLASSES, device=device, seed=6).softmax(1), normal(CLASSES, device=device, seed=5).exp()
    t = indices(9, device)
    options = {"gradient": mode, "chunk": 4}
    for others, ours, theirs in (
        ([c], lambda x, w, b, c: L.linear_cross_entropy(x, w, t, b, loss_weight=c, **options), lambda z, c: L.cross_entropy(z, t, c)),
        ([q], lambda x, w, b, q: L.linear_cross_entropy(x, w, q, b, **options), L.cross_entropy),
        ([q], lambda x, w, b, q: L.linear_kl_div(x, w, q, b, **options), L.kl_div_with_logits),
        (
            [hidden, weight],
            lambda x, w, b, h, u: L.linear_kl_div(x, w, L.LinearTeacher(h, u), b, **options),
            lambda z, h, u: L.kl_div_with_logits(z, F.linear(h, u)),
        ),
    ):
        given = [*leaves, *[o.requires_grad_() for o in others]]
        wide = [o.detach().double().requires_grad_() for o in given]
        exact = theirs(F.linear(*wide[:3]), *wide[3:])
        value = ours(*given)
        agree([value, *torch.autograd.grad(value, given)], [exact, *torch.autograd.grad(exact, wide)])


def test_teachers_dtypes_and_entropies(device):
    """A half-precision teacher beside a float32 student, and log-probabilities of a policy in half precision with float32 results."""
    leaves, hidden = layer(9, device), normal(9, 5, device=device, seed=3).bfloat16()
    teacher = L.LinearTeacher(hidden, normal(CLASSES, 5, device=device, seed=4).bfloat16())
    value = L.linear_kl_div(*leaves[:2], teacher, leaves[2], chunk=4)
    assert error(value, L.kl_div_with_logits(F.linear(*leaves), F.linear(*teacher[:2]))) < 1e-5
    half, target = [t.detach().bfloat16().requires_grad_() for t in leaves], indices(9, device)
    found = L.linear_selective_log_softmax(*half[:2], target, half[2], outputs=("entropy",), chunk=4)
    exact = L.selective_log_softmax(F.linear(*half), target, outputs=("entropy",))
    agree([*found[:2], L.linear_entropy(*half, chunk=4)], [*exact[:2], exact.entropy], 2e-2)
    assert {t.dtype for t in found[:2]} == {torch.float32}


@MODES
def test_a_users_own_loss(mode, device):
    """Of a row's negative log-likelihood, of elements with a number of its own, and as a module."""
    leaves, target, dense = layer(9, device), indices(9, device), normal(9, CLASSES, device=device, seed=3)
    charb = charbonnier.module(delta=0.5)
    for ours, theirs in (
        (lambda *given, **how: L.fuse_linear(generalized)(*given[:2], target, bias=given[2], **how), lambda z: generalized(z, target)),
        (lambda *given, **how: L.fuse_linear(charb)(*given[:2], dense, bias=given[2], **how), lambda z: charb(z, dense)),
    ):
        found = gradients(ours, leaves, gradient=mode, chunk=4)
        agree(found, gradients(lambda *given: theirs(F.linear(*given)), leaves))  # noqa: B023


def test_a_model_with_its_fused_loss(device):
    """FusedLinear in a model that is compiled, checkpointed and saved as any other."""
    torch._dynamo.reset()
    body, head = torch.nn.Linear(6, 8, device=device), torch.nn.Linear(8, CLASSES, device=device)
    fused, (x, *_), target = L.FusedLinear(L.cross_entropy, head), layer(9, device), indices(9, device)
    expected = torch.autograd.grad(F.cross_entropy(head(body(x)), target), (*body.parameters(), *head.parameters()))
    compiled = torch.compile(lambda x: fused(body(x), target), fullgraph=True, backend="aot_eager")
    agree(torch.autograd.grad(compiled(x), (*body.parameters(), *head.parameters())), expected)

"""What is the divergences' own: values by hand, limits, excluded classes, rows left out, teachers' gradients, a teacher's top-k."""

import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import launch_counts
from lossforge.kernels.classes.calls import DivergenceCall
from lossforge.losses import (
    JSDivWithLogitsLoss,
    KLDivWithLogitsLoss,
    cosine_distance_with_logits,
    js_div_with_logits,
    kl_div_with_logits,
    plain_torch,
    topk_kl_div_with_logits,
    total_variation_with_logits,
)
from lossforge.losses.base.record import CheckedCall, first
from lossforge.losses.engine.calls import compute
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
FUNCTIONS = [kl_div_with_logits, js_div_with_logits, total_variation_with_logits]
EACH = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
CLASSES = pytest.mark.parametrize("classes", [6, 9_001, 16_384])  # one tile; tiles that begin before the row; aligned ones
TOPK_CLASSES = pytest.mark.parametrize("classes", [7, 9_001, 16_384])


def test_values_by_hand(device):
    """p = (3/4, 1/4), q = (1/2, 1/2)."""
    x, t = torch.tensor([[3.0, 1.0]], device=device).log(), torch.zeros(1, 2, device=device)
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    js = 0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375))
    js += 0.5 * (0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375))
    for got, expected in (
        (kl_div_with_logits(x, t), forward),
        (kl_div_with_logits(x, t, reverse=True), reverse),
        (kl_div_with_logits(2 * x, t, 2.0), 4 * forward),
        (kl_div_with_logits(2 * x, t, 2.0, temperature_squared=False), forward),
        (js_div_with_logits(x, t), js),
        (js_div_with_logits(x, t, beta=0.0), forward),
        (js_div_with_logits(x, t, beta=1.0), reverse),
        (total_variation_with_logits(x, t), 0.25),
    ):
        torch.testing.assert_close(got.item(), expected, rtol=3e-6, atol=0)
    _, g = gradient_of(kl_div_with_logits, x, t)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.25, -0.25]]))
    _, g = gradient_of(total_variation_with_logits, x, t)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.1875, -0.1875]]))  # ½ p₁p₂ · 2


def test_reductions_of_images_as_torch(device):
    """batchmean divides by the samples, as F.kl_div's; mean by the rows."""
    x, t = torch.randn(2, 5, 3, 4, device=device), torch.randn(2, 5, 3, 4, device=device)
    exact = F.kl_div(x.log_softmax(1), t.log_softmax(1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(kl_div_with_logits(x, t), exact)
    torch.testing.assert_close(kl_div_with_logits(x, t, reduction="mean"), exact / 12)
    each = kl_div_with_logits(x, t, reduction="none")
    torch.testing.assert_close(each, F.kl_div(x.log_softmax(1), t.log_softmax(1), reduction="none", log_target=True).sum(1))
    kept = torch.rand(2, 3, 4, device=device) > 0.5
    torch.testing.assert_close(kl_div_with_logits(x, t, weight=kept), each[kept].mean() * 12)


def test_small_jsd_tends_to_forward_and_reverse_kl(device):
    """JSD / (β (1 - β)) at β near 0 and 1, in float64."""
    x, t = torch.randn(3, 7, device=device, dtype=torch.float64), torch.randn(3, 7, device=device, dtype=torch.float64)
    for beta, reverse in ((1e-6, False), (1 - 1e-6, True)):
        scaled = js_div_with_logits(x, t, beta=beta) / (beta * (1 - beta))
        torch.testing.assert_close(scaled, kl_div_with_logits(x, t, reverse=reverse), rtol=1e-4, atol=0)


@MODES
@EACH
@CLASSES
def test_equal_logits_give_zero(classes, function, mode, device):
    x = torch.randn(2, classes, device=device) * 3
    value, g = gradient_of(function, x, x, gradient=mode)
    assert abs(value.item()) < 1e-6
    assert g.abs().max() < 1e-6
    shifted, _ = gradient_of(function, x, x + 1000, gradient=mode)  # the same distribution, but for the rounding of x + 1000
    assert abs(shifted.item()) < 1e-3


@MODES
@CLASSES
def test_classes_that_both_exclude(classes, mode, device):
    """-inf on both sides: value and gradient of the classes that are left, and 0 there; a whole tile of them, too."""
    x, t = torch.randn(2, classes, device=device), torch.randn(2, classes, device=device)
    out = torch.rand(classes, device=device) < 0.3
    out[: classes // 2] = True
    out[-1] = False
    for function, options in ((f, o) for f in FUNCTIONS for o in ([{}, {"reverse": True}] if f is kl_div_with_logits else [{}])):
        exact, g_exact = gradient_of(function, x[:, ~out].double(), t[:, ~out].double(), **options)
        value, g = gradient_of(function, x.masked_fill(out, -INF), t.masked_fill(out, -INF), gradient=mode, **options)
        assert error(value, exact) < 3e-6
        assert error(g[:, ~out], g_exact) < 5e-6
        assert torch.equal(g[:, out], torch.zeros_like(g[:, out]))
        with plain_torch():
            value, g = gradient_of(function, x.masked_fill(out, -INF), t.masked_fill(out, -INF), **options)
        assert error(value, exact) < 3e-6
        assert error(g[:, ~out], g_exact) < 5e-6


@MODES
@CLASSES
def test_a_class_that_one_side_excludes(classes, mode, device):
    """Only the student: KL(teacher ‖ student) is inf, its gradient finite; all else finite. Only the teacher: the reverse is inf."""
    x, t = torch.randn(2, classes, device=device), torch.randn(2, classes, device=device)
    less = x.clone()
    less[0, 1] = -INF
    value, g = gradient_of(kl_div_with_logits, less, t, reduction="none")
    assert value[0] == INF
    assert value[1].isfinite()
    _, g = gradient_of(kl_div_with_logits, less, t, reduction="sum", gradient=mode)
    assert error(g, less.double().softmax(1) - t.double().softmax(1)) < 3e-6
    for function, options in ((kl_div_with_logits, {"reverse": True}), (js_div_with_logits, {}), (total_variation_with_logits, {})):
        for a, b in ((less, t), (t, less)):
            if function is kl_div_with_logits and b is less:
                assert gradient_of(function, a, b, reduction="none", **options)[0][0] == INF
                continue
            value, g = gradient_of(function, a, b, reduction="sum", gradient=mode, **options)
            with plain_torch():
                exact, g_exact = gradient_of(function, a.double(), b.double(), reduction="sum", **options)
            assert g_exact.isfinite().all()
            assert error(value, exact) < 3e-6
            assert error(g, g_exact) < 5e-6


@MODES
@EACH
@CLASSES
def test_rows_of_infinities_are_nan_alone(classes, function, mode, device):
    x, t = torch.randn(5, classes, device=device), torch.randn(5, classes, device=device)
    x[0] = -INF
    t[1] = -INF
    x[2, 3] = INF
    t[3, 0] = NAN
    value, _ = gradient_of(function, x, t, reduction="none")
    assert value[:4].isnan().all()
    exact, g_exact = gradient_of(function, x[4:].double(), t[4:].double(), reduction="sum")
    assert error(value[4:].sum(), exact) < 3e-6
    _, g = gradient_of(function, x, t, reduction="sum", gradient=mode)
    assert g[:4].isnan().any(1).all()
    assert error(g[4:], g_exact) < 5e-6


@MODES
@EACH
@CLASSES
def test_rows_left_out_are_not_read(classes, function, mode, device):
    """By label, by weight, by mask: nan in them changes nothing, their gradient is 0, and the mean is that of the others."""
    x, t = torch.randn(4, classes, device=device), torch.randn(4, classes, device=device)
    kept = torch.tensor([True, False, True, True], device=device)
    exact, g_exact = gradient_of(function, x[kept].double(), t[kept].double())
    x[1], t[1] = NAN, INF
    labels = torch.where(kept, 5, -100)
    for options in ({"weight": kept}, {"weight": kept * 2.0}, {"labels": labels}, {"labels": labels + 107, "ignore_index": 7}):
        for call in (function, lambda *given, **named: compute(function.definition(*given, **named))):
            value, g = gradient_of(call, x, t, gradient=mode, **options)
            assert error(value, exact) < 3e-6
            assert error(g[kept], g_exact) < 5e-6
            assert torch.equal(g[1], torch.zeros_like(g[1]))


@MODES
@EACH
def test_all_rows_left_out(function, mode, device):
    x, t = torch.randn(3, 5, device=device), torch.randn(3, 5, device=device)
    for options in ({"weight": torch.zeros(3, device=device)}, {"labels": torch.full((3,), -100, device=device)}):
        for empty, expected in (("nan", NAN), ("zero", 0.0)):
            value, g = gradient_of(function, x, t, empty=empty, gradient=mode, **options)
            assert str(value.item()) == str(expected)
            assert torch.equal(g, torch.zeros_like(g))
        value, g = gradient_of(function, x, t, reduction="sum", gradient=mode, **options)
        assert value == 0
        assert torch.equal(g, torch.zeros_like(g))


@MODES
@CLASSES
def test_large_logits(classes, mode, device):
    """Far from zero, and so far apart that most probabilities vanish: the largest logit comes late."""
    x, t = torch.randn(3, classes, device=device), torch.randn(3, classes, device=device)
    x[0] += 1e4
    t[1] -= 1e4
    x[2, -2] = 6e4
    t[2, 1] = 6e4
    x, t = x.half().float(), t.half().float()
    for function, options in ((f, o) for f in FUNCTIONS for o in ([{}, {"reverse": True}] if f is kl_div_with_logits else [{}])):
        value, g = gradient_of(function, x, t, reduction="sum", gradient=mode, **options)
        with plain_torch():
            exact, g_exact = gradient_of(function, x.double(), t.double(), reduction="sum", **options)
        assert error(value, exact) < 1e-5
        assert error(g[:2], g_exact[:2]) < 1e-5
        rounding = 6e4 * 2.0**-22 if options else 1e-5  # the reverse one's gradient is a difference of logarithms and their mean
        assert (g[2] - g_exact[2]).abs().max() < rounding


CAPPED = {"scale": 0.7, "softcap": 2.0, "target_scale": 1.4, "target_softcap": 3.0}


@EACH
@CLASSES
@MODES
@pytest.mark.parametrize("options", [CAPPED, {"scale": 1.5}, {"target_softcap": 2.0}], ids=["both", "scale", "the teacher's"])
def test_scaled_and_capped_logits(options, classes, function, mode, device):
    """As computed before the loss, in float64; of a row that is left out, too, and a class that the student excludes before its cap."""
    x, t = 3 * torch.randn(3, classes, device=device), 3 * torch.randn(3, classes, device=device)
    labels = torch.tensor([0, -100, 1], device=device)
    x[1] = NAN
    if "softcap" in options:
        x[0, 2] = -INF
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    found = function(leaf, t, labels=labels, temperature=1.3, gradient=mode, **options)

    def capped(z, scale=1.0, softcap=None):
        z = torch.where((labels != -100).unsqueeze(1), scale * z.double(), 0.0)
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    teacher = capped(t, options.get("target_scale", 1.0), options.get("target_softcap"))
    student = capped(wide, options.get("scale", 1.0), options.get("softcap"))
    expected = function(student, teacher, labels=labels, temperature=1.3)
    assert error(found, expected) < 1e-5
    gradients = torch.autograd.grad(3 * found, leaf)[0], torch.autograd.grad(3 * expected, wide)[0]
    assert error(*gradients) < 1e-5
    assert not gradients[0][1].any()


def test_teacher_gradients_come_from_the_reference(device):
    """The kernels differentiate the student alone: a teacher that requires grad launches nothing, and both gradients are right."""
    for function in FUNCTIONS:
        x, t = (torch.randn(4, 6, device=device, requires_grad=True) for _ in range(2))
        before = launch_counts()
        got = torch.autograd.grad(function(x, t, temperature=2.0) * 3, (x, t))
        assert launch_counts() == before
        wide = [v.detach().double().requires_grad_() for v in (x, t)]
        p, q = ((v / 2).softmax(1) for v in wide)
        m = (p + q) / 2
        exact = {
            kl_div_with_logits: lambda: 4 * (q * (q / p).log()).sum(),  # noqa: B023
            js_div_with_logits: lambda: ((q * (q / m).log()).sum() + (p * (p / m).log()).sum()) / 2,  # noqa: B023
            total_variation_with_logits: lambda: (p - q).abs().sum() / 2,  # noqa: B023
        }[function]()
        for ours, theirs in zip(got, torch.autograd.grad(exact * 3 / 4, wide), strict=True):
            assert error(ours, theirs) < 3e-6


def test_dtypes_of_the_teacher(device):
    x = torch.randn(3, 5, device=device)
    t = torch.randn(3, 5, device=device, dtype=torch.float64)
    assert kl_div_with_logits(x, t).dtype == torch.float64
    assert kl_div_with_logits(x.bfloat16(), t.half()).dtype == torch.float32


def test_compile_does_not_recompile(device):
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, t, w: kl_div_with_logits(x, t, weight=w), fullgraph=True, dynamic=True, backend=compiles)
    frames = []
    for rows in (3, 4, 5):
        x, t, w = (
            torch.randn(rows, 6, device=device, requires_grad=True),
            torch.randn(rows, 6, device=device),
            torch.rand(rows, device=device),
        )
        compiled(x, t, w).backward()
        assert error(x.grad, gradient_of(kl_div_with_logits, x.double(), t.double(), weight=w)[1]) < 3e-6
        frames.append(compiles.frame_count)
    assert frames[-1] == frames[0]  # the first call's graph is traced once more, with the keywords' defaults as constants


def test_backward_operator_refuses_to_be_differentiated(device):
    x, t = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(3, 4, device=device)
    args = [
        None,
        "kl",
        x,
        t,
        None,
        None,
        None,
        None,
        None,
        [],
        False,
        1.0,
        1.0,
        None,
        1.0,
        None,
        1.0,
        None,
        -100,
        1.0,
        "mean",
        False,
        False,
        [False, False],
    ]
    _, _, _, divisor, stats, _ = torch.ops.lossforge.divergence(*args, False, True)
    g = torch.ops.lossforge.divergence_backward(*args, divisor, stats, torch.ones((), device=device), True)
    with pytest.raises(RuntimeError, match="divergence_backward cannot be differentiated"):
        g.sum().backward()


def test_more_dimensions_than_kernels_address(device):
    """Strides that join into no two dimensions beside the classes are copied."""
    whole, t = torch.randn(3, 5, 4, 4, 6, device=device), torch.randn(3, 5, 2, 3, 3, device=device)
    for function in FUNCTIONS:
        for mode in ("forward", "backward"):
            results = []
            for dtype in (torch.float32, torch.float64):
                leaf = whole.to(dtype).requires_grad_()
                value = function(leaf[:, :, ::2, 1:, ::2], t.to(dtype), gradient=mode)
                results.append((value, *torch.autograd.grad(value, leaf)))
            for ours, exact in zip(*results, strict=True):
                assert error(ours, exact) < 3e-6


X, T = torch.randn(3, 4), torch.randn(3, 4)


@EACH
@pytest.mark.parametrize(
    ("kind", "message", "x", "target", "options"),
    [
        (TypeError, "input must be of a floating dtype, got torch.int64", X.long(), T, {}),
        (ValueError, "input must have a dimension of classes", X[0, 0], T, {}),
        (TypeError, "target_logits must be a tensor, got int", X, 1, {}),
        (TypeError, "target_logits must be of a floating dtype, got torch.int64", X, T.long(), {}),
        (ValueError, r"target_logits must have the shape of input, \(3, 4\), got \(3, 1\)", X, T[:, :1], {}),
        (ValueError, "temperature must be finite and above 0, got 0", X, T, {"temperature": 0}),
        (ValueError, "reduction must be one of 'none', 'batchmean', 'mean', 'sum', got 'avg'", X, T, {"reduction": "avg"}),
        (ValueError, "gradient must be one of None, 'forward', 'backward', got 'both'", X, T, {"gradient": "both"}),
        (ValueError, "gradient=\"forward\" needs a scalar result", X, T, {"gradient": "forward", "reduction": "none"}),
        (ValueError, "normalizer needs a scalar result", X, T, {"normalizer": 2.0, "reduction": "none"}),
        (TypeError, "weight must be of a floating dtype or bool, got torch.int64", X, T, {"weight": torch.ones(3).long()}),
        (ValueError, r"weight must have one entry a row, shape \(3,\), got \(3, 4\)", X, T, {"weight": X}),
        (TypeError, "labels must be of an integer dtype, got torch.float32", X, T, {"labels": torch.ones(3)}),
        (ValueError, r"labels must have one entry a row, shape \(3,\), got \(4,\)", X, T, {"labels": torch.ones(4).long()}),
        (TypeError, "ignore_index must be a whole number, got float", X, T, {"ignore_index": 1.5}),
        (TypeError, "unexpected keyword argument 'mask'.* It takes input, target_logits, ", X, T, {"mask": None}),
        (ValueError, "inplace=True needs logits that are an intermediate result", X.clone().requires_grad_(), T, {"inplace": True}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_mistakes(function, kind, message, x, target, options):
    before = launch_counts()
    with pytest.raises(kind, match=message):
        function(x, target, **options)
    assert launch_counts() == before


@pytest.mark.parametrize("name", CAPPED)
def test_caps_are_checked(name):
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=rf"{name} must be .*above 0.*, got 0"):
        kl_div_with_logits(x, x, **{name: 0.0})


def test_beta_is_checked():
    with pytest.raises(ValueError, match=r"beta must be finite and at least 0 and at most 1, got 1\.5"):
        js_div_with_logits(X, T, beta=1.5)


def test_modules_keep_their_options():
    module = KLDivWithLogitsLoss(2.0, "sum", reverse=True, gradient="backward")
    assert "temperature=2.0" in repr(module)
    labels = torch.tensor([1, -100, 2])
    expected = kl_div_with_logits(X, T, 2.0, "sum", reverse=True, labels=labels)
    torch.testing.assert_close(module(X, T, labels=labels), expected)
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'batchmean', 'mean', 'sum', got 'avg'"):
        JSDivWithLogitsLoss(reduction="avg")


def test_topk_values_by_hand(device):
    """p = (1/2, 1/4, 1/4); of the teacher's classes 0 and 2 are known: 0.6 and 0.3."""
    x = torch.tensor([[2.0, 1.0, 1.0]], device=device).log()
    indices, values = torch.tensor([[0, 2]], device=device), torch.tensor([[0.6, 0.3]], device=device).log()
    known = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.25)
    rest = 0.1 * math.log(0.1 / 0.25)
    value, g = gradient_of(topk_kl_div_with_logits, x, values, indices)
    torch.testing.assert_close(value.item(), known, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.45 - 0.6, 0.225, 0.225 - 0.3]]))
    value, g = gradient_of(topk_kl_div_with_logits, x, values, indices, tail=True)
    torch.testing.assert_close(value.item(), known + rest, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.cpu(), torch.tensor([[0.5 - 0.6, 0.25 - 0.1, 0.25 - 0.3]]))
    value, _ = gradient_of(topk_kl_div_with_logits, x, values, indices, renormalize=True)
    exact = 2 / 3 * math.log(2 / 3 / 0.5) + 1 / 3 * math.log(1 / 3 / 0.25)
    torch.testing.assert_close(value.item(), exact, rtol=1e-6, atol=0)


def test_topk_values_that_are_no_log_probabilities(device):
    """The row is nan where the host may not read them; rows that are left out may hold anything."""
    x, values = torch.randn(5, 9, device=device), torch.randn(5, 9, device=device).log_softmax(1)
    values, indices = values.bfloat16().topk(9, 1)  # whose sum may exceed 1
    labels = torch.tensor([-100, 0, 0, 0, 0], device=device)
    values[0], values[3] = 2.0, values[3] + 1
    with pytest.raises(ValueError, match=r"whose exponentials add up to at most 1, got 2\.7.* at row 3: give log_softmax"):
        topk_kl_div_with_logits(x, values, indices, labels=labels, validate=True)

    def compute(x):
        return topk_kl_div_with_logits(x, values, indices, labels=labels, reduction="none")

    unread = compute if device == "cuda" else torch.compile(compute, fullgraph=True, backend="aot_eager")
    for path in (unread, lambda x: torch.func.vmap(compute)(x[None])[0]):
        leaf = x.clone().requires_grad_()
        found = path(leaf)
        assert found.isnan().tolist() == [False, False, False, True, False]
        assert torch.autograd.grad(found[3], leaf)[0][3].isnan().all()


def test_what_topk_returns_fits(device):
    """In its order; all classes are the dense divergence, whose gradient is (p - q) / N."""
    x, t = torch.randn(2, 7, device=device), torch.randn(2, 7, device=device).log_softmax(1)
    value, g = gradient_of(topk_kl_div_with_logits, x, *t.topk(7, 1))
    exact = kl_div_with_logits(x, t)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(g, (x.softmax(1) - t.exp()) / 2)


@MODES
@TOPK_CLASSES
def test_topk_of_all_classes_is_the_dense_divergence(classes, mode, device):
    """K = C, and with fewer, q among the others 0: what kl_div_with_logits gives of teachers of that support."""
    x, t = torch.randn(2, classes, device=device), torch.randn(2, classes, device=device)
    k = min(classes, 33)
    logits, indices = t.topk(k, 1)
    sparse = torch.full_like(t, -INF).scatter(1, indices, logits)
    exact = kl_div_with_logits(x.double().requires_grad_(), sparse.double(), 2.0)
    value, g = gradient_of(topk_kl_div_with_logits, x, logits, indices, 2.0, renormalize=True, gradient=mode)
    assert error(value, exact) < 3e-6
    wide = x.double().requires_grad_()
    kl_div_with_logits(wide, sparse.double(), 2.0).backward()
    assert error(g, wide.grad) < 3e-6
    value, g = gradient_of(topk_kl_div_with_logits, x, (logits / 2).log_softmax(1), indices.int(), 2.0, gradient=mode)
    assert error(value, exact) < 3e-6
    assert error(g, wide.grad) < 3e-6


@MODES
def test_topk_tail_that_the_student_has_lost(mode, device):
    """1 - Σ p[i] rounds to 0: it is held at 2⁻²⁴, without a gradient, as the reference says."""
    x = torch.tensor([[50.0, 0.0, 0.0], [0.0, 1.0, 2.0]], device=device)
    indices, values = torch.tensor([[0], [2]], device=device), torch.tensor([[0.9], [0.5]], device=device).log()
    value, g = gradient_of(topk_kl_div_with_logits, x, values, indices, tail=True, gradient=mode)
    with plain_torch():
        exact, g_exact = gradient_of(topk_kl_div_with_logits, x, values, indices, tail=True)
    assert value.isfinite()
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(g, g_exact, rtol=1e-5, atol=1e-7)


@MODES
@TOPK_CLASSES
def test_topk_entries_that_are_absent(classes, mode, device):
    """An index of -1, or a probability of 0, adds nothing; a row of none gives 0 with gradient 0."""
    x = torch.randn(3, classes, device=device)
    values, indices = torch.randn(3, classes, device=device).log_softmax(1).topk(5, 1)
    exact, g_exact = gradient_of(topk_kl_div_with_logits, x[:1].double(), values[:1, :3].double(), indices[:1, :3], reduction="sum")
    indices[0, 3] = -1
    values[0, 4] = -INF
    indices[1], values[2] = -1, -INF
    for renormalize in (False, True):
        each, _ = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="none", renormalize=renormalize)
        assert torch.equal(each[1:], torch.zeros(2, device=device))
    value, g = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="sum", gradient=mode)
    assert error(value, exact) < 3e-6
    assert error(g[:1], g_exact) < 3e-6
    assert torch.equal(g[1:], torch.zeros_like(g[1:]))


@MODES
@TOPK_CLASSES
def test_topk_rows_left_out_are_not_read(classes, mode, device):
    x = torch.randn(4, classes, device=device)
    values, indices = torch.randn(4, classes, device=device).log_softmax(1).topk(3, 1)
    kept = torch.tensor([True, False, True, True], device=device)
    exact, g_exact = gradient_of(topk_kl_div_with_logits, x[kept].double(), values[kept].double(), indices[kept])
    x[1], values[1] = NAN, INF
    for options in ({"weight": kept}, {"weight": kept * 2.0}, {"labels": torch.where(kept, 5, -100)}):
        value, g = gradient_of(topk_kl_div_with_logits, x, values, indices, gradient=mode, **options)
        assert error(value, exact) < 3e-6
        assert error(g[kept], g_exact) < 3e-6
        assert torch.equal(g[1], torch.zeros_like(g[1]))
    for empty, expected in (("nan", NAN), ("zero", 0.0)):
        value, g = gradient_of(
            topk_kl_div_with_logits, x, values, indices, gradient=mode, empty=empty, weight=torch.zeros(4, device=device)
        )
        assert str(value.item()) == str(expected)
        assert torch.equal(g, torch.zeros_like(g))


@MODES
@pytest.mark.parametrize("index", [7, -3, 2**33, -(2**40)])
def test_topk_index_out_of_range(index, mode, device, monkeypatch):
    """On CPU an error with value and row; unchecked, nan in that row alone."""
    x = torch.randn(3, 7, device=device)
    values, indices = torch.randn(3, 7, device=device).log_softmax(1).topk(3, 1)
    indices[1, 2] = index
    if device == "cpu":
        with pytest.raises(IndexError, match=rf"indices must hold 0 to 6, or -1 where ignored, got {index} at row \(1, 2\)"):
            topk_kl_div_with_logits(x, values, indices)
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    good = torch.tensor([True, False, True], device=device)
    each, _ = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="none")
    value, g = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="sum", gradient=mode)
    exact, g_exact = gradient_of(topk_kl_div_with_logits, x[good], values[good], indices[good], reduction="none")
    assert each[1].isnan()
    assert value.isnan()
    assert g[1].isnan().all()
    torch.testing.assert_close(each[good], exact)
    torch.testing.assert_close(g[good], g_exact)
    with plain_torch():
        assert topk_kl_div_with_logits(x, values, indices, reduction="none")[1].isnan()


@MODES
@TOPK_CLASSES
def test_topk_infinite_logits(classes, mode, device):
    x = torch.randn(4, classes, device=device)
    values, indices = torch.randn(4, classes, device=device).log_softmax(1).topk(3, 1)
    x[0] = -INF
    x[1, 2] = INF
    x[2, indices[2, 1]] = -INF
    each, _ = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="none")
    assert each[:2].isnan().all()
    assert each[2] == INF
    assert each[3].isfinite()
    _, g = gradient_of(topk_kl_div_with_logits, x, values, indices, reduction="sum", gradient=mode)
    _, g_exact = gradient_of(topk_kl_div_with_logits, x[2:].double(), values[2:].double(), indices[2:], reduction="sum")
    assert g_exact.isfinite().all()
    assert error(g[2:], g_exact) < 3e-6


def test_topk_no_rows(device):
    x = torch.rand(0, 5, device=device, requires_grad=True)
    indices, values = torch.zeros(0, 2, dtype=torch.long, device=device), torch.rand(0, 2, device=device)
    assert topk_kl_div_with_logits(x, values, indices).isnan()
    assert topk_kl_div_with_logits(x, values, indices, reduction="sum") == 0
    assert topk_kl_div_with_logits(x, values, indices, reduction="none").shape == (0,)


INDICES, VALUES = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.full((3, 2), -1.0)


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (TypeError, "input must be of a floating dtype, got torch.int64", (X.long(), VALUES, INDICES), {}),
        (TypeError, "indices must be of an integer dtype, got torch.float32", (X, VALUES, VALUES), {}),
        (TypeError, "values must be of a floating dtype, got torch.int64", (X, INDICES, INDICES), {}),
        (TypeError, r"values come before indices, as topk gives them: .*\*teacher.topk\(k\)\), got torch.int64", (X, INDICES, VALUES), {}),
        (ValueError, r"indices must have K classes for each row of input, \(3, 4\), got shape \(2, 2\)", (X, VALUES[:2], INDICES[:2]), {}),
        (ValueError, r"indices must have K classes for each row .* got shape \(3, 0\)", (X, VALUES[:, :0], INDICES[:, :0]), {}),
        (ValueError, r"values must have the shape of indices, \(3, 2\), got \(3, 1\)", (X, VALUES[:, :1], INDICES), {}),
        (ValueError, "tail needs probabilities that leave some", (X, VALUES, INDICES), {"tail": True, "renormalize": True}),
        (ValueError, "temperature must be finite and above 0, got -1", (X, VALUES, INDICES, -1), {}),
        (ValueError, "reduction must be one of", (X, VALUES, INDICES), {"reduction": "avg"}),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else None,
)  # fmt: skip
def test_topk_mistakes(kind, message, args, options):
    before = launch_counts()
    with pytest.raises(kind, match=message):
        topk_kl_div_with_logits(*args, **options)
    assert launch_counts() == before


def hard_and_soft(function, x, t, labels, share, temperature, squared, **options):
    """Return hard and soft distillation from their definitions: values of the rows that count, and the entropies of all."""
    z = options["softcap"] * torch.tanh(x * options["scale"] / options["softcap"])
    lp, lq = (z / temperature).log_softmax(1), (t / temperature).log_softmax(1)
    if function is kl_div_with_logits:
        soft = (lq.exp() * (lq - lp)).sum(1)
    elif function is js_div_with_logits:
        m = ((lp.exp() + lq.exp()) / 2).log()
        soft = ((lq.exp() * (lq - m)).sum(1) + (lp.exp() * (lp - m)).sum(1)) / 2
    else:
        soft = (lp.exp() - lq.exp()).abs().sum(1) / 2
    if squared:
        soft = soft * temperature**2
    keep = labels != -100
    hard = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    return torch.where(keep, (1 - share) * soft + share * hard, 0.0), torch.where(keep, -(lp.exp() * lp).sum(1), 0.0)


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("classes", [10, 20_001])
@pytest.mark.parametrize("function", [kl_div_with_logits, js_div_with_logits, total_variation_with_logits], ids=lambda f: f.__name__)
def test_hard_labels_and_entropies(function, classes, share, temperature, gradient, device):
    """The cross entropy is not softened, T² multiplies the divergence alone, and the mean is over the rows that count."""
    generator = torch.Generator().manual_seed(0)
    x, t = (2 * torch.randn(4, classes, generator=generator).to(device) for _ in range(2))
    labels = torch.tensor([3, -100, 0, classes - 1], device=device)
    options = {"scale": 0.7, "softcap": 3.0}
    wide, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
    values, entropy = hard_and_soft(function, wide, t.double(), labels, share, temperature, True, **options)
    given = {"temperature": temperature, "labels": labels, "temperature_squared": True, "gradient": gradient, **options}
    found = function(leaf, t, reduction="mean", hard_weight=share, outputs=("entropy",), **given)
    assert error(found.loss, values.sum() / 3) < 3e-6
    assert error(found.entropy, entropy) < 3e-6
    assert not found.entropy.requires_grad
    (exact,) = torch.autograd.grad(2 * values.sum() / 3, wide)
    assert error(torch.autograd.grad(2 * found.loss, leaf)[0], exact) < 1e-5
    alone = function(x, t, reduction="none", hard_weight=share, **{**given, "gradient": None})
    assert error(alone, values) < 3e-6


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("classes", [10, 20_001])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_divergence_of_weight_zero_is_left_out(reverse, classes, gradient, device):
    """With hard_weight=1 the loss is the cross entropy, even where the divergence is infinite."""
    x, t = torch.randn(3, classes, device=device), torch.randn(3, classes, device=device)
    (t if reverse else x)[:, 1] = -torch.inf
    labels = torch.tensor([0, 3, classes - 1], device=device)
    wide, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(1.3 * wide, labels)
    options = {"reverse": reverse, "scale": 1.3, "temperature": 2.0, "reduction": "mean", "gradient": gradient}
    found = kl_div_with_logits(leaf, t, labels=labels, hard_weight=1.0, **options)
    assert kl_div_with_logits(x, t, **options) == torch.inf
    torch.testing.assert_close(found, expected.float())
    torch.testing.assert_close(torch.autograd.grad(found, leaf)[0], torch.autograd.grad(expected, wide)[0].float())


@pytest.mark.parametrize("gradient", ["forward", "backward"])
@pytest.mark.parametrize("classes", [10, 20_001])
def test_cosine_distance_with_labels(classes, gradient, device):
    """Its value and gradient as torch has them, also of rows of zeros, whose length counts as 1e-8."""
    x, t = torch.randn(5, classes, device=device), torch.randn(5, classes, device=device)
    x[1] = 0.0
    t[2] = 0.0
    labels = torch.tensor([0, 3, classes - 1, -100, 2], device=device)
    keep = labels != -100
    wide, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
    options = {"labels": labels, "scale": 1.3, "target_scale": 0.3, "reduction": "mean", "gradient": gradient}
    for share in (0.0, 0.3):
        rows = (1 - share) * (1 - torch.nn.functional.cosine_similarity(1.3 * wide, 0.3 * t.double(), dim=1))
        expected = (rows + share * torch.nn.functional.cross_entropy(1.3 * wide, labels, reduction="none"))[keep].sum() / 4
        found = cosine_distance_with_logits(leaf, t, hard_weight=share, **options)
        assert error(found, expected) < 3e-6
        (got,), (right,) = torch.autograd.grad(2 * found, leaf), torch.autograd.grad(2 * expected, wide)
        assert all(error(got[i], right[i]) < 1e-5 for i in (0, 1, 3, 4))
        assert (got[2] - right[2]).abs().max() < 1e-5


def test_labels_of_the_hard_part_are_checked(device):
    x, labels = torch.randn(3, 5, device=device), torch.tensor([0, 5, -100], device=device)
    with pytest.raises(ValueError, match="hard_weight needs labels"):
        kl_div_with_logits(x, x, hard_weight=0.5)
    with pytest.raises(ValueError, match="hard_weight must be"):
        kl_div_with_logits(x, x, hard_weight=1.5, labels=labels)
    with pytest.raises(IndexError, match="labels must hold 0 to 4, or -100 where ignored, got 5 at row 1"):
        kl_div_with_logits(x, x, hard_weight=0.5, labels=labels, validate=True)
    with pytest.raises(TypeError, match="labels must be of an integer dtype"):
        kl_div_with_logits(x, x, hard_weight=0.5, labels=torch.zeros(3, device=device))
    leaf = x.clone().requires_grad_()
    call = DivergenceCall("kl", leaf, x.flip(1), labels=labels, soft_weight=0.5, hard_weight=0.5, reduction="none")
    values = compute(CheckedCall(call, {}, first))  # as on a GPU, where labels are not read before the launch
    (g,) = torch.autograd.grad(values.sum(), leaf)
    assert values.isnan().tolist() == g.isnan().all(1).tolist() == [False, True, False]
    assert torch.equal(g[2], torch.zeros(5, device=device))


def test_entropy_of_one_row_and_of_an_image(device):
    x, t = torch.randn(2, 7, 3, 4, device=device), torch.randn(2, 7, 3, 4, device=device)
    entropy = torch.distributions.Categorical(logits=x.movedim(1, -1) / 2).entropy()
    found = js_div_with_logits(x, t, temperature=2.0, outputs=("entropy",))
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-6)
    one = js_div_with_logits(x[0, :, 0, 0], t[0, :, 0, 0], temperature=2.0, outputs=("entropy",))
    torch.testing.assert_close(one.entropy, entropy[0, 0, 0], rtol=1e-5, atol=1e-6)
    assert one.loss.ndim == 0

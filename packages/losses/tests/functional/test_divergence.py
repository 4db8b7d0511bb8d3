"""What is the divergences' own: values by hand, limits, excluded classes, rows left out, teachers' gradients, a teacher's top-k."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import launch_counts
from lossforge.kernels.classes.calls import DivergenceCall
from lossforge.losses import (
    TopKTeacher,
    cosine_distance_with_logits,
    cross_entropy,
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
        (ValueError, "input must have a dimension of classes", X[0, 0], T, {}),
        (TypeError, "target_logits must be of a floating dtype, got torch.int64", X, T.long(), {}),
        (ValueError, r"target_logits must have the shape of input, \(3, 4\), got \(3, 1\)", X, T[:, :1], {}),
        (TypeError, "weight must be of a floating dtype or bool, got torch.int64", X, T, {"weight": torch.ones(3).long()}),
        (ValueError, r"weight must have one entry a row, shape \(3,\), got \(3, 4\)", X, T, {"weight": X}),
        (TypeError, "labels must be of an integer dtype, got torch.float32", X, T, {"labels": torch.ones(3)}),
        (ValueError, r"labels must have one entry a row, shape \(3,\), got \(4,\)", X, T, {"labels": torch.ones(4).long()}),
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
def test_topk_of_a_share_with_labels_and_entropy(mode, device):
    """The parts apart: both directions of KL and the cross entropy of labels, one of which is among the K; entries that are padded."""
    x = torch.randn(5, 40, device=device, dtype=torch.float64)
    values, indices = torch.randn(5, 40, device=device, dtype=torch.float64).log_softmax(1).topk(4, 1)
    values[1, 2:], indices[1, 2:] = -torch.inf, 0  # as an engine pads a row of two
    labels = torch.tensor([int(indices[0, 1]), 7, -100, 3, 9], device=device)
    given = {"temperature": 2.0, "tail": True, "labels": labels, "reduction": "sum"}
    parts = [gradient_of(topk_kl_div_with_logits, x, values, indices, reverse=share, **given) for share in (0.0, 1.0)]
    parts.append(gradient_of(cross_entropy, x, labels, reduction="sum"))
    exact, g_exact = (0.7 * (0.75 * first + 0.25 * second) + 0.3 * third for first, second, third in zip(*parts, strict=True))
    entropy = kl_div_with_logits(x, x, 2.0, labels=labels, outputs=("entropy",)).entropy
    for dtype in (torch.float64, torch.float32):
        both = {"reverse": 0.25, "hard_weight": 0.3, "gradient": mode, **given}
        value, g = gradient_of(topk_kl_div_with_logits, x.to(dtype), values.to(dtype), indices, **both)
        assert error(value, exact) < 2e-6
        assert error(g, g_exact) < 5e-6
        found = topk_kl_div_with_logits(x.to(dtype), values.to(dtype), indices, **both, outputs=("entropy",))
        assert error(found.entropy, entropy) < 2e-6
        assert error(found.loss, exact) < 2e-6
    alone, _ = gradient_of(topk_kl_div_with_logits, x[1:2], values[1:2, :2], indices[1:2, :2], 2.0, tail=True, reverse=0.6)
    padded, _ = gradient_of(topk_kl_div_with_logits, x[1:2], values[1:2], indices[1:2], 2.0, tail=True, reverse=0.6)
    assert error(padded, alone) < 1e-12
    assert error(TopKTeacher(values, indices).mass, values.exp().sum(1)) < 1e-6


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("reverse", [0.0, 1.0])
def test_topk_of_trl(reverse, tail):
    """On rows that are padded as its server pads them: -inf, with a token that another entry has."""
    theirs = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    x = torch.randn(4, 30, dtype=torch.float64)
    values, indices = torch.randn(4, 30, dtype=torch.float64).log_softmax(1).topk(5, 1)
    values[1, 3:], indices[1, 3:] = -torch.inf, int(indices[1, 0])
    wide, valid = x.clone().requires_grad_(), values > -torch.inf
    student, teacher, support = torch.where(valid, wide.log_softmax(1).gather(1, indices), -torch.inf), values, valid
    if tail:
        (student, support), (teacher, _) = theirs._add_tail_bucket(student, valid), theirs._add_tail_bucket(teacher, valid)
    exact = theirs._jsd_divergence(student, teacher, reverse, support).sum(1)
    leaf = x.clone().requires_grad_()
    found = topk_kl_div_with_logits(leaf, values, indices, reduction="none", tail=tail, reverse=reverse)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)
    (g,), (g_exact,) = torch.autograd.grad(found.sum(), leaf), torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(g, g_exact, rtol=1e-12, atol=1e-14)


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


INDICES, VALUES = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.full((3, 2), -1.0)


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (TypeError, "indices must be of an integer dtype, got torch.float32", (X, VALUES, VALUES), {}),
        (TypeError, "values must be of a floating dtype, got torch.int64", (X, INDICES, INDICES), {}),
        (TypeError, r"values come before indices, as topk gives them: .*\*teacher.topk\(k\)\), got torch.int64", (X, INDICES, VALUES), {}),
        (ValueError, r"indices must have K classes for each row of input, \(3, 4\), got shape \(2, 2\)", (X, VALUES[:2], INDICES[:2]), {}),
        (ValueError, r"indices must have K classes for each row .* got shape \(3, 0\)", (X, VALUES[:, :0], INDICES[:, :0]), {}),
        (ValueError, r"values must have the shape of indices, \(3, 2\), got \(3, 1\)", (X, VALUES[:, :1], INDICES), {}),
        (ValueError, "tail needs probabilities that leave some", (X, VALUES, INDICES), {"tail": True, "renormalize": True}),
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

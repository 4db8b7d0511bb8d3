"""What is cross entropy's own: its further outputs, and the z-loss where no row or no weight counts."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from loss_calls import logits

from lossforge.losses import binary_cross_entropy_with_logits, cross_entropy, plain_torch
from lossforge.losses.registry import LOSSES

INF = math.inf


@pytest.mark.parametrize("lam", [-0.5, 0.0, 0.3, 1.0, 1.75])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_any_number_as_lam(lam, as_tensor, device):
    """λ L(a) + (1 - λ) L(b), and its gradient, outside of [0, 1] too: of rows, and of elements, whose loss is linear in the target."""
    x, a, b = torch.randn(6, 5, device=device), torch.randint(5, (6,), device=device), torch.randint(5, (6,), device=device)
    given = torch.full((6,), lam, device=device) if as_tensor else lam
    for ours, exact in (
        (cross_entropy, lambda z: lam * F.cross_entropy(z, a) + (1 - lam) * F.cross_entropy(z, b)),
        (
            binary_cross_entropy_with_logits,
            lambda z: F.binary_cross_entropy_with_logits(z, (lam * F.one_hot(a, 5) + (1 - lam) * F.one_hot(b, 5)).double()),
        ),
    ):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        value, expected = ours(leaf, a, target_b=b, lam=given), exact(wide)
        assert abs(value.item() - expected.item()) < 1e-6
        torch.testing.assert_close(
            *(torch.autograd.grad(v * 3, t)[0].double() for v, t in ((value, leaf), (expected, wide))), rtol=1e-5, atol=1e-6
        )


def test_correct_needs_a_counted_target(device):
    x = -torch.rand(2, 4, device=device) - 1
    ignored, kept = torch.tensor([-100, 1], device=device), torch.tensor([2, 1], device=device)
    out = cross_entropy(x, ignored, target_b=kept, lam=0.5, outputs=("correct",))
    assert not out.correct[0]


def test_further_outputs(device):
    """lse, z-loss, entropy and correctness from the same pass, differentiable together; ties go to the first class."""
    for classes in (7, 9_001):
        x = logits(5, classes, device)
        target = torch.tensor([3, 0, -100, 6, 1], device=device)
        x[0, 3] = x[0].max() + 1
        x[1, :2] = x[1].max() + 1
        x[4, :2] = x[4].max() + 1
        x.requires_grad_()
        out = cross_entropy(x, target, z_loss=0.1, outputs=("z_loss", "lse", "entropy", "correct"))
        weights = torch.rand(5, device=device)
        (out.loss * 2 + out.z_loss + (out.lse * weights).sum() + (out.entropy * weights).sum() * 0.5).backward()
        wide = x.detach().double().requires_grad_()
        keep = target >= 0
        lse = wide.logsumexp(1)
        z_loss = 0.1 * lse.square()[keep].mean()
        entropy = -(wide.softmax(1) * wide.log_softmax(1)).sum(1)
        loss = F.cross_entropy(wide, target) + z_loss
        (loss * 2 + z_loss + (lse * weights).sum() + (entropy * weights).sum() * 0.5).backward()
        for ours, exact in ((out.loss, loss), (out.z_loss, z_loss), (out.lse, lse), (out.entropy, entropy)):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-7)
        assert out.correct.tolist() == [True, True, False, x[3].argmax().item() == 6, False]


def test_z_loss_of_nothing(device):
    """No weight at all: nan as without z_loss; with empty="zero" the z-loss alone, and 0 where no row counts."""
    x = logits(2, 7, device)
    target, weight = torch.tensor([3, 0], device=device), torch.zeros(7, device=device)
    assert cross_entropy(x, target, weight, z_loss=0.1).isnan()
    alone = 0.1 * x.double().logsumexp(1).square().mean()
    torch.testing.assert_close(cross_entropy(x, target, weight, z_loss=0.1, empty="zero").double(), alone, rtol=2e-6, atol=0)
    ignored = torch.full((2,), -100, device=device)
    assert cross_entropy(x, ignored, weight + 1, z_loss=0.1).isnan()
    assert cross_entropy(x, ignored, weight + 1, z_loss=0.1, empty="zero") == 0


def test_returned_z_loss_has_no_weights(device):
    x, target = torch.zeros(2, 4, device=device), torch.tensor([0, 1], device=device)
    for w in (1.0, 10.0, 0.1):
        out = cross_entropy(x, target, weight=torch.full((4,), w, device=device), z_loss=0.1, outputs=("z_loss",))
        torch.testing.assert_close(out.z_loss, torch.tensor(0.1 * math.log(4) ** 2, device=device))


@pytest.mark.parametrize("classes", [7, 9_001])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 90.0}, {"label_smoothing": 0.1}], ids=str)
def test_outputs_for_logs(options, classes, device):
    """The largest class, the first of equal ones, ln Σ p² and the mean logit, of ignored rows too. None has or changes a gradient."""
    x = logits(6, classes, device) * 3 + 40
    x[1, 2:5] = x[1].max() + 1
    if "softcap" not in options:  # by which both were -90
        x[3] = -INF
        x[3, 5] = torch.finfo(torch.float32).min
    target = torch.tensor([3, 0, -100, 5, 1, 6], device=device)
    names = ("argmax", "log_p2", "mean_logit")
    for each in (names, *[(name,) for name in names]):
        leaf = x.clone().requires_grad_()
        out = cross_entropy(leaf, target, reduction="sum", **options, outputs=each)
        wide = x.double() * options.get("scale", 1.0)
        if "softcap" in options:
            wide = 90.0 * torch.tanh(wide / 90.0)
        exact = {"argmax": wide.argmax(1), "log_p2": wide.softmax(1).square().sum(1).log(), "mean_logit": wide.mean(1)}
        for name in names:
            got = getattr(out, name, None)
            assert (got is None) == (name not in each)
            if got is not None:
                assert not got.requires_grad
                torch.testing.assert_close(got.to(exact[name].dtype), exact[name], rtol=2e-6, atol=2e-6)
        if each == names:
            assert out.argmax[1] == 2
            assert out.argmax.dtype == torch.int64
        alone = x.clone().requires_grad_()
        value = cross_entropy(alone, target, reduction="sum", **options)
        torch.testing.assert_close(out.loss, value, equal_nan=True)
        (2 * out.loss).backward()
        (2 * value).backward()
        torch.testing.assert_close(leaf.grad, alone.grad, rtol=1e-5, atol=1e-7, equal_nan=True)  # another variant of the kernel


@pytest.mark.parametrize("classes", [7, 9_001])
def test_the_largest_class_passes_over_nan(classes, device):
    x = logits(4, classes, device)
    x[0, 1], x[1, 4], x[2] = math.nan, INF, math.nan
    x[3] = -INF
    expected = [x[0].nan_to_num(-INF).argmax().item(), 4, 0, 0]
    target = torch.zeros(4, dtype=torch.long, device=device)
    for function in (cross_entropy, LOSSES["ce"].reference):
        assert function(x, target, outputs=("argmax",)).argmax.tolist() == expected
        assert function(x, target, outputs=("argmax",), reduction="none").argmax.tolist() == expected


@pytest.mark.parametrize("classes", [7, 5_000, 9_001, 17_000])
def test_the_first_of_equal_classes(classes, device):
    """Whichever of a row's tiles are read first: logits of low precision often share their maximum."""
    x = torch.randn(6, classes, device=device).clamp(max=1.0).bfloat16()
    x[0] = 1.0
    x[1], x[1, classes // 2 :] = 0.5, 1.0
    x[2], x[2, [classes // 3, -1]] = 0.5, 1.0
    target = torch.tensor([0, classes // 2, classes - 1, 0, 1, 2], device=device)
    expected = x.argmax(1)
    for function in (cross_entropy, LOSSES["ce"].reference):
        for reduction in ("mean", "none"):
            found = function(x, target, outputs=("correct", "argmax"), reduction=reduction)
            assert torch.equal(found.argmax, expected)
            assert torch.equal(found.correct, expected == target)


def test_outputs_for_logs_of_an_image_and_of_one_row(device):
    x = logits(2 * 12, 5, device).view(2, 3, 4, 5).permute(0, 3, 1, 2)
    target = torch.randint(5, (2, 3, 4), device=device)
    out = cross_entropy(x, target, outputs=("argmax", "log_p2", "mean_logit"))
    assert torch.equal(out.argmax, x.argmax(1))
    torch.testing.assert_close(out.log_p2, x.softmax(1).square().sum(1).log(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.mean_logit, x.mean(1), rtol=1e-5, atol=1e-6)
    one = cross_entropy(x[0, :, 0, 0], target[0, 0, 0], outputs=("argmax",))
    assert one.argmax.shape == ()
    assert one.argmax == out.argmax[0, 0, 0]


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain torch"])
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"z_loss": 0.1}, {"z_loss": 0.1, "softcap": 3.0, "scale": 0.7}], ids=str)
def test_rows_of_nan_that_do_not_count(options, plain, device):
    """An ignored one, and one of weight 0: loss and gradient are those of other numbers there, which have gradient 0."""
    x, target = torch.randn(5, 6, device=device), torch.tensor([1, 2, -100, 3, 0], device=device)
    options = {**options, "token_weight": torch.tensor([0.5, 1.0, 1.0, 0.0, 2.0], device=device)}
    noisy = x.index_fill(0, torch.tensor([2, 3], device=device), torch.nan).requires_grad_()
    wide = x.double().requires_grad_()
    expected = cross_entropy(wide, target, **options)
    with plain_torch() if plain else contextlib.nullcontext():
        found = cross_entropy(noisy, target, **options)
        (g,) = torch.autograd.grad(found, noisy)
    assert not g[2:4].any()
    torch.testing.assert_close(found, expected.float())
    torch.testing.assert_close(g, torch.autograd.grad(expected, wide)[0].float())


@pytest.mark.parametrize("result", ["lse", "entropy", "argmax", "z_loss"])
@pytest.mark.parametrize("classes", [20, 9000])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("plain", [False, True])
def test_an_ignored_row_without_softmax_beside_further_results(plain, value, classes, result, device):
    """These are computed of ignored rows too, and may be nan. The loss gives the row the gradient 0."""
    x = torch.randn(4, classes, device=device)
    target = torch.tensor([1, -100, 2, 3], device=device)
    modes = ({"reduction": "none"}, {"reduction": "sum", "gradient": "backward"}, {"reduction": "sum", "gradient": "forward"})
    for z_loss in (0.0, 0.1):
        expected = torch.autograd.grad(cross_entropy(x.requires_grad_(), target, reduction="sum", z_loss=z_loss), x)[0]
        x = x.detach().clone()
        noisy = x.index_fill(0, torch.tensor([1], device=device), value).requires_grad_()
        for options in modes:
            with plain_torch() if plain else contextlib.nullcontext():
                found = cross_entropy(noisy, target, z_loss=z_loss, outputs=(result,), **options)
                g = torch.autograd.grad(found.loss.sum(), noisy, retain_graph=True)[0]
                torch.testing.assert_close(g, expected)
                if result in ("lse", "entropy"):
                    beyond = -INF if (value, result) == (-INF, "lse") else math.nan
                    torch.testing.assert_close(getattr(found, result)[1].item(), beyond, equal_nan=True)
                    assert getattr(found, result)[[0, 2, 3]].isfinite().all()
                    g = torch.autograd.grad(getattr(found, result).sum(), noisy)[0]
                    assert not g[[0, 2, 3]].isnan().any()


def weighed(x, target, factor, reduction, weight=None, z_loss=0.0):
    """Compute cross entropy with a factor a row in float64, by torch's own of each row."""
    counts = (target != -100) & (factor != 0)
    z = torch.where(counts.unsqueeze(1), x.double(), 0.0)
    each = factor.double() * F.cross_entropy(z, target, None if weight is None else weight.double(), reduction="none")
    each = torch.where(counts, each + z_loss * z.logsumexp(1).square(), 0.0)
    divisor = ((target != -100).sum() if weight is None else weight[target[target != -100]].sum()) if reduction == "mean" else 1
    return each if reduction == "none" else each.sum() / divisor


def weight_of_itself(kind, z, target):
    """Return the weight of each row of logits (N, C) that follows from them."""
    log_p = z.detach().log_softmax(1)
    if kind == "probability":
        return log_p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).exp()
    return (-(log_p.exp() * log_p).sum(1) / math.log(min(20, z.shape[1]))).clamp(max=1.0)


@pytest.mark.parametrize("case", [f"{kind}, {classes}" for kind in ("given", "probability", "entropy") for classes in (7, 9001)])
@pytest.mark.parametrize(("reduction", "mode"), [("mean", "forward"), ("mean", "backward"), ("sum", "forward"), ("none", None)])
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"z_loss": 1e-2}, {"scale": 3.0, "softcap": 5.0}], ids=str)
def test_a_weight_a_row(options, reduction, mode, case, device):
    """Any number, or that of the row itself. The mean does not divide by it; ignored rows, and those of weight 0, may hold nan."""
    kind, classes = case.split(", ")[0], int(case.split(", ")[1])
    x, target, factor = (
        2 * torch.randn(9, classes, device=device),
        torch.randint(classes, (9,), device=device),
        torch.randn(9, device=device),
    )
    target[1], factor[2], factor[4] = -100, 0.0, -3.0
    x[1], x[3] = torch.nan, 0.0
    if kind == "given":
        x[2] = torch.nan
    options = {**options, "weight": torch.rand(classes, device=device) + 0.5} if "weight" in options else options
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    given = factor if kind == "given" else kind
    found = cross_entropy(leaf, target, token_weight=given, reduction=reduction, gradient=mode, **options)
    counts = (target != -100) & ((factor != 0) | (kind != "given"))
    z = torch.where(counts.unsqueeze(1), wide, 0.0) * options.get("scale", 1.0)
    z = 5.0 * torch.tanh(z / 5.0) if "softcap" in options else z
    factor = factor if kind == "given" else weight_of_itself(kind, z, target)
    expected = weighed(z, target, factor, reduction, options.get("weight"), options.get("z_loss", 0.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaf, upstream)[0], torch.autograd.grad(expected, wide, upstream.double())[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-6)
    assert (gradients[0][~counts] == 0).all()


@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (2, 3, 4)], ids=str)
def test_weights_that_broadcast_over_an_image(shape, device):
    x, target = torch.randn(2, 5, 3, 4, device=device), torch.randint(5, (2, 3, 4), device=device)
    factor = torch.randn(shape, device=device)
    found = cross_entropy(x, target, token_weight=factor, reduction="sum")
    each = F.cross_entropy(x.double(), target, reduction="none") * factor
    torch.testing.assert_close(found.double(), each.sum(), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_weight_a_row(device):
    """Its row's loss, at a weight of 0 too."""
    x, target = torch.randn(6, 5, device=device), torch.randint(5, (6,), device=device)
    factor = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 0.0], device=device, requires_grad=True)
    (found,) = torch.autograd.grad(cross_entropy(x, target, token_weight=factor), factor)
    torch.testing.assert_close(found, F.cross_entropy(x, target, reduction="none") / 6)


def test_further_outputs_beside_weights_a_row(device):
    """A row of weight 0 has them as one that is ignored does: it is not correct."""
    x, factor = torch.randn(6, 5, device=device), torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 0.0], device=device)
    target = x.argmax(1)
    found = cross_entropy(x, target, token_weight=factor, outputs=("lse", "correct"))
    torch.testing.assert_close(found.lse, x.logsumexp(1))
    assert torch.equal(found.correct, factor != 0)


def test_further_outputs_beside_a_weight_of_the_row_itself(device):
    x, target = torch.randn(6, 5, device=device, requires_grad=True), torch.randint(5, (6,), device=device)
    plain = cross_entropy(x, target, outputs=("lse", "entropy"))
    found = cross_entropy(x, target, token_weight="entropy", outputs=("lse",))
    assert found._fields == ("loss", "lse")
    torch.testing.assert_close(found.lse, plain.lse)
    found = cross_entropy(x, target, token_weight="entropy", outputs=("entropy",))
    torch.testing.assert_close(found.entropy, plain.entropy)
    gradients = torch.autograd.grad(found.entropy.sum(), x)[0], torch.autograd.grad(plain.entropy.sum(), x)[0]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_probability_of_zero(mode, device):
    """Its product with the loss has the limit 0, and the row no gradient."""
    x = torch.tensor([[-torch.inf, 1.0, 2.0]], device=device, requires_grad=True)
    found = cross_entropy(x, torch.zeros(1, dtype=torch.int64, device=device), token_weight="probability", gradient=mode)
    assert found == 0
    assert not torch.autograd.grad(found, x)[0].any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_smoothing": 0.1, "token_weight": "entropy"}, ValueError, "token_weight excludes label_smoothing"),
        ({"target": torch.rand(3, 4), "token_weight": "probability"}, TypeError, "target must hold class indices where token_weight"),
        ({"token_weight": "certainty"}, ValueError, "token_weight must be .*probability.*entropy.*, got 'certainty'"),
        ({"label_smoothing": 0.1}, ValueError, r"token_weight excludes label_smoothing, got label_smoothing=0\.1"),
        ({"target_b": torch.tensor([1, 2, 0]), "lam": 0.5}, ValueError, "token_weight excludes target_b"),
        ({"target": torch.rand(3, 4)}, TypeError, "target must hold class indices where token_weight is given, got torch.float32"),
        ({"token_weight": torch.ones(4)}, ValueError, r"token_weight must broadcast to the shape of target, \(3,\), got .*\(4,\)"),
        ({"token_weight": torch.ones(3, dtype=torch.int64)}, TypeError, "token_weight must be .*floating.*, got torch.int64"),
    ],
)
def test_refused_weights_a_row(options, error, message):
    given = {"input": torch.randn(3, 4), "target": torch.tensor([0, 1, 2]), "token_weight": torch.ones(3), **options}
    with pytest.raises(error, match=message):
        cross_entropy(**given)

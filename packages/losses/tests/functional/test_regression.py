"""What is their own of the losses of a difference: kinks, nan and infinity, weighted means, as in torch."""

import mpmath
import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of

from lossforge.kernels import launch_counts
from lossforge.losses import (
    HuberLoss,
    MSELoss,
    SmoothL1Loss,
    general_robust_loss,
    huber_loss,
    l1_loss,
    mse_loss,
    plain_torch,
    quantile_loss,
    smooth_l1_loss,
)

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
CASES = [
    (mse_loss, F.mse_loss, {}),
    *((huber_loss, F.huber_loss, {"delta": delta}) for delta in (1.0, 0.25, 3.0)),
    *((smooth_l1_loss, F.smooth_l1_loss, {"beta": beta}) for beta in (1.0, 0.25, 3.0, 0.0, 1e-30)),
]
EACH = pytest.mark.parametrize(("ours", "torchs", "options"), CASES, ids=[f"{ours.__name__} {options}" for ours, _, options in CASES])


@EACH
@MODES
def test_at_and_around_the_kinks(ours, torchs, options, mode, device):
    """|d| = δ or β exactly, one unit beside it, 0, and where squares overflow."""
    bound = torch.tensor(max(options.values(), default=1.0))
    up, down = bound.nextafter(torch.tensor(INF)), bound.nextafter(torch.tensor(0.0))
    d = torch.stack([bound, up, down, bound * 0, bound / 2, bound * 100])
    d = torch.cat([d, -d, torch.tensor([1e-6, -1e-6, 1e15, -1e15])]).to(device)
    y = torch.zeros_like(d)
    value, g = gradient_of(ours, d, y, reduction="none", **options)
    exact, g_exact = gradient_of(torchs, d.double(), y.double(), reduction="none", **options)
    torch.testing.assert_close(value.double(), exact, rtol=3e-7, atol=1e-40)
    torch.testing.assert_close(g.double(), g_exact, rtol=3e-7, atol=1e-40)
    _, g_sum = gradient_of(ours, d, y, reduction="sum", gradient=mode, **options)
    assert torch.equal(g_sum, g)
    hard, g_hard = gradient_of(ours, torch.tensor([0.5, 1.0, 3.0], device=device)[None], torch.tensor([1], device=device), **options)
    dense = torch.tensor([[0.0, 1.0, 0.0]], device=device)
    exact, g_exact = gradient_of(torchs, torch.tensor([[0.5, 1.0, 3.0]], device=device), dense, **options)
    torch.testing.assert_close(hard, exact)
    torch.testing.assert_close(g_hard, g_exact)


@EACH
@MODES
def test_nan_and_infinity(ours, torchs, options, mode, device):
    """Huber nan / nan, the L1 that β = 0 is nan / 0; other elements are unharmed."""
    x = torch.tensor([NAN, INF, -INF, 2.0, 0.0, INF], device=device)
    y = torch.tensor([0.0, 0.0, 0.0, NAN, 0.0, INF], device=device)
    value, g = gradient_of(ours, x, y, reduction="none", **options)
    exact, g_exact = gradient_of(torchs, x, y, reduction="none", **options)
    torch.testing.assert_close(value, exact, equal_nan=True)
    torch.testing.assert_close(g, g_exact, equal_nan=True)
    assert value[0].isnan()
    assert g[0].isnan() if options.get("beta") != 0 else g[0] == 0
    _, g_sum = gradient_of(ours, x, y, reduction="sum", gradient=mode, **options)
    torch.testing.assert_close(g_sum, g, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_as_in_torch(reduction, device):
    """The weighted mean of mse_loss divides by the weights, that of huber_loss by the number of elements."""
    x, y, w = (torch.randn(5, 3, device=device) for _ in range(3))
    w = w.abs()
    torch.testing.assert_close(mse_loss(x, y, weight=w, reduction=reduction), F.mse_loss(x, y, weight=w, reduction=reduction))
    ours = huber_loss(x, y, reduction, 0.5, w)
    torch.testing.assert_close(ours, F.huber_loss(x, y, reduction, 0.5, w))
    ours = smooth_l1_loss(x, y, reduction=reduction, weight=w)
    each = F.smooth_l1_loss(x, y, reduction="none") * w
    torch.testing.assert_close(ours, {"mean": each.sum() / w.sum(), "sum": each.sum(), "none": each}[reduction])


def test_legacy_arguments_and_their_order(device):
    x, y = torch.randn(6, device=device), torch.randn(6, device=device)
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(mse_loss(x, y, False), F.mse_loss(x, y, reduction="sum"))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(smooth_l1_loss(x, y, None, False, "mean", 0.5), F.smooth_l1_loss(x, y, reduction="none", beta=0.5))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(SmoothL1Loss(False, None, "mean", 0.5)(x, y), F.smooth_l1_loss(x, y, reduction="sum", beta=0.5))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        torch.testing.assert_close(MSELoss(None, False)(x, y), F.mse_loss(x, y, reduction="none"))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        assert mse_loss(x, y, False, False).shape == F.mse_loss(x, y, False, False).shape == (6,)
    torch.testing.assert_close(HuberLoss("sum", 0.5)(x, y), F.huber_loss(x, y, "sum", 0.5))


def test_the_warning_of_old_arguments_names_the_users_line():
    x = torch.rand(3, 4)
    for call in (lambda: mse_loss(x, x, reduce=False), lambda: mse_loss(x, x, size_average=False), lambda: MSELoss(size_average=False)):
        with pytest.warns(UserWarning, match="size_average and reduce") as found:
            call()
        assert [each.filename for each in found if each.category is UserWarning] == [__file__]


ALPHAS = [2.0, 1.9999999, 2.0000002, 1.99, 2.5, 1.0, 0.5, 1e-3, 1e-7, 0.0, -1e-20, -1e-4, -2.0, -50.0, -1e6, -1e30, -INF]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_general_robust_around_its_special_shapes(alpha, device):
    """The paper's formula with 50 digits, and its limits, from tiny to huge differences."""
    mpmath.mp.dps = 50
    x = torch.tensor([0.0, 1e-6, -1e-3, 0.1, -0.9, 2.0, -7.0, 40.0, 1e4, -1e8, 1e15], device=device)
    value, g = gradient_of(general_robust_loss, x, torch.zeros_like(x), alpha=alpha, scale=0.5, reduction="none")
    shape = mpmath.mpf(torch.tensor(alpha).double().item())  # as the kernel has it, in float32
    exact, slopes = [], []
    for d in x.double().tolist():
        s = (mpmath.mpf(d) / 0.5) ** 2
        b = abs(shape - 2)
        power = mpmath.exp(-s / 2) if alpha == -INF else 1 if b == 0 else (s / b + 1) ** (shape / 2 - 1)
        if alpha == -INF:
            found = 1 - mpmath.exp(-s / 2)
        elif b == 0:
            found = s / 2
        elif shape == 0:
            found = mpmath.log(s / 2 + 1)
        else:
            found = b / shape * ((s / b + 1) ** (shape / 2) - 1)
        exact.append(float(found))
        slopes.append(float(4 * mpmath.mpf(d) * power))
    for got, wanted in ((value, exact), (g, slopes)):  # powers up to e^±80, whose float32 exponents are rounded by 4e-6 each way
        torch.testing.assert_close(got.double().cpu(), torch.tensor(wanted, dtype=torch.float64), rtol=8e-6, atol=1e-37)


def test_general_robust_of_outliers_in_plain_torch(device):
    """The slope x / (x²/4 + 1)² of α = -2."""
    x = torch.tensor([0.1, 30.0, 1e4, -1e6], device=device)
    with plain_torch():
        _, g = gradient_of(general_robust_loss, x, torch.zeros_like(x), alpha=-2.0, reduction="none")
    torch.testing.assert_close(g, (x.double() / (x.double().square() / 4 + 1) ** 2).float(), rtol=1e-5, atol=0)


def test_a_shape_of_each_column(device):
    """A tensor α that broadcasts; one that requires grad is differentiated, against differences."""
    x, y = torch.randn(5, 3, device=device), torch.randn(5, 3, device=device)
    alpha = torch.tensor([2.0, 0.0, -INF], device=device)
    whole = gradient_of(general_robust_loss, x, y, alpha=alpha, reduction="none")
    for column, each in enumerate(alpha.tolist()):
        part = gradient_of(general_robust_loss, x[:, column], y[:, column], alpha=each, reduction="none")
        for got, wanted in zip(whole, part, strict=True):
            torch.testing.assert_close(got[:, column], wanted)
    learned = torch.tensor([1.3, 0.4, -0.7], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: general_robust_loss(x.double(), y.double(), alpha=a), (learned,))


def test_quantiles_of_each_column(device):
    """By hand: τ (y - x) below the target, (1 - τ)(x - y) above it, and the middle of both slopes at it."""
    x = torch.tensor([[1.0, 1.0], [-2.0, -2.0], [0.5, 0.5]], device=device)
    y = torch.tensor([[0.0], [0.0], [0.5]], device=device).expand(3, 2)
    value, g = gradient_of(quantile_loss, x, y, quantile=torch.tensor([0.25, 0.875], device=device), reduction="none")
    assert torch.equal(value, torch.tensor([[0.75, 0.125], [0.5, 1.75], [0.0, 0.0]], device=device))
    assert torch.equal(g, torch.tensor([[0.75, 0.125], [-0.25, -0.875], [0.25, -0.375]], device=device))


BROADCAST = [(l1_loss, F.l1_loss), (mse_loss, F.mse_loss), (huber_loss, F.huber_loss), (smooth_l1_loss, F.smooth_l1_loss)]


@pytest.mark.parametrize(("ours", "theirs"), BROADCAST, ids=[ours.__name__ for ours, _ in BROADCAST])
@pytest.mark.parametrize(
    ("shape", "other"), [((4, 3), (3,)), ((4, 3), (4, 1)), ((4, 3), ()), ((4, 1), (4, 3)), ((3,), (4, 3)), ((4, 1), (1, 3))], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_broadcast(ours, theirs, shape, other, reduction, device):
    """As torch, with its warning, which points at the call; gradients are summed to the shapes of the tensors."""
    torch.manual_seed(0)
    x, y = torch.randn(shape, device=device), torch.randn(other, device=device)
    found = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, y)]
        with pytest.warns(UserWarning, match=r"Using a target size \(torch.Size.*\) that is different to the input size") as warned:
            value = function(*leaves, reduction=reduction)
        assert warned[0].filename == __file__
        value.backward(torch.full_like(value, 1.5))
        found.append((value, *[t.grad for t in leaves]))
    for got, exact in zip(*found, strict=True):
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ours", "theirs"), BROADCAST, ids=[ours.__name__ for ours, _ in BROADCAST])
def test_broadcast_by_the_kernel_and_compiled(ours, theirs, device):
    x, y = torch.randn(4, 3, device=device), torch.randn(4, 1, device=device)
    launches = launch_counts().get("elementwise_kernel", 0)
    with pytest.warns(UserWarning, match="Using a target size"):
        value, g = gradient_of(ours, x, y)
    assert launch_counts()["elementwise_kernel"] > launches
    expected, g_expected = gradient_of(theirs, x, y.expand(4, 3))
    torch._dynamo.reset()
    compiled, g_compiled = gradient_of(torch.compile(ours, fullgraph=True, backend="aot_eager"), x, y)
    for got, exact in ((value, expected), (g, g_expected), (compiled, expected), (g_compiled, g_expected)):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(("ours", "theirs"), BROADCAST, ids=[ours.__name__ for ours, _ in BROADCAST])
def test_shapes_that_do_not_broadcast(ours, theirs):
    with pytest.raises(ValueError, match=r"target must have the shape of input, \(3, 4\), got \(3,\) of torch.float32: for class indices"):
        ours(torch.rand(3, 4), torch.rand(3))

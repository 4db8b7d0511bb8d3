"""The contrastive losses over one similarity matrix: values, layouts, modes, edges, and what every operator promises."""

import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.losses import clip_loss, plain_torch
from lossforge.losses.testing import error

INF, NAN = float("inf"), float("nan")
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def each(x, offset=0, scale=1.0):
    """open_clip's ClipLoss with one loss a pair: two cross entropies, of the logits and of their transpose, against the same labels."""
    x = x * scale
    labels = torch.arange(x.shape[0], device=x.device)
    of_rows = F.cross_entropy(x, labels + offset, reduction="none")
    of_columns = F.cross_entropy(x.T[offset : offset + x.shape[0]], labels, reduction="none")
    return (of_rows + of_columns) / 2


def matrix(rows, columns, device="cpu", spread=2.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).mul(spread).to(device)


def run(function, x, upstream, **options):
    x = x.detach().requires_grad_()
    value = function(x, **options)
    (g,) = torch.autograd.grad(value, x, upstream.to(value.dtype))
    return value.detach(), g


def exact(x, upstream, reduction="mean", **options):
    wide = x.detach().double().requires_grad_()
    value = each(wide, **options)
    value = value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()
    return value.detach(), torch.autograd.grad(value, wide, upstream.double())[0]


CASES = {
    "small": lambda d: (matrix(7, 7, d), {}),
    "one pair": lambda d: (matrix(1, 1, d), {}),
    "one row": lambda d: (matrix(1, 9, d), {"offset": 4}),
    "one column among others": lambda d: (matrix(3, 5, d)[:, 1:4], {}),
    "whole tiles": lambda d: (matrix(128, 128, d), {"scale": 0.5}),
    "several tiles": lambda d: (matrix(130, 200, d), {"offset": 65}),
    "logits far apart": lambda d: (matrix(130, 130, d, 100.0), {}),
    "rows far apart": lambda d: (matrix(128, 128, d) + torch.arange(128.0, device=d)[:, None] * 10, {}),
    "columns far apart": lambda d: (matrix(128, 128, d) + torch.arange(128.0, device=d) * 10, {}),
    "transposed": lambda d: (matrix(70, 70, d).T, {}),
    "strided": lambda d: (matrix(30, 80, d)[:, ::2], {"offset": 7, "scale": -1.3}),
    "expanded": lambda d: (matrix(30, 1, d).expand(30, 30), {}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype, device):
    x, options = CASES[name](device)
    x = x.to(dtype)
    for reduction in ("mean", "sum", "none"):
        upstream = torch.rand(x.shape[0] if reduction == "none" else (), device=device) + 0.5
        value, g = exact(x, upstream, reduction, **options)
        with plain_torch():
            plain, g_plain = run(clip_loss, x, upstream, reduction=reduction, **options)
        for mode in ("backward",) if reduction == "none" else ("forward", "backward"):
            ours, g_ours = run(clip_loss, x, upstream, reduction=reduction, gradient=mode, **options)
            assert ours.dtype == plain.dtype == torch.float32
            assert g_ours.dtype == dtype
            assert error(ours, value) <= error(plain, value) + 3e-6
            assert error(g_ours, g) <= error(g_plain, g) + (2 if mode == "forward" else 1) * DTYPES[dtype]


def test_large_tiles(device):
    """Above 2²⁰ elements tiles are larger, and not square in number."""
    x = matrix(250, 4200, device)
    for options in ({}, {"offset": 3950}) if device == "cuda" else ({"offset": 3950},):  # interpreted, ten seconds each
        value, g = exact(x, torch.tensor(3.0), **options)
        ours, g_ours = run(clip_loss, x, torch.tensor(3.0, device=device), **options)
        assert error(ours, value) < 3e-6
        assert error(g_ours, g) < 3e-6


def test_by_hand(device):
    """Rows: -ln p = ln(1 + e^-ln 3) = ln 4/3 and ln 2; columns: ln(1 + 1/3) of (ln 3, 0) and ln 2 of (0, 0)."""
    x = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], device=device)
    value = clip_loss(x, reduction="none").cpu()
    torch.testing.assert_close(value, torch.tensor([math.log(4 / 3), math.log(2)]))


NUMBER_OR_TENSOR = pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])


@NUMBER_OR_TENSOR
def test_normalizer(make, device):
    x = matrix(6, 6, device)
    value, g = run(clip_loss, x, torch.ones((), device=device), normalizer=make(4.0))
    torch.testing.assert_close(value.double(), each(x.double()).sum() / 4)
    assert error(g, exact(x, torch.tensor(0.25), "sum")[1]) < 3e-6


@NUMBER_OR_TENSOR
def test_a_normalizer_of_0_gives_inf_or_0(make, device):
    x, normalizer = matrix(6, 6, device), make(0.0)
    assert clip_loss(x, normalizer=normalizer) == INF
    value, g = run(clip_loss, x, torch.ones((), device=device), normalizer=normalizer, empty="zero")
    assert value == 0
    assert (g == 0).all()


def test_no_pairs(device):
    none = torch.zeros(0, 3, device=device, requires_grad=True)
    assert clip_loss(none).isnan()
    assert clip_loss(none, empty="zero") == 0
    assert clip_loss(none, reduction="sum") == 0
    assert clip_loss(none, reduction="none").shape == (0,)
    assert torch.autograd.grad(clip_loss(none, reduction="sum"), none)[0].shape == (0, 3)


def with_pairs_that_cannot_be(device):
    x = matrix(5, 8, device)
    x[0, 3] = x[1, 0] = -INF
    return x


@MODES
def test_a_logit_of_minus_infinity_is_a_pair_that_cannot_be(mode, device):
    """As two cross entropies in torch."""
    x = with_pairs_that_cannot_be(device)
    value, g = run(clip_loss, x, torch.ones((), device=device), offset=1, gradient=mode, reduction="sum")
    expected, g_expected = exact(x, torch.tensor(1.0), "sum", offset=1)
    assert error(value, expected) < 3e-6
    assert error(g, g_expected) < 3e-6
    assert g[0, 3] == 0


@MODES
def test_a_true_pair_of_minus_infinity_has_an_infinite_loss(mode, device):
    x = with_pairs_that_cannot_be(device)
    x[2, 3] = -INF
    value, g = run(clip_loss, x, torch.ones((), device=device), offset=1, gradient=mode, reduction="sum")
    assert value == INF
    assert g.isfinite().all()


@pytest.mark.parametrize("special", [NAN, INF])
def test_nan_and_infinity_spoil_their_row_and_column_alone(special, device):
    x = with_pairs_that_cannot_be(device)
    x[2, 4] = special
    value, g = run(clip_loss, x, torch.ones(5, device=device), offset=1, reduction="none")
    assert value.isnan().tolist() == [False, False, True, True, False]
    assert g[2].isnan().all()
    assert g[:, 4].isnan().all()
    assert g[[0, 1, 3, 4]][:, [0, 1, 2, 3, 5, 6, 7]].isfinite().all()


def test_a_tile_of_minus_infinity(device):
    """Whole tiles of a row and of a column that cannot be."""
    x = matrix(130, 130, device)
    x[:64, 64:] = -INF
    value, g = run(clip_loss, x, torch.ones((), device=device))
    expected, g_expected = exact(x, torch.tensor(1.0))
    assert error(value, expected) < 3e-6
    assert error(g, g_expected) < 3e-6


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (ValueError, r"similarity must have shape \(N, M\).*got \(2,\)", (torch.zeros(2),), {}),
        (ValueError, r"0 ≤ offset ≤ M - N, got \(3, 2\) with offset 0", (torch.zeros(3, 2),), {}),
        (ValueError, r"got \(2, 3\) with offset 2", (torch.zeros(2, 3), 2), {}),
        (TypeError, "offset must be a whole number, got float", (torch.zeros(2, 3), 1.0), {}),
        (TypeError, r"offset .* got a tensor of shape \(2, 3\); .*images @ texts.T\)", (torch.zeros(2, 3), torch.zeros(2, 3)), {}),
        (TypeError, "target_b", (torch.zeros(2, 2),), {"target_b": torch.zeros(2), "lam": 0.5}),
        (
            TypeError,
            r"scale must be a number or a 0-d tensor, got a tensor of shape \(1,\)",
            (torch.zeros(2, 2),),
            {"scale": torch.ones(1)},
        ),
    ],
)
def test_errors(kind, message, args, options):
    with pytest.raises(kind, match=message):
        clip_loss(*args, **options)

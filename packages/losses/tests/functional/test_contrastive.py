"""The contrastive losses over one similarity matrix: values, layouts, modes, edges, and what every operator promises."""

import math

import pytest
import torch
import torch.nn.functional as F

from lossforge.kernels import launch_counts
from lossforge.losses import ClipLoss, backend, clip_loss, cross_entropy, plain_torch
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


def test_is_two_cross_entropies(device):
    x = matrix(20, 20, device)
    labels = torch.arange(20, device=device)
    torch.testing.assert_close(clip_loss(x), (cross_entropy(x, labels) + cross_entropy(x.T, labels)) / 2)
    torch.testing.assert_close(clip_loss(x.T), clip_loss(x))


@pytest.mark.skipif(
    not torch.cuda.is_available() and backend(torch.zeros(1)) == "torch", reason="CPU tensors launch no kernel without the interpreter"
)
def test_launches(device):
    """One for the loss, one for the gradient, whatever the mode; what forward wrote is multiplied by what arrives."""
    x = matrix(70, 70, device).requires_grad_()
    for mode, scaled in (("forward", {"scale_kernel": 1}), ("backward", {})):
        before = launch_counts()
        clip_loss(x, gradient=mode).backward()
        after = launch_counts()
        launched = {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}
        assert launched == {"contrastive_kernel": 1, "contrastive_backward_kernel": 1} | scaled


def test_repeated_runs_are_bitwise_equal(device):
    x = matrix(200, 200, device)
    first, second = (run(clip_loss, x, torch.ones((), device=device)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@MODES
def test_retained_graph_and_double_backward(mode, device):
    x = matrix(9, 12, device).requires_grad_()
    value = clip_loss(x, 2, gradient=mode)
    for upstream in (2.0, 1.0, -3.0):
        (g,) = torch.autograd.grad(value, x, torch.tensor(upstream, device=device), retain_graph=True)
        assert error(g, exact(x, torch.tensor(upstream), offset=2)[1]) < 3e-6
    (g,) = torch.autograd.grad(clip_loss(x, 2, gradient=mode) * 3, x, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (g,) = torch.autograd.grad(each(wide, 2).mean() * 3, wide, create_graph=True)
    assert error(second, torch.autograd.grad(g.square().sum(), wide)[0]) < 1e-5


def test_reference_gradients():
    x = matrix(4, 6).double().requires_grad_()
    with plain_torch():
        assert torch.autograd.gradcheck(lambda x: clip_loss(x, 1, "none", scale=0.7), x)
        assert torch.autograd.gradgradcheck(lambda x: clip_loss(x, 1, scale=0.7), x)


@MODES
def test_inplace(mode, device):
    leaf = matrix(70, 70, device).requires_grad_()
    x = leaf * 1
    squares = x.square()
    value = clip_loss(x, inplace=True, gradient=mode)
    memory = x.detach()
    (g,) = torch.autograd.grad(value, leaf, torch.tensor(3.0, device=device), retain_graph=True)
    expected, g_expected = exact(leaf, torch.tensor(3.0))
    assert error(value, expected) < 3e-6
    assert error(g, g_expected) < 3e-6
    assert torch.equal(memory, g)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


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


def test_no_gradient_writes_nothing(device):
    x = matrix(70, 70, device)
    before = launch_counts().get("contrastive_backward_kernel", 0)
    clip_loss(x.requires_grad_(False))
    with torch.no_grad():
        clip_loss(x.requires_grad_())
    assert launch_counts().get("contrastive_backward_kernel", 0) == before


def test_operator(device):
    x = matrix(6, 9, device).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for reduction, in_forward in (("mean", True), ("sum", False), ("none", False)):
        args = (None, "clip", x, None, 2, 1.5, 1.0, reduction, False, in_forward, True)
        result = torch.library.opcheck(torch.ops.lossforge.contrastive.default, args, test_utils=tests)
        assert set(result.values()) == {"SUCCESS"}
    _, rows, columns, _ = torch.ops.lossforge.contrastive(*args)
    g = torch.ops.lossforge.contrastive_backward(*args[:-2], rows, columns, torch.ones(6, device=device), True)
    with pytest.raises(RuntimeError, match="contrastive_backward cannot be differentiated"):
        g.sum().backward()


def test_compile_export_and_func(device):
    x = matrix(9, 12, device)
    expected, g_expected = exact(x, torch.tensor(2.0), offset=2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: clip_loss(x, 2) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    compiled(leaf).backward()
    assert error(leaf.grad, g_expected) < 3e-6

    class Model(torch.nn.Module):
        def forward(self, x):
            return clip_loss(x * 2, 2)

    program = torch.export.export(Model(), (x / 2,))
    assert any("lossforge" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x / 2).double(), expected, check_dtype=False)
    assert error(torch.func.grad(lambda x: clip_loss(x, 2) * 2)(x), g_expected) < 3e-6
    direction = torch.rand_like(x)
    _, slope = torch.func.jvp(lambda x: clip_loss(x, 2) * 2, (x,), (direction,))
    assert error(slope, (direction * g_expected).sum()) < 1e-5


def test_module(device):
    x = matrix(6, 9, device)
    assert torch.equal(ClipLoss(scale=3.0, reduction="sum")(x, 2), clip_loss(x, 2, "sum", scale=3.0))
    assert repr(ClipLoss()) == "ClipLoss(reduction='mean')"
    with pytest.raises(TypeError, match=r"ClipLoss\(\) got an unexpected .* 'scal'; did you mean 'scale'. It takes reduction, "):
        ClipLoss(scal=1.0)


def test_calls_that_repeat(device):
    """The second and third call of a kind take the kept path; their gradients are those of the first."""
    for offset in (0, 1):
        for normalizer in ({}, {"normalizer": torch.tensor(3.0, device=device)}):
            expected = exact(matrix(8, 9, device), torch.tensor(8 / 3 if normalizer else 1.0), offset=offset)[1]
            for _ in range(3):
                leaf = matrix(8, 9, device).requires_grad_()
                value = clip_loss(leaf, offset, **normalizer)
                for _ in range(2):
                    (g,) = torch.autograd.grad(value, leaf, retain_graph=True)
                    assert error(g, expected) < 3e-6


@pytest.mark.parametrize(
    ("kind", "message", "args", "options"),
    [
        (TypeError, "similarity must be of a floating dtype, got torch.int64", (torch.zeros(2, 2).long(),), {}),
        (ValueError, r"similarity must have shape \(N, M\).*got \(2,\)", (torch.zeros(2),), {}),
        (ValueError, r"0 ≤ offset ≤ M - N, got \(3, 2\) with offset 0", (torch.zeros(3, 2),), {}),
        (ValueError, r"got \(2, 3\) with offset 2", (torch.zeros(2, 3), 2), {}),
        (TypeError, "offset must be a whole number, got float", (torch.zeros(2, 3), 1.0), {}),
        (TypeError, r"offset .* got a tensor of shape \(2, 3\); .*images @ texts.T\)", (torch.zeros(2, 3), torch.zeros(2, 3)), {}),
        (TypeError, "target_b", (torch.zeros(2, 2),), {"target_b": torch.zeros(2), "lam": 0.5}),
        (TypeError, "unexpected keyword argument 'softcap'", (torch.zeros(2, 2),), {"softcap": 3.0}),
        (
            TypeError,
            r"scale must be a number or a 0-d tensor, got a tensor of shape \(1,\)",
            (torch.zeros(2, 2),),
            {"scale": torch.ones(1)},
        ),
        (ValueError, "reduction must be one of", (torch.zeros(2, 2),), {"reduction": "batchmean"}),
        (ValueError, 'gradient="forward" needs a scalar', (torch.zeros(2, 2),), {"reduction": "none", "gradient": "forward"}),
    ],
)
def test_errors(kind, message, args, options):
    with pytest.raises(kind, match=message):
        clip_loss(*args, **options)

"""The contract's table of edges, line by line."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from loss_calls import gradient_of, logits

from lossforge import losses as L
from lossforge.losses.base.record import Sample
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import samples

BY_ROWS = pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.template.by_rows], ids=lambda loss: loss.name)
PAIRED = [loss for loss in LOSSES.values() if loss.template.by_rows and "target_b" not in loss.without]
INF, NAN = float("inf"), float("nan")
DENSE = ("elementwise", "rowwise", "nll", "overlap", "divergence")  # templates whose targets may have the shape of the logits
called = [loss for loss in LOSSES.values() if loss.template.name in DENSE]
CALLED = pytest.mark.parametrize("loss", called, ids=lambda loss: loss.name)
EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
MODES = pytest.mark.parametrize("mode", ["forward", "backward"])


def without_rows(loss, device):
    """Yield a call of no rows for each kind of target and set of options."""
    for sample in distinct(loss, device):
        n = sample.x.shape[0] if sample.x.ndim > 1 else 0
        of_rows = {k: v[:0] if isinstance(v, torch.Tensor) and v.ndim and v.shape[0] == n else v for k, v in sample.kwargs.items()}
        target = sample.target if sample.target is None else sample.target[:0] if sample.target.ndim else None
        if n and sample.kwargs.get("dim", -1) != 0 and "normalizer" not in sample.kwargs and (sample.target is None) == (target is None):
            yield Sample(sample.name, sample.x[:0], target, of_rows)


@EACH
def test_no_rows(loss, device):
    """The mean of nothing is nan, or 0 where `empty` says so; the sum is 0, and there are no values.

    Regions of a whole batch exist without samples too, and have the loss 0.
    """
    found = 0
    for sample in without_rows(loss, device):
        of_regions = loss.template.name == "lovasz" or (bool(sample.kwargs.get("batch")) and loss.name != "dice_ce")
        for reduction in loss.reductions:
            for empty in ("nan", "zero"):
                if "empty" not in inspect.signature(loss.function).parameters:
                    continue
                options = {**sample.kwargs, "reduction": reduction, "empty": empty}
                for function in (loss.function, loss.reference):
                    value, g = gradient_of(function, sample.x, sample.target, **options)
                    assert g.shape == sample.x.shape
                    if reduction == "none":
                        assert of_regions or value.numel() == 0
                    else:
                        expected = NAN if reduction != "sum" and empty == "nan" and not of_regions else 0.0
                        assert str(value.item()) == str(expected), (sample.name, reduction, empty)
                    found += 1
    assert found


@MODES
@BY_ROWS
def test_all_ignored(loss, mode, device):
    x = torch.rand(4, 5, device=device)
    target = torch.full((4,), loss.template.ignored, device=device)
    for empty, expected in (("nan", NAN), ("zero", 0.0)):
        value, g = gradient_of(loss.function, x, target, reduction="mean", empty=empty, gradient=mode)
        assert str(value.item()) == str(expected)
        assert torch.equal(g, torch.zeros_like(g))
    value, g = gradient_of(loss.function, x, target, reduction="sum", gradient=mode)
    assert value == 0
    assert torch.equal(g, torch.zeros_like(g))


@MODES
@BY_ROWS
def test_ignored_row_of_nan(loss, mode, device):
    x = torch.rand(4, 5, device=device)
    target = torch.tensor([1, loss.template.ignored, 2, 0], device=device)
    kept = target >= 0
    expected, g_kept = gradient_of(loss.function, x[kept], target[kept], reduction="mean", gradient=mode)
    x[1] = NAN
    value, g = gradient_of(loss.function, x, target, reduction="mean", gradient=mode)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g[kept], g_kept)
    assert torch.equal(g[1], torch.zeros_like(g[1]))


@MODES
@pytest.mark.parametrize("classes", [3, 70])
def test_ignored_pixels_of_nan(classes, mode, device):
    """Where neighbouring rows are read at once, the ignored ones among them too."""
    x = torch.randn(2, classes, 4, 8, device=device)
    target = torch.randint(0, classes, (2, 4, 8), device=device)
    target[:, 1, ::3] = -100
    ignored = (target == -100).unsqueeze(1).expand_as(x)
    expected, g_kept = gradient_of(L.cross_entropy, x, target, gradient=mode)
    value, g = gradient_of(L.cross_entropy, torch.where(ignored, NAN, x), target, gradient=mode)
    assert torch.equal(value, expected)
    assert torch.equal(g, g_kept)
    assert (g[ignored] == 0).all()


@pytest.mark.parametrize("loss", PAIRED, ids=lambda loss: loss.name)
def test_share_of_a_mixup_pair_keeps_its_digits_in_float64(loss):
    x, a, b = torch.rand(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 4, 0])
    exact = torch.full((4,), 0.3, dtype=torch.float64)
    for got, expected in zip(*(gradient_of(loss.function, x, a, target_b=b, lam=lam) for lam in (0.3, exact)), strict=True):
        assert torch.equal(got, expected)


@MODES
def test_all_class_weights_zero(mode, device):
    x = logits(4, 5, device)
    value, g = gradient_of(L.cross_entropy, x, torch.tensor([0, 1, 2, 3], device=device), torch.zeros(5, device=device), gradient=mode)
    assert value.isnan()
    assert g.isnan().all()


@pytest.mark.each("template", "index", ci=True)
@pytest.mark.parametrize("index", [5, -3, 2**33, -(2**40)])
@BY_ROWS
def test_index_out_of_range_raises_with_value_and_row(loss, index):
    target = torch.tensor([1, 4, index, 0])
    with pytest.raises(IndexError, match=rf"targets? must hold .* got {index} at row 2"):
        loss.function(torch.rand(4, 5), target)
    if loss in PAIRED:
        with pytest.raises(IndexError, match=r"target_b must hold .* at row 2"):
            loss.function(torch.rand(4, 5), torch.tensor([1, 4, 2, 0]), target_b=target, lam=0.5)


@pytest.mark.each("template", "index", "mode", ci=True)
@MODES
@pytest.mark.parametrize("index", [5, -3, 2**33, -(2**40)])
@BY_ROWS
def test_index_out_of_range_unchecked_is_nan_in_its_row_alone(loss, index, mode, device, monkeypatch):
    """What a CUDA call gives without validate; on CPU the check is taken away to see the kernels."""
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    x = torch.rand(4, 5, device=device)
    target = torch.tensor([1, 4, index, 0], device=device)
    good = torch.tensor([True, True, False, True], device=device)
    value, g = gradient_of(loss.function, x, target, reduction="none")
    expected, g_good = gradient_of(loss.function, x[good], target[good], reduction="none")
    all_or_any = torch.any if loss.name == "nll" else torch.all  # its gradient is that of one gathered class
    assert value[2].isnan().all()
    assert all_or_any(g[2].isnan())
    torch.testing.assert_close(value[good], expected)
    torch.testing.assert_close(g[good], g_good)
    value, g = gradient_of(loss.function, x, target, reduction="sum", gradient=mode)
    assert value.isnan()
    assert all_or_any(g[2].isnan())
    torch.testing.assert_close(g[good], g_good)
    reference = loss.reference(x, target, reduction="none")
    assert reference[2].isnan().all()
    assert reference[good].isfinite().all()


@pytest.mark.parametrize("output", ["lse", "entropy"])
def test_further_results_of_an_ignored_row_of_nan_that_nothing_uses(output, device):
    x, target = logits(4, 6, device=device), torch.tensor([1, -100, 4, 0], device=device)
    x[1], kept = NAN, [0, 2, 3]

    def loss(x, rows):
        found = L.cross_entropy(x, target[rows], outputs=(output,))
        return found.loss + 0.3 * getattr(found, output)[[rows.index(i) for i in kept]].sum()

    value, g = gradient_of(loss, x, [0, 1, 2, 3])
    expected, g_expected = gradient_of(loss, x[kept], kept)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g[kept], g_expected)
    assert not g[1].any()


def with_infinite_logits(device):
    """A row of one class of +inf; one whose target is -inf; one with another class of -inf; two finite ones."""
    x = logits(5, 6, device=device)
    x[1, 3] = INF
    x[2, 2] = x[3, 0] = -INF
    return x, torch.arange(5, device=device)


def test_values_of_infinite_logits_are_torchs(device):
    x, target = with_infinite_logits(device)
    value, g = gradient_of(L.cross_entropy, x, target, reduction="none")
    torch.testing.assert_close(value.double(), F.cross_entropy(x.double(), target, reduction="none"), equal_nan=True)
    assert value.isfinite().tolist() == [True, False, False, True, True]
    assert value[1].isnan()
    assert value[2] == INF
    assert g[1].isnan().all()
    assert g[2].isfinite().all()
    assert g[3, 0] == 0


@MODES
def test_a_whole_tile_of_minus_infinity(mode, device):
    x = logits(2, 12_000, device)
    x[:, :9_000] = -INF
    target = torch.tensor([11_000, 9_000], device=device)
    value, g = gradient_of(L.cross_entropy, x, target, gradient=mode)
    exact, g_exact = gradient_of(F.cross_entropy, x.double(), target)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.double(), g_exact, rtol=1e-5, atol=1e-9)
    assert torch.equal(g[:, :9_000], torch.zeros_like(g[:, :9_000]))


@MODES
@pytest.mark.parametrize("classes", [8, 9_000])
def test_rows_masked_to_the_lowest_float(classes, mode, device):
    """Masks of finfo.min, a whole row of them too, and a row of -inf, as in torch."""
    x = logits(3, classes, device)
    x[0] = torch.finfo(torch.float32).min
    x[1, 1:] = torch.finfo(torch.float32).min
    x[2] = -INF
    target = torch.tensor([3, 0, 1], device=device)
    value, g = gradient_of(L.cross_entropy, x, target, reduction="none")
    torch.testing.assert_close(value[:2].cpu(), torch.tensor([math.log(classes), 0.0]), rtol=1e-6, atol=1e-6)
    assert value[2].isnan()
    _, g = gradient_of(L.cross_entropy, x, target, reduction="sum", gradient=mode)
    torch.testing.assert_close(g[0, 0].item(), 1 / classes, rtol=1e-5, atol=0)
    assert g[2].isnan().all()


@MODES
def test_probability_zero_at_minus_infinity(mode, device):
    x = logits(2, 4, device)
    x[0, 1] = -INF
    q = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]], device=device)
    value, g = gradient_of(L.cross_entropy, x, q, gradient=mode)
    assert value.isfinite()
    assert g.isfinite().all()
    assert g[0, 1] == 0


@MODES
@pytest.mark.parametrize("classes", [6, 9_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_large_logits(dtype, classes, mode, device):
    """Logits at ±6e4 and rows far from zero: as exact as float32 holds them."""
    x = logits(3, classes, device).to(dtype)
    x[0, :3] = torch.tensor([6e4, -6e4, 5e4])
    x[1] += 1e4
    target = torch.tensor([0, 1, 2], device=device)
    for options in ({}, {"label_smoothing": 0.1}):
        value, g = gradient_of(L.cross_entropy, x, target, reduction="sum", gradient=mode, **options)
        exact, g_exact = gradient_of(F.cross_entropy, x.double(), target, reduction="sum", **options)
        torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(g.double(), g_exact, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-7)
    q = x.float().softmax(1)
    value, _ = gradient_of(L.cross_entropy, x[1:], q[1:], reduction="sum", gradient=mode)
    exact, _ = gradient_of(F.cross_entropy, x[1:].double(), q[1:].double(), reduction="sum")
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)


@MODES
@pytest.mark.parametrize("function", [L.binary_cross_entropy_with_logits, L.preference_bce_with_logits, L.sigmoid_focal_loss])
def test_saturated_binary_logits(function, mode, device):
    x = torch.tensor([1e4, -1e4, 1e4, -1e4, 90.0, -90.0], device=device)
    y = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], device=device)
    value, g = gradient_of(function, x, y, reduction="sum", gradient=mode)
    with_alpha = function is L.sigmoid_focal_loss
    torch.testing.assert_close(value.item(), 1e4 if with_alpha else 2e4, rtol=1e-6, atol=0)
    expected = [0.0, -0.25, 0.75, 0.0, 0.0, 0.0] if with_alpha else [0.0, -1.0, 1.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(g.cpu(), torch.tensor(expected), rtol=1e-6, atol=1e-30)


@MODES
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 0.999, 1.0, 1.5, 2.0, 5.0])
def test_focal_is_finite_at_any_gamma(gamma, mode, device):
    x = torch.tensor([-1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4], device=device)
    for y in (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 0.3)):
        value, g = gradient_of(L.sigmoid_focal_loss, x, y, reduction="sum", gamma=gamma, gradient=mode)
        assert value.isfinite()
        assert g.isfinite().all()
        exact, g_exact = gradient_of(L.sigmoid_focal_loss, x.double(), y.double(), reduction="sum", gamma=gamma)
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(g.double(), g_exact, rtol=1e-4, atol=1e-7)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_of_zero_and_one(dtype, mode, device):
    p = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5], device=device, dtype=dtype)
    y = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 0.5, 1.0], device=device, dtype=dtype)
    value, g = gradient_of(L.preference_bce, p, y, reduction="none")
    torch.testing.assert_close(value.float().cpu(), torch.tensor([0.0, 100.0, 100.0, 0.0, 50.0, 50.0, math.log(2)]), rtol=1e-2, atol=0)
    assert g.isfinite().all()
    assert g[0] == 1
    assert g[3] == -1
    assert g[1] == -g[2] < -3e4
    value, g = gradient_of(L.preference_bce, p, y, reduction="sum", gradient=mode)
    assert value.isfinite()
    assert g.isfinite().all()


def test_probability_gradient_is_exact(device):
    """Down to 1e-12, where torch's own bound on p (1 - p) begins, and without its error in between."""
    p = torch.tensor([1e-11, 1e-8, 1e-4, 0.3, 1 - 2.0**-24], device=device)
    for y in (0.0, 0.4, 1.0):
        value, g = gradient_of(L.preference_bce, p, torch.full_like(p, y), reduction="sum")
        wide = p.double()
        exact = -(y * wide.log() + (1 - y) * (-wide).log1p())
        torch.testing.assert_close(value.double(), exact.sum(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(g.double(), (1 - y) / (1 - wide) - y / wide, rtol=1e-6, atol=0)
    assert L.preference_bce(torch.tensor([1.5, -0.1], device=device), torch.ones(2, device=device), reduction="none").isnan().all()


def test_small_losses_keep_their_digits(device):
    """ln(1 + e^-x) at confident logits, where 1 + e^-x rounds to 1."""
    x = torch.tensor([5.0, 12.0, 18.0, 40.0, 80.0], device=device)
    value, _ = gradient_of(L.binary_cross_entropy_with_logits, x, torch.ones_like(x), reduction="none")
    torch.testing.assert_close(value.double(), torch.log1p(torch.exp(-x.double())), rtol=1e-5, atol=0)


def test_l1_of_nan(device):
    value, g = gradient_of(L.l1_loss, torch.tensor([NAN, 1.0], device=device), torch.zeros(2, device=device), reduction="none")
    assert value[0].isnan()
    assert torch.equal(g.cpu(), torch.tensor([0.0, 1.0]))


def test_groups(device):
    """Each element's weight is its preference times its group's; a group that does not exist is an error, or nan where unchecked."""
    x, y = torch.randn(6, 4, device=device), torch.rand(6, 4, device=device)
    group = torch.tensor([0, 1, 2, 2, 1, 0], device=device)[:, None]
    weights = torch.tensor([0.5, 7.0, 2.0, 7.0, 0.0], device=device)[::2]
    preference = torch.rand(6, 4, device=device)
    value, g = gradient_of(L.preference_bce_with_logits, x, y, preference, group=group, group_weight=weights)
    exact, g_exact = gradient_of(
        F.binary_cross_entropy_with_logits, x.double(), y.double(), weight=preference.double() * weights[group].double()
    )
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(g.double(), g_exact, rtol=1e-5, atol=1e-9)
    if device == "cpu":
        with pytest.raises(IndexError, match="group must hold 0 to 2, got 3 at row"):
            L.preference_bce_with_logits(x, y, group=group + 1, group_weight=weights)


def test_group_out_of_range_unchecked(device, monkeypatch):
    monkeypatch.setattr("lossforge.losses.base.checks.in_range", lambda *args: None)
    x, y = torch.randn(3, 4, device=device), torch.rand(3, 4, device=device)
    group = torch.tensor([0, 7, -1], device=device)[:, None]
    value, g = gradient_of(L.preference_bce_with_logits, x, y, group=group, group_weight=torch.ones(2, device=device), reduction="none")
    assert value[0].isfinite().all()
    assert value[1:].isnan().all()
    assert g[1:].isnan().all()


def test_weighted_mean_of_l1_divides_by_the_weights(device):
    x, y, w = (torch.rand(5, 3, device=device) for _ in range(3))
    torch.testing.assert_close(L.l1_loss(x, y, weight=w), F.l1_loss(x, y, weight=w))


def test_weighted_mean_counts_a_row_of_a_pair(device):
    """A row that only the second index of a mixup pair keeps counts in the divisor."""
    x, w = torch.rand(3, 4, device=device), torch.full((3, 4), 0.5, device=device)
    a, b = torch.tensor([0, -2, -2], device=device), torch.tensor([1, 2, -2], device=device)
    options = {"target_b": b, "lam": 0.25}
    torch.testing.assert_close(L.l1_loss(x, a, weight=w, **options), L.l1_loss(x, a, **options))


@pytest.mark.parametrize("loss", [x for x in called if x.name != "dice_ce"], ids=lambda loss: loss.name)  # which takes no normalizer
def test_a_divisor_of_zero(loss, device):
    """As a number or a tensor: inf, or with empty="zero" a loss and a gradient of 0, on the kernels and in the reference."""
    x = torch.rand(3, 4, device=device)
    x = x.log() if loss.domain == "log-probabilities" else x
    target = torch.tensor([0, 1, 2], device=device) if loss.template.by_rows else torch.rand(3, 4, device=device)
    for function in (loss.function, loss.reference):
        for normalizer in (0, torch.tensor(0.0, device=device)):
            value, _ = gradient_of(function, x, target, reduction="mean", normalizer=normalizer)
            assert value == INF
            value, g = gradient_of(function, x, target, reduction="mean", normalizer=normalizer, empty="zero")
            assert value == 0
            assert torch.equal(g, torch.zeros_like(g))


def distinct(loss, device):
    """Yield a small sample of each kind of target and set of options, whatever the layout."""
    seen = set()
    for sample in samples(loss, device):
        options = {k: v if isinstance(v, str | bool | int | float) else "tensor" for k, v in sample.kwargs.items()}
        kind = (sample.target is None or sample.target.is_floating_point(), sample.x.ndim, str(options))
        if sample.x.numel() <= 150 and kind not in seen:
            seen.add(kind)
            yield sample


def check_agreement(loss, sample, **options):
    """Check that the kernels and plain PyTorch give infinities and nan in the same places."""
    options = {**sample.kwargs, **options}
    found = gradient_of(loss.function, sample.x, sample.target, **options)
    expected = gradient_of(loss.reference, sample.x, sample.target, **options)
    for part, got, wanted in zip(("value", "gradient"), found, expected, strict=True):
        case = f"{part} of the kernel, then of the reference, at {sample.name}"
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}")


DIVIDED = [loss for loss in LOSSES.values() if "normalizer" in inspect.signature(loss.function).parameters]


@pytest.mark.each("template")
@pytest.mark.parametrize("loss", DIVIDED, ids=lambda loss: loss.name)
def test_kernels_and_reference_agree_at_a_divisor_of_zero(loss, device):
    for sample in distinct(loss, device):
        for normalizer in (0, torch.tensor(0.0, device=device)):
            check_agreement(loss, sample, reduction="sum", normalizer=normalizer)
            options = {**sample.kwargs, "reduction": "sum", "normalizer": normalizer, "empty": "zero"}
            for function in (loss.function, loss.reference):
                value, g = gradient_of(function, sample.x, sample.target, **options)
                assert value == 0
                assert not g.any()


BETWEEN_0_AND_1 = ("quality_focal", "varifocal", "mal", "ia_bce", "poly_bce", "distribution_balanced", "siglip")
"""Losses whose targets lie in [0, 1]: of an infinite one, the last refuses it, and the others' slopes are not the same for both."""
HINGES = ("hinge_embedding", "margin_ranking", "triplet_margin")
"""Losses whose slope at nan is that of one side of a hinge, in plain torch perhaps of the other."""
TOO_SMALL = ("probiou",)
"""Losses whose gradients are below the smallest float32 where boxes are far apart: an infinite weight makes nan or infinity of them."""


@pytest.mark.each("template")
@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=[pytest.mark.slow] * (loss.name == "siou")) for loss in LOSSES.values()],  # of 4,000 operations
    ids=lambda loss: loss.name,
)
def test_kernels_and_reference_agree_at_an_infinite_number_and_at_nan(loss, device):
    """In the logits or boxes, a second tensor of them, dense targets, or weights."""
    for sample in distinct(loss, device):
        reduction = "sum" if "normalizer" in sample.kwargs else "none" if "none" in loss.reductions else "mean"
        tensors = {"": sample.x, "of target": sample.target, **sample.kwargs}
        for name, t in tensors.items():
            if (
                not isinstance(t, torch.Tensor) or not t.is_floating_point() or not t.numel() or name in ("lam", "normalizer", "target")
            ):  # the last: a label
                continue
            if name in ("of target", "score") and loss.name in BETWEEN_0_AND_1:
                continue
            if name == "weight" and loss.name in TOO_SMALL:
                continue
            numbers = (INF,) if "weight" in name or name == "var" else (INF, -INF) if loss.name in HINGES else (INF, -INF, NAN)
            if name == "of target" and loss.name == "topk_kl":
                numbers = (-INF,)  # a probability of infinity is refused
            for number in numbers:
                changed = t.clone(memory_format=torch.contiguous_format)
                changed.view(-1)[[0, -1]] = number
                given = {**tensors, name: changed}
                case = Sample(f"{sample.name}, {number} {name}", given.pop(""), given.pop("of target"), given)
                check_agreement(loss, case, reduction=reduction)


@MODES
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [4, 9_000])
def test_an_infinite_class_weight_with_probabilities(classes, smoothing, mode, device):
    """As torch: infinite, but for a row where the class has the probability 0; the gradient is nan for the class alone."""
    x, q = logits(3, classes, device), logits(3, classes, device).flip(0).softmax(1)
    x[0, 1], x[1, 1] = x[0].max() + 1, -30.0  # the largest, one of the least
    q[2, 1] = 0
    weight = torch.ones(classes, device=device)
    weight[1] = INF
    for reduction in ("none", "mean", "sum"):
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
        value, g = (
            gradient_of(L.cross_entropy, x, q, gradient=mode, **options)
            if reduction != "none"
            else gradient_of(L.cross_entropy, x, q, **options)
        )
        expected, wanted = gradient_of(F.cross_entropy, x, q, **options)
        torch.testing.assert_close(value, expected, equal_nan=True)
        torch.testing.assert_close(g, wanted, equal_nan=True)


@MODES
@pytest.mark.parametrize("classes", [4, 9_000])
def test_an_ignored_row_beside_an_infinite_class_weight(classes, mode, device):
    x, target = logits(3, classes, device), torch.tensor([1, -100, 2], device=device)
    weight = torch.ones(classes, device=device)
    weight[0] = INF
    _, g = gradient_of(L.cross_entropy, x, target, weight=weight, label_smoothing=0.1, reduction="sum", gradient=mode)
    assert (g[1] == 0).all()
    assert (g[0, 1:] == INF).all()


@MODES
@pytest.mark.parametrize("classes", [4, 9_000])
def test_cross_entropy_at_a_divisor_of_zero(classes, mode, device):
    """As a sum over 0 in torch: nan for the target, infinite for other classes."""
    x, target = logits(3, classes, device), torch.tensor([1, -100, 2], device=device)
    value, g = gradient_of(L.cross_entropy, x, target, normalizer=0, reduction="sum", gradient=mode)
    expected, wanted = gradient_of(lambda x: F.cross_entropy(x, target, reduction="sum") / 0.0, x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g, wanted, equal_nan=True)


@pytest.mark.parametrize("known", [True, False], ids=["", "not known to be finite"])
def test_plain_torch_with_weights_is_differentiated_forward_twice(known, monkeypatch):
    """As forward over reverse, whether or not the host may see that all weights are finite."""
    if not known:
        monkeypatch.setattr("lossforge.losses.templates.plain_forms.infinite._finite", lambda t: False)
    x, index, weights = logits(4, 6, "cpu").double(), torch.tensor([0, 5, 2, 1]), torch.rand(6, dtype=torch.float64)
    boxes = torch.tensor([[0.0, 0.0, 2.0, 3.0], [1.0, 1.0, 4.0, 2.0]], dtype=torch.float64)
    calls = {
        "ce": lambda x: LOSSES["ce"].reference(x, index, weight=weights),
        "mse": lambda x: LOSSES["mse"].reference(x, x.detach() * 0.5, weight=weights),
        "kl": lambda x: LOSSES["kl"].reference(x, x.detach() * 0.5, weight=weights[:4]),
        "giou": lambda x: LOSSES["giou"].reference(boxes + 0.1 * x[:2, :4], boxes * 1.1, weight=weights[:2], reduction="sum"),
    }
    for name, call in calls.items():
        twice = torch.func.jacfwd(torch.func.jacfwd(call))(x)
        torch.testing.assert_close(twice, torch.func.hessian(call)(x), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.large
def test_strides_beyond_32_bits(device):
    """A small view of a large tensor: the offsets, not the count of elements, need 64 bits."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # untouched pages take no memory
    memory = torch.empty(2**31 + 2**11, dtype=torch.float16, device=device)
    x = memory.as_strided((3, 4, 5), (2**30, 9, 2))
    x.copy_(torch.rand(3, 4, 5))
    exact = F.l1_loss(x.float(), torch.zeros(3, 4, 5, device=device), reduction="sum")
    torch.testing.assert_close(L.l1_loss(x, torch.zeros(3, 4, 5, device=device), reduction="sum"), exact)
    x = memory.as_strided((3, 4), (2**30, 2))
    x.copy_(torch.rand(3, 4))
    target = torch.tensor([0, 1, 2], device=device)
    exact = F.cross_entropy(x.float(), target)
    torch.testing.assert_close(L.cross_entropy(x, target), exact)
    torch.testing.assert_close(L.sigmoid_focal_loss(x, target), L.sigmoid_focal_loss(x.double(), target).to(x.dtype))
    for options in ({"offset": 1}, {"offset": -1, "dim": 0}, {"offset": -(2**40)}):
        torch.testing.assert_close(L.siglip_loss(x, **options), L.siglip_loss(x.double(), **options).float())


WEIGHTED = [loss for loss in LOSSES.values() if loss.template.name == "rowwise" and "weight" in inspect.signature(loss.function).parameters]
WEIGHTED = [loss for loss in WEIGHTED if "z_loss" not in loss.without]


@pytest.mark.parametrize("scale", [1.0, 10.0, 0.1])
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("loss", WEIGHTED, ids=lambda loss: loss.name)
def test_z_loss_is_averaged_over_rows(loss, mode, scale, device):
    """Whatever the class weights, in a mixup pair too: z_loss times the mean of lse² over the rows that count."""
    target = torch.tensor([3, 0, -100, 6, 1], device=device)
    weight = scale * (torch.arange(7, device=device) + 1.0)
    log_prior = {"log_prior": torch.zeros(7, device=device)} if "log_prior" in inspect.signature(loss.function).parameters else {}
    pair = {"target_b": torch.tensor([-100, 2, -100, 0, 1], device=device), "lam": torch.tensor([0.3, 0.5, 0.2, 0.9, 1.0], device=device)}
    both = {**pair, "target_b": target.flip(0)}
    for options in ({"weight": weight}, {"weight": weight, **pair}, both):
        x = logits(5, 7, device).requires_grad_()
        value = loss.function(x, target, reduction="mean", z_loss=0.1, gradient=mode, **options, **log_prior)
        value.backward()
        wide = x.detach().double().requires_grad_()
        wider = {k: v.double() if v.is_floating_point() else v for k, v in {**options, **log_prior}.items()}
        exact = loss.reference(wide, target, reduction="mean", **wider) + 0.1 * wide.logsumexp(1).square()[target >= 0].mean()
        exact.backward()
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)


ELEMENTWISE = [loss for loss in LOSSES.values() if loss.template.name == "elementwise"]


MORE_OPTIONS = {"asymmetric": ({"gamma_pos": 0.0, "clip": None}, {"gamma_neg": 0.0, "clip": 0.1})}


@pytest.mark.each("loss")
@pytest.mark.parametrize("indices", [False, True], ids=["dense", "indices"])
@pytest.mark.parametrize("loss", ELEMENTWISE, ids=lambda loss: loss.name)
def test_kernels_and_reference_agree_at_infinite_inputs(loss, indices, device):
    """Infinite inputs, probabilities outside of [0, 1], exponents of 0, weights of 0 and inf, a divisor of 0: values and gradients."""
    values = [-0.5, 1.5, 0.0, 1.0, INF, -INF, NAN] if loss.domain == "probabilities" else [INF, -INF, 0.0, 200.0, -200.0, NAN, 3.0]
    x = torch.tensor(values, device=device)[:, None].expand(-1, 3).contiguous()
    y = torch.tensor([0.0, 0.3, 1.0], device=device).expand_as(x)
    y = torch.tensor([0, 1, -1, 2, 0, -2, 1], device=device) if indices else y
    infinite = torch.where(torch.arange(x.numel(), device=device) % 2 == 0, 1.0, INF).view_as(x)
    name = next((name for name in ("weight", "preference") if name in inspect.signature(loss.function).parameters), None)
    calls = [{"reduction": "none"}]
    calls += [{"reduction": "sum", "normalizer": 0}, {"reduction": "mean", "normalizer": torch.tensor(0.0, device=device)}]
    calls += [{**call, "empty": "zero"} for call in calls[1:]]
    if name is not None:
        calls += [{**call, name: w} for call in calls[:2] for w in (x * 0, infinite, -infinite)]
    if name == "preference":
        calls.append({"reduction": "none", "group": y.long() if not indices else x.long() * 0, "group_weight": infinite[0, :2]})
    for options in ({}, *loss.options, *MORE_OPTIONS.get(loss.name, ())):
        if indices and ("smoothing" in options or "log_target" in options):
            continue  # which take no class indices
        options = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in options.items()}
        for call in calls:
            found = gradient_of(loss.function, x, y, **{**call, **options})
            expected = gradient_of(loss.reference, x, y, **{**call, **options})
            for part, got, wanted in zip(("value", "gradient"), found, expected, strict=True):
                case = f"{part} of the kernel, then of the reference, at {values}, {call | options}"
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize("alpha", [0.25, -1.0])
def test_focal_without_an_exponent_is_torchvisions_at_infinite_logits(alpha, device):
    x, y = (t.flatten().to(device) for t in torch.meshgrid(torch.tensor([INF, -INF, 2.0]), torch.tensor([0.0, 0.3, 1.0]), indexing="ij"))
    exact, theirs = gradient_of(torchvision.ops.sigmoid_focal_loss, x, y, alpha=alpha, gamma=0.0)
    assert theirs.isfinite().all()
    for function in (L.sigmoid_focal_loss, LOSSES["focal"].reference):
        value, g = gradient_of(function, x, y, alpha=alpha, gamma=0.0)
        torch.testing.assert_close(g, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value[~exact.isnan()], exact[~exact.isnan()])  # torch's is nan at -inf, where ours may be inf


@pytest.mark.parametrize(
    "function",
    [
        L.binary_cross_entropy_with_logits,
        L.sigmoid_focal_loss,
        L.preference_bce_with_logits,
        L.siglip_loss,
        L.quality_focal_loss,
        L.varifocal_loss,
    ],
)
def test_a_right_class_at_infinity_takes_its_limit(function, device):
    """Kernels and reference: 0 with a gradient of 0. A wrong one's loss is infinite."""
    x = torch.full((2, 3), -INF, device=device)
    x[:, 1] = INF
    for dtype in (torch.float32, torch.float64):  # which the reference computes
        value, g = gradient_of(function, x.to(dtype), torch.tensor([1, 0], device=device), reduction="none")
        assert torch.equal(value[0], torch.zeros_like(value[0]))
        assert torch.equal(g[0], torch.zeros_like(g[0]))
        assert torch.equal(value[1].cpu(), torch.tensor([INF, INF, 0.0], dtype=dtype))


@pytest.mark.each
@MODES
def test_infinite_weights_are_torchs(mode, device):
    """The gradient is the slope times infinity; nan where the slope is 0. As the tensors that torch.func wraps have it, and graphs."""
    x, y = torch.tensor([-3.0, 0.5, 3.0, 1e4, 1.0], device=device), torch.tensor([0.0, 0.3, 1.0, 1.0, 0.0], device=device)
    weight = torch.tensor([INF, INF, -INF, INF, 2.0], device=device)
    exact, theirs = gradient_of(F.binary_cross_entropy_with_logits, x, y, weight=weight, reduction="sum")
    assert theirs[:3].isinf().all()
    ours = L.binary_cross_entropy_with_logits
    reference = LOSSES["bce"].reference

    def loss(x, weight, function=ours):
        return function(x, y, weight=weight, reduction="sum")

    found = {
        "kernel": gradient_of(ours, x, y, weight=weight, reduction="sum", gradient=mode)[1],
        "reference": gradient_of(reference, x, y, weight=weight, reduction="sum")[1],
        "float64": gradient_of(ours, x.double(), y.double(), weight=weight.double(), reduction="sum")[1].float(),
        "func": torch.func.grad(loss)(x, weight),
        "vmap": torch.func.vmap(torch.func.grad(loss))(torch.stack([x, x]), torch.stack([weight, weight]))[1],
        "compiled func": torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(x, weight),
        "compiled": gradient_of(torch.compile(lambda x: loss(x, weight, reference), fullgraph=True, backend="aot_eager"), x)[1],
    }
    for how, gradient in found.items():
        torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=0, equal_nan=True, msg=lambda m, how=how: f"{how}: {m}")
    value, slope = torch.func.jvp(lambda x: loss(x, weight), (x,), (torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0], device=device),))
    torch.testing.assert_close(value, exact, equal_nan=True)
    assert slope.isnan()  # 0 · inf
    _, slope = torch.func.jvp(lambda x: ours(x, y[:3], weight=weight[:3]), (x[:3],), (torch.ones_like(x[:3]),))
    assert slope == INF


def test_a_weights_transforms_and_second_order(device):
    """Of finite weights and a finite divisor, which the same functions pass."""
    x, y, weight = (torch.rand(4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    divisor = torch.tensor(3.0, dtype=torch.float64, device=device)

    def loss(x, y, weight):
        return L.sigmoid_focal_loss(x, y, weight=weight, gamma=1.5, reduction="sum", normalizer=divisor)

    assert torch.autograd.gradcheck(loss, (x, y, weight), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, (x, y, weight), check_fwd_over_rev=True)


OF_ITEMS = (
    "elementwise",
    "pointwise",
    "boxes",
    "vectors",
    "distribution",
    "divergence",
    "topk",
)  # templates with a weight of elements or rows
WEIGHTED = [loss for loss in LOSSES.values() if loss.template.name in OF_ITEMS and "weight" in inspect.signature(loss.function).parameters]


def weight_of_items(loss, sample: Sample) -> torch.Tensor:
    """Return a weight for each item of a call, an element, a row or a box: every third is 0."""
    x = sample.x
    shape = x.shape if loss.template.name in ("elementwise", "pointwise") else x.shape[:1]
    weight = torch.rand(shape, device=x.device) + 0.5
    weight.view(-1)[::3] = 0
    return weight


@pytest.mark.each("template", "held")
@pytest.mark.parametrize("held", [NAN, INF])
@pytest.mark.parametrize("loss", WEIGHTED, ids=lambda loss: loss.name)
def test_an_item_of_weight_0_adds_nothing_whatever_it_holds(loss, held, device):
    """By the kernels and in plain torch, in value and gradient; its target holds nan."""
    plain = [s for s in samples(loss, device) if "weight" not in s.kwargs and "normalizer" not in s.kwargs and s.x.ndim == 2]
    for sample in (plain[0], *[s for s in plain[1:] if s.name in ("class index", "sliced", "all entries", "several tiles")]):
        weight = weight_of_items(loss, sample)
        nothing = (weight == 0).view(*weight.shape, *[1] * (sample.x.ndim - weight.ndim)).expand(sample.x.shape)
        target = sample.target
        if isinstance(target, torch.Tensor) and target.is_floating_point() and target.shape == sample.x.shape:
            target = torch.where(nothing, NAN, target)
        for function in (loss.function, loss.reference):
            for options in ({"reduction": "none"}, {"reduction": "mean", "gradient": "forward"}, {"reduction": "sum"}):
                if options["reduction"] not in loss.reductions:
                    continue
                call = {**sample.kwargs, **options, "weight": weight}
                expected, g_expected = gradient_of(function, sample.x, sample.target, **call)
                value, g = gradient_of(function, torch.where(nothing, held, sample.x), target, **call)
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(g, g_expected, rtol=1e-6, atol=1e-7)
                assert value.isfinite().all()
                assert (g[nothing] == 0).all()

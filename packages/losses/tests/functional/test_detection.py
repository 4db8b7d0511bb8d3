"""Losses of detectors against mmdetection's formulas and transformers' criteria in float64; scores a row, their edges and errors."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision.ops
from loss_calls import gradient_of

from lossforge.kernels.elements.elementwise import launch as element_launch
from lossforge.kernels.tiles import ElementTiles, trial
from lossforge.losses import (
    QualityFocalLoss,
    VarifocalLoss,
    binary_cross_entropy_with_logits,
    distribution_focal_loss,
    gaussian_focal_loss,
    ia_bce_loss,
    mal_loss,
    plain_torch,
    quality_focal_loss,
    sigmoid_focal_loss,
    varifocal_loss,
)
from lossforge.losses.testing import error

MODES = pytest.mark.parametrize("mode", ["forward", "backward"])
BOTH = pytest.mark.parametrize("function", [quality_focal_loss, varifocal_loss])
NAN, INF = float("nan"), float("inf")
SATURATED = [-6e4, -1e4, -200.0, -100.0, -88.0, -30.0, -17.0, -1.0, 0.0, 0.5, 17.0, 30.0, 88.0, 100.0, 200.0, 1e4, 6e4]


def their_quality_focal(x, label, score, beta):
    """Each row's loss as mmdetection has it: all as negatives, the positives then replaced."""
    zero = F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none") * x.sigmoid() ** beta
    rows = (label >= 0).nonzero().squeeze(1)
    at = rows, label[rows]
    positive = F.binary_cross_entropy_with_logits(x[at], score[rows], reduction="none") * (score[rows] - x[at].sigmoid()).abs() ** beta
    return zero.index_put(at, positive).sum(1)


def their_varifocal(x, y, alpha, gamma, iou_weighted):
    """Each element's loss as mmdetection has it: the weight depends on the logits and is differentiated."""
    positive = (y > 0).to(x.dtype)
    w = (y if iou_weighted else 1.0) * positive + alpha * (x.sigmoid() - y).abs() ** gamma * (1 - positive)
    return F.binary_cross_entropy_with_logits(x, y, reduction="none") * w


def boxes(device, classes=7):
    """Logits, class indices with background, and scores, of float32."""
    label = torch.tensor([0, 3, -1, classes - 1, 2, -1, 1, 3], device=device)
    return torch.randn(8, classes, device=device) * 3, label, torch.rand(8, device=device)


def dense(label, score, classes):
    return torch.where(label[:, None] == torch.arange(classes, device=label.device), score[:, None], 0.0)


@MODES
@pytest.mark.parametrize("classes", [7, 16])
@pytest.mark.parametrize("beta", [2.0, 0.5, 1.0, 3.0])
def test_quality_focal_is_mmdetections(beta, classes, mode, device):
    x, label, score = boxes(device, classes)
    weight = torch.rand(8, device=device)
    wide, quality = x.double().requires_grad_(), score.double().requires_grad_()
    rows = their_quality_focal(wide, label, quality, beta)
    for options, exact in (
        ({"gradient": mode}, rows.mean()),
        ({"gradient": mode, "reduction": "sum"}, rows.sum()),
        ({"gradient": mode, "weight": weight[:, None], "normalizer": 3}, (rows * weight).sum() / 3),
    ):
        g_exact, g_score = torch.autograd.grad(exact, (wide, quality), retain_graph=True)
        for y, q in ((label, score), (dense(label, score, classes), None)):
            value, g = gradient_of(quality_focal_loss, x, y, q, beta, **options)
            assert error(value, exact.detach()) < 1e-6
            assert error(g, g_exact) < 3e-6
        leaf = score.clone().requires_grad_()
        (g,) = torch.autograd.grad(quality_focal_loss(x, label, leaf, beta, **options), leaf)
        assert error(g, g_score) < 3e-6
    each = quality_focal_loss(x, label, score, beta, reduction="none")
    assert error(each.sum(1), rows.detach()) < 1e-6


@MODES
@pytest.mark.parametrize("classes", [7, 16])
@pytest.mark.parametrize("options", [(0.75, 2.0, True), (0.7, 2.0, False), (0.3, 0.5, True), (1.5, 3.0, False), (0.75, 0.0, True)], ids=str)
def test_varifocal_is_mmdetections(options, classes, mode, device):
    x, label, score = boxes(device, classes)
    score[3] = 0.0  # a positive that is no better than background is a negative
    wide, quality = x.double().requires_grad_(), score.double().requires_grad_()
    each = their_varifocal(wide, dense(label, quality, classes), *options)
    for reduction, exact in (("mean", each.mean()), ("sum", each.sum())):
        g_exact, g_score = torch.autograd.grad(exact, (wide, quality), retain_graph=True)
        for y, q in ((label, score), (dense(label, score, classes), None)):
            value, g = gradient_of(varifocal_loss, x, y, q, *options, reduction, gradient=mode)
            assert error(value, exact.detach()) < 1e-6
            assert error(g, g_exact) < 3e-6
        leaf = score.clone().requires_grad_()
        (g,) = torch.autograd.grad(varifocal_loss(x, label, leaf, *options, reduction), leaf)
        scored = score > 0  # at 0 there is no derivative
        assert error(g[scored], g_score[scored]) < 3e-6


def of_transformers(loss, x, label, boxes, wanted):
    """A loss of matched queries (B, Q, C) as transformers' criterion has it, its sum over all elements."""
    from transformers.loss import loss_deimv2, loss_lw_detr, loss_rt_detr

    indices = [(row.nonzero()[:, 0], torch.arange(len(row.nonzero()), device=row.device)) for row in label >= 0]
    targets = [{"class_labels": each[q], "boxes": box[q]} for each, box, (q, _) in zip(label, wanted, indices, strict=True)]
    places = functools.partial(loss_rt_detr.RTDetrLoss._get_source_permutation_idx, None)
    given = {"num_classes": x.shape[2], "_get_source_permutation_idx": places, "focal_alpha": 0.3}
    outputs = {"logits": x, "pred_boxes": boxes}, targets, indices, 1
    if loss == "vfl":
        made = loss_rt_detr.RTDetrLoss.loss_labels_vfl(SimpleNamespace(alpha=0.6, gamma=1.5, **given), *outputs)
    elif loss == "mal":
        made = loss_deimv2.Deimv2Loss.loss_labels_mal(SimpleNamespace(gamma=1.5, mal_alpha=0.6, **given), *outputs)
    else:
        made = loss_lw_detr.LwDetrImageLoss.loss_labels(SimpleNamespace(**given), *outputs)
    return made.popitem()[1]


@MODES
@pytest.mark.parametrize("loss", ["vfl", "mal", "ia_bce"])
def test_matched_queries_as_transformers(loss, mode, device):
    """RT-DETR's, DEIM's and LW-DETR's losses, among them of a matched box that does not overlap its target."""
    pytest.importorskip("transformers")
    make = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 6, 5, generator=make, dtype=torch.float64) * 3).to(device)
    label = torch.tensor([[3, -1, 0, 4, -1, -1], [-1, 1, 1, -1, 2, -1]], device=device)
    boxes = torch.cat([0.3 + 0.1 * torch.rand(2, 6, 2, generator=make), 0.2 + 0.1 * torch.rand(2, 6, 2, generator=make)], 2)
    wanted = boxes.roll(1, 1)
    wanted[1, 4, :2] = 0.9
    boxes, wanted = boxes.double().to(device), wanted.double().to(device)
    corners = [torchvision.ops.box_convert(each.flatten(0, 1), "cxcywh", "xyxy") for each in (boxes, wanted)]
    score = torchvision.ops.box_iou(*corners).diagonal().view(2, 6)
    assert score[1, 4] == 0
    function, options = {
        "vfl": (varifocal_loss, {"alpha": 0.6, "gamma": 1.5, "hold_weight": True, "positive_at_zero": True}),
        "mal": (mal_loss, {"gamma": 1.5, "alpha": 0.6}),
        "ia_bce": (ia_bce_loss, {"alpha": 0.3}),
    }[loss]
    wide = x.clone().requires_grad_()
    exact = of_transformers(loss, wide, label, boxes, wanted)
    (g_exact,) = torch.autograd.grad(exact, wide)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        value, g = gradient_of(function, x.to(dtype), label, score.to(dtype), reduction="sum", gradient=mode, **options)
        assert error(value, exact.detach()) < limit
        assert error(g, g_exact) < limit
    half, _ = gradient_of(function, x.half(), label, score.half(), reduction="sum", **options)  # float16 has no score just above 0
    wide = function(x.half().double(), label, score.half().double(), reduction="sum", **options)
    assert error(half, wide) < 1e-5


@MODES
@pytest.mark.parametrize("hyper", [{"gamma": 2.0}, {"gamma": 0.7}])
def test_the_gradient_of_a_score_and_of_dense_qualities(hyper, mode, device):
    """A quality is differentiated, the prediction in a weight or a target is not; and dense zeros are negatives."""
    x, label, score = boxes(device)
    for function, exponent in ((mal_loss, hyper["gamma"]), (ia_bce_loss, 0.75)):
        wide, quality = x.double(), score.double().requires_grad_()
        p, q = wide.sigmoid(), dense(label, quality, 7)
        positive = q > 0
        raised = torch.where(positive, torch.where(positive, q, 1.0) ** exponent, 0.0)
        t = raised if function is mal_loss else torch.where(positive, (p**0.25 * raised).clamp(min=0.01), 0.0)
        w = torch.where(positive, 1.0, p ** hyper["gamma"])
        exact = (w * F.binary_cross_entropy_with_logits(wide, t, reduction="none")).sum()
        (g_exact,) = torch.autograd.grad(exact, quality)
        for of_class in (True, False):
            leaf = score.clone().requires_grad_()
            given = (label, leaf) if of_class else (dense(label, leaf, 7), None)
            value = function(x, *given, reduction="sum", gradient=mode, **hyper)
            assert error(value.detach(), exact.detach()) < 1e-6
            assert error(torch.autograd.grad(value, leaf)[0], g_exact) < 3e-6


@pytest.mark.parametrize("gamma", [2.0, 1.5])
def test_a_held_weight_at_saturated_logits(gamma, device):
    """The derivative of a negative is α p^γ p, finite where its loss is infinite, and that of a positive y (p - y)."""
    x = torch.tensor([[-INF, -6e4, -30.0, 0.0, 30.0, 6e4, INF]], device=device).T
    for label, expected in ((-1, 0.75 * x.double().sigmoid() ** (gamma + 1)), (0, x.double().sigmoid() - 1)):
        index = torch.full((7,), label, device=device)
        for score in (None, torch.ones(7, device=device)):
            _, g = gradient_of(
                varifocal_loss, x[1:6], index[1:6], None if score is None else score[1:6], gamma=gamma, hold_weight=True, reduction="sum"
            )
            torch.testing.assert_close(g, expected[1:6].float())
        value, g = gradient_of(varifocal_loss, x, index, gamma=gamma, hold_weight=True, reduction="sum")
        assert value == INF
        torch.testing.assert_close(g, expected.float())


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 1.5, 2.0, 5.0])
@pytest.mark.parametrize(("function", "name"), [(quality_focal_loss, "beta"), (varifocal_loss, "gamma")])
def test_finite_and_exact_at_any_logit(function, name, gamma, dtype, mode, device):
    """Targets of 0 and 1 as tensors, as class indices and as scores; and a soft one."""
    x = torch.tensor(SATURATED, device=device, dtype=dtype)[:, None]
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    first, background = torch.zeros(len(x), dtype=torch.long, device=device), torch.full((len(x),), -1, device=device)
    cases = [(ones, ones), (zeros, zeros), (ones * 0.3, ones * 0.3), (first, ones), (background, zeros)]
    exact_options = {name: gamma, "reduction": "sum"}
    for y, y_exact in cases:
        value, g = gradient_of(function, x, y, gradient=mode, **exact_options)
        assert value.isfinite()
        assert g.isfinite().all()
        exact, g_exact = gradient_of(function, x.double(), y_exact.double(), **exact_options)
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(g.double(), g_exact, rtol=2e-3 if dtype == torch.float16 else 1e-4, atol=1e-6)
    value, g = gradient_of(function, x, first, ones[:, 0] * 0.3, gradient=mode, **exact_options)
    exact, g_exact = gradient_of(function, x.double(), ones.double() * (ones * 0.3).double(), **exact_options)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(g.double(), g_exact, rtol=2e-3 if dtype == torch.float16 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("classes", [80, 91])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [quality_focal_loss, varifocal_loss, sigmoid_focal_loss, binary_cross_entropy_with_logits])
def test_tiles_of_nothing_but_background(function, dtype, classes, device, monkeypatch):
    """They take a formula of their own, in one launch with tiles that hold a class or an ignored row; each program goes over many tiles."""
    monkeypatch.setattr(element_launch, "PROGRAMS", 3)
    x = torch.randn(101, classes, device=device).to(dtype) * 4
    label = torch.full((101,), -1, device=device)
    label[[3, 40, 99]] = torch.tensor([0, classes - 1, 5], device=device)
    label[70], x[70] = -2, NAN
    counts = label != -2
    wide = x.double().requires_grad_()
    options = {"reduction": "sum"} | ({"alpha": 0.25} if function is sigmoid_focal_loss else {})
    exact = function(wide[counts], dense(label, torch.ones(101, device=device), classes).double()[counts], **options)
    (g_exact,) = torch.autograd.grad(exact, wide)
    with trial(ElementTiles(64 if dtype == torch.float32 else 256, 2)):  # float32 tells tiles apart that are shorter than a row
        value, g = gradient_of(function, x, label, **options)
    assert error(value, exact.detach()) < 1e-6
    assert error(g, g_exact) < (3e-6 if dtype == torch.float32 else 2.0**-8)
    assert (g[~counts] == 0).all()


@MODES
@BOTH
def test_ignored_rows_and_background(function, mode, device):
    """An ignored row may hold nan as logits and score; a score of background is not looked at; a mean counts what is kept."""
    x, label, score = boxes(device)
    kept = torch.ones(8, dtype=torch.bool, device=device)
    kept[[1, 6]] = False
    expected, g_kept = gradient_of(function, x[kept], label[kept], score[kept], gradient=mode)
    label[~kept], score[~kept], score[label == -1], x[1] = -2, NAN, NAN, NAN
    value, g = gradient_of(function, x, label, score, gradient=mode)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(g[kept], g_kept)
    assert (g[~kept] == 0).all()
    reference, _ = gradient_of(function, x.double(), label, score.double())
    torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("gamma", [2.0, 1.3])
def test_without_a_score_it_is_focal(gamma, device):
    x, label, _ = boxes(device)
    got = gradient_of(quality_focal_loss, x, label, beta=gamma, reduction="sum")
    torch.testing.assert_close(got, gradient_of(sigmoid_focal_loss, x, label, -1, gamma, "sum"), rtol=1e-6, atol=1e-7)
    ones = torch.ones(8, device=device)
    torch.testing.assert_close(got, gradient_of(quality_focal_loss, x, label, ones, gamma, "sum"), rtol=1e-5, atol=1e-6)
    got = gradient_of(varifocal_loss, x, label, gamma=gamma)
    torch.testing.assert_close(got, gradient_of(varifocal_loss, x, label, ones, gamma=gamma), rtol=1e-5, atol=1e-6)


def test_half_precision_scores_of_pixels(device):
    x = torch.randn(2, 5, 3, 4, device=device)
    label, score = torch.randint(-1, 5, (2, 3, 4), device=device), torch.rand(2, 3, 4, device=device).half()
    y = torch.where(label.unsqueeze(1) == torch.arange(5, device=device).view(5, 1, 1), score.unsqueeze(1).float(), 0.0)
    for module in (QualityFocalLoss(dim=1), VarifocalLoss(dim=1)):
        torch.testing.assert_close(gradient_of(module, x, label, score=score), gradient_of(module, x, y))


@pytest.mark.parametrize(
    ("function", "target", "options", "kind", "message"),
    [
        (quality_focal_loss, "index", {"score": torch.rand(3, 1)}, ValueError, r"score must have the shape of target, \(3,\), got"),
        (quality_focal_loss, "index", {"score": torch.ones(3).int()}, TypeError, "score must be of a floating dtype, got torch.int32"),
        (varifocal_loss, "dense", {"score": torch.rand(3)}, TypeError, "target must hold .* where score is given, got torch.float32"),
        (varifocal_loss, "dense", {"positive_at_zero": True}, TypeError, "class indices where positive_at_zero=True, got torch.float32"),
        (mal_loss, "index", {"score": torch.ones(3).int()}, TypeError, "score must be of a floating dtype, got torch.int32"),
        (sigmoid_focal_loss, "dense", {"score": torch.rand(3)}, TypeError, "targets must hold class indices where score is given"),
        (quality_focal_loss, "dense", {"dim": 3}, ValueError, "dim must be at least -2 and below 2 .* got 3"),
    ],
)  # fmt: skip
def test_mistakes(function, target, options, kind, message):
    y = torch.rand(3, 4) if target == "dense" else torch.tensor([0, 1, 2])
    with pytest.raises(kind, match=message):
        function(torch.rand(3, 4), y, **options)


def test_a_score_excludes_a_pair():
    index = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="score and target_b exclude each other, got both"):
        quality_focal_loss(torch.rand(3, 4), index, torch.rand(3), target_b=index, lam=0.5)


def their_distribution_focal(x, y):
    """Each target's loss as mmdetection has it: two cross entropies, of the bins on the left and on the right."""
    left = y.long().clamp(max=x.shape[-1] - 2)
    of_left, of_right = (F.cross_entropy(x.movedim(-1, 1), bin, reduction="none") for bin in (left, left + 1))
    return of_left * (left + 1 - y) + of_right * (y - left)


def sides(device, bins=16):
    """Logits of boxes' sides, and where the sides are: on the first and the last bin too."""
    y = torch.rand(6, 4, device=device) * (bins - 1)
    y[0, 0], y[0, 1], y[0, 2] = 0, bins - 1, 1
    return torch.randn(6, 4, bins, device=device) * 3, y


@MODES
@pytest.mark.parametrize("bins", [2, 16, 17])
def test_distribution_focal_is_mmdetections(bins, mode, device):
    x, y = sides(device, bins)
    weight, boxes = torch.rand(6, 4, device=device), torch.rand(6, 1, device=device)
    wide = x.double().requires_grad_()
    each = their_distribution_focal(wide, y.double())
    for options, exact in (
        ({}, each.mean()),
        ({"reduction": "sum"}, each.sum()),
        ({"weight": weight}, (each * weight).mean()),
        ({"weight": boxes, "normalizer": 4 * boxes.sum()}, (each * boxes).sum() / (4 * boxes.sum())),
    ):
        (g_exact,) = torch.autograd.grad(exact, wide, retain_graph=True)
        value, g = gradient_of(distribution_focal_loss, x, y, gradient=mode, **options)
        assert error(value, exact.detach()) < 1e-6
        assert error(g, g_exact) < 3e-6
    assert error(distribution_focal_loss(x, y, reduction="none"), each.detach()) < 1e-6


@MODES
@pytest.mark.parametrize("bad", [-1e-3, 15.001, -1e9, 1e9, NAN, math.inf, -math.inf])
def test_a_target_outside_of_the_bins(bad, mode, device):
    """Its own loss and gradient are nan, and no other's; of weight 0 they are 0, whatever the target."""
    x, y = sides(device)
    good, g_good = gradient_of(distribution_focal_loss, x, y, reduction="none")
    y[3, 2] = bad
    there = torch.zeros_like(y, dtype=torch.bool)
    there[3, 2] = True
    for weight in (None, torch.where(there, 0.0, 1.0)):
        value, g = gradient_of(distribution_focal_loss, x, y, "none", weight=weight)
        with plain_torch():
            plain, g_plain = gradient_of(distribution_focal_loss, x, y, "none", weight=weight)
        for a, b in ((value, g), (plain, g_plain)):
            assert (a[there].isnan() if weight is None else a[there] == 0).all()
            assert (b[there].isnan() if weight is None else b[there] == 0).all()
            torch.testing.assert_close(a[~there], good[~there])
            torch.testing.assert_close(b[~there], g_good[~there])
    value, g = gradient_of(distribution_focal_loss, x, y, reduction="sum", gradient=mode)
    assert value.isnan()
    torch.testing.assert_close(g[~there], g_good[~there])
    assert g[there].isnan().all()


@MODES
def test_infinite_and_large_logits_of_bins(mode, device):
    x = torch.zeros(5, 4, device=device)
    y = torch.full((5,), 1.5, device=device)
    x[0, 3], x[1, 2], x[2, 0], x[3] = -math.inf, -math.inf, math.inf, torch.tensor([6e4, -6e4, 5e4, -6e4])
    value = distribution_focal_loss(x, y, reduction="none")
    torch.testing.assert_close(value[[0, 3, 4]].cpu(), torch.tensor([math.log(3), 65000.0, math.log(4)]), rtol=1e-6, atol=0)
    assert value[1] == math.inf
    assert value[2].isnan()
    for half in (x, x.half()):
        _, g = gradient_of(distribution_focal_loss, half, y, reduction="sum", gradient=mode)
        assert g[[0, 1, 3, 4]].isfinite().all()
        assert g[0, 3] == 0
        assert g[2].isnan().all()
        torch.testing.assert_close(g[3].float().cpu(), torch.tensor([1.0, -0.5, -0.5, 0.0]))


@pytest.mark.large
@pytest.mark.parametrize("strides", [(2**30, 3), (3, 2**29)], ids=["rows", "bins"])
def test_bins_beyond_32_bits(strides, device):
    torch.utils.deterministic.fill_uninitialized_memory = False  # untouched pages take no memory
    x = torch.empty(2**31 + 2**11, dtype=torch.float16, device=device).as_strided((3, 4), strides)
    x.copy_(torch.rand(3, 4))
    y = torch.tensor([0.5, 2.0, 3.0], device=device)
    (value, g), (exact, g_exact) = (gradient_of(distribution_focal_loss, t, y) for t in (x, x.contiguous()))
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(g, g_exact)


@pytest.mark.parametrize(
    ("args", "options", "kind", "message"),
    [
        ((torch.rand(3, 1), torch.zeros(3)), {}, ValueError, r"input must have shape \(..., bins\) with 2 to 4096 bins, got \(3, 1\)"),
        ((torch.rand(3, 4097), torch.zeros(3)), {}, ValueError, r"with 2 to 4096 bins, got \(3, 4097\)"),
        ((torch.rand(()), torch.zeros(())), {}, ValueError, r"with 2 to 4096 bins, got \(\)"),
        ((torch.rand(3, 4), torch.zeros(3, 4)), {}, ValueError, r"target must have the shape .* without its bins, \(3,\), got \(3, 4\)"),
        ((torch.rand(3, 4), torch.zeros(3).long()), {}, TypeError, "target must be of a floating dtype, got torch.int64"),
        ((torch.rand(3, 4), torch.zeros(3, device="meta")), {}, ValueError, "target must be on the device of input, cpu, got meta"),
        ((torch.rand(3, 4), torch.zeros(3)), {"weight": torch.rand(2)}, ValueError, r"weight must broadcast .* \(3,\), got \(2,\)"),
    ],
)  # fmt: skip
def test_mistakes_of_distributions(args, options, kind, message):
    with pytest.raises(kind, match=message):
        distribution_focal_loss(*args, **options)


def their_gaussian_focal(p, y, alpha, gamma, pos_weight, neg_weight):
    """Each pixel's loss as mmdetection has it, on probabilities."""
    eps, peak = 1e-12, (y == 1).to(p.dtype)
    positive = -(p + eps).log() * (1 - p) ** alpha * peak
    return pos_weight * positive - neg_weight * (1 - p + eps).log() * p**alpha * (1 - y) ** gamma


@pytest.mark.parametrize("alpha", [2.0, 0.5, 0.0])
def test_gaussian_focal_of_saturated_logits(alpha, device):
    """At peaks and elsewhere: finite, exact against float64, 0 where right; mmdetection's on probabilities is bounded by 28."""
    x = torch.tensor(SATURATED, device=device)
    for y in (0.0, 0.5, 1.0):
        target = torch.full_like(x, y)
        value, g = gradient_of(gaussian_focal_loss, x, target, alpha, 4.0, reduction="sum")
        u = (-x if y == 1 else x).double()
        w = (1.0 if y == 1 else (1 - y) ** 4) * torch.exp(alpha * F.logsigmoid(u))
        entropy = -F.logsigmoid(-u)
        slope = w * (u.sigmoid() + alpha * (-u).sigmoid() * entropy) * (-1 if y == 1 else 1)
        assert error(value, (w * entropy).sum()) < 1e-6
        assert error(g, slope) < 3e-6


def test_gaussian_focal_of_half_logits_and_a_heatmap_of_float32(device):
    """0.999 is no peak in float32, and becomes one in bfloat16."""
    x, y = torch.zeros(4, device=device, dtype=torch.bfloat16), torch.tensor([0.999, 1.0, 0.5, 0.0], device=device)
    exact = their_gaussian_focal(x.double().sigmoid(), y.double(), 2.0, 4.0, 1.0, 1.0)
    assert error(gaussian_focal_loss(x, y, reduction="sum"), exact.sum()) < 1e-5
    rounded = gaussian_focal_loss(x, y.bfloat16(), reduction="none")
    assert rounded[0] == rounded[1]

"""The losses of examples/losses against their papers' formulas, one number at a time: values and gradients in float64, and by kernels."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
import torchvision.ops
from pages import ROOT
from torch.distributions import Dirichlet, kl_divergence

from lossforge.losses import ldam_loss, logit_adjusted_cross_entropy
from lossforge.losses.custom.find import named

FOLDER = ROOT / "examples" / "losses"
G = torch.Generator().manual_seed(0)
PAIR = [torch.randn(4, 5, generator=G, dtype=torch.float64) * 3, torch.rand(4, 5, generator=G, dtype=torch.float64)]
LOW = torch.rand(2, 6, 2, generator=G, dtype=torch.float64)
BOXES = [torch.cat([low, low + 0.3 + torch.rand(6, 2, generator=G, dtype=torch.float64)], 1) for low in LOW]


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def example(file, name):
    return named(f"{FOLDER / file}.py:{name}")


def wing(x, y, w=10.0, e=2.0):
    d = abs(x - y)
    return w * math.log(1 + d / e) if d < w else d - (w - w * math.log(1 + w / e))


def adaptive_wing(x, y, omega=14.0, theta=0.5, e=1.0, alpha=2.1):
    d, p = abs(x - y), alpha - y
    a = omega / (1 + (theta / e) ** p) * p * (theta / e) ** (p - 1) / e
    return omega * math.log(1 + (d / e) ** p) if d < theta else a * d - (theta * a - omega * math.log(1 + (theta / e) ** p))


def berhu(x, y, c=0.2):
    d = abs(x - y)
    return d if d <= c else (d * d + c * c) / (2 * c)


def expectile(x, y, tau=0.7):
    return abs(tau - (y < x)) * (x - y) ** 2


def charbonnier(x, y, e=1e-3):
    return math.hypot(x - y, e)


def log_l1(x, y):
    return math.log(1 + abs(x - y))


def center_and_size(box):
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]


def nwd(a, b, c=12.8):
    (ax, ay, aw, ah), (bx, by, bw, bh) = center_and_size(a), center_and_size(b)
    return 1 - math.exp(-math.sqrt((ax - bx) ** 2 + (ay - by) ** 2 + ((aw - bw) ** 2 + (ah - bh) ** 2) / 4 + 1e-7) / c)


def inner_iou(a, b, ratio=0.75):
    (ax, ay, aw, ah), (bx, by, bw, bh) = center_and_size(a), center_and_size(b)
    aw, ah, bw, bh = (ratio * side for side in (aw, ah, bw, bh))
    width = min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)
    height = min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    shared = max(width, 0) * max(height, 0)
    return 1 - shared / (aw * ah + bw * bh - shared + 1e-7)


def plain_iou(a, b):
    shared = math.prod(max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]), 0) for i in (0, 1))
    return shared / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared)


def hull(a, b):
    return tuple(max(a[i + 2], b[i + 2]) - min(a[i], b[i]) for i in (0, 1))


def mpdiou(a, b):
    return 1 - plain_iou(a, b) + (math.dist(a[:2], b[:2]) ** 2 + math.dist(a[2:], b[2:]) ** 2) / (640**2 + 640**2)


def shape_iou(a, b, scale=0.7):
    (ax, ay, aw, ah), (bx, by, bw, bh) = center_and_size(a), center_and_size(b)
    ww, hh = (2 * side**scale / (bw**scale + bh**scale) for side in (bw, bh))
    distance = (hh * (ax - bx) ** 2 + ww * (ay - by) ** 2) / sum(side**2 for side in hull(a, b))
    costs = hh * abs(aw - bw) / max(aw, bw), ww * abs(ah - bh) / max(ah, bh)
    return 1 - plain_iou(a, b) + distance + 0.5 * sum((1 - math.exp(-cost)) ** 4 for cost in costs)


def piou_v2(a, b, lam=1.3):
    p = sum(abs(a[i] - b[i]) / (b[i % 2 + 2] - b[i % 2]) for i in range(4)) / 4
    q = lam * math.exp(-p)
    return 3 * q * math.exp(-(q**2)) * (2 - plain_iou(a, b) - math.exp(-(p**2)))


def focaler_iou(a, b, low=0.0, high=0.95):
    return 1 - min(max((plain_iou(a, b) - low) / (high - low), 0), 1)


def alpha_iou(a, b, alpha=3.0):
    return 1 - plain_iou(a, b) ** alpha


def wiou_v1(a, b):
    (ax, ay, _, _), (bx, by, _, _) = center_and_size(a), center_and_size(b)
    return math.exp(((ax - bx) ** 2 + (ay - by) ** 2) / sum(side**2 for side in hull(a, b))) * (1 - plain_iou(a, b))


OPTIONS = {"shape_iou": {"scale": 0.7}}
EXACT = {"nwd", "inner_iou"}
"""Of boxes those whose eps the formulas here have too."""
OF_FORMULAS = {
    **{f.__name__: ("regression", f, PAIR) for f in (wing, adaptive_wing, berhu, expectile, charbonnier, log_l1)},
    **{f.__name__: ("overlap", f, BOXES) for f in (nwd, inner_iou, mpdiou, shape_iou, piou_v2, focaler_iou, alpha_iou)},
}


@pytest.mark.parametrize("name", OF_FORMULAS)
def test_formulas(name):
    file, paper, given = OF_FORMULAS[name]
    loss = functools.partial(example(file, name), **OPTIONS.get(name, {}))
    one_by_one = zip(*(t.tolist() if file == "overlap" else t.flatten().tolist() for t in given), strict=True)
    expected = torch.tensor([paper(*each) for each in one_by_one], dtype=torch.float64)
    limit = 1e-9 if file == "regression" or name in EXACT else 1e-6
    torch.testing.assert_close(loss(*given, reduction="none").flatten(), expected, rtol=limit, atol=limit)
    x = given[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, given[1], reduction="none"), x, atol=1e-4)
    single = given[0].float().requires_grad_()  # by kernels, here interpreted
    loss(single, given[1].float(), reduction="sum").backward()
    loss(x, given[1], reduction="sum").backward()
    torch.testing.assert_close(single.grad.double(), x.grad, rtol=1e-4, atol=1e-4)


def test_wise_iou():
    """Its derivative takes the smallest box around both, and the weights of v2 and v3, for constants."""
    a, b = BOXES
    values = [wiou_v1(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    losses = [1 - plain_iou(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    mean = torch.tensor(0.6, dtype=torch.float64)
    betas = [each / 0.6 for each in losses]
    factors = {
        "wiou_v1": [1.0] * 6,
        "wiou_v2": [beta**0.5 for beta in betas],
        "wiou_v3": [beta / (3.0 * 1.9 ** (beta - 3.0)) for beta in betas],
    }
    for name, factor in factors.items():
        loss = example("overlap", name)
        state = () if name == "wiou_v1" else (mean,)
        given = {"reduction": "mean"} if name == "wiou_v1" else {}
        x = a.clone().requires_grad_()
        found = loss(x, b, *state, **given)
        expected = sum(f * value for f, value in zip(factor, values, strict=True)) / 6
        assert found.item() == pytest.approx(expected, rel=1e-6)
        (slope,) = torch.autograd.grad(found, x)
        low, high = torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:])
        center = (x[:, :2] + x[:, 2:] - b[:, :2] - b[:, 2:]) / 2
        away = (center.square().sum(1) / (high - low).square().sum(1)).exp()
        iou = torchvision.ops.box_iou(x, b).diagonal()
        exact = (torch.tensor(factor, dtype=torch.float64) * away * (1 - iou)).mean()
        torch.testing.assert_close(slope, torch.autograd.grad(exact, x)[0], rtol=1e-5, atol=1e-7)
        single = a.float().requires_grad_()  # by kernels, here interpreted
        (narrow,) = torch.autograd.grad(loss(single, b.float(), *(each.float() for each in state), **given), single)
        torch.testing.assert_close(narrow.double(), slope, rtol=1e-4, atol=1e-5)


def test_equal_inputs_have_finite_gradients():
    for name, (file, _, given) in {**OF_FORMULAS, "wiou_v1": ("overlap", wiou_v1, BOXES)}.items():
        x = given[1].float().requires_grad_()
        out = example(file, name)(x, given[1].float())
        assert torch.autograd.grad(out, x)[0].isfinite().all(), name


def test_keypoints():
    x, y = normal(2, 3, 4, 2).abs() * 9
    visible, area, sigmas = (
        torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]),
        torch.tensor([80.0, 50.0, 9.0]),
        torch.tensor([0.3, 0.5, 0.2, 0.9]),
    )
    terms = [[math.exp(-float(((x - y)[i, k] ** 2).sum()) / (2 * area[i] * (2 * sigmas[k]) ** 2)) for k in range(4)] for i in range(3)]
    rows = [
        sum(t for t, v in zip(row, seen, strict=True) if v) / max(sum(seen), 1) for row, seen in zip(terms, visible.tolist(), strict=True)
    ]
    loss = example("keypoints", "oks_loss")
    assert loss(x, y, visible, area, sigmas).item() == pytest.approx(1 - sum(rows) / 3, rel=1e-6)
    assert loss(y, y, visible[:1], area[:1], sigmas).item() == 0
    assert torch.autograd.gradcheck(lambda x: loss(x, y, visible, area.double(), sigmas.double()), x.requires_grad_())


def test_ordinal():
    x, y = normal(5, 3), torch.tensor([0, 3, 1, 2, 2])

    def bce(value, above):
        return math.log(1 + math.exp(-value if above else value))

    items = [[bce(float(x[i, k]), y[i] > k) for k in range(3)] for i in range(5)]
    kept = [items[i][k] for i in range(5) for k in range(3) if y[i] >= k]
    coral, corn = (example("ordinal", name) for name in ("coral_loss", "corn_loss"))
    assert coral(x, y).item() == pytest.approx(sum(map(sum, items)) / 5)
    assert corn(x, y).item() == pytest.approx(sum(kept) / len(kept))
    for loss in (coral, corn):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, y), x.clone().requires_grad_())


def test_ranking():
    x, y = normal(2, 3, 4)
    net, mle = 0.0, 0.0
    for scores, relevance in zip(x.tolist(), y.tolist(), strict=True):
        p, q = ([math.exp(v) / sum(map(math.exp, row)) for v in row] for row in (scores, relevance))
        net -= sum(b * math.log(a) for a, b in zip(p, q, strict=True)) / 3
        order = sorted(range(4), key=lambda i: -relevance[i])
        mle -= sum(math.log(math.exp(scores[i]) / sum(math.exp(scores[j]) for j in order[place:])) for place, i in enumerate(order)) / 3
    listnet, listmle = (example("ranking", name) for name in ("listnet_loss", "listmle_loss"))
    assert listnet(x, y).item() == pytest.approx(net)
    assert listmle(x, y).item() == pytest.approx(mle)
    for loss in (listnet, listmle):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, y), x.clone().requires_grad_())


@pytest.mark.parametrize(("t1", "t2"), [(0.8, 1.2), (0.2, 4.0), (1.0, 1.0)])
def test_noise(t1, t2):
    """The normaliser by bisection; at t1 = t2 = 1 it is the cross entropy."""
    x, y = normal(5, 30) * 3, torch.tensor([0, 29, 1, 2, 2])

    def power(v):
        return math.exp(v) if t2 == 1 else max(0.0, 1 + (1 - t2) * v) ** (1 / (1 - t2))

    total = 0.0
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        low, high = max(row), max(row) + 1e6
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(power(v - middle) for v in row) > 1 else (low, middle)
        p = [power(v - low) for v in row]
        log = math.log(p[label]) if t1 == 1 else (p[label] ** (1 - t1) - 1) / (1 - t1)
        total -= log + (1 - sum(v ** (2 - t1) for v in p)) / (2 - t1)
    loss = example("noise", "bi_tempered_loss")
    assert loss(x, y, t1, t2).item() == pytest.approx(total / 5)
    if t1 == t2 == 1:
        assert loss(x, y, t1, t2).item() == pytest.approx(torch.nn.functional.cross_entropy(x, y).item())
    assert torch.autograd.gradcheck(lambda x: loss(x, y, t1, t2), x.requires_grad_())


def test_classes_of_unequal_size():
    """LDAM and balanced softmax one row at a time, by the library's own losses, and by kernels."""
    x, y, counts = normal(6, 4).tanh(), torch.tensor([0, 3, 1, 2, 2, 3]), torch.tensor([500, 100, 20, 3])
    ldam, balanced = (example("classes", name) for name in ("ldam_loss", "balanced_softmax_loss"))
    expected = [0.0, 0.0]
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        moved = [30 * v for v in row]
        moved[label] -= 30 * 0.5 * (3 / counts[label].item()) ** 0.25
        shifted = [v + math.log(n) for v, n in zip(row, counts.tolist(), strict=True)]
        for i, each in enumerate((moved, shifted)):
            expected[i] += (math.log(sum(map(math.exp, each))) - each[label]) / 6
    margin = 0.5 * (counts.min() / counts) ** 0.25
    ours = [lambda x: ldam(x, y, counts), lambda x: balanced(x, y, counts)]
    library = [lambda x: ldam_loss(x, y, margin, 30.0), lambda x: logit_adjusted_cross_entropy(x, y, counts.log())]
    for loss, own, value in zip(ours, library, expected, strict=True):
        assert loss(x).item() == pytest.approx(value, rel=1e-6)  # the margins and logarithms of whole counts are of float32
        wide, single = x.clone().requires_grad_(), x.float().requires_grad_()
        assert torch.autograd.gradcheck(loss, wide)
        (slope,) = torch.autograd.grad(loss(wide), wide)
        assert torch.equal(slope, torch.autograd.grad(own(wide), wide)[0])
        torch.testing.assert_close(torch.autograd.grad(loss(single), single)[0].double(), slope, rtol=1e-5, atol=1e-6)


def test_focal_of_each_class():
    x, y, gamma = normal(6, 4), torch.tensor([0, 3, 1, 2, 2, 3]), torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    loss = example("classes", "class_focal")
    p = x.softmax(1)[torch.arange(6), y].tolist()
    expected = sum(-((1 - v) ** g) * math.log(v) for v, g in zip(p, gamma[y].tolist(), strict=True)) / 6
    assert loss(x, y, gamma=gamma).item() == pytest.approx(expected)
    wide, single = x.clone().requires_grad_(), x.float().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, gamma: loss(x, y, gamma=gamma), (wide, gamma.clone().requires_grad_()))
    (slope,) = torch.autograd.grad(loss(wide, y, gamma=gamma), wide)
    torch.testing.assert_close(torch.autograd.grad(loss(single, y, gamma=gamma.float()), single)[0].double(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_power_score(k):
    """One row at a time; half the Brier score at k = 2, and the bi-tempered loss without a heavy tail."""
    x, y = normal(6, 4), torch.tensor([0, 3, 1, 2, 2, 3])
    loss, bi_tempered = example("classes", "power_score"), example("noise", "bi_tempered_loss")
    expected = 0.0
    for p, label in zip(x.softmax(1).tolist(), y.tolist(), strict=True):
        own = -math.log(p[label]) if k == 1 else (1 - p[label] ** (k - 1)) / (k - 1)
        expected += (own - (1 - sum(v**k for v in p)) / k) / 6
    assert loss(x, y, k=k).item() == pytest.approx(expected)
    if 1 <= k <= 2:
        assert loss(x, y, k=k).item() == pytest.approx(bi_tempered(x, y, 2 - k, 1.0).item())
    if k == 2:
        assert loss(x, y).item() == pytest.approx((x.softmax(1) - torch.nn.functional.one_hot(y, 4)).square().sum(1).mean().item() / 2)
    wide, single = x.clone().requires_grad_(), x.float().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, y, k=k), wide)
    (slope,) = torch.autograd.grad(loss(wide, y, k=k), wide)
    torch.testing.assert_close(torch.autograd.grad(loss(single, y, k=k), single)[0].double(), slope, rtol=1e-5, atol=1e-6)


def test_evidential():
    """The expected cross entropy under the Dirichlet distribution, and torch's own divergence."""
    x, y = normal(5, 3), torch.tensor([0, 2, 1, 2, 2])
    alpha = 1 + torch.nn.functional.softplus(x)
    wrong = alpha.clone()
    wrong[torch.arange(5), y] = 1
    divergence = kl_divergence(Dirichlet(wrong), Dirichlet(torch.ones_like(wrong)))
    loss = example("evidential", "evidential_loss")
    risk = loss(x, y, 0.0)
    assert loss(x, y, 0.4).item() == pytest.approx((risk + 0.4 * divergence.mean()).item())
    torch.manual_seed(0)
    sampled = -Dirichlet(alpha).sample((200_000,))[:, torch.arange(5), y].log().mean()
    assert risk.item() == pytest.approx(sampled.item(), rel=0.01)
    assert torch.autograd.gradcheck(lambda x: loss(x, y), x.clone().requires_grad_())


@pytest.mark.parametrize("shape", [(9, 12), (5, 6, 7)], ids=["image", "volume"])
def test_segmentation(shape):
    """MONAI's values; of unified focal those without its clamp of probabilities."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monai = pytest.importorskip("monai.losses")
    x, y = normal(2, 2, *shape), (normal(2, *shape) > 0.3).long()
    cldice, unified = (example("segmentation", name) for name in ("soft_cldice_loss", "unified_focal_loss"))
    one_hot = torch.stack([1 - y, y], 1).double()
    for iterations in (3, 1):
        theirs = monai.SoftclDiceLoss(iter_=iterations, include_background=False, smooth=1e-12)
        assert cldice(x, y, iterations).item() == pytest.approx(theirs(x.softmax(1), one_hot).item())
    focal, tversky = monai.unified_focal_loss.AsymmetricFocalLoss, monai.unified_focal_loss.AsymmetricFocalTverskyLoss
    p, given = x.softmax(1), {"delta": 0.6, "gamma": 0.3}
    expected = 0.2 * focal(**given)(p, one_hot) + 0.8 * tversky(**given)(p, one_hot)
    assert unified(x, y, 0.2, **given).item() == pytest.approx(expected.item(), rel=1e-5)
    for loss in (cldice, unified):
        small = x[..., :4].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, y[..., :4]), small)


def test_depth():
    """Scale and shift by numpy's least squares; another scale and shift of the prediction changes nothing."""
    x, y, valid = normal(2, 9, 11).abs(), 3 * normal(2, 11, 9).mT.abs() + 1, normal(2, 9, 11) > -0.5
    loss = example("depth", "affine_invariant_loss")
    expected = 0.0
    for a, b, m in zip(x, y, valid, strict=True):
        line = torch.stack([a[m], torch.ones_like(a[m])], 1)
        scale, shift = np.linalg.lstsq(line.numpy(), b[m].numpy(), rcond=None)[0]
        r = scale * a + shift - b
        expected += (r[m] ** 2).sum() / (2 * m.sum()) / 2
        for k in range(4):
            e, v = r[:: 2**k, :: 2**k], m[:: 2**k, :: 2**k]
            edges = sum(abs(e[i, j] - e[i, j - 1]) for i in range(len(e)) for j in range(1, e.shape[1]) if v[i, j] and v[i, j - 1])
            edges += sum(abs(e[i, j] - e[i - 1, j]) for i in range(1, len(e)) for j in range(e.shape[1]) if v[i, j] and v[i - 1, j])
            expected += 0.5 * edges / max(v.sum(), 1) / 2
    assert loss(x, y, valid).item() == pytest.approx(float(expected))
    assert loss(7 * x + 2, y, valid).item() == pytest.approx(float(expected))
    assert torch.autograd.gradcheck(lambda x: loss(x, y, valid), x.requires_grad_())

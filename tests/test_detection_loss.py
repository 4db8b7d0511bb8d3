"""The losses of detectors: equal to torchvision's, finite where references are not, one launch over the batch."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision.ops
from stock_detectors import CLASSES, HEIGHT, KINDS, WIDTH, batch, detector, learn, pyramid, stock, stock_losses, trained_without_boxes

from lab.base.errors import UserError
from lab.detectors.detection import LOSSES as DETECTION_LOSSES
from lab.detectors.detection.loss import DECODED, ENCODED, DetectionLoss
from lab.detectors.detection.types import DetectorOutput

BOX_LOSSES = (*ENCODED, *DECODED)
COMBINATIONS = sorted({*itertools.product(["focal"], BOX_LOSSES), *itertools.product(DETECTION_LOSSES, ["ciou"])})
STOCK = {"retinanet": "l1", "fcos": "giou"}


def parts(batch, image):
    """The batch of one of its images."""
    return SimpleNamespace(**{name: value[image : image + 1] for name, value in vars(batch).items()})


def own_loss(model, data):
    matched = model.match(data)
    return model.loss(model(data.images), matched, matched.positives.clamp(min=1))


def head_gradients(model, losses, upstream):
    model.zero_grad()
    sum(factor * loss for factor, loss in zip(upstream, losses.values(), strict=False)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.head.named_parameters()}


def assert_same(ours, theirs, rtol):
    """Relative to the largest element."""
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=rtol, atol=rtol * theirs[name].abs().max().item(), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("counts", [(4, 0, 7), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_stock_weights_give_the_stock_loss(kind, counts, implementation):
    """RetinaNet's divides by the positives of each image and takes the mean of the images; the sum of a batch of one image is the same."""
    body = pyramid().eval()
    theirs = stock(kind, body)
    ours = detector(kind, DetectionLoss("focal", STOCK[kind], implementation=implementation), body)
    ours.load_state_dict(theirs.state_dict())
    data = batch(counts)
    each = [data] if kind == "fcos" else [parts(data, image) for image in range(len(counts))]
    upstream = (1.5, 0.7, 2.0)
    for piece in each:
        expected, found = stock_losses(theirs, piece), own_loss(ours, piece)
        assert set(found) == set(expected)
        assert_same({name: value.detach() for name, value in found.items()}, expected, 1e-6)
        ours_gradients = head_gradients(ours, {name: found[name] for name in expected}, upstream)
        theirs_gradients = head_gradients(theirs, expected, upstream)
        biases = [name for name in theirs_gradients if name.endswith("bias")]  # sums over all positions, most of which cancel
        assert_same(ours_gradients, {name: theirs_gradients.pop(name) for name in biases}, 1e-4)
        assert_same(ours_gradients, theirs_gradients, 1e-5)


def example(kind, counts=(5,), seed=0):
    """A detector's coder, outputs at random that require gradients, and targets, without the network."""
    model = detector(kind, DetectionLoss(), pyramid())
    matched = model.match(batch(counts, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    shape = matched.labels.shape
    regression = 0.5 * torch.randn(*shape, 4, generator=generator)
    values = {
        "logits": torch.randn(*shape, CLASSES, generator=generator) - 2,
        "regression": regression.abs() * 4 if kind == "fcos" else regression,
        "centerness": torch.randn(shape, generator=generator) if kind == "fcos" else None,
    }
    output = DetectorOutput(**{name: None if value is None else value.requires_grad_() for name, value in values.items()})
    return model.coder, output, matched


def run(criterion, coder, output, matched, normalizer=None, upstream=(1.5, 0.7, 2.0)):
    """Losses, and gradients of the outputs that are there."""
    losses = criterion(output, matched, coder, matched.positives if normalizer is None else normalizer)
    leaves = [value for value in output if value is not None]
    gradients = torch.autograd.grad(sum(f * v for f, v in zip(upstream, losses.values(), strict=False)), leaves)
    return {name: value.detach() for name, value in losses.items()}, dict(zip(output._fields, gradients, strict=False))


@pytest.mark.parametrize(("name", "box_loss"), COMBINATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_torch(kind, name, box_loss):
    """On one-hot targets and copied rows. timm keeps logarithms above ln 1e-8, which these logits do not reach."""
    ours, our_gradients = run(DetectionLoss(name, box_loss), *example(kind, (5, 0)))
    theirs, their_gradients = run(DetectionLoss(name, box_loss, implementation="torch"), *example(kind, (5, 0)))
    assert_same(ours, theirs, 1e-5)
    assert_same(our_gradients, their_gradients, 1e-4)
    assert all(value > 0 for value in ours.values())


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_hyper_parameters_and_weights_count(kind, implementation):
    coder, output, matched = example(kind)
    plain = DetectionLoss("focal", "smooth_l1", implementation=implementation)
    changed = DetectionLoss(
        "focal", "smooth_l1", hyper={"gamma": 1.0, "alpha": 0.6}, box_hyper={"beta": 0.2}, box_weight=3.0, implementation=implementation
    )
    losses, _ = run(changed, coder, output, matched)
    positive, target = matched.positive, F.one_hot(matched.labels.clamp(min=0), CLASSES).float()
    target = torch.where(positive[..., None], target, 0.0)[matched.labels != -2]
    focal = torchvision.ops.sigmoid_focal_loss(output.logits[matched.labels != -2].double(), target.double(), 0.6, 1.0, "sum")
    boxes = F.smooth_l1_loss(output.regression[positive], coder.encode(matched.anchors, matched.boxes)[positive], reduction="sum", beta=0.2)
    torch.testing.assert_close(losses["classification"].double(), focal.detach() / positive.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["boxes"], 3 * boxes.detach() / positive.sum(), rtol=1e-5, atol=0)
    assert losses["boxes"] != run(plain, coder, output, matched)[0]["boxes"]


@pytest.mark.parametrize("name", ["quality_focal", "varifocal"])
@pytest.mark.parametrize("kind", KINDS)
def test_quality_is_the_overlap_and_has_no_gradient(kind, name):
    """By hand: each positive's class has the IoU of its decoded box as its target; the boxes' gradient is that of their own loss."""
    coder, output, matched = example(kind)
    losses, gradients = run(DetectionLoss(name, "giou"), coder, output, matched)
    predicted = coder.decode(output.regression.detach(), matched.anchors)
    where = matched.positive.nonzero()
    overlap = torch.stack([torchvision.ops.box_iou(predicted[n, a][None], matched.boxes[n, a][None])[0, 0] for n, a in where])
    target = torch.zeros(output.logits.shape, dtype=torch.float64)
    target[where[:, 0], where[:, 1], matched.labels[matched.positive]] = overlap.double()
    x = output.logits.detach().double()
    p, cross_entropy = x.sigmoid(), F.binary_cross_entropy_with_logits(x, target, reduction="none")
    scale = (target - p).square() if name == "quality_focal" else torch.where(target > 0, target, 0.75 * p.square())
    expected = (scale * cross_entropy)[matched.labels != -2].sum() / len(where)
    torch.testing.assert_close(losses["classification"].double(), expected, rtol=1e-5, atol=0)
    _, other = run(DetectionLoss("focal", "giou"), *example(kind))
    assert torch.equal(gradients["regression"], other["regression"])


@pytest.mark.parametrize(("name", "box_loss"), COMBINATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite(kind, name, box_loss):
    """Predicted boxes without area (FCOS's at first), saturated logits, overflowing regressions and centerness where nothing is matched."""
    coder, output, matched = example(kind)
    positive = matched.positive[..., None]
    with torch.no_grad():
        output.regression.copy_(torch.where(positive, 0.0 if kind == "fcos" else output.regression, torch.inf))
        output.regression[:, ::2] = torch.where(positive[:, ::2], -100.0 if kind == "retinanet" else 0.0, -3e38)
        output.logits[:, ::5], output.logits[:, 1::5] = 200.0, -200.0
        if output.centerness is not None:
            output.centerness.copy_(torch.where(matched.positive, output.centerness, torch.inf))
    losses, gradients = run(DetectionLoss(name, box_loss), coder, output, matched)
    assert all(value.isfinite() for value in losses.values()), losses
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (gradients["regression"][~matched.positive] == 0).all()
    assert (gradients["logits"][matched.labels == -2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_boxes(kind):
    model = detector(kind, DetectionLoss("varifocal", "ciou"), pyramid())
    output, losses = trained_without_boxes(model)
    negatives = (0.75 * output.logits.sigmoid().square() * F.softplus(output.logits)).sum()
    torch.testing.assert_close(losses["classification"], negatives, rtol=1e-5, atol=0)
    assert all(parameter.grad is not None for parameter in model.head.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_batch_is_the_sum_of_its_parts(kind):
    """So that accumulated batches and several ranks give what one large batch gives."""
    model = detector(kind, DetectionLoss("quality_focal", "diou"), pyramid()).eval()
    data = batch()
    normalizer = model.match(data).positives
    whole = model.loss(model(data.images), model.match(data), normalizer)
    pieces = [parts(data, image) for image in range(3)]
    losses = [model.loss(model(piece.images), model.match(piece), normalizer) for piece in pieces]
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(loss[name] for loss in losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kind", "name", "box_loss"), [("retinanet", "focal", "smooth_l1"), ("fcos", "quality_focal", "giou")])
def test_learns_one_batch(kind, name, box_loss):
    learn(
        detector(kind, DetectionLoss(name, box_loss), pyramid(), **({"head_norm": True} if kind == "retinanet" else {})), batch((2, 3)), 60
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "focl"}, "loss: 'focl' is not known.\nDid you mean .*focal"),
        ({"box_loss": "gIoU2"}, "box_loss: 'gIoU2' is not known"),
        ({"implementation": "jax"}, "loss.implementation: 'jax'"),
        ({"hyper": {"gama": 1.0}}, "loss.hyper: 'gama' is not known.\nDid you mean .*gamma"),
        ({"box_loss": "l1", "box_hyper": {"beta": 1.0}}, "box_loss.hyper: 'beta'"),
    ],
)
def test_names_that_are_not_known(options, message):
    with pytest.raises(UserError, match=message):
        DetectionLoss(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("name", "box_loss"), [("focal", "l1"), ("quality_focal", "giou"), ("varifocal", "ciou"), ("bce", "smooth_l1")])
@pytest.mark.parametrize("kind", KINDS)
def test_no_host_synchronisation(kind, name, box_loss):
    model = detector(kind, DetectionLoss(name, box_loss), pyramid()).cuda()
    data = SimpleNamespace(**{key: value.cuda() for key, value in vars(batch()).items()})
    on_host = batch()
    output = DetectorOutput(*(None if value is None else value.detach().requires_grad_() for value in model(data.images)))
    model.anchors(HEIGHT, WIDTH, data.images.device)  # the first call copies from the host
    torch.cuda.set_sync_debug_mode("error")
    try:
        matched = model.match(data)
        losses = model.loss(output, matched, matched.positives.clamp(min=1))
        torch.stack(list(losses.values())).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = model.cpu().match(on_host)
    assert torch.equal(matched.labels.cpu(), expected.labels)
    assert all(value is None or value.grad.isfinite().all() for value in output)

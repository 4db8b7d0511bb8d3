"""YOLO: its levels, what its head's numbers mean, its targets, its losses, and that it learns."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision.ops
from stock_detectors import CLASSES, HEIGHT, WIDTH, batch, learn, pyramid, trained_without_boxes

from lab.detectors.detection import LOSSES as DETECTION_LOSSES
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.backbone import backbone
from lab.detectors.detection.models.yolo import STRIDES, Yolo
from lab.detectors.detection.types import BACKGROUND, DetectorOutput

BOX_LOSSES = ("giou", "ciou", "siou", "eiou", "l1", "smooth_l1")
COMBINATIONS = sorted({*itertools.product(["varifocal"], BOX_LOSSES), *itertools.product(DETECTION_LOSSES, ["ciou"])})


def yolo(name="varifocal", box_loss="ciou", implementation="lossforge", **options) -> Yolo:
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    return Yolo(body, CLASSES, DetectionLoss(name, box_loss, implementation=implementation), **options)


def example(**options):
    model, data = yolo(**options), batch()
    torch.manual_seed(2)
    for parameter in model.head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    output = model(data.images)
    return model, data, DetectorOutput(*(None if part is None else part.detach().requires_grad_() for part in output))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_levels_of_the_aggregated_pyramid(name):
    with torch.device("meta"):
        body = backbone(name, (64, 64), channels=16, aggregated=True)
        levels = body(torch.empty(2, 3, 64, 64))
    assert [tuple(level.shape) for level in levels.values()] == [(2, 16, 64 // stride, 64 // stride) for stride in STRIDES]


def test_a_coarse_level_sees_the_finest():
    body = pyramid(aggregated=True).eval()
    images = torch.randn(1, 3, HEIGHT, WIDTH, requires_grad=True)
    with torch.no_grad():
        features = {str(i): level for i, level in enumerate(body.body(images))}
    features = {name: level.requires_grad_() for name, level in features.items()}
    list(body.fpn(features).values())[-1].sum().backward()
    assert features["0"].grad.abs().sum() > 0


def test_sides_are_distances_from_a_cells_centre_in_strides():
    model = yolo()
    cells = model.anchors(HEIGHT, WIDTH, torch.device("cpu"))
    assert [len(level) for level in cells] == [(HEIGHT // stride) * (WIDTH // stride) for stride in STRIDES]
    assert cells[1][1].tolist() == [16, 0, 32, 16]
    logits = torch.full((1, 4, 17), -1e9)
    for side, distance in enumerate((1, 2, 0, 3)):
        logits[0, side, distance] = 0.0
    distances = logits.softmax(-1) @ torch.arange(17.0)
    box = model.coder.decode(distances, cells[1][1:2])
    assert box.tolist() == [[24 - 16, 8 - 32, 24, 8 + 48]]
    torch.testing.assert_close(model.coder.encode(cells[1][1:2], box), distances)


@pytest.fixture(scope="module")
def matched():
    """Return targets that a model was assigned, and the batch."""
    model, data, output = example(candidates=5)
    return model.match(data, output), data


def test_positives_have_a_box_of_their_image_its_label_and_a_score(matched):
    """All others are background; an image without boxes has none."""
    targets, data = matched
    assert targets.positives == targets.positive.sum() > 0
    assert (targets.labels == BACKGROUND).equal(~targets.positive)
    assert not targets.positive[(data.labels < 0).all(1)].any(), "an image without boxes has none"
    for image, rows, of_row in with_positives(matched):
        assert of_row.any(1).all()
        assert matched[0].labels[image, rows].equal(matched[1].labels[image][of_row.float().argmax(1)])
    targets, _ = matched
    centres = (targets.anchors[:, :2] + targets.anchors[:, 2:]) / 2
    for image, rows, _ in with_positives(matched):
        near = (centres[rows] > targets.boxes[image, rows, :2]) & (centres[rows] < targets.boxes[image, rows, 2:])
        assert near.all()
    for image, rows, _ in with_positives(matched):
        assert ((targets.scores[image] > 0) == rows).all()
        assert targets.scores[image].max() <= 1


def with_positives(matched):
    """Give of each image with boxes its number, its positives, and which of its boxes each of them has."""
    targets, data = matched
    for image, (labels, boxes) in enumerate(zip(data.labels, data.boxes, strict=True)):
        if (labels >= 0).any():
            rows = targets.positive[image]
            yield image, rows, (targets.boxes[image, rows][:, None] == boxes).all(-1)


@pytest.mark.parametrize(("name", "box_loss"), COMBINATIONS)
def test_kernels_and_plain_torch_give_the_same(name, box_loss):
    """The criterion's two implementations, values and gradients."""
    results = []
    for implementation in ("lossforge", "torch"):
        model, data, output = example(name=name, box_loss=box_loss, implementation=implementation)
        matched = model.match(data, output)
        losses = model.loss(output, matched, matched.scores.sum())
        torch.stack(list(losses.values())).sum().backward()
        results.append((matched, losses, output))
    (first, ours, left), (second, plain, right) = results
    assert first.labels.equal(second.labels)
    assert ours.keys() == plain.keys() == {"classification", "boxes", "sides"}
    for part in ours:
        torch.testing.assert_close(ours[part], plain[part], rtol=1e-5, atol=1e-7)
    for a, b in zip(left, right, strict=True):
        if a is not None and a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_losses_are_their_formulas():
    model, data, output = example(name="bce", box_loss="giou")
    matched = model.match(data, output)
    losses = model.loss(output, matched, torch.tensor(3.0))
    target = torch.zeros_like(output.logits)
    rows = matched.positive
    target[rows] = F.one_hot(matched.labels[rows], CLASSES).float() * matched.scores[rows][:, None]
    expected = F.binary_cross_entropy_with_logits(output.logits, target, reduction="sum") / 3
    torch.testing.assert_close(losses["classification"], expected, rtol=1e-5, atol=0)
    predicted = model.coder.decode(output.regression, matched.anchors)
    giou = torchvision.ops.generalized_box_iou_loss(predicted[rows], matched.boxes[rows])
    torch.testing.assert_close(losses["boxes"], (giou * matched.scores[rows]).sum() / 3, rtol=1e-5, atol=0)
    distance = model.coder.encode(matched.anchors, matched.boxes)[rows].clamp(0, 16)
    low = distance.floor().clamp(max=15).long()
    log_p = output.sides[rows].log_softmax(-1)
    of = [log_p.gather(-1, (low + i)[..., None])[..., 0] for i in (0, 1)]
    dfl = -(of[0] * (low + 1 - distance) + of[1] * (distance - low))
    torch.testing.assert_close(losses["sides"], 0.25 * (dfl * matched.scores[rows][:, None]).sum() / 3, rtol=1e-5, atol=0)


def test_the_second_head_gives_each_box_one_anchor():
    """And the first several, as without the second one; the losses are the sum of both heads' own."""
    model, data = yolo(one_to_one=True), batch()
    torch.manual_seed(2)
    for parameter in model.head.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    output = model(data.images)
    matched = model.match(data, output)
    first, second = matched.positive.chunk(2)
    boxes = matched.boxes[3:]
    for image, count in enumerate((4, 0, 7)):
        found = (boxes[image, second[image]][:, None] == data.boxes[image, :count]).all(-1)
        assert found.sum(0).le(1).all()
        assert found.sum() == second[image].sum() >= (count > 0)
    assert first.sum() > 2 * second.sum()
    losses = model.loss(output, matched, torch.tensor(11.0))
    heads = DetectorOutput(output.earlier_logits, output.earlier_regression, sides=output.earlier_sides), DetectorOutput(*output[:4])
    alone = yolo()
    of_first = alone.loss(heads[0], alone.match(data, heads[0]), torch.tensor(11.0))
    of_second = model.loss(heads[1], model.match(data, heads[1]), torch.tensor(11.0))
    for part, value in losses.items():
        torch.testing.assert_close(value, of_first[part] + of_second[part], rtol=1e-5, atol=1e-6)


def test_the_second_heads_gradient_ends_at_the_features():
    model, data = yolo(one_to_one=True), batch()
    output = model(data.images)
    output.logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert model.one_to_one.cls_logits.weight.grad.abs().sum() > 0
    model(data.images).earlier_logits.sum().backward()
    assert any(parameter.grad is not None for parameter in model.backbone.parameters())


def test_detections_of_one_to_one_are_not_suppressed():
    model, data = yolo(one_to_one=True, score_thresh=0.0, detections_per_img=7).eval(), batch()
    output = model(data.images)
    assert output.earlier_logits is None
    cells = torch.cat(model.anchors(HEIGHT, WIDTH, torch.device("cpu")))
    for image, found in enumerate(model.detections(output, data.sizes, (HEIGHT, WIDTH))):
        scores, place = output.logits[image].sigmoid().flatten().topk(7)
        torch.testing.assert_close(found["scores"], scores, rtol=1e-6, atol=0)
        assert found["labels"].equal(place % CLASSES)
        boxes = model.coder.decode(output.regression[image], cells)[place // CLASSES]
        limit = data.sizes[image].flip(0).repeat(2)
        torch.testing.assert_close(found["boxes"], boxes.clamp(min=0).minimum(limit))


def test_a_batch_without_boxes():
    model = yolo()
    trained_without_boxes(model)
    assert all(parameter.grad is not None for parameter in model.head.parameters())


def test_autocast_does_not_round_sides():
    model, data = yolo(), batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(data.images)
    expected = output.sides.double().softmax(-1) @ torch.arange(17.0, dtype=torch.float64)
    torch.testing.assert_close(output.regression.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("one_to_one", [False, True])
def test_learns_one_batch(one_to_one):
    learn(yolo("varifocal", "ciou", one_to_one=one_to_one), batch((2, 3), seed=3), 80, clip=5.0)  # boxes that do not overlap


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_host_synchronisation():
    model = yolo().cuda()
    data = SimpleNamespace(**{key: value.cuda() for key, value in vars(batch()).items()})
    output = model(data.images)
    model.loss(output, model.match(data, output), torch.ones((), device="cuda"))
    output = DetectorOutput(*(None if part is None else part.detach().requires_grad_() for part in output))
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = model.loss(output, model.match(data, output), torch.ones((), device="cuda"))
        torch.stack(list(losses.values())).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

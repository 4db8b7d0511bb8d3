"""DETR: what its queries' numbers mean, the matching of all layers at once, its losses, and that it learns."""

import pytest
import torch
import torchvision.ops
from scipy.optimize import linear_sum_assignment
from stock_detectors import CLASSES, HEIGHT, WIDTH, batch, pyramid

from lab.tasks.detection.loss import DetectionLoss
from lab.tasks.detection.models.detr import Detr, ImageCoder, joined
from lossforge.losses import matching_cost

LAYERS = 3


def detr(name="focal", box_loss="giou", implementation="lossforge", **options) -> Detr:
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    criterion = DetectionLoss(name, box_loss, box_weight=2.0, l1_weight=5.0, implementation=implementation)
    return Detr(body, CLASSES, criterion, queries=20, heads=4, layers=LAYERS, **options)


def test_boxes_are_shares_of_the_image():
    coder, image = ImageCoder(), torch.tensor([[0.0, 0.0, WIDTH, HEIGHT]])
    box = torch.tensor([[24.0, 16.0, 72.0, 48.0]])
    assert coder.encode(image, box).tolist() == [[0.5, 0.5, 0.5, 0.5]]
    boxes = batch().boxes[0, :4]
    torch.testing.assert_close(coder.decode(coder.encode(image, boxes), image), boxes)


def test_layers_before_the_last_are_for_training_alone():
    model = detr()
    output = model(batch().images)
    assert output.logits.shape == (3, 20, CLASSES)
    assert output.earlier_logits.shape == (3 * LAYERS, 20, CLASSES)
    assert joined(output).regression.shape == (3 * (LAYERS + 1), 20, 4)
    assert model.eval()(batch().images).earlier_logits is None
    assert ((output.regression > 0) & (output.regression < 1)).all()


def test_matching_of_each_layer_is_the_cheapest():
    """One query for each box, at the cost of the best assignment of that layer and image; padded rows take none."""
    model, data = detr(), batch()
    output = model(data.images)
    matched, every = model.match(data, output), joined(output)
    (image,) = model.anchors(HEIGHT, WIDTH, torch.device("cpu"))
    assert matched.positives == matched.positive.sum() == (LAYERS + 1) * 11
    for row in range(len(every.logits)):
        kept = data.labels[row % 3] >= 0
        boxes, labels = data.boxes[row % 3][kept], data.labels[row % 3][kept]
        cost = matching_cost(
            every.logits[row : row + 1], every.regression[row : row + 1], labels, model.coder.encode(image, boxes), [len(labels)]
        )
        cheapest = cost[linear_sum_assignment(cost.detach().numpy())].sum()
        queries = matched.positive[row].nonzero()[:, 0]
        assert len(queries) == len(labels)
        if not len(labels):
            continue
        of_query = (matched.boxes[row, queries][:, None] == boxes).all(-1)
        assert (of_query.sum(0) == 1).all()
        targets = of_query.float().argmax(1)
        assert matched.labels[row, queries].equal(labels[targets])
        torch.testing.assert_close(cost[queries, targets].sum(), cheapest)


@pytest.mark.parametrize(("name", "box_loss"), [("focal", "giou"), ("varifocal", "ciou"), ("bce", "siou")])
def test_kernels_and_plain_torch_give_the_same(name, box_loss):
    losses = []
    for implementation in ("lossforge", "torch"):
        model, data = detr(name, box_loss, implementation), batch()
        output = model(data.images)
        losses.append(model.loss(output, model.match(data, output), torch.tensor(11.0)))
    ours, plain = losses
    assert ours.keys() == plain.keys() == {"classification", "boxes", "l1"}
    for part in ours:
        torch.testing.assert_close(ours[part], plain[part], rtol=1e-5, atol=1e-6)


def test_a_batch_without_boxes():
    model, data = detr(), batch((0, 0))
    output = model(data.images)
    matched = model.match(data, output)
    losses = model.loss(output, matched, torch.ones(()))
    sum(losses.values()).backward()
    assert matched.positives == losses["boxes"] == losses["l1"] == 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_detections_are_the_best_pairs_of_query_and_class():
    model, data = detr(score_thresh=0.0, detections_per_img=7), batch()
    output = model.eval()(data.images)
    found = model.detections(output, data.sizes, (HEIGHT, WIDTH))
    for image, each in enumerate(found):
        scores = output.logits[image].sigmoid().flatten().topk(7).values
        torch.testing.assert_close(each["scores"], scores, rtol=1e-6, atol=0)  # vectors of another length round another way
        assert (each["boxes"] >= 0).all()
        assert (each["boxes"][:, 3] <= data.sizes[image, 0]).all()


def test_learns_one_batch():
    """To find its boxes: each one's best detection is of its class and covers it."""
    model, data = detr(), batch((2, 3), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for _ in range(150):
        output = model(data.images)
        loss = sum(model.loss(output, model.match(data, output), torch.tensor(5.0)).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = model.detections(model(data.images), data.sizes, (HEIGHT, WIDTH))
    for detections, boxes, labels in zip(found, data.boxes, data.labels, strict=True):
        for box, label in zip(boxes[labels >= 0], labels[labels >= 0], strict=True):
            near = torchvision.ops.box_iou(box[None], detections["boxes"])[0] > 0.5
            assert near.any()
            assert detections["labels"][near][0] == label


def test_settings_of_suppression_are_said_to_have_no_effect(make_trainer):
    words = [
        "task=detection",
        "model=detr_tiny",
        "data.train_scenes=4",
        "data.val_scenes=2",
        "data.scene_pixels=64",
        "data.digit_pixels=[14,24]",
    ]
    told = [note for note in make_trainer(*words, "model.nms_threshold=0.7", "model.candidates=10").task.notes if "no effect" in note]
    assert [note.partition(":")[0] for note in told] == ["model.nms_threshold=0.7", "model.candidates=10"]

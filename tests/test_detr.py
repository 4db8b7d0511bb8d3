"""DETR: what its queries' numbers mean, the matching of all layers at once, its losses, and that it learns."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from stock_detectors import CLASSES, HEIGHT, WIDTH, batch, learn, pyramid, trained_without_boxes

from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.detr import Denoising, Detr, ImageCoder
from lab.detectors.detection.types import DetectorOutput, rows_of
from lab.tasks.finetuning import load_own_weights
from lossforge.losses import DenoisingQueries, DetrCriterion, matching_cost

LAYERS = 3


def detr(name="focal", box_loss="giou", implementation="lossforge", classes=CLASSES, **options) -> Detr:
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    criterion = DetectionLoss(name, box_loss, box_weight=2.0, l1_weight=5.0, implementation=implementation)
    return Detr(body, classes, criterion, queries=20, heads=4, layers=LAYERS, **options)


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
    assert rows_of(output).regression.shape == (3 * (LAYERS + 1) * 20, 4)
    assert model.eval()(batch().images).earlier_logits is None
    assert ((output.regression > 0) & (output.regression < 1)).all()


def test_matching_of_each_layer_is_the_cheapest():
    """One query for each box, at the cost of the best assignment of that layer and image; padded rows take none."""
    model, data = detr(), batch()
    output = model(data.images)
    found, rows = model.match(data, output), rows_of(output)
    matched, every = (
        part._replace(**{name: getattr(part, name).unflatten(0, (-1, 20)) for name in names})
        for part, names in ((found, ("labels", "boxes", "positive")), (rows, ("logits", "regression")))
    )
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
        of_query = torch.isclose(matched.boxes[row, queries][:, None], boxes, atol=1e-3).all(-1)
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


HELD = {"hold_weight": True, "positive_at_zero": True}


def with_noise(name="varifocal", hyper=None, counts=(4, 0, 7), **options):
    """A DETR with denoising queries, a batch, and what it gives of it."""
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    criterion = DetectionLoss(name, "giou", hyper=hyper, box_weight=2.0, l1_weight=5.0)
    model, data = Detr(body, CLASSES, criterion, queries=20, heads=4, layers=LAYERS, **({"denoising": 30} | options)), batch(counts)
    torch.manual_seed(2)
    return model, data, model(data.images, data.boxes, data.labels)


@pytest.mark.parametrize(("name", "hyper"), [("focal", {}), ("varifocal", HELD), ("mal", {})])
def test_losses_with_denoising_are_those_of_the_criterion(name, hyper):
    """Values and gradients of lossforge's DetrCriterion, of boxes that are not padded."""
    model, data, output = with_noise(name, hyper)
    parts = [None if part is None else part.detach().requires_grad_() for part in output]
    output = DetectorOutput(*parts)
    losses = model.loss(output, model.match(data, output), torch.tensor(11.0))
    exists = data.labels >= 0
    place = torch.full(exists.shape, -1)
    place[exists] = torch.arange(11)
    assert model.denoising.groups(7) == 2
    denoising = DenoisingQueries(
        output.noisy_logits.view(LAYERS, 3, 28, CLASSES),
        output.noisy_regression.view(LAYERS, 3, 28, 4),
        torch.cat([place, torch.full_like(place, -1)] * 2, 1),
        2,
    )
    (image,) = model.anchors(HEIGHT, WIDTH, torch.device("cpu"))
    expected = DetrCriterion(name)(
        torch.cat([output.earlier_logits, output.logits]).view(LAYERS + 1, 3, 20, CLASSES),
        torch.cat([output.earlier_regression, output.regression]).view(LAYERS + 1, 3, 20, 4),
        data.labels[exists],
        model.coder.encode(image, data.boxes[exists]),
        [4, 0, 7],
        denoising=denoising,
    )
    for ours, theirs in (("classification", "loss_class"), ("boxes", "loss_giou"), ("l1", "loss_bbox")):
        torch.testing.assert_close(losses[ours], expected[theirs], rtol=1e-5, atol=1e-6)
    leaves = [part for part in parts if part is not None]
    ours, theirs = (torch.autograd.grad(sum(each.values()), leaves) for each in (losses, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_queries_do_not_see_denoising_ones():
    """What is matched is as without them, and so is each group without the other ones."""
    model, data, output = with_noise()
    alone = model(data.images)
    assert output.noisy_logits.shape == (3 * LAYERS, 28, CLASSES)
    assert alone.noisy_logits is None
    for name in ("logits", "regression", "earlier_logits", "earlier_regression"):
        torch.testing.assert_close(getattr(output, name), getattr(alone, name), rtol=1e-4, atol=1e-5)
    assert model.eval()(data.images, data.boxes, data.labels).noisy_logits is None
    hidden = model.denoising.hidden(7, 20, torch.device("cpu"))
    assert not hidden[:14, :14].any()
    assert hidden[:14, 14:28].all()
    assert hidden[14:28, :14].all()
    assert not hidden[:, 28:].any()
    assert hidden[28:, :28].all()


def test_denoising_queries_are_made_of_boxes_and_labels():
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.3, 0.6, 0.1, 0.1]]]).repeat(500, 1, 1)
    labels = torch.tensor([[2, -1]]).repeat(500, 1)
    torch.manual_seed(0)
    made = Denoising(3, 8, 4, label_noise=0.0, box_noise=1.0)
    content, noisy = made(boxes, labels)
    assert noisy.shape == (500, 4, 4)
    for query, label in enumerate((2, 3, 2, 3)):  # the class of padding is 3
        assert content[:, query].equal(made.content.weight[label].expand(500, -1))
    corner, opposite = noisy[..., :2] - noisy[..., 2:] / 2, noisy[..., :2] + noisy[..., 2:] / 2
    moves = torch.cat([corner - torch.tensor([0.4, 0.3]), opposite - torch.tensor([0.6, 0.7])], -1).abs() / torch.tensor([0.2, 0.4] * 2)
    assert 0.45 < moves[:, 0].max() <= 0.5 + 1e-5
    assert 0.5 - 1e-5 <= moves[:, 2].min() < 0.55
    assert moves[:, 2].max() <= 1 + 1e-5
    assert made.places(torch.tensor([[5, -1]])).tolist() == [[5, -1, -1, -1]]
    changed = Denoising(3, 8, 4, label_noise=0.5, box_noise=0.0)
    content, noisy = changed(boxes, labels)
    torch.testing.assert_close(noisy[:, :2], boxes)
    other = (content[:, 0] != changed.content.weight[2]).any(-1).double().mean()
    assert 0.23 < other < 0.43  # a third of the random classes are its own
    assert content[:, 1].equal(changed.content.weight[3].expand(500, -1))


def test_weights_of_other_classes_are_taken_but_for_what_depends_on_them(tmp_path):
    """The denoising queries have one row of weights a class."""
    path = tmp_path / "theirs.pt"
    theirs, ours = detr(denoising=10, classes=CLASSES + 2), detr(denoising=10)
    own = ours.denoising.content.weight.clone()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 1
    torch.save(theirs.state_dict(), path)
    assert "left out, for another number of classes" in load_own_weights(ours, str(path))
    assert ours.denoising.content.weight.equal(own)
    assert ours.enter[0].weight.equal(theirs.enter[0].weight)


@pytest.mark.parametrize(("theirs", "ours"), [(10, 0), (0, 10)])
def test_weights_load_with_and_without_denoising_queries(tmp_path, theirs, ours):
    theirs, ours = detr(denoising=theirs), detr(denoising=ours)
    torch.nn.init.normal_(theirs.cls_logits[-1].weight)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    said = load_own_weights(ours, str(tmp_path / "theirs.pt"))
    what = "left out, for a part that this model trains without" if theirs.denoising else "begun anew, because the file lacks them"
    assert said == f"begins with the weights of theirs.pt; {what}: denoising.content.weight"
    own = ours.state_dict()
    assert all(own[name].equal(value) for name, value in theirs.state_dict().items() if name in own)


@pytest.mark.parametrize("denoising", [0, 30])
def test_a_batch_without_boxes(denoising):
    trained_without_boxes(detr(denoising=denoising))


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
    """Beside denoising queries."""
    learn(detr(implementation="torch", denoising=12), batch((2, 3), seed=3), 150, lr=5e-4)


SCENES = [
    "task=detection",
    "data.train_scenes=8",
    "data.val_scenes=2",
    "data.scene_pixels=64",
    "data.digit_pixels=[14,24]",
    "data.workers=0",
]


@pytest.mark.parametrize("model", ["model=detr_tiny", "model=yolo_tiny model.one_to_one=true"])
def test_settings_of_suppression_are_said_to_have_no_effect(make_trainer, model):
    words = [*SCENES, *model.split(), "model.nms_threshold=0.7", "model.candidates=10"]
    told = [note for note in make_trainer(*words).task.notes if "no effect" in note]
    assert [note.partition(":")[0] for note in told] == ["model.nms_threshold=0.7", "model.candidates=10"]

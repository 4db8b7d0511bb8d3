"""Oriented boxes: their files, batches, coder, targets, detections and figures."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from stock_detectors import CLASSES, HEIGHT, WIDTH, batch, pyramid

from lab.base.errors import UserError
from lab.base.seeds import seeded
from lab.config.settings import load
from lab.data.sets import Norm
from lab.detectors.detection.boxes import corners_of, turned_boxes
from lab.detectors.detection.data import load_detection_data
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.metrics import Found
from lab.detectors.detection.task import criterion
from lab.detectors.oriented.model import TurnedCoder, YoloOriented
from lab.detectors.oriented.task import OrientedCounts, OrientedScenes
from lab.detectors.schema import BoxesConfig, DigitScenesConfig
from lab.run.predict import draw, predictor
from lossforge.losses.registry import LOSSES

CPU = torch.device("cpu")
NORM = Norm([0.5] * 3, [0.25] * 3)


def boxes_at_random(count, seed=0):
    """Centres, sides and angles in [-π/4, 3π/4)."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor([[20.0, 20, 8, 8, -math.pi / 4], [76.0, 44, 30, 20, 3 * math.pi / 4]])
    return low + (high - low) * torch.rand(count, 5, generator=generator)


def test_corners_and_boxes_and_distances_are_each_others_inverse():
    boxes = boxes_at_random(50)
    corners = corners_of(boxes).view(-1, 4, 2)
    torch.testing.assert_close(turned_boxes(corners), boxes, rtol=1e-4, atol=1e-4)
    one = corners_of(torch.tensor([[10.0, 20, 6, 2, math.pi / 2]]))
    assert one.tolist()[0] == pytest.approx([11, 17, 11, 23, 9, 23, 9, 17], abs=1e-5)
    anchors = torch.cat([boxes[:, :2] - 7, boxes[:, :2] + 1], 1)
    coder = TurnedCoder()
    again = coder.decode(torch.cat([coder.encode(anchors, boxes), boxes[:, 4:]], 1), anchors)
    torch.testing.assert_close(again, boxes, rtol=1e-4, atol=1e-4)


def test_distances_are_those_to_the_sides_of_a_turned_box():
    """A quarter turn of a box of 6 by 2: along its axes an anchor in its centre is 3 from left and right, 1 from top and bottom."""
    anchors = torch.tensor([[8.0, 16, 16, 24]])
    box = torch.tensor([[12.0, 21, 6, 2, math.pi / 2]])  # its centre is 1 below the anchor's, so behind it along the width
    assert TurnedCoder().encode(anchors, box).mul(8).tolist()[0] == pytest.approx([2, 1, 4, 1], abs=1e-5)


@pytest.fixture
def folder(tmp_path):
    """Pictures of a bright turned rectangle each, with YOLO's lines of corners."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for number, box in enumerate(boxes_at_random(4, seed=1)):
        corners = corners_of(box[None])[0].tolist()
        image = Image.new("RGB", (96, 64))
        ImageDraw.Draw(image).polygon(corners, fill=(200, 200, 200))
        image.save(tmp_path / "images" / f"{number}.png")
        shares = [value / (96, 64)[place % 2] for place, value in enumerate(corners)]
        (tmp_path / "labels" / f"{number}.txt").write_text(f"{number % 2} " + " ".join(f"{share:.9f}" for share in shares))
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [ant, bee]\n")
    return tmp_path


def opened(folder, **given):
    plain = {"workers": 0, "shortest": None, "longest": None, "photometric": 0.0, "horizontal_flip": 0.0}
    return load_detection_data(BoxesConfig(root=str(folder), **plain | given), None, NORM, CPU, 0, shapes="corners")


@pytest.mark.parametrize(
    "given", [{"augment": False}, {"horizontal_flip": 1.0}, {"scale": [0.5, 0.6]}, {"batch_scale": [2.0, 2.0]}, {"mosaic": 1.0}]
)
def test_boxes_stay_on_the_rectangles_that_they_frame(folder, given):
    checked = 0
    for each in opened(folder, **{"scale": [1.0, 1.0]} | given).train:
        bright = (each.images[:, 0] * 0.25 + 0.5) > 0.65  # the padding is 0.5
        for image, boxes, labels in zip(bright, each.turned, each.labels, strict=True):
            framed = Image.new("1", (image.shape[1], image.shape[0]))
            for corners in corners_of(boxes[labels >= 0]).tolist():
                ImageDraw.Draw(framed).polygon(corners, fill=1)
                checked += 1
            framed = torch.from_numpy(np.array(framed))
            if framed.any():
                assert (framed & image).sum() / (framed | image).sum() > (0.6 if "mosaic" in given else 0.7)
    assert checked >= 3


def test_a_line_that_is_no_oriented_box_is_named(folder):
    (folder / "labels" / "2.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5")
    with pytest.raises(UserError, match=r"labels/2.txt, line 1: segmentation .* one polygon of four corners, an oriented box, is expected"):
        opened(folder)


@pytest.mark.parametrize("corners", ["0.1 0.1 0.5 0.5 0.5 0.1 0.1 0.5", "0.1 0.1 0.5 0.5 0.5 0.5 0.1 0.1"], ids=["crosswise", "a line"])
def test_corners_that_frame_nothing_are_named(folder, corners):
    (folder / "labels" / "2.txt").write_text(f"0 {corners}")
    with pytest.raises(UserError, match=r"labels/2.txt, line 1: segmentation .* has a side of no length; corners in their order around"):
        opened(folder)


def test_turned_scenes_have_the_corners_of_their_digits(tmp_path):
    config = DigitScenesConfig(
        root=str(tmp_path), train_scenes=6, val_scenes=1, scene_pixels=64, digits=[1, 1], clutter=0.0, turn=60.0, workers=0
    )
    file = load_detection_data(config, None, NORM, CPU, 0, shapes="corners").train.file
    boxes = turned_boxes(file.corners.flatten(0, 0))
    assert boxes[:, 4].abs().max() > 0.3
    for position in range(len(file)):
        (x, y, width, height), corners = file.boxes[position].tolist(), file.corners[position]
        assert corners.amin(0).tolist() == pytest.approx([x, y], abs=1.5)
        assert corners.amax(0).tolist() == pytest.approx([x + width, y + height], abs=1.5)


def oriented(**options):
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    return YoloOriented(body, CLASSES, DetectionLoss("varifocal", LOSSES["probiou"]), **options)


def example(counts=(2, 3), **options):
    data = batch(counts, seed=3)
    data.turned = boxes_at_random(data.labels.numel(), seed=4).view(*data.labels.shape, 5)
    return oriented(**options), data


def test_targets_are_boxes_whose_turned_rectangles_hold_the_anchors():
    model, data = example()
    matched = model.match(data, model(data.images))
    assert matched.positives == matched.positive.sum() > 0
    centres = (matched.anchors[:, :2] + matched.anchors[:, 2:]) / 2
    for image, anchor in matched.positive.nonzero().tolist():
        box = matched.boxes[image, anchor]
        assert (box == data.turned[image]).all(-1).any()
        offset = centres[anchor] - box[:2]
        cosine, sine = box[4].cos(), box[4].sin()
        along, across = offset[0] * cosine + offset[1] * sine, offset[1] * cosine - offset[0] * sine
        assert abs(along) < box[2] / 2 + 1e-3
        assert abs(across) < box[3] / 2 + 1e-3


@pytest.mark.parametrize("box_loss", ["probiou", "gwd", "kld", "kfiou", "rotated_iou"])
def test_every_loss_of_oriented_boxes_trains(box_loss):
    model, data = example()
    options = ["task=oriented", f"box_loss={box_loss}", "box_loss.weight=2"]
    config = load(options).config
    model.criterion = criterion(config.loss, config.box_loss, config.model, "probiou")
    assert model.criterion.boxes is LOSSES[box_loss]
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    matched = model.match(data, model(data.images))
    for _ in range(4):
        losses = model.loss(model(data.images), matched, matched.positives.float())
        values.append(losses["boxes"].item())
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    assert values[-1] < 0.97 * values[0], values


def test_of_two_heads_one_has_an_anchor_a_box():
    model, data = example(one_to_one=True)
    output = model(data.images)
    assert output.regression.shape == output.earlier_regression.shape == (*output.logits.shape[:2], 5)
    positive = model.match(data, output).positive.sum(1).view(2, 2)  # heads × images
    assert positive[1].tolist() == [2, 3]
    assert (positive[0] > positive[1]).all()
    loss = sum(model.loss(output, model.match(data, output), torch.tensor(5.0)).values())
    loss.backward()
    assert model.one_to_one.angle.weight.grad.abs().sum() > 0
    assert model.head.angle.weight.grad.abs().sum() > 0
    found = model.eval().detections(model(data.images), data.sizes, (HEIGHT, WIDTH))
    assert all(len(each["boxes"]) <= model.detections_per_img and each["boxes"].shape[1] == 5 for each in found)


@pytest.mark.parametrize("one_to_one", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_exported_model_gives_the_detections(one_to_one):
    model, data = example((2, 3, 0), one_to_one=one_to_one, score_thresh=0.02, detections_per_img=50, topk_candidates=200)
    head = model.one_to_one if one_to_one else model.head
    with seeded(0):
        for layer in (head.cls_logits, head.side_logits, head.angle):
            torch.nn.init.normal_(layer.weight, std=0.2)
        head.cls_logits.bias.data.zero_()
    model.eval()
    pixels = (data.images.clamp(-2, 2) * 63 + 127).byte()
    module = OrientedScenes(model, NORM)
    with torch.no_grad():
        found, output = module(pixels), model(module.normalised(pixels))
    assert found.shape == (3, 50, 7)
    expected = model.detections(output, data.sizes, (HEIGHT, WIDTH))
    for rows, each in zip(found, expected, strict=True):
        count = len(each["scores"])
        assert count > 10
        torch.testing.assert_close(rows[:count, :5], each["boxes"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(rows[:count, 5], each["scores"])
        assert rows[:count, 6].equal(each["labels"].float())
        assert not rows[count:].any()


def test_learns_one_batch():
    """To find its boxes: each one's best detection overlaps it by half at its angle."""
    model, data = example((1, 1))
    model.criterion = DetectionLoss("varifocal", LOSSES["probiou"], implementation="torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        output = model(data.images)
        loss = sum(model.loss(output, model.match(data, output), torch.tensor(2.0)).values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    found = model.detections(model(data.images), data.sizes, (HEIGHT, WIDTH))
    from lossforge.losses import rotated_box_iou

    for each, box, label in zip(found, data.turned[:, 0], data.labels[:, 0], strict=True):
        assert each["labels"][0] == label
        assert rotated_box_iou(each["boxes"][:1], box[None]) > 0.5


def test_detections_are_suppressed_within_a_class_alone():
    model, data = example()
    output = model(data.images)
    regression = torch.zeros_like(output.regression[:1])
    regression[..., :4] = 1.0
    logits = torch.full_like(output.logits[:1], -20.0)
    logits[0, 5, 0], logits[0, 5, 1], logits[0, 6, 0], logits[0, 50, 0] = 2.0, 1.0, 0.0, 3.0
    model.nms_thresh = 0.05
    (found,) = model.detections(output._replace(logits=logits, regression=regression), data.sizes[:1], (HEIGHT, WIDTH))
    assert found["labels"].tolist() == [0, 0, 1]
    assert found["scores"].tolist() == pytest.approx(torch.tensor([3.0, 2.0, 1.0]).sigmoid().tolist())


def test_precision_is_cocos_where_boxes_are_upright():
    """Against faster_coco_eval's own IoU, which knows no angle."""
    from faster_coco_eval import COCO, COCOeval_faster

    generator = torch.Generator().manual_seed(0)
    offsets, of_image, found, rows, truth = [0], [], {}, [], []
    for image in range(12):
        own = boxes_at_random(1 + image % 4, seed=image).double()
        own[:, 4] = 0
        of_image.append(own)
        offsets.append(offsets[-1] + len(own))
        guesses = own.repeat(2, 1)
        guesses[:, :4] += 2 * torch.randn(len(guesses), 4, generator=generator)
        scores = (torch.rand(len(guesses), generator=generator).mul(10).round() / 10).sort(descending=True, stable=True).values
        found[image] = Found(guesses, scores, torch.zeros(len(guesses), dtype=torch.int64))
        frames = [torch.cat([each[:, :2] - each[:, 2:4] / 2, each[:, 2:4]], 1).tolist() for each in (own, guesses)]
        truth += [{"image_id": image, "category_id": 1, "bbox": box, "area": box[2] * box[3], "iscrowd": 0} for box in frames[0]]
        rows += [{"image_id": image, "category_id": 1, "bbox": box, "score": s} for box, s in zip(frames[1], scores.tolist(), strict=True)]
    every = torch.cat(of_image)
    file = SimpleNamespace(
        image_ids=list(range(12)),
        sizes=[(64, 96)] * 12,
        labels=torch.zeros(len(every), dtype=torch.int64),
        crowd=torch.zeros(len(every), dtype=torch.bool),
        areas=every[:, 2] * every[:, 3],
        corners=corners_of(every).view(-1, 4, 2),
        masks=None,
        rows=lambda position: slice(offsets[position], offsets[position + 1]),
    )
    result = OrientedCounts(["ant"], [1], CPU, file)._evaluate(found)
    entries = [entry | {"id": number + 1} for number, entry in enumerate(truth)]
    known = COCO({"images": [{"id": n, "height": 64, "width": 96} for n in range(12)], "categories": [{"id": 1}], "annotations": entries})
    judge = COCOeval_faster(known, known.loadRes(rows), "bbox", print_function=lambda *_: None)
    judge.evaluate()
    judge.accumulate()
    expected = judge.eval["precision"][:, :, 0, 0, -1]
    assert 0.05 < expected.mean() < 0.95
    assert result.per_class["ant"] == pytest.approx(expected.mean(), abs=1e-6)
    assert result.precision["ant"] == pytest.approx(expected[0].tolist(), abs=1e-6)
    assert result.values["map75"] == pytest.approx(expected[5].mean(), abs=1e-6)


@pytest.fixture
def detected(folder):
    """Figures of detections that are the true boxes, and one that is turned away."""
    data = opened(folder, eval_batch_size=3)
    counts = OrientedCounts(data.classes, data.category_ids, CPU, data.val.file)
    for each in data.val:
        found = []
        for boxes, labels, index in zip(each.turned, each.labels, each.index.tolist(), strict=True):
            boxes = boxes[labels >= 0] + torch.tensor([0, 0, 0, 0, math.pi / 2 if index == 2 else math.pi])
            found.append({"boxes": boxes, "scores": torch.full((len(boxes),), 0.5 + 0.1 * (index == 0)), "labels": labels[labels >= 0]})
        counts.add(found, each)
    return counts.result()


def test_a_box_counts_at_its_angle_and_half_a_turn_further(detected):
    """Of two ants one is turned away by a quarter and comes second: recalls up to 0.5, 51 of 101. Both bees are found."""
    assert detected.per_class == {"ant": pytest.approx(51 / 101), "bee": pytest.approx(1.0)}
    assert detected.values["map50"] == pytest.approx((51 / 101 + 1) / 2)
    assert detected.values["map"] == detected.values["map75"]


def test_detections_are_written_with_their_corners(detected, tmp_path):
    detected.export_coco(tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) == 4
    for row in rows:
        assert "bbox" not in row
        assert row["poly"] == pytest.approx(corners_of(torch.tensor([row["rbox"]]))[0].tolist())


def test_a_file_is_predicted_as_it_was_evaluated(make_trainer, folder):
    words = ["task=oriented", "model=yolo_tiny", "data=boxes", f"data.root={folder}", "data.shortest=null", "data.longest=null"]
    words += ["data.workers=0", "model.score_threshold=0.0", "model.candidates=12", "model.detections=5", "tracking=none"]
    trainer = make_trainer(*words)
    result = trainer.evaluate(trainer.model, trainer.data.val)
    config = load(["trainer.device=cpu", *words]).config
    state = {"norm": asdict(trainer.data.norm), "classes": trainer.data.classes, "model": trainer.model.state_dict(), "ema": None}
    predict = predictor(config, state, CPU, top=5, score=0.0)
    file = trainer.data.val.file
    for position, image_id in enumerate(file.image_ids):
        found, expected = predict(file.open(position)), result.found[image_id]
        assert found.scores == pytest.approx(expected.scores.tolist(), abs=1e-6)
        for entry, corners in zip(found.tree(), corners_of(expected.boxes).tolist(), strict=True):
            assert entry["polygon"] == pytest.approx(corners, abs=1e-3)
        drawn, plain = draw(file.open(position), found), draw(file.open(position), type(found)([], [], []))
        assert drawn.size == plain.size
        assert (np.asarray(drawn) != np.asarray(plain)).any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["task=oriented", "data=digit_scenes"],
            r"data\.turn=0: drawn scenes have corners .* Take above 0, as data=turned_scenes has it\.",
        ),
        (["task=instances", "data=turned_scenes"], r"data\.turn=60: drawn scenes have corners .* else masks\. Take 0\."),
    ],
)
def test_scenes_with_other_shapes_are_refused(make_trainer, words, said):
    with pytest.raises(UserError, match=said):
        make_trainer(*words, "model=yolo_tiny")

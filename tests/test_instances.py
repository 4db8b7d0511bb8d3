"""Masks of instances: their files, batches, loss, detections and figures."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from stock_detectors import CLASSES, HEIGHT, WIDTH, batch, pyramid
from torch.utils._python_dispatch import TorchDispatchMode

from lab.base.drawing import colour_of, with_masks
from lab.base.errors import UserError
from lab.base.seeds import seeded
from lab.config.settings import load
from lab.data.images.files import CorruptError
from lab.data.rle import areas_of, as_coco, decoded, encoded, rle_of
from lab.data.sets import Norm
from lab.detectors.detection.data import load_detection_data
from lab.detectors.detection.loss import DetectionLoss
from lab.detectors.detection.models.yolo import Yolo, both
from lab.detectors.detection.task import Detection
from lab.detectors.instances.loss import point_loss, prototype_loss
from lab.detectors.instances.model import DetrMasks, YoloMasks, encoded_in_file
from lab.detectors.instances.task import InstanceCounts, Instances, InstanceScenes
from lab.detectors.schema import BoxesConfig, CocoConfig, DigitScenesConfig
from lab.run.predict import draw, predictor
from lossforge.losses import sample_uncertain_points

CPU = torch.device("cpu")
NORM = Norm([0.5] * 3, [0.25] * 3)
SIZE = (50, 70)


def ellipse(size, box):
    """The pixels of an ellipse in a box x, y, width, height."""
    x, y, width, height = box
    down, across = np.mgrid[: size[0], : size[1]] + 0.5
    return ((across - x) / width * 2 - 1) ** 2 + ((down - y) / height * 2 - 1) ** 2 <= 1


@pytest.mark.parametrize("form", ["text", "runs"])
def test_an_encoding_gives_back_its_mask(form):
    mask = ellipse(SIZE, (10, 5, 30, 40))
    (rle,) = encoded(mask[None])
    counts = rle.decode()
    if form == "runs":
        flat = np.concatenate([[0], mask.T.flatten().astype(int), [2]])
        ends = np.flatnonzero(np.diff(flat[:-1])).tolist()
        counts = np.diff([0, *ends, mask.size]).tolist()
    again = rle_of({"size": list(SIZE), "counts": counts}, SIZE)
    assert again == rle
    assert (decoded([again], SIZE)[0].astype(bool) == mask).all()
    assert areas_of([again], SIZE) == [mask.sum()]


def test_polygons_cover_what_they_frame():
    """Two rectangles of whole pixels, as pycocotools 2.0.11 fills them."""
    polygons = [[10, 10, 20, 10, 20, 15, 10, 15], [30, 20, 40, 20, 40, 40, 30, 40]]
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[10:15, 10:20] = expected[20:40, 30:40] = 1
    rle = rle_of(polygons, SIZE)
    assert rle == b"n?5]100000000000000000n??c_O00000000000000000X^1"
    assert (decoded([rle], SIZE)[0] == expected).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "no segmentation; polygons or a run-length encoding are expected"),
        ([], "polygons or a run-length encoding are expected"),
        ([[1, 2, 3, 4]], "three corners or more"),
        ([[1, 2, 3, 4, 5, 1e9]], "is not numbers in the image (70×50)"),
        ([[1, 2, 3, 4, 5, float("nan")]], "is not numbers in the image"),
        ([[-70, -70, 140, 140] * 15000], "has sides of 6300000 pixels together; at most 4194304 are expected"),
        ({"size": [70, 50], "counts": [3500]}, "its size is [70, 50], and the image's [50, 70]"),
        ({"size": [50, 70], "counts": [3499]}, "lengths that fill the image, 3500 pixels"),
        ({"size": [50, 70], "counts": [3501, -1]}, "lengths that fill the image"),
        ({"size": [50, 70], "counts": "~~~"}, "lengths that fill the image"),
        ({"size": [50, 70], "counts": "o" * 40}, "lengths that fill the image"),
        ({"size": [50, 70], "counts": "PPPPPPPP"}, "lengths that fill the image"),
    ],
)
def test_what_is_no_mask_is_refused_before_c_code_reads_it(given, said):
    with pytest.raises(CorruptError) as error:
        rle_of(given, SIZE)
    assert said in str(error.value)


@pytest.fixture
def coco(tmp_path):
    """A COCO file of bright ellipses on black, each of its own grey, some of which are crowds; masks in all forms."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    tree = {"images": [], "annotations": [], "categories": [{"id": i, "name": name} for i, name in ((3, "ant"), (7, "bee"))]}
    for image_id in (5, 2, 9, 4):
        height, width = (int(side) for side in rng.integers(60, 120, 2))
        pixels = np.zeros((height, width), dtype=np.uint8)
        tree["images"].append({"id": image_id, "file_name": f"{image_id}.png", "height": height, "width": width})
        for number in range(4):
            box = [float(v) for v in (rng.uniform(0, width - 24), rng.uniform(0, height - 24), *rng.uniform(14, 24, 2))]
            mask = ellipse((height, width), box) & (pixels == 0)
            if mask.sum() < 50:
                continue
            pixels[mask] = 60 + 40 * number
            entry = {"id": len(tree["annotations"]) + 1, "image_id": image_id, "category_id": (3, 7)[number % 2], "bbox": box}
            rle = as_coco(encoded(mask[None])[0], (height, width))
            crowd = int(number == 3 and image_id == 2)
            tree["annotations"].append(entry | {"segmentation": rle, "iscrowd": crowd, "area": float(mask.sum())})
        Image.fromarray(pixels).save(tmp_path / "images" / f"{image_id}.png")
    (tmp_path / "truth.json").write_text(json.dumps(tree))
    return tmp_path


def opened(folder, fixed_size=None, **given):
    files = {"train_images": "images", "val_images": "images", "train_annotations": "truth.json", "val_annotations": "truth.json"}
    plain = {"shortest": None, "longest": None, "photometric": 0.0, "workers": 0}
    return load_detection_data(CocoConfig(root=str(folder), **files | plain | given), fixed_size, NORM, CPU, 0, shapes="masks")


@pytest.mark.parametrize("given", [{}, {"horizontal_flip": 1.0}, {"scale": [0.5, 0.6]}, {"scale": [1.6, 2.0]}, {"mosaic": 1.0}])
def test_masks_stay_on_what_they_cover(coco, given):
    """In training: flipped, scaled, cropped, in a window of four. Each ellipse has one grey, and the others and the ground have another."""
    data = opened(coco, **{"horizontal_flip": 0.0, "batch_size": 4} | given)
    seen, close = 0, []
    for each in data.train:
        grey = F.avg_pool2d(((each.images[:, :1] * 0.25 + 0.5) * 255), 4)[:, 0]
        for image, boxes, labels, masks in zip(grey, each.boxes, each.labels, each.masks, strict=True):
            assert not masks[labels < 0].any()
            for box, mask in zip(boxes[labels >= 0] / 4, masks[labels >= 0], strict=True):
                rows, columns = (mask > 0).nonzero().T
                assert rows.min() >= box[1].floor() - 1
                assert columns.max() <= box[2].ceil()
                inner = image[mask == 255]
                seen += len(inner)
                if len(inner):
                    close.append((inner - inner.max()).abs() < 12)
    assert seen > 20
    assert torch.cat(close).double().mean() > 0.9, "whole cells of a mask have one grey, but where a resized image is blurred"


def test_batches_of_another_size_keep_their_masks(coco):
    small, large = (next(iter(opened(coco, augment=True, horizontal_flip=0.0, scale=[1, 1], batch_scale=[by, by]).train)) for by in (1, 2))
    assert large.masks.shape[2:] == tuple(2 * side for side in small.masks.shape[2:])
    again = F.avg_pool2d(large.masks.float(), 2)
    assert (again - small.masks.float()).abs().mean() < 3


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.most = max(self.most, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


def test_the_first_batch_is_drawn_with_its_masks_and_little_memory():
    data = batch((4, 0, 7))
    torch.manual_seed(3)
    data.index, data.masks = torch.arange(3), torch.randint(0, 256, (*data.labels.shape, HEIGHT // 4, WIDTH // 4)).byte()
    task = object.__new__(Instances)
    names, files = [str(label) for label in range(CLASSES)], [f"{place}.png" for place in range(3)]
    task.data = SimpleNamespace(norm=NORM, classes=names, train=SimpleNamespace(file=SimpleNamespace(files=files)))
    with Largest() as made:
        found = task.first_batch(data)
    assert made.most <= data.images.numel()  # a number for each pixel of 7 masks, and not of all rows of all images
    assert [title for _, title in found] == files
    for place, ((image, _), (plain, _)) in enumerate(zip(found, Detection.first_batch(task, data), strict=True)):
        there = (data.labels[place] >= 0).nonzero()[:, 0].tolist()
        large = F.interpolate(data.masks[place][None].float(), scale_factor=4)[0] > 127
        parts = [(0, 0, large[number]) for number in there]
        assert image == with_masks(plain, parts, [colour_of(int(data.labels[place, number])) for number in there])
        assert (image == plain) == (not there)


def test_an_annotation_without_a_mask_is_named(coco):
    tree = json.loads((coco / "truth.json").read_text())
    del tree["annotations"][1]["segmentation"]
    (coco / "truth.json").write_text(json.dumps(tree))
    with pytest.raises(
        UserError, match=r"annotation 2 of image 5: no segmentation; polygons or a run-length .* \(task=detection learns boxes alone\)"
    ):
        opened(coco)


@pytest.mark.parametrize("size", [(2**40, 2**40), (10, 10**9), (20_000, 20_000)])
def test_an_image_that_says_it_has_very_many_pixels_is_refused_before_its_masks_are_made(coco, size):
    tree = json.loads((coco / "truth.json").read_text())
    tree["images"][0] |= dict(zip(("height", "width"), size, strict=True))
    for entry in tree["annotations"]:
        entry["segmentation"] = [[0, 0, size[1] - 1, 0, size[1] - 1, size[0] - 1]]
    (coco / "truth.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"image 5: has {size[1]} x {size[0]} pixels; at most 89,478,485 are read"):
        opened(coco, check="off")


def test_lines_of_polygons_in_yolos_form_are_masks(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for name in "abcd":
        Image.new("RGB", (70, 50)).save(tmp_path / "images" / f"{name}.png")
        corners = np.array([[10, 10], [20, 10], [20, 15], [10, 15]]) / [70, 50]
        (tmp_path / "labels" / f"{name}.txt").write_text("0 " + " ".join(f"{value:.9f}" for value in corners.flatten()))
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [ant]\n")
    config = BoxesConfig(root=str(tmp_path), workers=0, shortest=None, longest=None)
    data = load_detection_data(config, None, NORM, CPU, 0, shapes="masks")
    mask = decoded([data.val.file.masks[0]], SIZE)[0]
    assert mask[10:15, 10:20].all()
    assert mask.sum() == 50


def test_masks_of_scenes_are_the_ink_that_is_seen(tmp_path):
    config = DigitScenesConfig(root=str(tmp_path), train_scenes=3, val_scenes=2, scene_pixels=64, digits=[3, 4], clutter=0.0, workers=0)
    file = load_detection_data(config, None, NORM, CPU, 0, shapes="masks").train.file
    for position in range(len(file)):
        pixels = np.asarray(file.open(position)).astype(float)
        masks = decoded(file.masks[file.rows(position)], file.sizes[position]).astype(bool)
        assert masks.sum(0).max() == 1, "an object in front covers what is behind it"
        for mask, (x, y, width, height) in zip(masks, file.boxes[file.rows(position)].long().tolist(), strict=True):
            assert mask.sum() == mask[y : y + height, x : x + width].sum() > 20
            ground = pixels[y : y + height, x : x + width][~masks[:, y : y + height, x : x + width].any(0)]
            assert np.abs(pixels[mask].mean(0) - ground.mean(0)).max() > 40


def yolo_masks(implementation="lossforge", **options):
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    model = YoloMasks(body, CLASSES, DetectionLoss("varifocal", "ciou", implementation=implementation), prototypes=6, **options)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "head" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def detr_masks(**options):
    body = pyramid(aggregated=True)
    torch.manual_seed(1)
    return DetrMasks(body, CLASSES, DetectionLoss("varifocal", "giou"), prototypes=6, queries=12, layers=2, heads=2, **options)


def example(counts=(4, 0, 7), make=yolo_masks, **options):
    data = batch(counts)
    torch.manual_seed(3)
    data.index, data.masks = torch.arange(3), torch.randint(0, 256, (*data.labels.shape, HEIGHT // 4, WIDTH // 4)).byte()
    model = make(**options)
    output = model(data.images, *(data.boxes, data.labels) * model.takes_targets)
    names = [name for name in ("coefficients", "earlier_coefficients", "prototypes") if getattr(output, name) is not None]
    return model, data, output._replace(**{name: getattr(output, name).detach().requires_grad_() for name in names})


def by_hand(output, matched, data):
    """The loss of one head as loops over anchors and cells, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for image, anchor in (matched.box_index >= 0).nonzero().tolist():
        place = int(matched.box_index[image, anchor])
        x1, y1, x2, y2 = (data.boxes[image, place].double() / 4).tolist()
        logits = torch.einsum("p,phw->hw", output.coefficients[image, anchor].double(), output.prototypes[image].double())
        target = data.masks[image, place].double() / 255
        own = 0
        for row in range(logits.shape[0]):
            for column in range(logits.shape[1]):
                if x1 <= column + 0.5 < x2 and y1 <= row + 0.5 < y2:
                    own = own + F.binary_cross_entropy_with_logits(logits[row, column], target[row, column])
        total = total + matched.scores[image, anchor].double() * own / max((x2 - x1) * (y2 - y1), 1)
    return total


@pytest.mark.parametrize(("plain", "one_to_one"), [(False, False), (True, False), (True, True)], ids=["kernels", "torch", "two heads"])
def test_the_loss_is_its_formula(plain, one_to_one):
    """Of two heads the second one, which predicts, does not train the prototypes."""
    model, data, output = example((2, 0, 1), one_to_one=one_to_one)
    model.candidates = 3
    matched = model.match(data, output)
    loss = prototype_loss(both(output), matched, data.masks, data.boxes, plain=plain)
    leaves = [output.coefficients, output.prototypes, *[output.earlier_coefficients] * one_to_one]
    found = torch.autograd.grad(3 * loss, leaves)
    if one_to_one:
        parts = [matched._replace(box_index=matched.box_index[rows], scores=matched.scores[rows]) for rows in (slice(3), slice(3, 6))]
        second = output._replace(prototypes=output.prototypes.detach())
        expected = by_hand(output._replace(coefficients=output.earlier_coefficients), parts[0], data) + by_hand(second, parts[1], data)
    else:
        expected = by_hand(output, matched, data)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert theirs.abs().max() > 0


@pytest.mark.parametrize(("training", "denoising"), [(True, 0), (True, 8), (False, 0)])
def test_the_loss_of_queries_is_that_of_their_boxes_masks(training, denoising):
    """Of each layer the query that a box was matched with; at points it is what torch's own functions make of the masks there."""
    model, data, _ = example((2, 0, 3), detr_masks, denoising=denoising)
    model.train(training)
    output = model(data.images, *(data.boxes, data.labels) * model.takes_targets)
    names = ["coefficients", "prototypes", *["earlier_coefficients"] * training]
    output = output._replace(**{name: getattr(output, name).detach().requires_grad_() for name in names})
    matched = model.match(data, output)
    found = point_loss(output, matched, data.masks, points=40, plain=True, generator=torch.Generator().manual_seed(5))
    rows = output.coefficients if not training else torch.cat([output.earlier_coefficients, output.coefficients])
    assert len(rows) == (9 if training else 3)
    generator, expected, pairs = torch.Generator().manual_seed(5), 0, 0
    place = matched.box_index[: rows.shape[0] * rows.shape[1]].view(rows.shape[:2])
    for layer in range(len(rows) // 3):
        logits = torch.zeros(3, 3, HEIGHT // 4, WIDTH // 4)
        for image in range(3):
            for box in range(3):
                (query,) = (place[3 * layer + image] == box).nonzero()[:, 0].tolist() or [0]
                logits[image, box] = torch.einsum("p,phw->hw", rows[3 * layer + image, query], output.prototypes[image])
        at = sample_uncertain_points(logits.flatten(0, 1), 40, generator=generator)
        for image, row in enumerate(place[3 * layer : 3 * layer + 3]):
            for box in row[row >= 0].tolist():
                grid = 2 * at[None, None, 3 * image + box] - 1
                mask = logits[image, box][None, None], data.masks[image, box][None, None].float() / 255
                x, y = (F.grid_sample(each, grid, align_corners=False).flatten() for each in mask)
                expected = expected + F.binary_cross_entropy_with_logits(x, y)
                expected = expected + 1 - (2 * (x.sigmoid() * y).sum() + 1) / (x.sigmoid().sum() + y.sum() + 1)
                pairs += 1
    assert pairs == 5 * len(rows) // 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    leaves = [getattr(output, name) for name in names]
    for ours, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert theirs.abs().max() > 0


@pytest.mark.parametrize("counts", [(0, 0), (0, 0, 1)])
@pytest.mark.parametrize("make", [yolo_masks, detr_masks])
def test_what_no_object_asks_for_has_no_gradient(make, counts):
    model, data, output = example(counts, make)
    loss = model.mask_loss(output, model.match(data, output), data)
    gradients = torch.autograd.grad(loss, (output.coefficients, output.prototypes))
    assert (loss == 0) == (sum(counts) == 0)
    assert not any(each[:2].any() for each in gradients)
    assert all(each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("threshold", [0.012, 0.9])
def test_detections_are_torchvisions_and_masks_those_of_their_anchors(threshold):
    model, data, output = example()
    model.eval()
    model.score_thresh = threshold
    found = model.detections(output, data.sizes, (HEIGHT, WIDTH))
    expected = Yolo.detections(model, output, data.sizes, (HEIGHT, WIDTH))
    cells = torch.cat(model.anchors(HEIGHT, WIDTH, CPU))
    for image, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (len(ours["labels"]) > 5) == (threshold < 0.5)
        for name in ("boxes", "scores", "labels"):
            assert ours[name].equal(theirs[name])
        boxes = model.coder.decode(output.regression[image].float(), cells)
        logits = torch.einsum("ap,phw->ahw", output.coefficients[image], output.prototypes[image])
        for box, score, label, mask in zip(*(ours[name] for name in ("boxes", "scores", "labels", "masks")), strict=True):
            same = ((output.logits[image, :, label].sigmoid() - score).abs() < 1e-6).nonzero()[:, 0]
            assert any(torch.allclose(mask, logits[place], atol=1e-3) for place in same.tolist())
            assert any(torch.allclose(box[:2].clamp(min=0.01), boxes[place, :2].clamp(min=0.01), atol=1e-3) for place in same.tolist())


@pytest.mark.parametrize(("make", "options"), [(yolo_masks, {}), (yolo_masks, {"one_to_one": True}), (detr_masks, {})])
def test_an_exported_model_gives_the_detections_and_their_masks(make, options):
    model, data, _ = example((4, 0, 7), make, **options)
    model.eval()
    model.score_thresh = 0.005
    pixels = (data.images.clamp(-2, 2) * 63 + 127).byte()
    module = InstanceScenes(model, NORM)
    with torch.no_grad():
        found = module(pixels)
        output = model(module.boxes.normalised(pixels))
    assert found.shape == (3, min(100, 12 * CLASSES if make is detr_masks else 100), 6 + HEIGHT * WIDTH // 16)
    expected = model.detections(output, torch.tensor([[HEIGHT, WIDTH]] * 3), (HEIGHT, WIDTH))
    for rows, each in zip(found, expected, strict=True):
        count = len(each["scores"])
        assert count > 5
        torch.testing.assert_close(rows[:count, :4], each["boxes"], rtol=0, atol=1e-3)
        masks = rows[:count, 6:].view(count, HEIGHT // 4, WIDTH // 4)
        inner = masks > 0
        torch.testing.assert_close(masks[inner], each["masks"].sigmoid()[inner], rtol=1e-4, atol=1e-5)
        assert inner.any()
        assert not rows[count:].any()


def test_masks_are_resized_to_the_file_and_cut_off_at_their_boxes():
    masks = torch.full((2, 16, 16), -5.0)
    masks[:, 2:6, 4:12] = 5.0  # rows 8 to 24 and columns 16 to 48 of the padded image
    boxes = torch.tensor([[0.0, 0.0, 120.0, 96.0], [50.0, 0.0, 70.0, 30.0]])
    found = torch.from_numpy(decoded(encoded_in_file(masks, boxes, (48, 60), (96, 120)), (96, 120))).bool()
    whole = torch.zeros(96, 120, dtype=torch.bool)
    whole[16:48, 32:96] = True
    assert (found[0] ^ whole).sum() < 0.1 * whole.sum()
    assert found[1].equal(found[0] & torch.zeros_like(whole).index_fill(1, torch.arange(50, 70), True) & (torch.arange(96) < 30)[:, None])


def guesses(each, seed=0):
    """Detections of a batch: true boxes, moved, with masks that are the true ones, shifted and cut, and strays; some scores tie."""
    found = []
    for boxes, labels, masks, image_id in zip(each.boxes, each.labels, each.masks, each.image_ids, strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + int(image_id))
        boxes, masks, labels = boxes[labels >= 0], masks[labels >= 0].float() / 255 - 0.5, labels[labels >= 0]
        boxes = boxes.repeat(2, 1) + torch.randn(2 * len(boxes), 4, generator=generator)
        shifted = torch.cat([masks, masks.roll((1, 0), (1, 2))])
        labels = torch.cat([labels, labels.flip(0)])
        scores = (torch.rand(len(labels), generator=generator) * 10).round() / 10
        found.append({"boxes": boxes, "scores": scores, "labels": labels, "masks": shifted})
    return found


def test_figures_are_those_of_coco_on_the_exported_file(coco, tmp_path):
    """Of masks and of boxes; pycocotools 2.0.11 gave FIGURES for the two files that this test writes."""
    from faster_coco_eval import COCO, COCOeval_faster

    data = opened(coco, eval_batch_size=3)
    counts = InstanceCounts(data.classes, data.category_ids, CPU, data.val.file)
    for each in data.val:
        counts.add(guesses(each), each)
    result = counts.result()
    result.export_coco(tmp_path / "results.json")
    truth = COCO(str(data.val.file.path))
    names = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
    for kind, prefix, checked in (("segm", "", names), ("bbox", "box_", names[:3])):
        judge = COCOeval_faster(truth, truth.loadRes(str(tmp_path / "results.json")), kind, print_function=lambda *_: None)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
        for name, expected in zip(checked, judge.stats, strict=False):
            assert result.values[prefix + name] == pytest.approx(expected if expected >= 0 else float("nan"), abs=1e-6, nan_ok=True), name
    assert {name: result.values[name] for name in FIGURES} == pytest.approx(FIGURES, abs=1e-6)


FIGURES = {"map": 0.423385196, "map50": 0.558816597, "map75": 0.499292786, "box_map": 0.447640657, "box_map50": 0.653618576}


def test_a_file_is_predicted_as_it_was_evaluated(make_trainer, tmp_path):
    """By the same model: scores, boxes and masks of each held-out image."""
    words = ["task=instances", "model=yolo_tiny", f"data.root={tmp_path}", "data.train_scenes=4", "data.val_scenes=2", "data.workers=0"]
    words += ["data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.digits=[2,3]", "model.score_threshold=0.0", "tracking=none"]
    trainer = make_trainer(*words, "model.detections=5")
    with seeded(0):
        torch.nn.init.normal_(trainer.model.head.cls_logits.weight, std=0.2)
        torch.nn.init.normal_(trainer.model.head.coefficients.bias)
    result = trainer.evaluate(trainer.model, trainer.data.val)
    config = load(["trainer.device=cpu", *words, "model.detections=5"]).config
    state = {"norm": asdict(trainer.data.norm), "classes": trainer.data.classes, "model": trainer.model.state_dict(), "ema": None}
    predict = predictor(config, state, CPU, top=5, score=0.0)
    file = trainer.data.val.file
    for position, image_id in enumerate(file.image_ids):
        found = predict(file.open(position))
        expected = result.found[image_id]
        assert found.scores == pytest.approx(expected.scores.tolist(), abs=1e-6)
        assert list(found.instances) == expected.masks
        assert found.tree()[0]["mask"] == {"size": [64, 64], "counts": expected.masks[0].decode()}
        plain, drawn = (np.asarray(draw(file.open(position), replace(found, boxes=[], instances=each))) for each in (None, found.instances))
        covered = decoded(expected.masks, (64, 64)).any(0)
        assert covered.any()
        changed = (plain != drawn).any(-1).reshape(64, 5, 64, 5).any((1, 3))
        assert changed[covered].all()

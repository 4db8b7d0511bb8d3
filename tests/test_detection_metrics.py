"""COCO's figures against faster_coco_eval run on the written files, over one process and two."""

import json
import math
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lab.base.drawing import colour_of
from lab.data.sets import Norm
from lab.detectors.annotations.coco_file import read_coco
from lab.detectors.detection.data import load_detection_data
from lab.detectors.detection.metrics import DetectionCounts, Found, confusion_of
from lab.detectors.detection.plots import CROWD, _drawn, detections_picture, precision_recall_picture, true_boxes
from lab.detectors.schema import CocoConfig

CPU = torch.device("cpu")
NORM = Norm([0.5] * 3, [0.25] * 3)
IDS = [2, 5, 9, 40]
NAMES = ["ant", "bee", "cat", "dog"]


def write_truth(folder, images=30, seed=0):
    """A COCO file of random boxes, crowds among them; its ids are not in order and no box is a dog."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    tree = {"images": [], "annotations": [], "categories": [{"id": i, "name": name} for i, name in zip(IDS, NAMES, strict=True)]}
    for image_id in rng.permutation(1000)[:images].tolist():
        height, width = (int(edge) for edge in rng.integers(100, 300, 2))
        Image.new("RGB", (width, height), (90, 120, 60)).save(folder / "images" / f"{image_id}.png")
        tree["images"].append({"id": image_id, "file_name": f"{image_id}.png", "height": height, "width": width})
        for _ in range(int(rng.integers(0, 7))):
            w, h = (rng.uniform(8, 0.9 * edge) for edge in (width, height))
            box = [float(v) for v in (rng.uniform(0, width - w), rng.uniform(0, height - h), w, h)]
            entry = {"id": len(tree["annotations"]) + 1, "image_id": image_id, "category_id": IDS[int(rng.integers(3))], "bbox": box}
            tree["annotations"].append(entry | {"area": w * h * rng.uniform(0.4, 1), "iscrowd": int(rng.random() < 0.15)})
    (folder / "truth.json").write_text(json.dumps(tree))


@pytest.fixture
def coco(tmp_path):
    write_truth(tmp_path / "coco")
    return tmp_path / "coco"


def load(folder, fixed_size=None, **given):
    files = {"train_images": "images", "val_images": "images", "train_annotations": "truth.json", "val_annotations": "truth.json"}
    sizes = {"shortest": 120, "longest": 200, "eval_batch_size": 7}
    config = CocoConfig(root=str(folder), workers=0, **files | sizes | given)
    return load_detection_data(config, fixed_size, NORM, CPU, 0)


def guesses(batch, seed=0):
    """Detections in a batch: moved and repeated true boxes of rounded scores, so that some tie, and others of any class."""
    found = []
    for boxes, labels, image_id, size in zip(batch.boxes, batch.labels, batch.image_ids, batch.sizes, strict=True):
        generator = torch.Generator().manual_seed(1000 * seed + int(image_id))
        boxes, labels = boxes[labels >= 0], labels[labels >= 0]
        move = torch.randn(2 * len(boxes), 4, generator=generator) * 0.06 * (boxes[:, 2:] - boxes[:, :2]).repeat(2, 2)
        stray = torch.rand(5, 4, generator=generator).sort(1).values[:, [0, 1, 2, 3]] * size.flip(0).repeat(2)
        labels = torch.cat([labels.repeat(2), torch.randint(4, (5,), generator=generator)])
        scores = torch.rand(len(labels), generator=generator)
        scores[: len(boxes)] = scores[: len(boxes)].clamp_min(0.5)
        found.append({"boxes": torch.cat([boxes.repeat(2, 1) + move, stray]), "scores": scores.mul(20).round() / 20, "labels": labels})
    return found


def counts_of(data):
    return DetectionCounts(data.classes, data.category_ids, CPU, data.val.file)


def evaluated(data, detections=guesses):
    counts = counts_of(data)
    for batch in data.val:
        counts.add(detections(batch), batch)
    return counts.result()


def judge(truth, results, category=None):
    from faster_coco_eval import COCO, COCOeval_faster

    truth = COCO(str(truth))
    judge = COCOeval_faster(truth, truth.loadRes(str(results)), "bbox", print_function=lambda *_: None)
    if category is not None:
        judge.params.catIds = [category]
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return judge


@pytest.mark.parametrize("given", [{}, {"fixed_size": [128, 160]}, {"fixed_size": [128, 160], "rect": True}])
def test_figures_are_those_of_coco_on_the_exported_file(coco, tmp_path, given):
    data = load(coco, **given)
    result = evaluated(data)
    path = tmp_path / "results.json"
    result.export_coco(path)
    stats = judge(data.val.file.path, path).stats
    names = {"map": 0, "map50": 1, "map75": 2, "map_small": 3, "map_medium": 4, "map_large": 5, "mar100": 8}
    assert sorted(result.values) == sorted([*names, "loss"])
    for name, place in names.items():
        assert result.values[name] == pytest.approx(stats[place], abs=1e-6), name
    assert 0.1 < result.values["map"] < result.values["map50"] < 1
    for name, category in zip(NAMES[:3], IDS, strict=False):
        judged = judge(data.val.file.path, path, category)
        assert result.per_class[name] == pytest.approx(judged.stats[0], abs=1e-6), name
        assert result.precision[name] == pytest.approx(judged.eval["precision"][0, :, 0, 0, -1].tolist(), abs=1e-6)
    assert math.isnan(result.per_class["dog"])
    assert "dog" not in result.precision


def test_a_recall_of_exactly_a_threshold_counts(tmp_path):
    """Three of five objects found: COCO counts the recalls 0 to 0.6, 61 of 101."""
    folder = tmp_path / "coco"
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (200, 50)).save(folder / "images/1.png")
    boxes = [{"id": i + 1, "image_id": 1, "category_id": 1, "bbox": [20 * i, 5, 16, 16], "area": 256, "iscrowd": 0} for i in range(5)]
    images = [{"id": 1, "file_name": "1.png", "height": 50, "width": 200}]
    (folder / "truth.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "ant"}]}))
    data = load(folder, shortest=None, longest=None)
    corners = torch.tensor([[20.0 * i, 5, 20 * i + 16, 21] for i in range(3)])
    found = {"boxes": corners, "scores": torch.tensor([0.9, 0.8, 0.7]), "labels": torch.zeros(3, dtype=torch.int64)}
    assert evaluated(data, lambda batch: [found]).values["map"] == pytest.approx(61 / 101)


def test_the_export_has_the_files_ids_and_pixels(coco, tmp_path):
    data = load(coco, fixed_size=[128, 160])
    result = evaluated(data, lambda batch: [truth(batch, i) for i in range(len(batch))])
    result.export_coco(tmp_path / "results.json")
    rows = json.loads((tmp_path / "results.json").read_text())
    wanted = [entry for entry in json.loads((coco / "truth.json").read_text())["annotations"] if not entry["iscrowd"]]
    by_image = {}
    for entry in wanted:
        by_image.setdefault(entry["image_id"], []).append((entry["category_id"], *entry["bbox"]))
    assert len(rows) == len(wanted)
    for row in rows:
        left = by_image[row["image_id"]].pop(0)
        assert row["category_id"] == left[0]
        assert row["bbox"] == pytest.approx(left[1:], abs=1e-3)
        assert row["score"] == 0.75
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["results.json"]


def truth(batch, row):
    real = batch.labels[row] >= 0
    return {"boxes": batch.boxes[row][real], "scores": torch.full((int(real.sum()),), 0.75), "labels": batch.labels[row][real]}


def nothing(batch):
    return [{"boxes": torch.empty(0, 4), "scores": torch.empty(0), "labels": torch.empty(0, dtype=torch.int64)} for _ in range(len(batch))]


def test_all_none_and_broken_detections(coco):
    data = load(coco)
    perfect = evaluated(data, lambda batch: [truth(batch, i) for i in range(len(batch))])
    assert [perfect.values[name] for name in ("map", "map50", "mar100")] == pytest.approx([1, 1, 1])
    assert perfect.per_class["ant"] == pytest.approx(1)
    none = evaluated(data, nothing)
    assert [none.values[name] for name in ("map", "map50", "mar100")] == [0, 0, 0]
    broken = evaluated(data, lambda batch: [{**truth(batch, i), "scores": truth(batch, i)["scores"] * math.nan} for i in range(len(batch))])
    assert broken.values["map"] == 0
    assert all(math.isnan(value) for value in counts_of(data).result().values.values()), "no image was evaluated"


def test_a_detection_across_the_borders_is_cut_off(coco):
    data = load(coco)
    each = next(iter(data.val))
    found = [{"boxes": torch.tensor([[-9.0, -5, 999, 888]]), "scores": torch.ones(1), "labels": torch.zeros(1)} for _ in range(len(each))]
    counts = counts_of(data)
    counts.add(found, each)
    for position, rows in zip(each.index.tolist(), counts.rows, strict=True):
        height, width = data.val.file.sizes[position]
        assert rows[0, :4].tolist() == [0, 0, width, height]


def test_detections_in_a_crowd_are_no_mistakes(coco):
    data = load(coco)
    file = data.val.file
    crowds = {file.image_ids[i]: file.rows(i) for i in range(len(file)) if file.crowd[file.rows(i)].any()}
    assert len(crowds) > 5

    def with_crowds(batch):
        found = []
        for row, image_id in enumerate(batch.image_ids.tolist()):
            each = truth(batch, row)
            if image_id in crowds:
                rows = crowds[image_id]
                boxes, labels = file.boxes[rows][file.crowd[rows]], file.labels[rows][file.crowd[rows]]
                ratio = (batch.sizes[row] / batch.originals[row]).flip(0).repeat(2)
                corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1).float() * ratio
                # surer than the true ones: they would spoil the precision if they counted
                extra = {"boxes": corners.repeat(2, 1), "scores": torch.full((2 * len(labels),), 0.9), "labels": labels.repeat(2)}
                each = {key: torch.cat([each[key], extra[key]]) for key in each}
            found.append(each)
        return found

    assert evaluated(data, with_crowds).values["map"] == pytest.approx(1)


def rank(number, place, folder, queue):
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    data = load(folder, eval_batch_size=4)
    result = evaluated(data)
    queue.put((number, len(data.val), result.values, result.per_class, sorted(result.found)))
    torch.distributed.destroy_process_group()


def test_two_ranks_count_each_image_once(tmp_path):
    folder = tmp_path / "coco"
    write_truth(folder, images=13)
    alone = evaluated(load(folder))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=rank, args=(number, tmp_path / "meeting", folder, queue), daemon=True) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    results = sorted((queue.get(timeout=600) for _ in processes), key=lambda each: each[0])
    assert [batches for _, batches, *_ in results] == [2, 2], "seven images each: one is counted on both"
    for _, _, values, per_class, _ in results:
        assert values == pytest.approx(alone.values, nan_ok=True)
        assert per_class == pytest.approx(alone.per_class, nan_ok=True)
    assert results[0][4] == sorted(alone.found)
    assert len(alone.found) == 13
    assert results[1][4] == []


def test_a_confusion_matrix_counts_each_box_once(coco):
    """Exact boxes of other classes stand in their column, missed ones and inventions in those of nothing; crowds do not count."""
    data = load(coco)
    file, classes = data.val.file, len(data.classes)
    found = {}
    for position, image_id in enumerate(file.image_ids):
        rows = file.rows(position)
        boxes, labels = file.boxes[rows], file.labels[rows]
        found[image_id] = Found(boxes, torch.linspace(0.9, 0.5, len(boxes)), (labels + 1) % classes)
    result = evaluated(data)
    counts = confusion_of(replace(result, found=found), file, 0.3)
    true = file.counts()
    expected = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    for label in range(classes):
        expected[label, (label + 1) % classes] = true[label]
    assert torch.equal(counts, expected)
    even = replace(file, boxes=file.boxes.div(2).floor().mul(2).clamp(min=2))
    half = torch.tensor([1.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    halves = {
        image_id: Found(even.boxes[file.rows(i)] * half, found[image_id].scores, found[image_id].labels) for i, image_id in enumerate(found)
    }
    missed = confusion_of(replace(result, found=halves), even, 0.3, 0.5)[:-1, -1].sum()
    assert missed < 0.1 * true.sum()  # an overlap of one half is enough
    none = {image_id: Found(each.boxes, each.scores * 0, each.labels) for image_id, each in found.items()}
    assert torch.equal(confusion_of(replace(result, found=none), file, 0.3)[:-1, -1], true)
    far = {image_id: Found(torch.tensor([[-500.0, -500, 20, 20]]), torch.ones(1), torch.tensor([1])) for image_id in found}
    counts = confusion_of(replace(result, found=far), file, 0.3)
    assert counts[-1].tolist() == [len(found) * (label == 1) for label in range(classes + 1)]
    assert int(counts.sum()) == len(found) + int(true.sum())


@pytest.fixture
def file(coco):
    """Return the file of true boxes."""
    return read_coco(coco / "truth.json", coco / "images", settings=("a", "b"), check="off", skip_corrupt=False)


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB"))


def test_a_box_is_drawn_where_it_is(file):
    drawn = _drawn(file, 0, torch.tensor([[40.0, 30, 50, 60]]), [colour_of(1)], [""])
    assert max(drawn.shape) == 480
    ratio = 480 / max(file.sizes[0])
    rows, columns = np.nonzero((drawn == np.array(colour_of(1))).all(-1))
    edges = [columns.min(), rows.max(), columns.max()]
    assert edges == pytest.approx([40 * ratio, 90 * ratio, 90 * ratio], abs=3)


def test_true_boxes_have_their_class_and_crowds_a_colour(coco, file):
    classes = load(coco).classes
    crowded = next(i for i in range(len(file)) if file.crowd[file.rows(i)].any())
    colours, text = true_boxes(file, crowded, classes)
    crowds = file.crowd[file.rows(crowded)].tolist()
    assert [colour == CROWD for colour in colours] == [each.endswith(" (crowd)") for each in text] == crowds
    assert [each.removesuffix(" (crowd)") for each in text] == [classes[i] for i in file.labels[file.rows(crowded)].tolist()]


def test_the_curve_of_precision_and_recall_has_a_line_for_each_class(coco, tmp_path):
    precision_recall_picture(evaluated(load(coco)), tmp_path / "curve.png")
    pixels = pixels_of(tmp_path / "curve.png").reshape(-1, 3)
    assert all((pixels == colour).all(-1).any() for colour in (np.array([31, 119, 180]), np.array([44, 160, 44])))


def test_only_the_surest_boxes_are_drawn_and_the_title_says_how_many_are_not(coco, file, tmp_path):
    """Of boxes found everywhere, as by a detector that has learned little."""
    data, drawn = load(coco), {}
    result = evaluated(data)
    for name, kept in (("all", slice(None)), ("surest", slice(12))):
        generator = torch.Generator().manual_seed(0)
        boxes = torch.rand(100, 4, generator=generator) * torch.tensor([30, 30, 60, 60]) + 8
        scores = torch.linspace(0.9, 0.31, 100)[torch.randperm(100, generator=generator)]
        order = scores.argsort(descending=True)[kept]
        found = {image_id: Found(boxes[order], scores[order], torch.zeros(len(order), dtype=torch.int64)) for image_id in result.found}
        detections_picture(replace(result, found=found), file, data.classes, tmp_path / "many.png", images=1)
        drawn[name] = pixels_of(tmp_path / "many.png")
    assert (drawn["all"][40:] == drawn["surest"][40:]).all(), "below the title"
    assert (drawn["all"][:40] != drawn["surest"][:40]).any(), "the title"

"""COCO folders, as a stranger brings them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.base.errors import UserError
from lab.data.sets import Norm
from lab.detectors.detection.data import load_detection_data
from lab.detectors.detection.inference import batches
from lab.detectors.schema import CocoConfig

CPU = torch.device("cpu")
NORM = Norm([0.5, 0.4, 0.2], [0.2, 0.25, 0.5])
RED, BLUE, GREY = (230, 20, 30), (20, 30, 230), (128, 102, 51)


class CocoFolder:
    """Images of one colour with filled rectangles, and their annotations; category ids have gaps."""

    def __init__(self, path):
        self.path = path
        self.trees = {
            part: {
                "images": [],
                "annotations": [],
                "categories": [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}, {"id": 90, "name": "none"}],
            }
            for part in ("train", "val")
        }
        for part in self.trees:
            (path / part).mkdir(parents=True)
        for part, shift in (("train", 0), ("val", 100)):
            self.image(part, shift + 11, (60, 100), [(3, [10, 20, 30, 25]), (7, [60, 10, 20, 40])])
            self.image(part, shift + 5, (80, 40), [(7, [5, 30, 20, 36])])
            self.image(part, shift + 8, (50, 50), [])
            self.image(part, shift + 9, (64, 64), [(3, [8, 8, 16, 24]), (3, [30.5, 20.25, 30, 40])], crowd=1)
        self.write()

    def image(self, part, image_id, size, boxes, crowd=None):
        name = f"{image_id:03}.png"
        pixels = np.empty((*size, 3), dtype=np.uint8)
        pixels[:] = GREY
        tree = self.trees[part]
        for number, (category, (x, y, w, h)) in enumerate(boxes):
            pixels[round(y) : round(y + h), round(x) : round(x + w)] = RED if category == 3 else BLUE
            entry = {
                "id": len(tree["annotations"]) + 1,
                "image_id": image_id,
                "category_id": category,
                "bbox": [x, y, w, h],
                "area": w * h / 2,
            }
            tree["annotations"].append(entry | {"iscrowd": int(number == crowd)})
        Image.fromarray(pixels).save(self.path / part / name)
        tree["images"].append({"id": image_id, "file_name": name, "height": size[0], "width": size[1]})

    def write(self):
        for part, tree in self.trees.items():
            (self.path / f"{part}.json").write_text(json.dumps(tree))

    def config(self, **given):
        names = {"train_images": "train", "val_images": "val", "train_annotations": "train.json", "val_annotations": "val.json"}
        plain = {"workers": 0, "shortest": None, "longest": None, "augment": False, "batch_size": 4, "eval_batch_size": 4, "divisor": 16}
        return CocoConfig(root=str(self.path), **names | plain | given)

    def load(self, seed=0, fixed_size=None, **given):
        return load_detection_data(self.config(**given), fixed_size, NORM, CPU, seed)


@pytest.fixture
def coco(tmp_path):
    return CocoFolder(tmp_path / "coco")


def pixels_of(images):
    """The colours that a batch was normalised from."""
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (NORM.mean, NORM.std))
    return (images * deviation + mean) * 255


def painted(image):
    """The rectangle that holds all red pixels of (3, H, W) and the one of all blue ones; None where there are none."""
    found = []
    for strong, weak in ((0, 2), (2, 0)):
        rows, columns = torch.nonzero((image[strong] > 180) & (image[weak] < 80), as_tuple=True)
        found.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if len(rows) else None)
    return [None if each is None else torch.tensor([float(v) for v in each]) for each in found]


def test_classes_and_their_counts_are_the_files(coco):
    data = coco.load()
    assert (data.classes, data.category_ids) == (["red", "blue", "none"], [3, 7, 90])
    assert data.counts.tolist() == [2, 2, 0], "the crowd is not trained on"
    assert data.val.file.path == coco.path / "val.json"


@pytest.fixture
def held_out(coco):
    """Return the batch of all held-out images."""
    (batch,) = coco.load().val
    return batch


def test_a_batch_is_of_the_files_images_boxes_and_pixels(held_out):
    """The rest is padding, of the mean colour."""
    assert held_out.image_ids.tolist() == [111, 105, 108, 109]
    assert held_out.index.tolist() == [0, 1, 2, 3]
    assert held_out.sizes.tolist() == held_out.originals.tolist() == [[60, 100], [80, 40], [50, 50], [64, 64]]
    assert held_out.boxes.shape == (4, 8, 4)
    assert (held_out.boxes.dtype, held_out.labels.dtype) == (torch.float32, torch.int64)
    assert held_out.labels[:, :2].tolist() == [[0, 1], [1, -1], [-1, -1], [0, -1]]
    assert held_out.labels[:, 2:].eq(-1).all()
    assert held_out.boxes[0, :2].tolist() == [[10, 20, 40, 45], [60, 10, 80, 50]]
    assert held_out.boxes[held_out.labels < 0].eq(0).all()
    assert held_out.images.shape == (4, 3, 80, 112)
    torch.testing.assert_close(pixels_of(held_out.images)[0, :, 30, 20], torch.tensor(RED).float(), atol=1e-3, rtol=0)
    assert held_out.images[1, :, :, 40:].abs().max() < 0.02, "padding is the mean colour"


@pytest.mark.parametrize("given", [{}, {"fixed_size": [96, 64]}, {"shortest": 30, "longest": 70}])
def test_boxes_stay_on_what_they_frame(coco, given):
    data = coco.load(augment=True, horizontal_flip=0.5, scale=[0.4, 2.0], photometric=0.0, min_visible=0.0, **given)
    seen = 0
    for _ in range(12):
        for batch in data.train:
            for image, boxes, labels, position in zip(pixels_of(batch.images), batch.boxes, batch.labels, batch.index, strict=True):
                if position == 3:
                    continue  # has a crowd painted in the same colour
                for label, frame in enumerate(painted(image)):
                    (rows,) = torch.nonzero(labels == label, as_tuple=True)
                    if frame is None or not len(rows):
                        continue
                    torch.testing.assert_close(boxes[rows[0]], frame, atol=1.6, rtol=0)
                    seen += 1
    assert seen > 20


def test_a_box_that_a_crop_has_cut_away_goes(coco):
    given = {"augment": True, "horizontal_flip": 0.0, "scale": [2.0, 2.0], "photometric": 0.0}
    kept = {}
    for share in (0.0, 0.5, 1.0):
        data = coco.load(min_visible=share, **given)
        boxes = [(batch.boxes[batch.labels >= 0]) for _ in range(20) for batch in data.train]
        kept[share] = torch.cat(boxes)
    assert len(kept[0.0]) > len(kept[0.5]) > len(kept[1.0]) > 0
    whole = {(60.0, 50.0), (40.0, 80.0), (40.0, 72.0), (32.0, 48.0)}  # twice what the file says
    assert {tuple((box[2:] - box[:2]).tolist()) for box in kept[1.0].round()} <= whole
    assert (kept[0.0][:, 2:] > kept[0.0][:, :2]).all()


def test_fixed_sizes_make_all_batches_alike(coco):
    data = coco.load(augment=True, scale=[0.5, 2.0], fixed_size=[64, 96], batch_size=2)
    shapes = {(batch.images.shape, batch.boxes.shape) for _ in range(3) for batch in data.train}
    assert shapes == {((2, 3, 64, 96), (2, 8, 4))}
    (batch,) = data.val
    assert batch.sizes.tolist() == [[58, 96], [64, 32], [64, 64], [64, 64]], "proportions stay"
    assert batch.boxes[1, 0].tolist() == pytest.approx([5 * 0.8, 30 * 0.8, 25 * 0.8, 66 * 0.8])
    assert next(iter(coco.load(max_boxes=3).val)).boxes.shape == (4, 3, 4)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [([0], (64, 96)), ([2], (64, 64)), ([3], (64, 64)), ([1], (64, 32))]), (2, [([0, 2], (64, 96)), ([3, 1], (64, 64))])],
)
def test_rect_evaluates_images_at_their_own_proportions(coco, size, expected):
    data = coco.load(fixed_size=[64, 96], rect=True, eval_batch_size=size)
    seen = list(data.val)
    assert [(batch.index.tolist(), batch.images.shape[2:]) for batch in seen] == expected
    for batch in seen:
        for image, boxes, position in zip(pixels_of(batch.images), batch.boxes, batch.index.tolist(), strict=True):
            for frame in painted(image) if position < 2 else ():
                assert frame is None or (boxes - frame).abs().amax(1).min() < 1.6
    assert {batch.images.shape[2:] for batch in data.train} == {(64, 96)}, "training keeps its size"


def test_rect_predicts_images_as_it_evaluates_them(coco):
    config = coco.config(rect=True, eval_batch_size=1)
    tall = list(load_detection_data(config, [64, 96], NORM, CPU, 0).val)[-1]
    with Image.open(coco.path / "val" / "105.png") as image:
        assert torch.equal(batches(config, [64, 96], NORM)(image).images, tall.images)


def test_a_model_of_one_size_has_no_rect(coco, make_trainer):
    names = ["data.train_images=train", "data.val_images=val", "data.train_annotations=train.json", "data.val_annotations=val.json"]
    model = ["model=fcos_tiny", "model.name=test_coatnet", "model.channels=64", "model.fixed_size=[64,96]", "data.rect=true"]
    with pytest.raises(UserError, match=r"data\.rect=true: model\.name=test_coatnet takes only images of 64×96\. Take data\.rect=false\."):
        make_trainer("task=detection", "data=coco", f"data.root={coco.path}", "data.workers=0", *names, *model)


def test_neither_workers_nor_the_global_generator_change_an_epoch(coco):
    given = {"augment": True, "scale": [0.5, 2.0], "fixed_size": [64, 64], "batch_size": 3}
    torch.manual_seed(1)
    alone, helped, other = coco.load(seed=4, **given), coco.load(seed=4, workers=2, **given), coco.load(seed=5, **given)
    before = torch.get_rng_state()
    first = [batch for _ in range(2) for batch in alone.train]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = [batch for _ in range(2) for batch in helped.train]
    for one, two in zip(first, second, strict=True):
        for name, value in one.tensors().items():
            assert torch.equal(value, two.tensors()[name]), name
    assert not torch.equal(first[0].images, first[2].images), "epochs differ"
    assert not torch.equal(first[0].images, next(iter(other.train)).images), "seeds differ"
    assert sorted(int(i) for batch in first[:2] for i in batch.index) == [0, 1, 2, 3]


FAULTS = [
    ({"bbox": [1, 2, 0, 5]}, "annotation 1 of image 11: bbox [1, 2, 0, 5] has no area"),
    ({"bbox": [1, 2, 5, -5]}, "has no area"),
    ({"bbox": [1, 2, 5]}, "four finite numbers"),
    ({"bbox": None}, "four finite numbers"),
    ({"bbox": [1, 2, float("nan"), 5]}, "four finite numbers"),
    ({"bbox": [200, 20, 10, 10]}, "mostly outside of the image (100×60)"),
    ({"bbox": [80, 40, 99, 59]}, "[x, y, width, height] is expected"),
    ({"category_id": 4}, "category_id 4 is not among the categories"),
    ({"category_id": "red"}, "category_id 'red'"),
    ({"image_id": 77}, "annotation 1 of image 77: no such image"),
    ({"bbox": [1, 2, 10**400, 5]}, "four finite numbers"),
    ({"iscrowd": "0"}, "iscrowd '0'; 0 or 1 is expected"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_a_corrupt_annotation_is_named(coco, change, said, capsys):
    coco.trees["train"]["annotations"][0] |= change
    coco.write()
    with pytest.raises(UserError) as caught:
        coco.load()
    assert said in str(caught.value)
    assert "train.json: 1 corrupt entries" in str(caught.value)
    data = coco.load(skip_corrupt=True)
    assert data.counts.tolist() == [1, 2, 0]
    assert data.train.samples == 4
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert said in printed


def test_corrupt_images_are_named_and_their_boxes_are_not(coco):
    tree, folder = coco.trees["train"], coco.path / "train"
    (folder / "011.png").unlink()
    (folder / "005.png").write_bytes(b"no image")
    Image.new("RGB", (30, 50)).save(folder / "008.png")
    tree["images"] += [
        {"id": 20, "file_name": "009.png", "height": 64},
        {"id": "x", "file_name": "009.png", "height": 64, "width": 64},
        {"id": 9, "file_name": "009.png", "height": 64, "width": 64},
        {"id": 2**63, "file_name": "009.png", "height": 64, "width": 64},
        {"id": 21, "file_name": "\ud800/009.png", "height": 64, "width": 64},
    ]
    coco.write()
    with pytest.raises(UserError) as caught:
        coco.load()
    lines = str(caught.value).splitlines()
    assert "8 corrupt entries" in lines[0]
    for wanted in (
        "image 20: file_name, height and width",
        "{'id': 'x'",
        "{'id': 9223372036854775808",
        "image 9: its id is given twice",
        "image 21: ",
    ):
        assert sum(wanted in line for line in lines) == 1, wanted
    for image_id, wanted in ((11, "no such file"), (5, "cannot be read"), (8, "has 30×50 pixels, the annotations say 50×50")):
        assert sum(f"image {image_id} (" in line and wanted in line for line in lines) == 1, wanted
    data = coco.load(skip_corrupt=True)
    assert (data.train.samples, data.counts.tolist()) == (1, [1, 0, 0])


@pytest.mark.parametrize("kind", [float, str])
def test_numbers_of_other_kinds_and_paths_of_windows_are_read(coco, kind):
    plain = coco.load().train.file
    for name, tree in coco.trees.items():
        for entry in tree["categories"]:
            entry["id"] = kind(entry["id"])
        for entry in tree["images"] if name == "train" else ():
            entry |= {name: kind(entry[name]) for name in ("id", "height", "width")} | {"file_name": ".\\" + entry["file_name"]}
        for entry in tree["annotations"] if name == "train" else ():
            entry |= {name: kind(entry[name]) for name in ("image_id", "category_id")}
    coco.write()
    read = coco.load().train.file
    assert (read.image_ids, read.sizes, read.category_ids) == (plain.image_ids, plain.sizes, plain.category_ids)
    assert all(type(each) is int for each in (*read.image_ids, *read.category_ids))
    assert [Path(file).resolve() for file in read.files] == [Path(file).resolve() for file in plain.files]
    assert torch.equal(read.labels, plain.labels)
    coco.trees["train"]["images"][0]["id"] = "a7f"
    coco.write()
    with pytest.raises(UserError, match="has no integer id of 64 bits; number the images, and give their boxes these numbers as image_id"):
        coco.load()


def test_a_file_whose_name_has_a_backslash_comes_before_one_in_a_folder(coco):
    image = coco.trees["train"]["images"][0]
    plain, image["file_name"] = image["file_name"], ".\\" + image["file_name"]
    (coco.path / "train" / image["file_name"]).write_bytes((coco.path / "train" / plain).read_bytes())
    coco.write()
    assert coco.load().train.file.files[0].endswith(image["file_name"])


def test_paths_that_lead_out_and_numbers_that_are_not_whole_are_named(coco):
    images = coco.trees["train"]["images"]
    images[0]["file_name"] = "..\\val\\x.png"
    images[1] |= {"id": 4.5, "width": 1e400}
    coco.write()
    with pytest.raises(UserError) as caught:
        coco.load()
    assert "file_name '../val/x.png' leads out of" in str(caught.value)
    assert "has no integer id" in str(caught.value)


def test_held_out_images_that_are_the_training_images_are_said(coco):
    assert coco.load().notes == []
    data = coco.load(val_annotations="train.json", val_images="train")
    (note,) = data.notes
    assert note.endswith(
        "train.json: 4 of its 4 images are scored in another part, too, and none is left; scores say nothing of unseen images"
    )
    assert len(data.train.file) == 4


def test_a_held_out_image_is_not_trained_on(coco):
    """Also where another path or a link leads to it."""
    tree = coco.trees["train"]
    (coco.path / "both").symlink_to(coco.path)
    (coco.path / "link.png").symlink_to(coco.path / "val" / "105.png")
    for image, name in zip(tree["images"], ("train/011.png", "link.png", "both/val/../val/108.png", "train/009.png"), strict=True):
        image["file_name"] = name
    tree["images"][1] |= {"height": 80, "width": 40}
    for image in coco.trees["val"]["images"]:
        image["file_name"] = "./val/" + image["file_name"]
    coco.write()
    data = coco.load(train_images=".", val_images=".", images_outside=True)
    assert data.train.file.image_ids == [11, 9]
    assert data.train.file.labels.tolist() == [0, 1, 0, 0]
    assert len(data.val.file) == 4
    (note,) = data.notes
    assert note == f"{coco.path / 'train.json'}: 2 of its 4 images are scored in another part, too, and are left out here"


def test_an_image_of_two_ids_is_taken_once(coco):
    tree = coco.trees["train"]
    (image,) = (each for each in tree["images"] if each["id"] == 11)
    boxes = [each for each in tree["annotations"] if each["image_id"] == 11]
    plain = coco.load().train.file
    tree["images"].append(image | {"id": 12, "file_name": "./" + image["file_name"]})
    tree["annotations"] += [each | {"id": 50 + each["id"], "image_id": 12} for each in boxes]
    coco.write()
    data = coco.load()
    assert (data.train.file.image_ids, data.train.file.boxes.tolist()) == (plain.image_ids, plain.boxes.tolist())
    (note,) = data.notes
    assert "train.json: 1 images are given under two ids twice" not in note
    assert "train.json: 1 images are given under two ids, and taken once (the first: " in note
    tree["annotations"].pop()
    coco.write()
    with pytest.raises(UserError, match=r"image 12 \(.*011.png\): is the file of image 11, with other boxes; one id"):
        coco.load()
    assert coco.load(skip_corrupt=True).train.file.boxes.tolist() == plain.boxes.tolist()


def test_only_ten_faults_are_listed(coco):
    tree = coco.trees["val"]
    tree["annotations"] += [{"id": 50 + i, "image_id": 111, "category_id": 3, "bbox": [0, 0, 0, 0]} for i in range(30)]
    coco.write()
    with pytest.raises(UserError, match="30 corrupt entries") as caught:
        coco.load()
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "... and 20 more"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_found_before_the_run_or_named_in_it(coco, workers):
    path = coco.path / "train" / "011.png"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (60, 100, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4000])
    with pytest.raises(UserError, match=r"1 corrupt entries.*\nimage 11 .*cannot be read as an image"):
        coco.load()
    path.write_bytes(whole[:4000] + bytes(40) + whole[4040:])
    train = coco.load(workers=workers).train
    with pytest.raises(UserError) as caught:
        list(train)
    assert "image 11 (" in str(caught.value)
    assert "data.check=pixels" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(UserError, match=r"image 11 .*cannot be read"):
        coco.load(check="pixels")
    assert coco.load(check="pixels", skip_corrupt=True).train.samples == 3


def test_borders_are_clipped_and_areas_kept(coco):
    coco.trees["val"]["annotations"][0] |= {"bbox": [-2, 20, 30, 41.5], "area": 100.5}
    del coco.trees["val"]["annotations"][1]["area"]
    coco.trees["val"]["annotations"][2]["area"], coco.trees["val"]["annotations"][3]["area"] = 0, -5
    coco.write()
    file = coco.load().val.file
    assert file.boxes[:2].tolist() == [[0, 20, 28, 40], [60, 10, 20, 40]]
    assert file.areas[:4].tolist() == [100.5, 800, 720, 384]
    assert file.crowd.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("given", "box"),
    [
        ([-2, -3, 30, 30], [0, 0, 28, 27]),
        ([60, -10, 20, 40], [60, 0, 20, 30]),
        ([70, 40, 40, 30], [70, 40, 30, 20]),
        ([-5, -5, 110, 70], [0, 0, 100, 60]),
    ],
    ids=str,
)
def test_a_box_across_the_borders_keeps_its_part_inside(coco, given, box):
    coco.trees["val"]["annotations"][0]["bbox"] = given
    coco.write()
    assert coco.load().val.file.boxes[0].tolist() == box


def test_odd_pixel_formats(coco):
    folder = coco.path / "val"
    Image.open(folder / "111.png").convert("L").save(folder / "111.png")
    Image.open(folder / "105.png").convert("P").save(folder / "105.png")
    Image.open(folder / "108.png").convert("RGBA").save(folder / "108.png")
    (batch,) = coco.load().val
    colours = pixels_of(batch.images)
    assert torch.allclose(colours[0, 0, 30, 20], colours[0, 2, 30, 20], atol=1e-3)
    assert colours[2, :, 25, 25].tolist() == pytest.approx(GREY, abs=1e-3)
    Image.fromarray(np.full((60, 100), 40000, dtype=np.uint16)).save(folder / "111.png")
    (batch,) = coco.load().val
    assert pixels_of(batch.images)[0, :, 30, 20].tolist() == [round(40000 / 65535 * 255)] * 3
    Image.fromarray(np.full((60, 100), 0.5, dtype=np.float32)).save(folder / "111.tiff")
    (folder / "111.tiff").rename(folder / "111.png")
    with pytest.raises(UserError, match="mode F; 8 bits"):
        coco.load()


def break_file(change):
    def apply(coco):
        change(coco.trees)
        coco.write()

    return apply


MISTAKES = [
    ({"root": "/nowhere/at/all"}, None, "data.root=/nowhere/at/all: no such folder"),
    ({"val_annotations": "vall.json"}, None, "data.val_annotations="),
    ({"train_images": "images"}, None, "data.train_images="),
    ({"train_images": "val"}, None, "none of the 4 images of data.train_annotations is there"),
    ({"train_annotations": "train/005.png"}, None, "is not JSON"),
    ({"train_annotations": "deep.json"}, lambda coco: (coco.path / "deep.json").write_text("[" * 100_000), "is not JSON"),
    ({}, break_file(lambda trees: trees["val"].pop("annotations")), "no list annotations"),
    ({}, break_file(lambda trees: trees["val"]["categories"].pop()), "90 'none'. Remedy: write the same list `categories`"),
    ({}, break_file(lambda trees: trees["val"]["categories"].append({"id": 7, "name": "x"})), "id 7 is given to 'blue' and to 'x'"),
    ({}, break_file(lambda trees: trees["train"]["annotations"].clear()), "data.train_annotations="),
    ({}, break_file(lambda trees: [a.update(iscrowd=1) for a in trees["train"]["annotations"]]), "no image has a box"),
    ({}, break_file(lambda trees: [a.update(bbox=[0.1, 0.2, 0.5, 0.5]) for a in trees["train"]["annotations"]]), "within [0, 1]"),
    ({"max_boxes": 1}, None, "data.max_boxes=1: image 11"),
    ({"fixed_size": [64, 70]}, None, "multiples of data.divisor=16"),
    ({"fixed_size": [64]}, None, "height and width"),
]


@pytest.mark.parametrize(("given", "damage", "said"), MISTAKES)
def test_a_mistake_is_named(coco, given, damage, said):
    if damage:
        damage(coco)
    given = dict(given)
    fixed_size = given.pop("fixed_size", None)
    config = replace(coco.config(), **given)
    with pytest.raises(UserError) as caught:
        load_detection_data(config, fixed_size, NORM, CPU, 0)
    assert said in str(caught.value)


def test_a_third_file_is_scored_at_the_end(coco):
    shutil.copytree(coco.path / "val", coco.path / "test")
    tree = coco.trees["val"]
    kept = [image for image in tree["images"] if image["id"] != 105]
    boxes = [each for each in tree["annotations"] if each["image_id"] != 105]
    (coco.path / "test.json").write_text(json.dumps(tree | {"images": kept, "annotations": boxes}))
    data = coco.load(test_images="test", test_annotations="test.json")
    assert [loader.samples for loader in (data.train, data.val, data.test)] == [4, 4, 3]
    assert [id for batch in data.test for id in batch.image_ids.tolist()] == [111, 108, 109]
    assert data.held_out == "of val.json"
    assert [batch.index.tolist() for batch in data.plain()] == [[0, 1, 2, 3]]
    assert coco.load().test is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"test_images": "val"}, "data.test_images=val: data.test_annotations is expected with it."),
        ({"test_annotations": "val.json"}, "data.test_annotations=val.json: data.test_images is expected with it."),
        (
            {"test_annotations": "./val.json", "test_images": "val"},
            "data.test_annotations=./val.json: is data.val_annotations, too; images that nothing else uses are expected.",
        ),
    ],
)
def test_a_third_file_that_is_none_is_refused(coco, given, said):
    with pytest.raises(UserError) as caught:
        coco.load(**given)
    assert str(caught.value) == said


def test_categories_of_one_name_are_told_apart(coco):
    for tree in coco.trees.values():
        tree["categories"].append({"id": 0, "name": "red"})
    coco.write()
    data = coco.load()
    assert data.classes == ["red (0)", "red (3)", "blue", "none"]
    assert next(iter(data.val)).labels[0, :2].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=detection"], "data.shortest=auto: 64 pixels; the median training image is 64×64, which 800 would enlarge 12.5 times"),
        (
            ["task=detection", "data.shortest=800"],
            "data.shortest=800: images are enlarged 12.5 times, .*64×64 to 800×800 .* 156 times",
        ),
        (["task=detection", "data.shortest=50"], None),
        (["task=detection", "data.shortest=null"], None),
        (["task=detection", "data.shortest=90"], None),
        (["task=detection", "data.shortest=112"], "data.shortest=112: images are enlarged 1.8 times.* 3 times as much"),
        (["task=detection", "model.fixed_size=[320,320]"], r"model.fixed_size=\[320, 320\]: .* 5.0 times.*=\[64,64\] keeps"),
        (["task=multilabel", "model=tiny_resnet"], "data.shortest=auto: 64 pixels; "),
        (
            ["task=multilabel", "model=tiny_resnet", "data.shortest=800"],
            "data.shortest=800: images .* 12.5 times.*; data.shortest=64 ",
        ),
        (["task=multilabel", "model=tiny_resnet", "data.shortest=64"], None),
    ],
    ids=str,
)
def test_a_size_is_chosen_for_small_images_and_one_that_enlarges_them_is_named(coco, make_trainer, words, said):
    """COCO's data.shortest=800 is for photos; small images would take many times as long."""
    names = ["data.train_images=train", "data.val_images=val", "data.train_annotations=train.json", "data.val_annotations=val.json"]
    model = [] if "model=tiny_resnet" in words else ["model=fcos_tiny"]
    trainer = make_trainer(*words[:1], "data=coco", f"data.root={coco.path}", "data.workers=0", *names, *model, *words[1:])
    assert len(trainer.notes) == (said is not None)
    if said is not None:
        assert re.search(said, trainer.notes[0])
        assert trainer.tree["data"]["shortest"] == (64 if "auto" in said else trainer.config.data.shortest)  # the checkpoint's


def lead(coco, way, tmp_path):
    """Write a file_name that leads out of the folder, to an image that is as the annotations say; return it."""
    outside, inside = tmp_path / "private" / "011.png", coco.path / "train"
    outside.parent.mkdir()
    shutil.copy(inside / "011.png", outside)
    names = {"parent": "../../private/011.png", "absolute": str(outside), "link": "linked.png", "folder": "linked/011.png"}
    if way in ("link", "folder"):
        (inside / names[way].split("/")[0]).symlink_to(outside if way == "link" else outside.parent)
    coco.trees["train"]["images"][0]["file_name"] = names[way]
    coco.write()
    return names[way]


@pytest.mark.parametrize("way", ["parent", "absolute", "link", "folder"])
def test_a_file_name_leads_out_of_the_folder_only_where_it_may(coco, way, tmp_path):
    """An annotation file of somebody else's chose which files of this machine are read."""
    name = lead(coco, way, tmp_path)
    with pytest.raises(UserError) as caught:
        coco.load()
    said = str(caught.value)
    assert said.startswith(f"{coco.path / 'train.json'}: 1 corrupt entries")
    assert f"image 11: file_name {name!r} leads out of {coco.path / 'train'}; data.images_outside=true takes such files." in said
    assert coco.load(skip_corrupt=True).train.file.image_ids == [5, 8, 9]
    assert coco.load(images_outside=True).train.file.image_ids == [11, 5, 8, 9]


def test_a_file_outside_is_not_even_looked_for(coco):
    """Whether it is there cannot be learnt from the message."""
    for name in ("../none.png", "/none.png", "a\0b.png"):
        coco.trees["train"]["images"][0]["file_name"] = name
        coco.write()
        with pytest.raises(UserError, match=r"image 11: .* leads out of") as caught:
            coco.load()
        assert "no such file" not in str(caught.value)


def test_what_stays_in_the_folder_is_taken(coco, tmp_path):
    """Folders within it, ways that come back, links within it, and a folder that is a link itself."""
    inside = coco.path / "train"
    (inside / "more").mkdir()
    shutil.move(inside / "011.png", inside / "more" / "011.png")
    (tmp_path / "moved").mkdir()
    shutil.move(inside, tmp_path / "moved" / "train")
    inside.symlink_to(tmp_path / "moved" / "train")
    shutil.copy(inside / "005.png", inside / "..005.png")
    (inside / "again.png").symlink_to("005.png")
    for entry, name in zip(coco.trees["train"]["images"], ("more/011.png", "again.png", "more/../008.png", "./009.png"), strict=True):
        entry["file_name"] = name
    coco.trees["train"]["images"].append(coco.trees["train"]["images"][1] | {"id": 77, "file_name": "..005.png"})
    coco.write()
    assert coco.load().train.file.image_ids == [11, 5, 8, 9, 77]


def test_boxes_follow_from_polygons(coco):
    entry = coco.trees["train"]["annotations"][0]
    del entry["bbox"]
    entry["segmentation"] = [[4, 5, 9.5, 5, 9.5, 13], [12, 6, 14, 6, 14, 7.5, 12, 7]]
    coco.write()
    assert coco.load().train.file.boxes[0].tolist() == [4, 5, 10, 8]
    entry["segmentation"][0].append(1)
    coco.write()
    with pytest.raises(UserError, match=r"bbox None; four finite numbers"):
        coco.load()


def test_an_image_without_a_size_has_that_of_its_file(coco):
    images = coco.trees["train"]["images"]
    sizes = coco.load().train.file.sizes
    for entry in images:
        del entry["height"], entry["width"]
    coco.write()
    assert coco.load().train.file.sizes == sizes
    images.append({"id": 2, "file_name": "none.png"})
    coco.write()
    with pytest.raises(UserError, match=r"image 2 \(.*none\.png\): has no height and width in the annotations, and no such file"):
        coco.load()


def test_names_stay_different_where_one_ends_in_the_id_of_another(coco):
    for part in coco.trees:
        for entry, name in zip(coco.trees[part]["categories"], ("a", "a", "a (3)"), strict=True):
            entry["name"] = name
    coco.write()
    assert len(set(coco.load().classes)) == 3

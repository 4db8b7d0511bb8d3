"""data=boxes: each layout is found, read and checked; a stranger's files stay data."""

import json
import os
import re
import unicodedata
from math import cos, pi, sin
from pathlib import Path

import numpy as np
import pytest
import torch
from box_folders import (
    CLASSES,
    COLOURS,
    LAYOUTS,
    coco,
    drawn,
    kaggle_voc,
    kaggle_yolo,
    pictures,
    roboflow_coco,
    roboflow_csv,
    roboflow_yolo,
    voc,
    write_labels,
    xml,
    yolo,
)
from PIL import Image

import evaluate
import predict
import train
from lab.base.drawing import colour_of
from lab.base.errors import UserError
from lab.config.settings import load as settings
from lab.data.load import load_data
from lab.data.sets import Norm
from lab.detectors.detection.data import load_detection_data
from lab.detectors.detection.task import build
from lab.detectors.schema import BoxesConfig

CPU, GREY = torch.device("cpu"), Norm([0.5] * 3, [0.5] * 3)


def load(root, **given):
    return load_detection_data(
        BoxesConfig(root=str(root), workers=0, augment=False, shortest=None, longest=None, **given), None, GREY, CPU, 0
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_boxes_that_were_drawn(layout, tmp_path):
    data = load(LAYOUTS[layout](tmp_path / "data"))
    assert data.classes == (["object"] if layout == "kaggle csv" else CLASSES)
    whole = layout.startswith("kaggle") or layout == "cvat coco"
    train, val = data.train.file, data.val.file
    assert (len(train), len(val)) == ((12, 3) if whole else (10, 6)) or layout in (
        "roboflow csv",
        "openimages csv",
    )  # which list no image without a box
    assert not set(train.files) & set(val.files)
    seen = 0
    for file in (train, val):
        for position, path in enumerate(file.files):
            _, boxes = drawn(int(Path(path).stem))
            labels = [0] * len(boxes) if layout == "kaggle csv" else [label for label, *_ in boxes]
            assert file.labels[file.rows(position)].tolist() == labels
            given = torch.tensor([box[1:] for box in boxes], dtype=torch.float64).view(-1, 4)
            torch.testing.assert_close(file.boxes[file.rows(position)], given, atol=1e-5, rtol=0)
            seen += len(boxes)
    assert seen > 20
    assert any(
        layout.split()[-1].lower().replace("polygons", "yolo").replace("oriented", "yolo") in note.lower() or "boxes in" in note
        for note in data.notes
    )


def test_test_images_are_taken_where_they_are_asked_for(tmp_path):
    root = roboflow_yolo(tmp_path)
    plain = load(root)
    assert plain.test is None
    assert any("data.score_test=true scores" in note for note in plain.notes)
    assert len(load(root, score_test=True).test.file) == 6
    with pytest.raises(UserError, match="has no test images"):
        load(yolo(tmp_path / "other"), score_test=True)


def test_a_description_names_lists_files_and_absolute_paths(tmp_path):
    root = yolo(tmp_path, description="train: /elsewhere/mine/images/train\nval: val.txt\nnames: [cat, dog, owl]\n")
    (root / "val.txt").write_text("".join(f"./images/val/{name}\n" for name in sorted(os.listdir(root / "images/val"))[:4]))
    data = load(root)
    assert (len(data.train.file), len(data.val.file)) == (10, 4)
    assert any("2 of 16 images are in no part" in note for note in data.notes)
    assert len(load(root / "data.yaml").train.file) == 10
    flat = kaggle_yolo(tmp_path / "flat")
    (flat / "archive/data.yaml").write_text("train: .\nnames: [cat, dog, owl]\n")
    assert len(load(flat).train.file) == 12
    (root / "other.yaml").write_text((root / "data.yaml").read_text().replace("val.txt", "images/val"))
    assert len(load(root).val.file) == 4  # data.yaml goes before others
    assert len(load(root / "other.yaml").val.file) == 6


@pytest.mark.parametrize("part", ["val", "train"])
def test_images_of_two_parts_are_said(part, tmp_path):
    root = yolo(tmp_path, description=f"train: images/train\nval: images/{part}\nnames: [cat, dog, owl]\n")
    said = [note for note in load(root).notes if "10 of its 10 images are scored in another part, too, and none is left" in note]
    assert len(said) == (part == "train")


LINES = {
    "1 0.5 0.5 0.2": "has 4 numbers; class, x, y, width, height, or a class and the corners of a polygon are expected",
    "3 0.5 0.5 0.2 0.2": "class 3 is not among the 3 classes, 0 to 2",
    "-1 0.5 0.5 0.2 0.2": "class -1 is not among",
    "1 50 40 20 20": "50 40 20 20 are not shares of the image, from 0 to 1",
    "1 0.5 0.5 0.2 0": "has no area",
    "1 1.005 0.5 0.9 0.2": "is mostly outside of the image",
    "cat 0.5 0.5 0.2 0.2": "has something else than numbers",
    "1 0.5 0.5 0.2 0.2 0.3 0.4 0.5": "has 8 numbers",
    f"{'9' * 400} 0.5 0.5 0.2 0.2": "is not among",
}


@pytest.mark.parametrize("line", LINES)
def test_a_fault_of_a_line_is_named_by_file_and_line(line, tmp_path):
    root = yolo(tmp_path)
    path = root / "labels" / "train" / "001.txt"
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    with pytest.raises(UserError) as caught:
        load(root)
    assert f"labels/train/001.txt, line {len(before.splitlines()) + 2}: " in str(caught.value)
    assert LINES[line] in str(caught.value)
    assert "data.skip_corrupt=true" in str(caught.value)
    assert len(load(root, skip_corrupt=True).train.file.boxes) == len(load(yolo(tmp_path / "whole")).train.file.boxes)


XML = b"<?xml version='1.0' encoding='%s'?><annotation><object><name>%s</name></object></annotation>"


def change(name, old, new):
    def apply(root):
        path = next(root.rglob(name))
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return apply


def rename(name, other):
    def apply(root):
        path = next(root.rglob(name))
        path.rename(path.with_name(other))

    return apply


MISTAKES = [
    (yolo, change("data.yaml", "images/val", "images/other"), "val: images/other: no such folder or list of files below"),
    (yolo, change("data.yaml", "images/val", "../../../etc"), "other places are not read"),
    (yolo, change("data.yaml", "images/val", "[[a]]"), "val: a folder or a list of files is expected, got ['a']"),
    (yolo, change("data.yaml", "  2: owl", "  5: owl"), "names: numbers from 0 to 2 are expected"),
    (yolo, change("data.yaml", "  1: dog", "\t1: dog"), "line 6, column 1: while scanning a plain scalar found a tab character"),
    (yolo, change("data.yaml", "  0: cat", "\t0: cat"), "cannot start any token; YAML takes spaces, not tabs, before a value"),
    (yolo, change("data.yaml", "  1: dog", "  1: ''"), "names: a list of names, or names by number, is expected"),
    (yolo, change("data.yaml", "names:", "nc: 7\nnames:"), "nc: 7 is said, while names has 3"),
    (yolo, change("data.yaml", "path:", "path: &a\nother: *a\nx:"), "holds references"),
    (yolo, change("data.yaml", "path:", "x: !!python/object/apply:os.system [touch ran]\ny:"), "cannot be read"),
    (yolo, lambda root: (root / "labels").rename(root / "texts"), "none of its 10 images has a file of boxes; the first would be"),
    (yolo, lambda root: (root / "labels/val/020.txt").write_bytes(b"\xff\xfe0"), "labels/val/020.txt: "),
    (yolo, lambda root: (root / "train.csv").write_text("image_id,xmin,ymin,xmax,ymax\n001,1,1,9,9\n"), "holds boxes in 2 forms"),
    (kaggle_voc, change("001.xml", "<xmin>", "<xmin>x"), "annotations/001.xml, line 6: bndbox: xmin, ymin, xmax, ymax are expected"),
    (kaggle_voc, change("001.xml", "<bndbox>", "<box>"), "annotations/001.xml: is not XML"),
    (kaggle_voc, change("001.xml", "<width>96", "<width>97"), "the annotations say 97×64"),
    (kaggle_voc, change("001.xml", "<annotation>", "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation>"), "document type"),
    (kaggle_voc, lambda root: (root / "images/001.png").unlink(), "annotations/001.xml: its image '001.png' is not below"),
    (kaggle_voc, rename("001.png", "one.png"), "\n1 pictures there are named by no label: images/one.png"),
    (roboflow_csv, rename("000.png", "one.png"), "\n3 pictures there are named by no label: train/004.png, train/009.png, train/one"),
    (roboflow_coco, rename("000.png", "one.png"), "\n1 pictures there are named by no label: train/one.png"),
    (voc, change("val.txt", "011", "911"), "'911' has no XML file"),
    (
        kaggle_voc,
        lambda root: (root / "annotations/zzz.xml").write_text(xml("001.png", [])),
        "zzz.xml: its image images/001.png is that of ann",
    ),
    (kaggle_voc, lambda root: (root / "annotations/001.xml").write_bytes(b"<annotation>\xe9</annotation>"), "in its first line: <?xml"),
    (kaggle_voc, lambda root: (root / "annotations/001.xml").write_bytes(XML % (b"gbk", b"\xff\xff")), "is not text in gbk (byte "),
    (kaggle_voc, lambda root: (root / "annotations/001.xml").write_bytes(XML % (b"punycode", b"a-b")), "declares the encoding punycode"),
    (
        kaggle_yolo,
        lambda root: next(root.rglob("classes.txt")).write_bytes(b"caf\xe9\n"),
        "names of the classes cannot be read: is not text",
    ),
    (coco, lambda root: [path.unlink() for path in root.rglob("*.png")] and pictures(root, 1, 99), "none of its images, such as '000.png'"),
    (roboflow_csv, change("_annotations.csv", "96,64,", "96,64,,"), "in no column"),
    (roboflow_csv, lambda root: (root / "train/000.png").unlink(), "row 2: the image '000.png' is not below"),
    (kaggle_voc, lambda root: [path.unlink() for path in root.rglob("*.xml")], "no boxes are found: 15 images"),
]


@pytest.mark.parametrize(("layout", "damage", "said"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_named(layout, damage, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = layout(tmp_path / "data")
    damage(root)
    with pytest.raises(UserError, match=re.escape(said)):
        load(root)
    assert not (tmp_path / "ran").exists()


def test_nothing_outside_of_the_root_is_read(tmp_path):
    """Links of labels, of images and of whole folders that lead out are faults or passed over; what they lead to is not opened."""
    secret = tmp_path / "secret"
    write_labels(secret / "labels", pictures(secret / "images", 3))
    (secret / "labels" / "000.txt").write_text("secret words\n")
    root = yolo(tmp_path / "data")
    (root / "labels/train/001.txt").unlink()
    (root / "labels/train/001.txt").symlink_to(secret / "labels" / "000.txt")
    (root / "images/train/link.png").symlink_to(secret / "images" / "001.png")
    (root / "images/train/folder").symlink_to(secret / "images")
    with pytest.raises(UserError) as caught:
        load(root)
    assert "secret words" not in str(caught.value)
    assert "labels/train/001.txt: leads out of" in str(caught.value)
    assert "file_name 'images/train/link.png' leads out of" in str(caught.value)
    assert len(load(root, skip_corrupt=True).train.file) == 10


@pytest.mark.parametrize("name", ["data.yaml", "labels/train/001.txt"])
def test_pipes_and_large_files_are_refused(name, tmp_path):
    root = yolo(tmp_path / "data")
    (root / name).unlink()
    os.mkfifo(root / name)
    with pytest.raises(UserError, match="is not a regular file"):
        load(root)
    (root / name).unlink()
    with (root / name).open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(UserError, match="has more than 16,777,216 bytes"):
        load(root)


def test_boxes_follow_the_picture_as_shown(tmp_path):
    """A photo that EXIF turns has its shares in the size that a viewer shows; data.exif=stored takes those of the stored pixels."""
    root = yolo(tmp_path)
    path = root / "images/train/001.png"
    exif = Image.Exif()
    exif[274] = 6
    with Image.open(path) as image:
        image.load()
        image.save(path, exif=exif)
    (root / "labels/train/001.txt").write_text("1 0.5 0.25 0.5 0.25\n")
    with Image.open(root / "images/train/002.png") as image:
        square = image.resize((64, 64))
        exif[274] = 3  # its size fits both ways
        square.save(root / "images/train/002.png", exif=exif)
    for given, size, box in (("shown", (96, 64), [16, 12, 32, 24]), ("stored", (64, 96), [24, 8, 48, 16])):
        data = load(root, exif=given)
        file = data.train.file
        position = file.files.index(str(path))
        assert file.sizes[position] == size
        assert file.boxes[file.rows(position)].tolist() == [box]
        assert file.open(position).size == size[::-1]
        assert any("2 images have a turn in EXIF" in note for note in data.notes)


def test_difficult_objects_turned_boxes_and_a_size_of_0(tmp_path):
    root = kaggle_voc(tmp_path)
    (root / "annotations/000.xml").write_text(xml("000.png", [(0, 4, 5, 20, 30)], (0, 0), "<difficult>1</difficult>"))
    turned = "<robndbox><cx>30</cx><cy>30</cy><w>20</w><h>10</h><angle>1.5707963267948966</angle></robndbox>"
    (root / "annotations/001.xml").write_text(re.sub("<bndbox>.*</bndbox>", turned, xml("wrong.png", [(1, 1, 1, 9, 9)])))
    data = load(root)
    parts = {Path(path).stem: (file, i) for file in (data.train.file, data.val.file) for i, path in enumerate(file.files)}
    file, position = parts["000"]
    assert file.crowd[file.rows(position)].tolist() == [True]
    file, position = parts["001"]
    torch.testing.assert_close(file.boxes[file.rows(position)], torch.tensor([[25.0, 20, 10, 20]], dtype=torch.float64))


@pytest.mark.parametrize("angle", [pi / 6, -pi / 6, 5 * pi / 6, -5 * pi / 6], ids=str)
def test_the_box_around_a_turned_box_by_its_corners(angle, tmp_path):
    root = kaggle_voc(tmp_path)
    turned = f"<robndbox><cx>32</cx><cy>31</cy><w>20</w><h>8</h><angle>{angle}</angle></robndbox>"
    (root / "annotations/001.xml").write_text(re.sub("<bndbox>.*</bndbox>", turned, xml("wrong.png", [(1, 1, 1, 9, 9)])))
    corners = [(x * cos(angle) - y * sin(angle), x * sin(angle) + y * cos(angle)) for x in (-10, 10) for y in (-4, 4)]
    across, down = (max(values) for values in zip(*corners, strict=True))
    ((box,), _) = boxes_of(load(root))["001"]
    assert box == pytest.approx([32 - across, 31 - down, 2 * across, 2 * down])


def boxes_of(data):
    """Boxes and labels of each training and held-out image, by its stem."""
    return {
        Path(path).stem: (file.boxes[file.rows(i)].tolist(), file.labels[file.rows(i)].tolist())
        for file in (data.train.file, data.val.file)
        for i, path in enumerate(file.files)
    }


def repeated(text, start, end):
    """The text with each of its pieces twice."""
    return re.sub(f"{start}.*?{end}", lambda piece: piece[0] * 2, text, flags=re.DOTALL)


DOUBLES = [
    (yolo, "001.txt", lambda text: text + re.sub(r"(\.\d+)", r"\g<1>00", text)),
    (kaggle_voc, "001.xml", lambda text: repeated(text, "<object>", "</object>")),
    (roboflow_csv, "_annotations.csv", lambda text: text + text.partition("\n")[2]),
    (
        roboflow_coco,
        "_annotations.coco.json",
        lambda text: json.dumps((tree := json.loads(text)) | {"annotations": tree["annotations"] * 2}),
    ),
]


@pytest.mark.parametrize(("layout", "name", "double"), DOUBLES)
def test_a_box_that_is_given_twice_is_taken_once(layout, name, double, tmp_path):
    root = layout(tmp_path / "data")
    plain = load(root)
    path = next(path for path in sorted(root.rglob(name)) if path.parent.name != "test")
    path.write_text(double(path.read_text()))
    data = load(root)
    assert boxes_of(data) == boxes_of(plain)
    (note,) = (note for note in data.notes if "boxes are given twice for their image, and taken once (the first: " in note)
    doubled = len(plain.train.file.boxes) if layout in (roboflow_csv, roboflow_coco) else 2
    assert f": {doubled} boxes are given twice" in note


def test_old_file_names_in_xml_pin_no_boxes_to_one_picture(tmp_path):
    root = kaggle_voc(tmp_path)
    plain = load(root)
    for path in root.rglob("*.xml"):
        path.write_text(path.read_text().replace(f"{path.stem}.png", "000.png"))
    assert boxes_of(load(root)) == boxes_of(plain)
    (root / "annotations/001.xml").rename(root / "annotations/other.xml")  # only its filename is left, of another file's picture
    with pytest.raises(UserError, match=r"other.xml: its image images/000.png is that of annotations/000.xml, too; one file of boxes"):
        load(root)


def test_a_picture_of_two_spellings_in_a_table_is_one(tmp_path):
    root = roboflow_csv(tmp_path / "data")
    plain = boxes_of(load(root))
    path = root / "train/_annotations.csv"
    head, *rows = path.read_text().splitlines()
    ways = ("./", ".\\", "C:\\mine\\train\\", "/home/x/train/")
    path.write_text("\n".join([head, *(f"{ways[number % 4]}{row}" for number, row in enumerate(rows))]))
    assert boxes_of(load(root)) == plain


def test_labels_and_pictures_that_do_not_pair_are_both_named(tmp_path):
    root = yolo(tmp_path)
    (root / "images/train/001.png").rename(root / "images/train/001.heic")
    (root / "images/train/002.png").rename(root / "images/train/two.png")
    with pytest.raises(UserError) as caught:
        load(root)
    said = str(caught.value)
    assert "2 files of boxes have no picture: labels/train/001.txt, labels/train/002.txt; " in said
    assert "1 pictures have no file of boxes: images/train/two.png; " in said
    assert "1 files of the same names are not read as pictures: images/train/001.heic" in said
    assert "data.skip_corrupt=true passes over them" in said
    data = load(root, skip_corrupt=True)
    assert len(data.train.file) == 9
    assert any("passed over (data.skip_corrupt=true): 2 files of boxes have no picture" in note for note in data.notes)
    assert f"{root}: 1 file passed over: 1 .heic" in data.notes
    assert not any("share their file" in note for note in data.notes)
    (root / "images/train/003.jpeg").write_bytes((root / "images/train/003.png").read_bytes())
    shared = f"{root / 'images/train'}: 1 images share their file of boxes with an image of another ending"
    assert shared in load(root, skip_corrupt=True).notes


@pytest.mark.parametrize("layout", [coco, roboflow_coco])
def test_a_coco_file_whose_first_picture_is_missing_is_read_without_it(layout, tmp_path):
    root = layout(tmp_path)
    next(path for path in sorted(root.rglob("*.png")) if path.stem == "000").unlink()
    with pytest.raises(UserError, match=r"1 corrupt entries; .*\nimage 0 \(.*000.png\): no such file"):
        load(root)
    file = load(root, skip_corrupt=True).train.file
    assert [os.path.relpath(path, file.folder) for path in file.files] == [f"{number:03}.png" for number in range(1, 10)]


def test_absolute_paths_and_those_of_windows_are_read_by_their_ends(tmp_path):
    """In a COCO file, too."""
    root = coco(tmp_path / "coco")
    plain = boxes_of(load(root))
    path = root / "annotations/instances_train2017.json"
    tree = json.loads(path.read_text())
    for number, image in enumerate(tree["images"]):
        image["file_name"] = ("C:\\set\\train2017\\", "/home/x/train2017/", ".\\")[number % 3] + image["file_name"]
    path.write_text(json.dumps(tree))
    assert boxes_of(load(root)) == plain
    root = yolo(tmp_path / "yolo")
    plain = boxes_of(load(root))
    names = sorted(os.listdir(root / "images/val"))
    for base, train_path in (("D:\\sets\\mine", "images\\train"), ("..", "D:\\sets\\mine\\images\\train"), ("/x", "/y/images/train")):
        for start in ("D:\\sets\\mine\\images\\val\\", "/home/x/mine/images/val/", f"{root}/images/val/", "images\\val\\"):
            (root / "val.txt").write_text("".join(f"{start}{name}\n" for name in names))
            (root / "data.yaml").write_text(f"path: {base}\ntrain: {train_path}\nval: val.txt\nnames: [cat, dog, owl]\n")
            assert boxes_of(load(root)) == plain


def test_a_line_of_a_list_without_its_picture_is_a_fault_of_its_own(tmp_path):
    root = yolo(tmp_path, description="train: images/train\nval: val.txt\nnames: [cat, dog, owl]\n")
    names = sorted(os.listdir(root / "images/val"))
    (root / "val.txt").write_text("".join(f"images/val/{name}\n" for name in ["none.png", *names, names[0]]))
    with pytest.raises(UserError, match=r"1 corrupt entries(.|\n)*val.txt, line 1: 'images/val/none.png' is not an image below"):
        load(root)
    data = load(root, skip_corrupt=True)
    assert len(data.val.file) == 6
    assert any("data.yaml: val: 1 images are named twice, and taken once" in note for note in data.notes)
    (root / "val.txt").write_text("none.png\n")
    with pytest.raises(UserError, match=r"line 1: 'none.png' is not an image below .*It lists no image that is there"):
        load(root)


@pytest.mark.parametrize("layout", [yolo, kaggle_voc, roboflow_csv, roboflow_coco])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_pictures_pair_in_each_unicode_form_and_with_endings_in_capitals(layout, form, tmp_path):
    """macOS writes é in file names as two characters."""
    root = layout(tmp_path / "data")
    plain = boxes_of(load(root))
    name, other = (unicodedata.normalize(each, "caf\u00e9") for each in (form, "NFD" if form == "NFC" else "NFC"))
    (picture,) = root.rglob("001.png")
    picture.rename(picture.with_name(f"{name}.PNG"))
    for path in [path for path in root.rglob("*") if path.suffix in (".txt", ".xml", ".csv", ".json")]:
        path.write_text(path.read_text().replace("001.png", f"{other}.png"))
        if path.stem == "001":
            path.rename(path.with_name(f"{other}{path.suffix.upper()}"))
    found = boxes_of(load(root))
    assert found.pop(name) == plain.pop("001")
    assert found == plain


def test_names_of_classes_are_the_texts_that_are_written(tmp_path):
    """YAML's yes is true, its 007 is 7, its 1:30 is 90, and its 1e3 a number."""
    names = ["yes", "no", "007", "1:30", "1e3", "null", "2024-01-02", "~", "On", "0x1F"]
    root = yolo(tmp_path, description=f"train: images/train\nval: images/val\ntest: null\nnc: 10\nnames: [{', '.join(names)}]\n")
    assert load(root).classes == names
    by_number = "".join(f"  {number}: {name}\n" for number, name in enumerate(names))
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\ntest: ~\nnc: ''\nnames:\n{by_number}")
    assert load(root).classes == names


@pytest.mark.parametrize("encoding", ["gbk", "GB2312", "latin-1", "windows-1252", "utf-8", "utf-16"])
def test_xml_is_read_in_the_encoding_that_it_declares(encoding, tmp_path):
    root = kaggle_voc(tmp_path)
    name = "caf\u00e9" if encoding in ("latin-1", "windows-1252", "utf-8") else "\u732b"
    for path in root.rglob("*.xml"):
        text = f'<?xml version="1.0" encoding="{encoding}"?>\n{path.read_text().replace(">cat<", f">{name}<")}'
        path.write_bytes(text.encode(encoding))
    assert load(root).classes == sorted(["dog", "owl", name])


def test_a_folder_of_boxes_is_named_to_who_takes_it_for_classes(tmp_path):
    for layout in (yolo, roboflow_yolo, kaggle_voc, coco):
        root = layout(tmp_path / layout.__name__)
        said = load(root).notes
        (found,) = (note for note in said if note.startswith(f"{root}: ") and "images of" in note)
        what = found.removeprefix(f"{root}: ").partition(": ")[0]
        words = ["data=folder", f"data.root={root}", "data.workers=0"]
        with pytest.raises(UserError, match=re.escape(f"data.root={root}: holds boxes ({what}); task=detection data=boxes reads them")):
            load_data(settings(words).config.data, GREY, CPU, 0)


def test_keypoints_after_the_box(tmp_path):
    root = yolo(tmp_path)
    (root / "labels/train/001.txt").write_text("1 0.5 0.5 0.5 0.25 0.1 0.1 2 0.2 0.2 2\n")
    with pytest.raises(UserError, match="are not shares of the image"):
        load(root)
    path = root / "data.yaml"
    path.write_text(path.read_text() + "kpt_shape: [2, 3]\n")
    file = load(root).train.file
    position = file.files.index(str(root / "images/train/001.png"))
    assert file.boxes[file.rows(position)].tolist() == [[24, 24, 48, 16]]


def test_the_first_batch_is_drawn_with_its_boxes(tmp_path):
    """Each box's edge has its class's colour where the model's image has the drawn rectangle."""
    words = ["task=detection", "model=yolo_tiny", "data=boxes", f"data.root={yolo(tmp_path)}", "data.workers=0", "data.augment=false"]
    task = build(settings([*words, "data.shortest=128", "data.longest=192", "data.batch_size=4"]).config, CPU, None)
    batch = next(iter(task.data.train))
    found = task.first_batch(batch)
    assert len(found) == 4
    edges = 0
    for (image, title), boxes, labels in zip(found, batch.boxes, batch.labels, strict=True):
        pixels = np.asarray(image)
        _, drawn_boxes = drawn(int(Path(title).stem))
        for (label, left, top, width, height), box, known in zip(drawn_boxes, boxes, labels, strict=False):
            assert int(known) == label
            assert box.tolist() == pytest.approx([2 * left, 2 * top, 2 * (left + width), 2 * (top + height)], abs=1e-3)
            assert tuple(pixels[2 * (top + height) - 1, 2 * left + width]) == colour_of(label)
            inside = pixels[2 * top + height, 2 * left + width].astype(int)
            assert abs(inside - np.array(COLOURS[label])).max() < 6
            edges += 1
    assert edges >= 4


def test_train_evaluate_and_predict(tmp_path, capsys):
    root = roboflow_yolo(tmp_path / "data")
    runs = tmp_path / "runs"
    few = [f"trainer.runs={runs}", "data.workers=0", "tracking=none"]
    sized = ["data.shortest=64", "data.longest=96", "trainer.epochs=1", "data.batch_size=4", "tracking.model=false"]
    assert train.main(["task=detection", "model=yolo_tiny", "data=boxes", f"data.root={root}", *sized, *few]) == 0
    said = capsys.readouterr().out
    assert "YOLO's data.yaml, 3 classes: 10 train images of train/images, 6 val images of valid/images" in said
    (run,) = runs.iterdir()
    assert Image.open(run / "first_batch.png").size == (4 * 326 + 6, 346 + 6)
    assert evaluate.main([f"checkpoint={run}", *few]) == 0
    assert evaluate.main([f"checkpoint={run}", "data.held_out=0.5", *few]) == 1
    assert "the model was trained with data.held_out=0.2" in capsys.readouterr().err
    assert predict.main([f"checkpoint={run}", f"out={tmp_path / 'found'}", str(root / "test" / "images")]) == 0
    assert len(list((tmp_path / "found").rglob("*.png"))) >= 6

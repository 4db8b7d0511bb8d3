"""Folders of pictures and boxes as YOLO, Roboflow, Pascal VOC, Kaggle and COCO lay them out, drawn for the tests."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CLASSES = ["cat", "dog", "owl"]
COLOURS = [(220, 40, 40), (40, 90, 220), (30, 170, 60)]
Box = tuple[int, int, int, int, int]  # label, left, top, width, height


def drawn(seed: int, size: tuple[int, int] = (96, 64), boxes: int = 2) -> tuple[Image.Image, list[Box]]:
    """A picture of filled rectangles side by side, and their boxes; every fifth has none."""
    choice, picture = random.Random(seed), Image.new("RGB", size, (120, 120, 110))
    found: list[Box] = []
    for number in range(0 if seed % 5 == 4 else boxes):
        width, height = choice.randint(12, size[0] // boxes - 8), choice.randint(12, size[1] - 8)
        left, top = number * size[0] // boxes + choice.randint(1, 6), choice.randint(1, size[1] - height - 1)
        label = choice.randrange(len(CLASSES))
        ImageDraw.Draw(picture).rectangle((left, top, left + width - 1, top + height - 1), fill=COLOURS[label])
        found.append((label, left, top, width, height))
    return picture, found


def pictures(folder: Path, count: int, first: int = 0) -> dict[str, list[Box]]:
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for number in range(first, first + count):
        picture, boxes = drawn(number)
        picture.save(folder / f"{number:03}.png")
        found[f"{number:03}.png"] = boxes
    return found


def yolo_line(box: Box, kind: str = "box", size: tuple[int, int] = (96, 64)) -> str:
    label, left, top, width, height = box
    x1, y1, x2, y2 = left / size[0], top / size[1], (left + width) / size[0], (top + height) / size[1]
    if kind == "box":
        numbers = [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
    elif kind == "oriented":
        numbers = [x1, y1, x2, y1, x2, y2, x1, y2]
    else:  # a polygon of five corners that touches all four sides
        numbers = [x1, (y1 + y2) / 2, (x1 + x2) / 2, y1, x2, y1, x2, y2, (x1 + x2) / 2, y2]
    return f"{label} " + " ".join(f"{number:.9f}" for number in numbers)


def write_labels(folder: Path, boxes: dict[str, list[Box]], kind: str = "box", *, empty: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in boxes.items():
        if each or empty:
            (folder / f"{Path(name).stem}.txt").write_text("".join(f"{yolo_line(box, kind)}\n" for box in each))


def yolo(root: Path, kind: str = "box", description: str | None = None) -> Path:
    """Ultralytics' layout: images/train, labels/train and a data.yaml."""
    for part, count, first in (("train", 10, 0), ("val", 6, 20)):
        write_labels(root / "labels" / part, pictures(root / "images" / part, count, first), kind)
    (root / "data.yaml").write_text(
        description or "path: ../datasets/mine\ntrain: images/train\nval: images/val\nnames:\n  0: cat\n  1: dog\n  2: owl\n"
    )
    return root


def roboflow_yolo(root: Path) -> Path:
    for part, count, first in (("train", 10, 0), ("valid", 6, 20), ("test", 6, 40)):
        write_labels(root / part / "labels", pictures(root / part / "images", count, first))
    paths = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n"
    (root / "data.yaml").write_text(
        paths + "nc: 3\nnames: ['cat', 'dog', 'owl']\nroboflow:\n  license: CC BY 4.0\n  url: https://example.com\n"
    )
    (root / "README.roboflow.txt").write_text("exported\n")
    return root


def kaggle_yolo(root: Path) -> Path:
    """Images and text files side by side, with a classes.txt, in a folder of an archive."""
    inside = root / "archive" / "obj_train_data"
    write_labels(inside, pictures(inside, 15), empty=False)
    (root / "archive" / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def xml(name: str, boxes: list[Box], size: tuple[int, int] = (96, 64), more: str = "") -> str:
    lines = ["<annotation>", f"  <filename>{name}</filename>", "  <size>"]
    lines += [f"    <width>{size[0]}</width><height>{size[1]}</height><depth>3</depth>", "  </size>"]
    for label, left, top, width, height in boxes:
        corners = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{left + width}</xmax><ymax>{top + height}</ymax>"
        lines += ["  <object>", f"    <name>{CLASSES[label]}</name>{more}", f"    <bndbox>{corners}</bndbox>", "  </object>"]
    return "\n".join([*lines, "</annotation>"]) + "\n"


def voc(root: Path) -> Path:
    """Pascal VOC's own layout, in VOCdevkit/VOC2012, with lists of the parts."""
    base = root / "VOCdevkit" / "VOC2012"
    (base / "Annotations").mkdir(parents=True)
    (base / "ImageSets" / "Main").mkdir(parents=True)
    found = pictures(base / "JPEGImages", 16)
    for name, boxes in found.items():
        (base / "Annotations" / f"{Path(name).stem}.xml").write_text(xml(name, boxes))
    for part, names in (("train", sorted(found)[:10]), ("val", sorted(found)[10:]), ("trainval", sorted(found))):
        (base / "ImageSets" / "Main" / f"{part}.txt").write_text("".join(f"{Path(name).stem}\n" for name in names))
        (base / "ImageSets" / "Main" / f"cat_{part}.txt").write_text("".join(f"{Path(name).stem} -1\n" for name in names))
    return root


def roboflow_voc(root: Path) -> Path:
    for part, count, first in (("train", 10, 0), ("valid", 6, 20)):
        for name, boxes in pictures(root / part, count, first).items():
            (root / part / f"{Path(name).stem}.xml").write_text(xml(name, boxes))
    return root


def kaggle_voc(root: Path) -> Path:
    """images/ and annotations/ without parts."""
    (root / "annotations").mkdir(parents=True)
    for name, boxes in pictures(root / "images", 15).items():
        (root / "annotations" / f"{Path(name).stem}.xml").write_text(xml(name, boxes))
    return root


def roboflow_csv(root: Path) -> Path:
    for part, count, first in (("train", 10, 0), ("valid", 6, 20)):
        rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
        for name, boxes in pictures(root / part, count, first).items():
            rows += [f"{name},96,64,{CLASSES[label]},{x},{y},{x + w},{y + h}" for label, x, y, w, h in boxes]
        (root / part / "_annotations.csv").write_text("\n".join(rows) + "\n")
    return root


def openimages_csv(root: Path) -> Path:
    """Open Images' columns: corners in shares of the image."""
    for part, count, first in (("train", 10, 0), ("valid", 6, 20)):
        rows = ["ImageID,LabelName,XMin,XMax,YMin,YMax"]
        for name, boxes in pictures(root / part, count, first).items():
            for label, left, top, width, height in boxes:
                sides = left / 96, (left + width) / 96, top / 64, (top + height) / 64
                rows.append(f"{Path(name).stem},{CLASSES[label]}," + ",".join(f"{side:.9f}" for side in sides))
        (root / part / "_annotations.csv").write_text("\n".join(rows) + "\n")
    return root


def kaggle_csv(root: Path) -> Path:
    """Global Wheat's layout: train.csv with a bbox in a cell, images in train/, an empty box for an image without one."""
    rows = ["image_id,width,height,bbox,source"]
    for name, boxes in pictures(root / "train", 15).items():
        rows += [f'{Path(name).stem},96,64,"[{x}.0, {y}.0, {w}.0, {h}.0]",here' for _, x, y, w, h in boxes] or [
            f"{Path(name).stem},96,64,,here"
        ]
    (root / "train.csv").write_text("\n".join(rows) + "\n")
    (root / "sample_submission.csv").write_text("image_id,PredictionString\n000,1.0 0 0 50 50\n")
    return root


def coco_tree(found: dict[str, list[Box]]) -> dict[str, Any]:
    images = [{"id": number, "file_name": name, "width": 96, "height": 64} for number, name in enumerate(found)]
    boxes = [(number, box) for number, each in enumerate(found.values()) for box in each]
    annotations = [
        {"id": i, "image_id": image, "category_id": box[0], "bbox": box[1:], "iscrowd": 0} for i, (image, box) in enumerate(boxes)
    ]
    return {"images": images, "annotations": annotations, "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)]}


def coco(root: Path) -> Path:
    """COCO's own layout, with its file of captions."""
    (root / "annotations").mkdir(parents=True)
    for part, count, first in (("train2017", 10, 0), ("val2017", 6, 20)):
        tree = coco_tree(pictures(root / part, count, first))
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(tree))
        (root / "annotations" / f"captions_{part}.json").write_text(json.dumps({"images": tree["images"], "annotations": []}))
    return root


def roboflow_coco(root: Path) -> Path:
    for part, count, first in (("train", 10, 0), ("valid", 6, 20), ("test", 6, 40)):
        (root / part).mkdir(parents=True)
        (root / part / "_annotations.coco.json").write_text(json.dumps(coco_tree(pictures(root / part, count, first))))
    return root


def cvat_coco(root: Path) -> Path:
    """One file for all images, which lie in images/."""
    (root / "annotations").mkdir(parents=True)
    (root / "annotations" / "instances_default.json").write_text(json.dumps(coco_tree(pictures(root / "images", 15))))
    return root


LAYOUTS = {
    "yolo": yolo,
    "yolo polygons": lambda root: yolo(root, "polygon"),
    "yolo oriented": lambda root: yolo(root, "oriented"),
    "roboflow yolo": roboflow_yolo,
    "kaggle yolo": kaggle_yolo,
    "voc": voc,
    "roboflow voc": roboflow_voc,
    "kaggle voc": kaggle_voc,
    "roboflow csv": roboflow_csv,
    "openimages csv": openimages_csv,
    "kaggle csv": kaggle_csv,
    "coco": coco,
    "roboflow coco": roboflow_coco,
    "cvat coco": cvat_coco,
}

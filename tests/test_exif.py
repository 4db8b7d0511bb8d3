"""Photos that EXIF turns: labels, boxes and masks belong to the picture as a viewer shows it, unless their size says otherwise."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from lab.base.errors import UserError
from lab.data.images.exif import sizes_of, turn_of
from lab.data.images.files import UNREADABLE, ImageBytes, open_any_mode, read_rgb
from lab.data.images.pixels import read_pixels
from lab.data.sets import Norm
from lab.data.sources.custom import as_rgb, of_channels
from lab.detectors.detection.data import load_detection_data
from lab.detectors.schema import CocoConfig
from lab.tasks.segmentation import MaskFolderConfig
from lab.tasks.segmentation.data import load_masks

TURNS = range(1, 9)
KINDS = ["early.png", "late.png", "xmp.png", "a.tif", "a.webp", "a.jpg"]
CPU, NORM = torch.device("cpu"), Norm([0.0] * 3, [1.0] * 3)
# by EXIF's table: what the first stored row and the first stored column are of the picture that a viewer shows
STORED = {
    1: lambda v: v,
    2: lambda v: v[:, ::-1],  # row 0 is the top, column 0 the right
    3: lambda v: v[::-1, ::-1],  # the bottom, the right
    4: lambda v: v[::-1],  # the bottom, the left
    5: lambda v: v.swapaxes(0, 1),  # the left, the top
    6: lambda v: v.swapaxes(0, 1)[::-1],  # the right, the top
    7: lambda v: v.swapaxes(0, 1)[::-1, ::-1],  # the right, the bottom
    8: lambda v: v.swapaxes(0, 1)[:, ::-1],  # the left, the bottom
}


def picture(height, width, seed=0):
    """A picture of 4 × 4 fields of different colours, on which no turn is invisible; JPEG leaves fields nearly as they are."""
    fields = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return fields.repeat(height // 4, 0).repeat(width // 4, 1)


def write(path, shown, turn):
    """Write the picture that a viewer shows as `shown` with a turn; `path` ends in a name of KINDS."""
    stored = Image.fromarray(np.ascontiguousarray(STORED[turn](shown)))
    exif = Image.Exif()
    exif[0x0112] = turn
    name = path.name
    if name.endswith("xmp.png"):
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", f'<x:xmpmeta><rdf:Description tiff:Orientation="{turn}"/></x:xmpmeta>')
        stored.save(path, pnginfo=info)
    elif name.endswith("late.png"):
        stored.save(path)
        chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
        whole = path.read_bytes()
        end = whole[-12:]
        path.write_bytes(whole[:-12] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + end)
    else:
        more = {"quality": 100, "subsampling": 0} if name.endswith("jpg") else {"lossless": True} if name.endswith("webp") else {}
        stored.save(path, exif=exif, **more)
    return path


def near(found, expected, name):
    """Whether two pictures are equal; those of JPEG may differ a little."""
    found, expected = (np.asarray(each, dtype=np.int64) for each in (found, expected))
    return found.shape == expected.shape and np.abs(found - expected).max() <= (6 if name.endswith("jpg") else 0)


@pytest.fixture(scope="module", params=[(kind, size) for kind in KINDS for size in ((16, 24), (16, 16))], ids=str)
def turned(request, tmp_path_factory):
    """Return a picture of one kind and size in each turn: the turn, the file, what is shown, what is stored, the kind."""
    kind, size = request.param
    shown, folder = picture(*size), tmp_path_factory.mktemp("turned")
    return [(turn, write(folder / f"{turn}-{kind}", shown, turn), shown, STORED[turn](shown), kind) for turn in TURNS]


def test_the_turn_of_a_picture_and_both_sizes_are_read_without_its_pixels(turned):
    for turn, path, shown, stored, _ in turned:
        with open_any_mode(path) as opened:
            assert (turn_of(opened), sizes_of(opened)) == (turn, (shown.shape[:2], stored.shape[:2]))


def test_a_picture_is_read_as_shown_unless_its_annotations_fit_the_stored_pixels_alone(turned):
    for _, path, shown, stored, kind in turned:
        assert near(read_rgb(path), shown, kind)
        assert near(read_rgb(path, shown.shape[:2]), shown, kind)
        alone = stored.shape[:2] != shown.shape[:2]
        assert near(read_rgb(path, stored.shape[:2]), stored if alone else shown, kind)


def test_a_picture_whose_sizes_are_those_stored_is_read_as_stored(turned):
    for _, path, shown, stored, kind in turned:
        assert near(read_rgb(path, stored.shape[:2], "stored"), stored, kind)
        alone = stored.shape[:2] != shown.shape[:2]
        assert near(read_rgb(path, shown.shape[:2], "stored"), shown if alone else stored, kind)


def test_a_picture_is_read_as_shown_by_every_reader(turned):
    """Of channels, of shards, and of a user's data set that has opened the file."""
    for _, path, shown, _, kind in turned:
        assert near((read_pixels(path, 3) * 255).round().permute(1, 2, 0), shown, kind)
        assert near(read_rgb(ImageBytes(path.read_bytes(), path.name)), shown, kind)
        with Image.open(path) as own:
            assert near(as_rgb(own), shown, kind)
        with Image.open(path) as own:
            assert near((of_channels(own.convert("RGB"), 3) * 255).round().permute(1, 2, 0), shown, kind)


def test_annotations_of_another_size_are_refused_in_each_turn(turned):
    for _, path, *_ in turned:
        with pytest.raises(UNREADABLE, match="the annotations say 5×7"):
            read_rgb(path, (7, 5))


def test_a_png_of_16_bits_and_pages_of_a_tiff_are_turned(tmp_path):
    shown = np.random.default_rng(0).integers(0, 65536, (6, 4, 3), dtype=np.uint16)
    for turn in TURNS:
        stored = np.ascontiguousarray(STORED[turn](shown))
        exif = Image.Exif()
        exif[0x0112] = turn
        lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in stored)
        chunks = [
            b"IHDR" + struct.pack(">IIBBBBB", stored.shape[1], stored.shape[0], 16, 2, 0, 0, 0),
            b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0"),
            b"IDAT" + zlib.compress(lines),
            b"IEND",
        ]
        body = b"".join(struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
        (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
        first, *others = [Image.fromarray(np.ascontiguousarray(stored[:, :, channel])) for channel in range(3)]
        first.save(tmp_path / "pages.tif", save_all=True, append_images=others, exif=exif)
        first.save(tmp_path / "grey.png", exif=exif)
        for name, channels in (("deep.png", 3), ("pages.tif", 3), ("grey.png", 1)):
            found = (read_pixels(tmp_path / name, channels).double() * 65535).round().permute(1, 2, 0).numpy()
            assert np.array_equal(found, shown[:, :, :channels]), (turn, name)


def test_damaged_exif_leaves_the_picture_as_it_is(tmp_path):
    shown = picture(16, 24)
    for number, exif in enumerate((b"Exif\0\0nonsense", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x05", b"Exif\0\0")):
        path = tmp_path / f"{number}.webp"
        Image.fromarray(shown).save(path, exif=exif, lossless=True)
        assert near(read_rgb(path), shown, path.name)
        assert near(read_rgb(path, (16, 24)), shown, path.name)


BOX = (4, 8, 12, 4)  # x, y, width, height


def boxed(height, width):
    """A grey picture with a red box."""
    shown = np.full((height, width, 3), 100, np.uint8)
    shown[BOX[1] : BOX[1] + BOX[3], BOX[0] : BOX[0] + BOX[2]] = (230, 20, 30)
    return shown


def coco(folder, images, *, as_stored=False):
    """Write a COCO folder of pictures with one box each, from (name, turn, size); boxes as shown, or as the file stores the pixels."""
    folder.mkdir(exist_ok=True)
    tree = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "red"}]}
    for number, (name, turn, size) in enumerate(images, start=1):
        shown = boxed(*size)
        write(folder / name, shown, turn)
        seen = STORED[turn](shown) if as_stored else shown
        rows, columns = np.nonzero(seen[:, :, 0] > 180)
        box = [columns.min(), rows.min(), columns.max() + 1 - columns.min(), rows.max() + 1 - rows.min()]
        tree["images"].append({"id": number, "file_name": name, "height": seen.shape[0], "width": seen.shape[1]})
        tree["annotations"].append({"id": number, "image_id": number, "category_id": 1, "bbox": [int(edge) for edge in box]})
    for part in ("train", "val"):
        (folder / f"{part}.json").write_text(json.dumps(tree))
    return folder


def load(folder, **given):
    names = {"train_images": ".", "val_images": ".", "train_annotations": "train.json", "val_annotations": "val.json"}
    plain = {"workers": 0, "shortest": None, "longest": None, "augment": False, "batch_size": 1, "eval_batch_size": 1, "divisor": 8}
    return load_detection_data(CocoConfig(root=str(folder), **names | plain | given), None, NORM, CPU, 0)


def fitting(data):
    """For each held-out image, whether its box holds its red pixels and nothing else."""
    found = []
    for batch in data.val:
        red = (batch.images[0, 0] > 0.7) & (batch.images[0, 2] < 0.3)
        rows, columns = red.nonzero(as_tuple=True)
        corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        found.append(batch.boxes[0, 0].tolist() == [float(each) for each in corners])
    return found


SQUARE, WIDE = (24, 24), (24, 40)


@pytest.mark.parametrize("size", [SQUARE, WIDE])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_lie_where_they_were_drawn(tmp_path, kind, size):
    images = [(f"{turn}-{kind}", turn, size) for turn in TURNS]
    keeps = [turn for turn in TURNS if turn != 1 and (size == SQUARE or turn < 5)]
    shown = load(coco(tmp_path / "shown", images))
    assert fitting(shown) == [True] * 8
    counted = [note for note in shown.notes if "turn in EXIF" in note]
    assert len(counted) == 2
    assert f"{tmp_path / 'shown' / 'train.json'}: {len(keeps)} images have a turn in EXIF" in counted[0]
    assert "boxes are read as a viewer shows them, and data.exif=stored reads" in counted[0]
    stored = coco(tmp_path / "stored", images, as_stored=True)
    assert fitting(load(stored, exif="stored")) == [True] * 8
    right = [turn == 1 or (size == WIDE and turn >= 5) for turn in TURNS]  # their size says which are of the stored pixels
    if kind != "a.jpg":
        assert [all(each) for each in zip(fitting(load(stored)), strict=True)] == [
            fits or bool(np.array_equal(*symmetric(turn, size))) for turn, fits in zip(TURNS, right, strict=True)
        ]


def symmetric(turn, size):
    """The box as shown and as stored; equal where a turn moves it onto itself."""
    shown = boxed(*size)
    return shown, np.zeros(0) if STORED[turn](shown).shape != shown.shape else STORED[turn](shown)


def test_a_size_that_fits_neither_is_named_with_both(tmp_path):
    folder = coco(tmp_path / "coco", [("6-a.jpg", 6, WIDE)])
    text = (folder / "train.json").read_text().replace('"height": 24', '"height": 25')
    (folder / "train.json").write_text(text)
    with pytest.raises(UserError, match=r"has 40×24 pixels \(24×40 without its turn in EXIF\), the annotations say 40×25"):
        load(folder)


@pytest.mark.parametrize("in_memory", [False, True])
def test_multi_label_images_are_read_as_boxes_are(make_trainer, tmp_path, in_memory):
    folder = coco(tmp_path / "coco", [(f"{turn}-a.tif", turn, SQUARE) for turn in TURNS])
    named = ["data.train_images=.", "data.val_images=.", "data.train_annotations=train.json", "data.val_annotations=val.json"]
    small = ["data.workers=0", "data.shortest=32", "data.longest=32", "data.divisor=32", "data.augment=false"]
    trainer = make_trainer(
        "task=multilabel", "data=coco", f"data.root={folder}", *named, *small, f"task.in_memory={str(in_memory).lower()}", "loss=bce"
    )
    images = torch.cat([batch.images for batch in trainer.data.val])
    assert torch.equal(images, images[:1].expand_as(images))
    assert any("turn in EXIF" in note for note in trainer.notes)


def masks(folder, pairs):
    """Write a folder of masks from (size, turn of the image, turn of the mask, name of the mask); a mask says where its image is red."""
    for part in ("train", "val"):
        for name in ("images", "masks"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
        for number, (size, turn, turn_of_mask, name) in enumerate(pairs):
            shown = boxed(*size)
            write(folder / part / "images" / f"{number:02}_a.jpg", shown, turn)
            write(folder / part / "masks" / f"{number:02}_a{name}", (shown[:, :, 0] > 180).astype(np.uint8), turn_of_mask)
    return folder


def mask_data(folder, **given):
    plain = {"image_size": 32, "augment": False, "workers": 0, "batch_size": 1, "eval_batch_size": 1}
    return load_masks(MaskFolderConfig(root=str(folder), classes=["back", "red"], **plain | given), CPU, 0, NORM)


def covering(data):
    """For each held-out pair, whether the mask covers the red pixels, but for a seam that resizing blurs."""
    found = []
    for batch in data.val:
        red = (batch.images[0, 0] - batch.images[0, 2]) > 0.4
        found.append(bool((red != (batch.target[0] == 1)).float().mean() < 0.04))
    return found


@pytest.mark.parametrize("size", [SQUARE, WIDE])
def test_masks_cover_what_they_were_drawn_over(tmp_path, size):
    """A mask without a turn beside a turned photo, a mask turned alike, and masks that are turned by themselves."""
    pairs = [(size, turn, 1, ".png") for turn in TURNS]
    pairs += [(size, turn, turn, ".png") for turn in TURNS]
    pairs += [(size, 1, turn, ".tif") for turn in TURNS]
    data = mask_data(masks(tmp_path, pairs))
    assert covering(data) == [True] * 24
    keeps = sum(1 for turn in TURNS if turn != 1 and (size == SQUARE or turn < 5))
    (counted,) = data.notes
    assert f": {4 * keeps} images have a turn in EXIF" in counted  # those of one turn, in both parts
    assert [data.val.size(position) for position in range(24)] == [size] * 24


@pytest.mark.parametrize("size", [SQUARE, WIDE])
def test_masks_of_the_stored_pixels(tmp_path, size):
    """Their size says so, or data.exif does where both fit."""
    folder = masks(tmp_path, [(size, turn, 1, ".png") for turn in TURNS])
    for part in ("train", "val"):
        for number, turn in enumerate(TURNS):
            mask = STORED[turn]((boxed(*size)[:, :, 0] > 180).astype(np.uint8))
            Image.fromarray(np.ascontiguousarray(mask)).save(folder / part / "masks" / f"{number:02}_a.png")
    assert covering(mask_data(folder, exif="stored")) == [True] * 8
    found = covering(mask_data(folder))
    assert [found[turn - 1] for turn in (1, 5, 6, 7, 8)] == [True] + [size == WIDE] * 4
    assert mask_data(folder).val.size(5) == (size[::-1] if size == WIDE else size)


def test_a_mask_of_another_size_is_refused_while_it_is_read(tmp_path):
    folder = masks(tmp_path, [(WIDE, 6, 1, ".png")] * 2)
    Image.fromarray(np.ones((30, 40), np.uint8)).save(folder / "val" / "masks" / "01_a.png")
    with pytest.raises(UserError, match=r"masks/01_a.png: is 40×30, its image 40×24"):
        mask_data(folder)
    with pytest.raises(UserError, match=r"masks/01_a.png: is 40×30, its image 40×24"):
        list(mask_data(folder, check="off").val)

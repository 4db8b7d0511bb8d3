"""Grey images of 16 bits for detectors and segmentation, and masks of 16 bits."""

import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image, TiffImagePlugin
from words import ALONE

import train
from lab.data.images.files import CorruptError, read_rgb
from lab.data.images.pixels import dark_note, read_pixels
from lab.data.sets import Norm
from lab.data.sources.hub import HubSamples
from lab.detectors.detection.data import load_detection_data
from lab.detectors.schema import CocoConfig
from lab.tasks.segmentation import MaskFolderConfig
from lab.tasks.segmentation.data import MaskFiles, Pairs, read_mask

SIZE = 32
NORM = Norm([0.5] * 3, [0.25] * 3)
TRAINING = ["trainer.device=cpu", "trainer.max_updates=1", *ALONE, "data.workers=0", "data.batch_size=2"]


def written(path, bright, kind="png"):
    """An image (H, W) of 16 bits: dark, with a bright square from (8, 4) to (24, 20) as x and y."""
    pixels = np.full((SIZE, SIZE), 257 * 3, dtype=np.uint16)
    pixels[4:20, 8:24] = bright
    Image.fromarray(pixels).save(path.with_suffix(f".{kind}"))


@pytest.fixture
def boxes(tmp_path):
    """A COCO file of images of 16 bits, for training and held out."""
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        images, found = [], []
        for number in range(2):
            kind = ("png", "tiff")[number]
            written(tmp_path / part / f"{number}", 257 * 200, kind)
            images.append({"id": number, "file_name": f"{number}.{kind}", "height": SIZE, "width": SIZE})
            found.append({"id": number, "image_id": number, "category_id": 1, "bbox": [8, 4, 16, 16]})
        tree = {"images": images, "annotations": found, "categories": [{"id": 1, "name": "square"}]}
        (tmp_path / f"{part}.json").write_text(json.dumps(tree))
    return tmp_path


def opened(folder):
    names = {"train_images": "train", "val_images": "val", "train_annotations": "train.json", "val_annotations": "val.json"}
    config = CocoConfig(root=str(folder), **names, workers=0, shortest=None, longest=None, augment=False, divisor=16, batch_size=2)
    return load_detection_data(config, None, NORM, torch.device("cpu"), 0)


def test_a_detector_sees_sixteen_bits_as_eight(boxes):
    data = opened(boxes)
    (batch,) = data.val
    pixels = ((batch.images * 0.25 + 0.5) * 255).round()
    expected = torch.full((SIZE, SIZE), 3.0)
    expected[4:20, 8:24] = 200
    torch.testing.assert_close(pixels, expected.expand(2, 3, SIZE, SIZE))
    assert data.notes == []


def test_images_that_become_dark_are_said(boxes):
    for number, kind in enumerate(("png", "tiff")):
        written(boxes / "train" / f"{number}", 4095, kind)
    (said,) = opened(boxes).notes
    assert "the brightest value of 2 training images is 4095: 16 shades are left" in said


def written_in_12_bits(path, *pages, turn=1):
    """Write a TIFF of 12 bits, two pixels in three bytes, which Pillow cannot write."""
    content = b"II*\0" + struct.pack("<I", 8)
    for number, values in enumerate(pages):
        first, second = values.reshape(-1, 2).astype(np.uint32).T
        packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8).tobytes()
        height, width = values.shape
        tags = {256: width, 257: height, 258: (12,), 259: 1, 262: 1, 273: 0, 274: turn, 277: 1, 278: height, 279: len(packed)}
        directory = TiffImagePlugin.ImageFileDirectory_v2()
        for tag, value in tags.items():
            directory[tag] = value
        start = len(content)
        entries = directory.tobytes(start)  # Pillow adds `start` to the place of the pixels
        end = start + len(entries) + len(packed)
        content += entries[:-4] + struct.pack("<I", 0 if number == len(pages) - 1 else end) + packed
    path.write_bytes(content)


@pytest.fixture
def values():
    """Pixels (SIZE, SIZE / 2) of 12 bits, from the darkest to the brightest."""
    made = np.random.default_rng(0).integers(0, 4096, (SIZE, SIZE // 2))
    made[0, :2] = 0, 4095
    return made


@pytest.mark.parametrize("turn", [1, 6])
def test_a_file_of_12_bits_is_scaled_by_its_own_depth(tmp_path, values, turn):
    path, expected = tmp_path / "a.tiff", values if turn == 1 else np.rot90(values, -1)
    written_in_12_bits(path, values, turn=turn)
    torch.testing.assert_close(read_pixels(path, 1)[0], torch.from_numpy(expected / 4095).float(), atol=2e-5, rtol=0)
    assert np.array_equal(np.asarray(read_rgb(path, deep=True))[:, :, 0], (expected * 255 / 4095).round())
    assert dark_note([str(path)]) == [], "the whole range is used"


def test_pages_of_12_bits_are_scaled_by_their_own_depth(tmp_path, values):
    written_in_12_bits(tmp_path / "a.tiff", values, values[::-1])
    expected = torch.from_numpy(np.stack([values, values[::-1]]) / 4095).float()
    torch.testing.assert_close(read_pixels(tmp_path / "a.tiff", 2), expected, atol=2e-5, rtol=0)


def test_segmentation_scales_an_image_of_12_bits_and_not_its_mask(tmp_path, values):
    image, mask, labels = tmp_path / "image.tiff", tmp_path / "mask.tiff", values % 3
    written_in_12_bits(image, values)
    written_in_12_bits(mask, labels)
    config = MaskFolderConfig(classes=["ground", "square", "disc"], image_size=SIZE, augment=False)
    pairs = Pairs(targets=torch.zeros(1), keys=["0"], pairs=[(image, mask)], classes=3, exif="shown")
    files = MaskFiles(pairs, config, [0] * 3, train=False)
    files.size = list(values.shape)
    pixels, found, _ = files[0, 0]
    assert np.array_equal(pixels[0].numpy(), (values * 255 / 4095).round())
    assert np.array_equal(found.numpy(), labels)


@pytest.mark.parametrize("bits", [12, 16])
def test_images_of_the_hub_are_scaled_as_those_of_a_folder(tmp_path, values, bits):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.tiff"
    if bits == 12:
        written_in_12_bits(path, values)
    else:
        Image.fromarray((values * 16).astype(np.uint16)).save(path)
    cells = {"picture": [{"bytes": path.read_bytes(), "path": None}]}
    rows = datasets.Dataset.from_dict(cells, datasets.Features({"picture": datasets.Image()})).with_format("arrow")
    shared = {"mode": None, "targets": torch.zeros(1), "keys": ["0"], "dataset": rows, "column": "picture", "folders": None}
    torch.testing.assert_close(HubSamples(**shared, channels=1).image(0), read_pixels(path, 1), atol=0, rtol=0)
    assert np.array_equal(np.asarray(HubSamples(**shared).image(0)), np.asarray(read_rgb(path, deep=True)))


def test_segmentation_trains_on_images_and_masks_of_sixteen_bits(tmp_path):
    for part in ("train", "val"):
        for name in ("images", "masks"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
        for number in range(2):
            written(tmp_path / "data" / part / "images" / f"{number}", 257 * 200)
            mask = np.zeros((SIZE, SIZE), dtype=np.uint16)
            mask[4:20, 8:24], mask[0] = 1, 255
            Image.fromarray(mask).save(tmp_path / "data" / part / "masks" / f"{number}.png")
    places = [f"data.root={tmp_path / 'data'}", "data.classes=[ground,square]", "data.image_size=32"]
    words = ["task=segmentation", "model=segmenter_tiny", "data=mask_folder", *places]
    assert train.main([*words, *TRAINING, f"trainer.runs={tmp_path / 'runs'}"]) == 0
    values = read_mask(tmp_path / "data" / "val" / "masks" / "0.png", 2)
    assert (values.dtype, values.unique().tolist(), values[4:20, 8:24].unique().tolist()) == (torch.uint8, [0, 1, 255], [1])
    large = tmp_path / "data" / "val" / "masks" / "1.png"
    Image.fromarray(np.full((SIZE, SIZE), 257, dtype=np.uint16)).save(large)  # 1 in its low byte
    with pytest.raises(CorruptError, match="has the value 257"):
        read_mask(large, 2)

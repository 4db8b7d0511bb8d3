"""Images of 1 to 12 channels, of 8 bits, 16 bits and floats: read as they are, normalised by what was measured, and predicted."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, TiffImagePlugin

from lab.base.errors import UserError
from lab.config.settings import Settings
from lab.data.images.files import UNREADABLE, CorruptError, ImageBytes, fault_in
from lab.data.images.pixels import measured, read_pixels, shown
from lab.data.sources.custom import of_channels
from lab.results.prediction import AskedPrediction, predict
from lab.run.predict import predictor

SIDE = 20


def pixels(channels, dtype, seed=0):
    values = np.random.default_rng(seed).random((SIDE, SIDE, channels))
    return (
        (values * 65535).astype(dtype)
        if dtype == np.uint16
        else (values * 255).astype(dtype)
        if dtype == np.uint8
        else values.astype(dtype)
    )


def saved(path, array):
    """Write an array as the file that its channels and dtype need."""
    if path.suffix == ".npy":
        np.save(path, array)
    elif array.shape[2] in (3, 4) and array.dtype == np.uint8:
        Image.fromarray(array).save(path)
    else:
        first, *others = [Image.fromarray(np.ascontiguousarray(array[:, :, channel])) for channel in range(array.shape[2])]
        first.save(path, **({"save_all": True, "append_images": others} if others else {}))
    return path


@pytest.mark.parametrize(
    ("name", "channels", "dtype", "scale"),
    [
        ("a.png", 1, np.uint8, 255),
        ("a.png", 1, np.uint16, 65535),
        ("a.png", 3, np.uint8, 255),
        ("a.png", 4, np.uint8, 255),
        ("a.tif", 1, np.uint16, 65535),
        ("a.tif", 1, np.float32, 1),
        ("a.tif", 12, np.uint16, 65535),
        ("a.tif", 5, np.float32, 1),
        ("a.npy", 12, np.float32, 1),
        ("a.npy", 7, np.uint8, 255),
        ("a.npy", 2, np.float64, 1),
    ],
)
def test_every_pixel_is_read_as_it_is(tmp_path, name, channels, dtype, scale):
    array = pixels(channels, dtype)
    found = read_pixels(saved(tmp_path / name, array), channels)
    expected = torch.from_numpy(array.astype(np.float64) / scale).permute(2, 0, 1).float()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("array", "channels", "said"),
    [
        (pixels(3, np.uint8), 4, "has 3 channels; 4 are expected, or data.channels=3"),
        (pixels(3, np.float32).astype(np.int32), 3, "has pixels of int32; 8 or 16 bits without sign, or floats, are expected"),
        (np.full((SIDE, SIDE, 2), np.nan, np.float32), 2, "nan or infinite"),
        (np.zeros((2, 2, 2, 2), np.uint8), 2, r"has \(2, 2, 2, 2\) channels; 2 are expected$"),
        (np.array([object()]), 1, "Object arrays cannot be loaded"),
    ],
)
def test_other_files_are_named(tmp_path, array, channels, said):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UNREADABLE, match=said):
        read_pixels(tmp_path / "a.npy", channels)


def deep_png(path, array):
    """Write a PNG of 16 bits (H, W, channels), which Pillow cannot write."""
    height, width, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = (struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("of_shard", [False, True])
def test_a_png_of_16_bits_keeps_them_in_every_channel(tmp_path, channels, of_shard):
    array = pixels(channels, np.uint16)
    path = deep_png(tmp_path / "a.png", array)
    found = read_pixels(ImageBytes(path.read_bytes(), path.name) if of_shard else path, channels)
    assert torch.equal(found, torch.from_numpy(array.astype(np.float32)).permute(2, 0, 1) / 65535)
    path.write_bytes(path.read_bytes()[:200])
    assert fault_in(lambda: read_pixels(path, channels)).startswith("cannot be read as an image (")


def test_a_tiff_whose_16_bits_would_be_read_as_8_is_refused(tmp_path):
    path, array = tmp_path / "a.tif", pixels(3, np.uint16)
    tags = {256: SIDE, 257: SIDE, 258: (16, 16, 16), 259: 1, 262: 2, 273: 0, 277: 3, 278: SIDE, 279: array.nbytes}
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[tag] = value
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + directory.tobytes(8) + array.astype("<u2").tobytes())  # the pixels after the tags
    with Image.open(path) as image:
        assert np.array_equal(np.array(image), array >> 8)
    with pytest.raises(UNREADABLE, match=r"16 bits side by side, of which Pillow reads 8; a page a channel, or .npy, is expected"):
        read_pixels(path, 3)


@pytest.fixture
def folder(tmp_path):
    """Twelve channels of 16 bits, of two classes, whose brightness says the class."""
    root = tmp_path / "satellite"
    for part, count in (("train", 6), ("val", 3)):
        for label in (0, 1):
            (root / part / f"c{label}").mkdir(parents=True)
            for number in range(count):
                array = pixels(12, np.uint16, seed=10 * number + label) // 2 + label * 30000
                saved(root / part / f"c{label}" / f"{number}.tif", array)
    return root


def words(root, *more):
    return ["data=folder", f"data.root={root}", "data.image_size=16", "data.batch_size=4", "data.workers=0", "data.channels=12", *more]


def test_a_model_trains_on_them_and_says_what_they_show(make_trainer, folder, run_folder, quiet, tmp_path, capsys):
    chosen = words(folder, "trainer.epochs=1", "tracking=none", "tracking.model=true")
    trainer = make_trainer(*chosen)
    trainer.fit(run_folder, quiet)
    trainer.finish()
    state = torch.load(run_folder.path / "checkpoints" / "best.pt", weights_only=True)
    assert len(state["norm"]["mean"]) == 12
    exported = torch.export.load(run_folder.path / "checkpoints" / "best.pt2").module()
    with torch.no_grad():
        batch = next(iter(trainer.data.val))
        expected = trainer.model.eval()(batch.images).softmax(1)
    mean, std = (torch.tensor(state["norm"][name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(exported(batch.images * std + mean), expected, atol=1e-4, rtol=1e-3)
    say = predictor(trainer.config, state, torch.device("cpu"), top=2, score=0.3)
    path = next((folder / "val").rglob("*.tif"))
    settings = Settings(trainer.config)
    assert predict(AskedPrediction(settings, state, [], [path, folder / "none.tif"], [], tmp_path / "out", top=2, score=0.3)) == 1
    (line,) = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert [each["label"] for each in json.loads(line)["found"]] == say(read_pixels(path, 12)).labels
    assert Image.open(tmp_path / "out" / json.loads(line)["picture"]).mode == "RGB"
    assert "none.tif" in capsys.readouterr().err


def test_wrong_channels_are_named_before_the_run(make_trainer, folder, tmp_path):
    saved(folder / "train" / "c0" / "0.tif", pixels(3, np.uint16))
    with pytest.raises(UserError, match=r"1 corrupt entries.*\ntrain/c0/0.tif: has 3 channels; 12 are expected, or data.channels=3"):
        make_trainer(*words(folder))
    with pytest.raises(UserError, match=r"18 corrupt entries; no entry is left to use, so look at the settings, too.\n"):
        make_trainer(*words(folder, "data.channels=5", "data.skip_corrupt=true"))
    with pytest.raises(UserError, match=r"data.normalization=model: the model knows 3 channels"):
        make_trainer(*words(folder, "data.skip_corrupt=true", "data.normalization=model"))
    with pytest.raises(UserError, match=r"data.auto_augment=original: changes images in RGB"):
        make_trainer(*words(folder, "data.skip_corrupt=true", "data.auto_augment=original"))


def test_few_of_many_are_measured():
    class Many:
        targets = torch.zeros(2500)

        def __init__(self):
            self.seen = []

        def image(self, index):
            self.seen.append(index)
            return torch.full((1, 2, 2), float(index))

    many = Many()
    norm = measured(many)
    assert sorted(many.seen) == list(range(0, 2500, 3))
    assert norm.mean == pytest.approx([np.mean(many.seen)])
    assert norm.std == pytest.approx([np.std(many.seen)])


def test_any_channels_are_shown_from_darkest_to_brightest():
    grey = shown(torch.linspace(-3, 5, 16).view(1, 4, 4))
    assert (grey.mode, grey.getextrema()) == ("RGB", ((0, 255),) * 3)
    assert shown(torch.rand(12, 4, 4)).size == (4, 4)


def test_files_that_need_channels_are_named(make_trainer, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "arrays" / "train" / name).mkdir(parents=True)
        np.save(tmp_path / "arrays" / "train" / name / "0.npy", np.zeros((8, 8, 5), np.float32))
    with pytest.raises(UserError, match=r"Found no image .*Files .npy are read with data.channels=NUMBER"):
        make_trainer("data=folder", f"data.root={tmp_path / 'arrays'}", "data.image_size=16")


def test_a_header_takes_no_memory_that_the_file_does_not_hold(tmp_path):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6, 3)})
    zipped = io.BytesIO()
    np.savez(zipped, x=np.zeros(3))
    for content in (file.getvalue(), zipped.getvalue()):
        with pytest.raises(UNREADABLE):
            read_pixels(ImageBytes(content, "a.npy"), 3)
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(UNREADABLE):
            read_pixels(tmp_path / "a.npy", 3)


def test_a_header_of_a_deep_png_takes_no_memory_that_its_pixels_would_need(tmp_path):
    head = struct.pack(">IIBBBBB", 2**20, 2**20, 16, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
    with pytest.raises(CorruptError, match="1048576 x 1048576 pixels"):
        read_pixels(tmp_path / "a.png", 3)


@pytest.mark.parametrize(("image", "expected"), [(Image.new("I;16", (4, 3), 510), 2.0), (torch.full((1, 3, 4), 510.0), 510.0)])
def test_the_scale_of_a_custom_source_stays(image, expected):
    """PIL images are divided by 255, tensors of floats are taken as they are: checkpoints hold the normalisation of these numbers."""
    pixels = of_channels(image, 1)
    assert pixels.shape == (1, 3, 4)
    assert (pixels == expected).all()

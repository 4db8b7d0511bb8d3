"""data=npz: images and classes in arrays of NumPy's files."""

import io
import zipfile

import numpy as np
import pytest
import torch

from lab.base.errors import UserError
from lab.config.schema import NpzConfig
from lab.config.settings import load
from lab.data.load import load_data
from lab.data.sets import Norm
from lab.tracking.datasets import data_sets

NORM = Norm([0.5] * 3, [0.25] * 3)
CPU = torch.device("cpu")
GREY = np.arange(12 * 8 * 8, dtype=np.uint8).reshape(12, 8, 8)
LABELS = np.arange(12) % 3


def arrays(path, images=GREY, labels=LABELS, **others):
    np.savez_compressed(path, images=images, labels=labels, **others)
    return str(path)


def opened(file, **settings):
    settings = {"image_size": 8, "workers": 0, "batch_size": 4, "crop_pct": 1.0, "interpolation": "nearest", **settings}
    return load_data(NpzConfig(file=file, **settings), NORM, CPU, 0)


def test_other_channels_are_read_as_they_are(tmp_path):
    images = np.random.default_rng(0).random((12, 8, 8, 2), dtype=np.float32)
    data = opened(arrays(tmp_path / "two.npz", images), val=arrays(tmp_path / "val.npz", images[:4], LABELS[:4, None]), channels=2)
    (batch,) = data.val
    mean, std = data.norm.on(CPU)
    torch.testing.assert_close(batch.images * std + mean, torch.from_numpy(images[:4]).permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("made", "settings", "said"),
    [
        ({"images": GREY[0]}, {}, r"images has the shape \(8, 8\); images are \(N, H, W\)"),
        ({"images": GREY.astype(np.float32)}, {}, "is of float32 with 1 channels; uint8 with 1 or 3 is expected"),
        ({"images": GREY.astype(np.int64)}, {"channels": 1}, "an image of the array images has pixels of int64"),
        ({"images": np.where(GREY > 200, np.nan, 0.5)}, {"channels": 1}, "images has pixels that are nan or infinite"),
        ({"labels": LABELS[:5]}, {}, r"labels has the shape \(5,\); a class for each of 12 images"),
        ({"labels": LABELS / 2}, {}, "labels is of float64; whole numbers from 0 or texts"),
        ({"labels": LABELS - 1}, {}, "has the class -1; classes are from 0 to 1"),
        ({"labels": LABELS}, {"classes": ["a", "b"]}, "has the class 2; classes are from 0 to 1"),
        ({"labels": LABELS.astype(object)}, {}, "cannot be read as an .npz file: Object arrays cannot be loaded"),
        ({}, {"images": "image"}, "array: 'image' is not known"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, made, settings, said):
    with pytest.raises(UserError, match=said):
        opened(arrays(tmp_path / "train.npz", **made), **settings)


def test_numbers_of_classes_that_are_only_held_out_are_said(tmp_path):
    train, val = arrays(tmp_path / "train.npz", labels=LABELS // 2 * 2), arrays(tmp_path / "val.npz")
    assert opened(train, val=val).notes == ["no training image is of 1, which held-out images have"]


def test_a_file_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "train.npz").write_bytes(b"PK no archive")
    with pytest.raises(UserError, match=r"train\.npz: cannot be read as an \.npz file: File is not a zip file"):
        opened(str(tmp_path / "train.npz"))


def test_a_header_that_says_more_than_the_file_holds_is_refused_before_memory_is_taken(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 8, 8)})
    with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
        archive.writestr("images.npy", head.getvalue())
        archive.writestr("labels.npy", head.getvalue())
    with pytest.raises(UserError, match=r"images\.npy is cut off: its header says uint8 of the shape \(1099511627776, 8, 8\)"):
        opened(str(tmp_path / "train.npz"))


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**52, 8, 8)})
    with zipfile.ZipFile(tmp_path / "train.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("images.npy", "labels.npy"):
            archive.writestr(name, head.getvalue())
        for info in archive.infolist():
            info.file_size = 2**58 + 128
    with pytest.raises(
        UserError, match=r"images\.npy takes 288,230,376,151,711,872 bytes; at most 4,294,967,296 are read, and LOSSFORGE_MAX_BYTES"
    ):
        opened(str(tmp_path / "train.npz"))


def test_the_bytes_of_the_files_that_are_given_identify_the_data(tmp_path):
    def digests():
        config = load(["data=npz", f"data.file={tmp_path}/a.npz", "data.image_size=8", "data.workers=0", "model=tiny_resnet"]).config
        data = load_data(config.data, NORM, CPU, 0)
        return [each["digest"] for each in data_sets(config, data, train="training", val="validation", test="test")]

    arrays(tmp_path / "a.npz")
    first = digests()
    arrays(tmp_path / "a.npz", 255 - GREY)  # without other labels
    assert len(first) == 2
    assert not set(first) & set(digests())

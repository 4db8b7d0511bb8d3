"""Scenes drawn from handwritten digits."""

import json
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.base.errors import UserError
from lab.data.sets import Norm
from lab.detectors.detection.data import load_detection_data
from lab.detectors.scenes import _digits, draw_scene, scenes_folder
from lab.detectors.schema import DigitScenesConfig

CPU = torch.device("cpu")
NORM = Norm([0.5] * 3, [0.25] * 3)
SMALL = DigitScenesConfig(train_scenes=6, val_scenes=3, scene_pixels=64, digit_pixels=[14, 24], digits=[2, 4], workers=0)


def test_scenes_are_drawn_once_and_from_their_seed(tmp_path):
    folder = scenes_folder(SMALL, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert scenes_folder(replace(SMALL, batch_size=3), tmp_path / "a") == folder, "loading does not change the pictures"
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == before
    again = scenes_folder(SMALL, tmp_path / "b")
    assert again.name == folder.name
    assert all((again / path.relative_to(folder)).read_bytes() == path.read_bytes() for path in folder.rglob("*.*"))
    other = scenes_folder(replace(SMALL, scene_seed=1), tmp_path / "a")
    assert other != folder
    assert (other / "images/train_000000.png").read_bytes() != (folder / "images/train_000000.png").read_bytes()


def test_scenes_are_a_coco_data_set(tmp_path):
    data = load_detection_data(replace(SMALL, root=str(tmp_path)), None, NORM, CPU, 0)
    assert data.classes == [str(digit) for digit in range(10)]
    assert data.category_ids == list(range(1, 11))
    assert (data.train.samples, data.val.samples) == (6, 3)
    ids = [entry["id"] for entry in json.loads(data.val.file.path.read_text())["annotations"]]
    assert ids == list(range(1, len(ids) + 1))
    assert not set(data.train.file.image_ids) & set(data.val.file.image_ids)
    assert int(data.counts.sum()) == len(data.train.file.boxes)
    assert next(iter(data.train)).images.shape == (6, 3, 64, 64)


def test_scenes_of_two_processes_at_once_are_one(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=scenes_folder, args=(SMALL, tmp_path), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == [scenes_folder(SMALL, tmp_path).name]


def test_scenes_that_cannot_be_written_leave_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.root=.*cannot be written"):
        scenes_folder(SMALL, tmp_path / "file" / "scenes")
    with pytest.raises(UserError, match=r"data.held_out=0.0001"):
        scenes_folder(replace(SMALL, held_out=0.0001), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_boxes_of_a_scene_are_tight():
    config = replace(SMALL, clutter=0.0, digits=[1, 1])
    glyphs, labels = _digits(config)[0]
    for seed in range(30):
        picture, ((label, (x, y, w, h), *_),) = draw_scene(config, glyphs, labels, np.random.default_rng(seed))
        assert 0 <= label <= 9
        padded = np.pad(picture.astype(int), ((1, 1), (1, 1), (0, 0)), mode="edge")
        steps = np.zeros(picture.shape[:2], dtype=int)
        for rows, columns in (
            (slice(2, None), slice(1, -1)),
            (slice(None, -2), slice(1, -1)),
            (slice(1, -1), slice(2, None)),
            (slice(1, -1), slice(None, -2)),
        ):
            steps = np.maximum(steps, abs(padded[1:-1, 1:-1] - padded[rows, columns]).max(-1))
        rows, columns = np.nonzero(steps > 20)
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert edges == pytest.approx([x, y, x + w, y + h], abs=2)


def test_digits_of_a_scene_keep_apart():
    config = replace(SMALL, digits=[8, 8], scene_pixels=96, digit_pixels=[20, 40], max_iou=0.08, max_cover=0.2)
    glyphs, labels = _digits(config)[0]
    touching = 0
    for seed in range(20):
        _, found = draw_scene(config, glyphs, labels, np.random.default_rng(seed))
        masks = np.zeros((len(found), 96, 96), dtype=bool)
        for mask, (_, (x, y, w, h), *_) in zip(masks, found, strict=True):
            mask[y : y + h, x : x + w] = True
        for i, one in enumerate(masks):
            for two in masks[:i]:
                shared = (one & two).sum()
                touching += shared > 0
                assert shared / (one | two).sum() <= 0.08
                assert shared <= 0.2 * min(one.sum(), two.sum())
    assert touching > 5

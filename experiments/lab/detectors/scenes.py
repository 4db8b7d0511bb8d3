"""Scenes composed from scikit-learn's handwritten digits, written once as a COCO data set."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image, ImageDraw

from lab.base.errors import UserError
from lab.data.loading import number_of_workers
from lab.data.rle import as_coco, encoded
from lab.data.split import split
from lab.detectors.schema import DetectionDataConfig, DigitScenesConfig

DRAWING = 2  # a version, increased when the same settings give other pictures, so that an old folder is not reused
LUMA = np.array([0.299, 0.587, 0.114])
CONTRAST = 0.4  # smallest contrast of a digit's ink to the background under it
TRIES = 40
FEW = 100  # so few scenes are drawn faster than worker processes start
PARTS = ("train", "val", "test")


def scenes_folder(config: DigitScenesConfig, root: Path) -> Path:
    """Return the folder under `root` with the scenes of these settings; draw them if the folder does not exist yet.

    It holds images/ and a file instances_<part>.json for each part. The folder is either complete or absent, even if several processes
    make it at once.

    Raises:
        UserError: the folder cannot be written, or the settings allow no scene.
    """
    settings = _settings(config)
    folder = root / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    if folder.is_dir():
        return folder
    digits = _digits(config)
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
        try:
            draft.chmod(0o755)
            _write(config, settings, digits, draft)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        # another process may have made it first
        if not folder.is_dir():
            raise UserError(f"data.root={root}: the scenes cannot be written: {error.strerror or str(error).splitlines()[-1]}") from None
    return folder


def _settings(config: DigitScenesConfig) -> dict[str, Any]:
    """Return the settings that decide the pictures; those of test scenes and turns only where asked, so that older folders are found."""
    loading = {item.name for item in fields(DetectionDataConfig)} | (set() if config.test else {"test", "test_scenes"})
    loading |= set() if config.turn else {"turn"}
    return {"drawing": DRAWING} | {item.name: getattr(config, item.name) for item in fields(config) if item.name not in loading}


def _digits(config: DigitScenesConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Load each part's digits: images (N, 8, 8) in [0, 1] and classes."""
    from sklearn.datasets import load_digits

    if config.digit_pixels[1] > config.scene_pixels:
        raise UserError(f"data.digit_pixels={config.digit_pixels}: at most data.scene_pixels={config.scene_pixels}.")
    known = load_digits()
    parts = split(config, known.target.tolist(), [str(digit) for digit in range(10)], config.test)
    return [((known.images[part] / 16).astype(np.float32), known.target[part]) for part in parts if part]


class Digit(NamedTuple):
    """A digit of a scene."""

    label: int
    box: list[int]  # x, y, width, height
    mask: np.ndarray  # (H, W) bool: pixels that are ink at least by half, and that no later digit covers
    corners: list[float]  # x, y, x, y, ... of the turned box; empty where digits are upright


@dataclass
class Drawing:
    """Draw, write and describe the scenes of a part by their number, in any process."""

    config: DigitScenesConfig
    part: int  # index in PARTS
    glyphs: np.ndarray
    labels: np.ndarray
    folder: Path

    def __len__(self) -> int:
        return int(getattr(self.config, f"{PARTS[self.part]}_scenes"))

    def __getitem__(self, scene: int) -> tuple[str, list[Digit]]:
        """Draw a scene; return its file's name, and its digits."""
        random = np.random.default_rng([self.config.scene_seed, self.part, scene])
        picture, found = draw_scene(self.config, self.glyphs, self.labels, random)
        name = f"{PARTS[self.part]}_{scene:06}.png"
        Image.fromarray(picture).save(self.folder / name, compress_level=1)
        return name, found


def _write(config: DigitScenesConfig, settings: dict[str, Any], digits: list[tuple[np.ndarray, np.ndarray]], folder: Path) -> None:
    (folder / "images").mkdir()
    first = 1
    for number, part in enumerate(PARTS[: len(digits)]):
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for image_id, (name, found) in enumerate(_drawn(Drawing(config, number, *digits[number], folder / "images")), start=first):
            images.append({"id": image_id, "file_name": name, "width": config.scene_pixels, "height": config.scene_pixels})
            side = config.scene_pixels, config.scene_pixels
            masks = encoded(np.stack([digit.mask for digit in found])) if found else []
            for (label, box, _, corners), mask in zip(found, masks, strict=True):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": image_id,
                        "category_id": label + 1,
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                        "segmentation": [corners] if corners else as_coco(mask, side),
                    }
                )
        first += len(images)
        categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
        tree = {"info": settings, "images": images, "annotations": annotations, "categories": categories}
        (folder / f"instances_{part}.json").write_text(json.dumps(tree))


def _drawn(drawing: Drawing) -> Iterable[tuple[str, list[Digit]]]:
    """Draw all scenes in their order; use worker processes if there are many."""
    import torch
    from torch.utils.data import DataLoader

    workers = number_of_workers(drawing.config.workers) if len(drawing) > FEW else 0
    # a separate generator, because drawing scenes must not change the run's random numbers
    return DataLoader(cast(Any, drawing), batch_size=None, num_workers=workers, generator=torch.Generator())


def draw_scene(
    config: DigitScenesConfig, glyphs: np.ndarray, labels: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, list[Digit]]:
    """Draw one scene: (H, W, 3) uint8, and its digits with their tight boxes.

    Args:
        config: sizes, counts and limits.
        glyphs: (N, 8, 8) ink in [0, 1] to choose from.
        labels: (N,) classes.
        random: the source of all random numbers.
    """
    canvas = _background(config, random)
    found: list[Digit] = []
    for _ in range(int(random.integers(config.digits[0], config.digits[1] + 1))):
        chosen = int(random.integers(len(labels)))
        ink = _ink(glyphs[chosen], int(random.integers(config.digit_pixels[0], config.digit_pixels[1] + 1)))
        ink, corners = _turned(ink, random.uniform(-config.turn, config.turn)) if config.turn else (ink, [])
        for x, y in _corners(config.scene_pixels, ink, random):
            box = [x, y, ink.shape[1], ink.shape[0]]
            if all(_far_enough(config, box, other) for _, other, *_ in found):
                _paint(canvas[y : y + box[3], x : x + box[2]], ink, random)
                mask = np.zeros(canvas.shape[:2], dtype=bool)
                mask[y : y + box[3], x : x + box[2]] = ink >= 0.5
                found = [digit._replace(mask=digit.mask & ~mask) for digit in found]
                found.append(Digit(int(labels[chosen]), box, mask, [side + (x, y)[place % 2] for place, side in enumerate(corners)]))
                break
    canvas += random.normal(0, 0.04 * config.clutter * random.random(), canvas.shape)
    return (canvas.clip(0, 1) * 255).round().astype(np.uint8), found


def _ink(glyph: np.ndarray, pixels: int) -> np.ndarray:
    """Enlarge a glyph smoothly to coverage in [0, 1], and crop it to the rows and columns with ink."""
    large = np.asarray(Image.fromarray(glyph).resize((pixels, pixels), Image.Resampling.BICUBIC))
    ink = ((large - 0.35) / 0.3).clip(0, 1)
    rows, columns = (np.flatnonzero((ink > 0.25).any(axis)) for axis in (1, 0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _turned(ink: np.ndarray, degrees: float) -> tuple[np.ndarray, list[float]]:
    """Turn ink clockwise; return it in its upright frame, and the corners [x, y, ...] of its own frame, the upper left one first."""
    turned = np.asarray(Image.fromarray(ink).rotate(-degrees, Image.Resampling.BILINEAR, expand=True))
    down, across = ink.shape[0] / 2, ink.shape[1] / 2
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    corners: list[float] = []
    for x, y in ((-across, -down), (across, -down), (across, down), (-across, down)):
        corners += [turned.shape[1] / 2 + x * cosine - y * sine, turned.shape[0] / 2 + x * sine + y * cosine]
    return turned, [float(corner) for corner in corners]


def _corners(side: int, ink: np.ndarray, random: np.random.Generator) -> Iterator[tuple[int, int]]:
    for _ in range(TRIES):
        yield int(random.integers(side - ink.shape[1] + 1)), int(random.integers(side - ink.shape[0] + 1))


def _far_enough(config: DigitScenesConfig, one: list[int], two: list[int]) -> bool:
    across, down = (max(0, min(one[i] + one[i + 2], two[i] + two[i + 2]) - max(one[i], two[i])) for i in (0, 1))
    shared, areas = across * down, (one[2] * one[3], two[2] * two[3])
    return shared <= config.max_iou * (sum(areas) - shared) and shared <= config.max_cover * min(areas)


def _paint(patch: np.ndarray, ink: np.ndarray, random: np.random.Generator) -> None:
    """Blend a random colour that stands out into the patch."""
    colours = random.random((64, 3))
    contrast = np.abs(colours @ LUMA - (patch.mean((0, 1)) @ LUMA))
    colour = colours[np.argmax(contrast > CONTRAST) if (contrast > CONTRAST).any() else contrast.argmax()]
    patch += ink[..., None] * (colour - patch)


def _background(config: DigitScenesConfig, random: np.random.Generator) -> np.ndarray:
    """Draw a gradient with strokes, arcs and corners of low contrast: (H, W, 3) in [0, 1]."""
    side = config.scene_pixels
    one = random.random(3)
    two = (one + random.uniform(-0.25, 0.25, 3)).clip(0, 1)
    angle = random.random() * 2 * np.pi
    down, across = np.mgrid[0:side, 0:side] / side - 0.5
    slope = ((across * np.cos(angle) + down * np.sin(angle)) / np.sqrt(2) + 0.5)[..., None]
    picture = Image.fromarray(((one + slope * (two - one)) * 255).round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(int(random.poisson(5 * config.clutter))):
        colour = tuple(int(c) for c in ((one + two) / 2 + random.uniform(-0.25, 0.25, 3)).clip(0, 1) * 255)
        _scribble(pen, side, colour, random)
    return np.asarray(picture, dtype=np.float64) / 255


def _scribble(pen: ImageDraw.ImageDraw, side: int, colour: tuple[int, ...], random: np.random.Generator) -> None:
    """Draw a stroke, an arc or a corner."""
    start = random.uniform(0, side, 2)
    length, turn = random.uniform(0.1, 0.6) * side, random.random() * 2 * np.pi
    width = int(random.integers(1, 4))
    step = length * np.array([np.cos(turn), np.sin(turn)])
    kind = random.choice(["stroke", "arc", "corner"])
    if kind == "arc":
        angle, box = random.uniform(0, 360), [*start, *(start + length * np.array([1, random.uniform(0.5, 1)]))]
        pen.arc(box, angle, angle + random.uniform(30, 120), fill=colour, width=width)
    else:
        path = [start, start + step] if kind == "stroke" else [start, start + step, start + step + step[::-1] * (-0.5, 0.5)]
        pen.line([tuple(point) for point in path], fill=colour, width=width)

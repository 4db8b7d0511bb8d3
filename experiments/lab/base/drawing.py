"""Boxes with their names, drawn into a picture: a colour for each class, and letters that can be read at any size."""

import colorsys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lab.base.fonts import drawable, font_for

Colour = tuple[int, int, int]
GOLDEN = 0.6180339887498949  # a turn of the hue after which colours that follow each other differ most
LEAST_LETTERS, LETTERS = 12, 1 / 32  # pixels, and share of the longer side


def colour_of(label: int) -> Colour:
    """Return a class's colour: neighbours differ in hue, and each 12 classes in lightness, too."""
    red, green, blue = colorsys.hls_to_rgb((0.02 + label * GOLDEN) % 1, (0.45, 0.62, 0.33)[label // 12 % 3], 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def with_boxes(image: Image.Image, boxes: Sequence[Sequence[float]], names: Sequence[str], colours: Sequence[Colour]) -> Image.Image:
    """Return a copy of an RGB image with boxes, later ones on top.

    Args:
        image: the picture.
        boxes: (x1, y1, x2, y2) of each box, in its pixels, or all corners (x, y, x, y, ...) of an oriented one.
        names: what is written at each box, on a ground of its colour: above the box, or in it where nothing fits above.
        colours: the colour of each box.
    """
    page = image.copy()
    pen, longer = ImageDraw.Draw(page), max(image.size)
    font = font_for(names)
    letters, line = ImageFont.truetype(font, max(LEAST_LETTERS, round(longer * LETTERS))), max(2, round(longer / 300))
    for box, name, colour in zip(boxes, names, colours, strict=True):
        corners = (min(box[::2]), min(box[1::2]), max(box[::2]), max(box[1::2]))
        if len(box) == 4:
            pen.rectangle(corners, outline=colour, width=line)
        else:
            pen.polygon(list(box), outline=colour, width=line)
        if not name:
            continue
        text = drawable(name, font)
        left, top, right, bottom = pen.textbbox((0, 0), text, font=letters)
        width, height = right - left + 4, bottom - top + 4
        x = max(0, min(corners[0], image.width - width))
        y = corners[1] - height if corners[1] >= height else min(corners[1], image.height - height)
        pen.rectangle((x, y, x + width, y + height), fill=colour)
        pen.text((x + 2 - left, y + 2 - top), text, fill=_readable(colour), font=letters)
    return page


def with_masks(image: Image.Image, masks: Iterable[tuple[int, int, Any]], colours: Sequence[Colour]) -> Image.Image:
    """Return a copy of an RGB image with half-transparent masks, later ones on top.

    Args:
        image: the picture.
        masks: the top row and the left column of each mask, and an array or tensor (h, w) from there, not 0 inside.
        colours: the colour of each mask.
    """
    planes = np.asarray(image).transpose(2, 0, 1).copy()
    for (top, left, inside), colour in zip(masks, colours, strict=True):
        mask = np.ascontiguousarray(inside, dtype=bool)
        for plane, ink in zip(
            planes[:, top : top + mask.shape[0], left : left + mask.shape[1]], np.array(colour, dtype=np.uint8), strict=True
        ):
            np.copyto(plane, (plane & ink) + ((plane ^ ink) >> 1), where=mask)  # the mean of both, in 8 bits
    return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))


def _readable(ground: Colour) -> str:
    """Return black or white, whichever differs more from the ground."""
    return "black" if 0.299 * ground[0] + 0.587 * ground[1] + 0.114 * ground[2] > 140 else "white"


def page_of(pictures: Sequence[Image.Image], titles: Sequence[str], columns: int = 4, side: int = 320) -> Image.Image:
    """Return one page with pictures in rows, each under its title.

    Args:
        pictures: images in RGB, of any sizes.
        titles: a line above each; what is longer than the picture is cut off.
        columns: pictures in a row.
        side: pixels of each picture's longer side.
    """
    font = font_for(titles)
    letters, gap, head = ImageFont.truetype(font, 13), 6, 20
    rows = -(-len(pictures) // columns)
    page = Image.new("RGB", (min(columns, len(pictures)) * (side + gap) + gap, rows * (side + head + gap) + gap), "white")
    pen = ImageDraw.Draw(page)
    for number, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        ratio = side / max(picture.size)
        left, top = gap + number % columns * (side + gap), gap + number // columns * (side + head + gap)
        size = max(1, round(picture.width * ratio)), max(1, round(picture.height * ratio))
        text = drawable(title, font)
        while text and pen.textlength(text, font=letters) > side:
            text = text[:-1]
        pen.text((left, top), text, fill="black", font=letters)
        page.paste(picture.resize(size, Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.BILINEAR), (left, top + head))
    return page

"""The turn that EXIF gives a photo: the picture as a viewer shows it, and the pixels as the file stores them.

Labels, boxes and masks belong to the picture as a viewer shows it. Boxes and masks whose size only the stored pixels have belong to those.
Where both fit (a square photo, or a turn that keeps the size), data.exif decides.
"""

import os
import struct
from collections.abc import Sequence

from PIL import ExifTags, Image

from lab.base.formats import visible

Size = tuple[int, int]  # height, width
SHOWN, STORED = "shown", "stored"
"""What data.exif takes."""
BOTH = "fits as shown and as stored"
"""What the check of a data set's files says of an image that both readings fit, which is not a fault."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How a viewer turns the stored pixels, by EXIF's orientation."""
BACK = TURNS | {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
METADATA = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""Where Pillow keeps what may say an orientation."""
TEXTS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # a PNG's chunks that may say one


def turn_of(image: Image.Image) -> int:
    """Return EXIF's orientation of an image that is not decoded yet: 1 to 8, and 1 where it has none or a damaged one."""
    try:
        if image.format == "PNG" and "exif" not in image.info:
            if _has_late_metadata(image):
                image.load()
            found = Image.Image.getexif(image)  # a PNG's own method decodes all pixels
        else:
            found = image.getexif()
        turn = found.get(ExifTags.Base.Orientation, 1)
        return int(turn) if turn in TURNS else 1
    except Exception:  # damaged metadata raises any error, and viewers show the picture all the same
        return 1


def _has_late_metadata(image: Image.Image) -> bool:
    """Return whether a PNG has metadata after its pixels, where Pillow finds them only by decoding."""
    file = getattr(image, "fp", None)
    if file is None:
        return False
    place = file.tell()
    try:
        file.seek(8)
        pixels = False
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if pixels and kind in TEXTS:
                return True
            pixels = pixels or kind == b"IDAT"
            file.seek(length + 4, os.SEEK_CUR)
        return False
    finally:
        file.seek(place)


def turned(image: Image.Image, *, shown: bool = True) -> Image.Image:
    """Return an image that is not decoded yet as a viewer shows it, or as the file stores its pixels.

    A picture that is turned has no metadata any more, so that nothing turns it again.
    """
    turn = turn_of(image)
    if turn == 1:
        return image
    if image.format == "TIFF":  # Pillow turns it while it decodes it
        image.load()
        return image if shown else image.transpose(BACK[turn])
    if not shown:
        return image
    upright = image.transpose(TURNS[turn])
    for name in METADATA:
        upright.info.pop(name, None)
    return upright


def sizes_of(image: Image.Image) -> tuple[Size, Size]:
    """Return height and width of an image that is not decoded yet: as a viewer shows it, and as the file stores it."""
    size = image.height, image.width
    other = size[::-1] if turn_of(image) >= 5 else size
    return (size, other) if image.format == "TIFF" else (other, size)


def is_shown(fits: tuple[bool, bool], exif: str) -> bool:
    """Return whether annotations belong to the picture as shown.

    Args:
        fits: whether they fit the picture as shown, and as stored.
        exif: data.exif, which decides where both fit.
    """
    return fits[0] and not (fits[1] and exif == STORED)


def take_both(said: dict[int, str]) -> list[int]:
    """Remove the images that both readings fit from what a check says of a data set's images, and return their ids."""
    both = [number for number, each in said.items() if each == BOTH]
    for number in both:
        del said[number]
    return both


def note(where: object, names: Sequence[str], exif: str, annotations: str) -> list[str]:
    """Return a message that counts the images that both readings fit; none if there are none."""
    if not names:
        return []
    taken, other = ("as a viewer shows them", STORED) if exif == SHOWN else ("as their files store the pixels", SHOWN)
    return [
        visible(
            f"{where}: {len(names)} images have a turn in EXIF after which their size still fits (the first: {names[0]}); "
            f"their {annotations} are read {taken}, and data.exif={other} reads them the other way"
        )
    ]

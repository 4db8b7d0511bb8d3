"""Images as they are in their files: 1 to 12 channels of 8 bits, 16 bits or floats."""

import contextlib
import math
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from lab.data.fitting import ENLARGED, SMALLEST, STEP, median_size
from lab.data.images.exif import turned
from lab.data.images.files import (
    BITS_PER_SAMPLE,
    DEEP,
    UNREADABLE,
    CorruptError,
    ImageBytes,
    ImageFile,
    open_any_mode,
    read_rgb,
    refuse_pixels,
    refuse_unfit,
    whole_range,
)
from lab.data.sets import Norm

MOST = 1000  # images by which mean and deviation are measured
MOST_CHANNELS = 12
LOOKED = 20  # images whose brightest value is looked at
DEAR = 128  # pixels a side from which an image costs a noticeable time
DARK = 2**14  # a quarter of the range of 16 bits
ARRAY = ".npy"
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of a file; byte 24 has the bits of a channel, byte 25 is 0 of a grey one
LARGEST = {np.dtype(np.bool_): 1.0, np.dtype(np.uint8): 255.0, np.dtype(np.uint16): 65535.0}


def read_pixels(path: ImageFile, channels: int) -> Tensor:
    """Read an image (channels, H, W) as float32: integers from 0 to 1, floats as they are.

    A TIFF of several pages has a page a channel; a .npy file is (H, W) or (H, W, channels).

    Raises:
        one of UNREADABLE.
    """
    return pixels_of(_array(path, channels), channels)


def pixels_of(array: Any, channels: int) -> Tensor:
    """Return an array (H, W) or (H, W, channels) as float32 (channels, H, W): integers from 0 to 1, floats as they are.

    Raises:
        CorruptError: it has another shape or type, or a pixel is not finite.
    """
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] != channels:
        raise _other_channels(array.shape[2] if array.ndim == 3 else array.shape, channels)
    if array.dtype.kind != "f" and array.dtype not in LARGEST:
        raise CorruptError(f"has pixels of {array.dtype}; 8 or 16 bits without sign, or floats, are expected")
    pixels = torch.from_numpy(array.astype(np.float32)).permute(2, 0, 1).contiguous() / LARGEST.get(array.dtype, 1.0)
    if not pixels.isfinite().all():
        raise CorruptError("has pixels that are nan or infinite")
    return pixels


def _other_channels(found: int | tuple[int, ...], expected: int) -> CorruptError:
    remedy = f", or data.channels={found}" if isinstance(found, int) and found <= MOST_CHANNELS else ""
    return CorruptError(f"has {found} channels; {expected} are expected{remedy}")


def read_image(path: ImageFile, channels: int | None, *, deep: bool = False) -> Image.Image | Tensor:
    """Read an image as data.channels says: as it is, or in RGB of 8 bits; deep: as in open_image.

    Raises:
        one of UNREADABLE.
    """
    return read_pixels(path, channels) if channels else read_rgb(path, deep=deep)


def _array(path: ImageFile, channels: int) -> Any:
    refuse_unfit(path)
    if str(getattr(path, "name", path)).lower().endswith(ARRAY):
        return _numbers(path)
    if (deep := _deep_png(path)) is not None:
        return deep
    with open_any_mode(path) as image:
        pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
        if pages > 1:
            if pages != channels:  # before they are decoded: a small file may have thousands of large pages
                raise _other_channels(pages, channels)
            return np.stack([np.array(whole_range(page, page)) for page in ImageSequence.Iterator(image)], axis=-1)
        # only Pillow's class of TIFF images declares tag_v2
        if image.format == "TIFF" and image.mode.startswith("RGB") and 16 in image.tag_v2.get(BITS_PER_SAMPLE, ()):  # type: ignore[attr-defined]
            raise CorruptError("has channels of 16 bits side by side, of which Pillow reads 8; a page a channel, or .npy, is expected")
        upright = whole_range(turned(image), image)
        if upright.mode in ("P", "PA"):
            upright = upright.convert("RGBA" if upright.mode == "PA" or "transparency" in upright.info else "RGB")
        return np.array(upright)


def _deep_png(path: ImageFile) -> Any:
    """Return the pixels (H, W, channels) of a PNG of 16 bits with several channels, of which Pillow reads 8; None of another file."""
    with ImageBytes(path.getvalue(), path.name) if isinstance(path, ImageBytes) else open(path, "rb") as file:
        head = file.read(26)
        if not head.startswith(PNG) or head[24:25] != b"\x10" or head[25:] == b"\0":  # Pillow reads grey; torchvision cannot mirror it
            return None
        width, height = struct.unpack(">II", head[16:24])
        refuse_pixels(width, height)
        content = bytearray(head + file.read())
    from torchvision.io import ImageReadMode, decode_image

    try:
        image = decode_image(torch.frombuffer(content, dtype=torch.uint8), ImageReadMode.UNCHANGED, apply_exif_orientation=True)
    except RuntimeError as error:
        raise CorruptError(f"cannot be read as an image ({str(error).splitlines()[0]})") from None
    return image.permute(1, 2, 0).numpy()


def _numbers(path: ImageFile) -> Any:
    """Read a .npy file, without unpickling."""
    with contextlib.ExitStack() as stack:
        file: Any = path if isinstance(path, ImageBytes) else stack.enter_context(open(path, "rb"))
        held = file.seek(0, os.SEEK_END)
        file.seek(0)
        refuse_pixels(*(*shape_of(file, held), 1, 1)[:2])
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


def shape_of(file: Any, held: int) -> tuple[int, ...]:
    """Return the shape that the header of a .npy file of `held` bytes says.

    Raises:
        CorruptError: it says more than the file holds; the memory for it would be taken first.
    """
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize > (rest := held - file.tell()):
        raise CorruptError(f"is cut off: its header says {dtype} of the shape {shape}, and {rest:,} bytes follow")
    return shape


def measured(samples: Any) -> Norm:
    """Return mean and deviation of each channel over at most MOST of the samples, evenly spaced."""
    positions = range(0, len(samples.targets), -(-len(samples.targets) // MOST))

    def sums(index: int) -> Tensor:
        pixels = as_pixels(samples.image(index)).double().flatten(1)
        return torch.stack([torch.full_like(pixels[:, 0], pixels.shape[1]), pixels.sum(1), pixels.square().sum(1)])

    with ThreadPoolExecutor(4) as pool:
        count, total, squares = torch.stack(list(pool.map(sums, positions))).sum(0)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return Norm(mean.tolist(), torch.where(deviation > 0, deviation, 1.0).tolist())


def as_pixels(image: Image.Image | Tensor) -> Tensor:
    """Return an image as a tensor (C, H, W) of float32; a PIL image and 8 bits are divided by 255."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    pixels = image if isinstance(image, Tensor) else pil_to_tensor(image)
    return pixels.float() / 255 if isinstance(image, Image.Image) or pixels.dtype == torch.uint8 else pixels.float()


def shown(image: Image.Image | Tensor) -> Image.Image:
    """Return an image of any channels as RGB to look at: the first three channels, or one as grey, from darkest to brightest."""
    from torchvision.transforms.v2.functional import to_pil_image

    if isinstance(image, Image.Image):
        return image
    seen = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    least, most = seen.min(), seen.max()
    return to_pil_image((seen - least) / (most - least).clamp(min=1e-12))


def alpha_note(samples: Any) -> list[str]:
    """Return a message if some of the images have transparency, which RGB drops; looks at MOST files, evenly spaced."""
    looked = range(0, len(samples), -(-len(samples) // MOST))
    found = sum(_has_alpha(samples, index) for index in looked)
    if not found:
        return []
    return [f"{found} of {len(looked)} training images have transparency (alpha), which is left out; data.channels=4 reads it, too"]


def small_note(samples: Any, side: int) -> list[str]:
    """Return a message if the model sees images much larger than they are, which costs time; looks at LOOKED files, evenly spaced."""
    sizes = []
    for index in range(0, len(samples), -(-len(samples) // LOOKED)):
        with contextlib.suppress(*UNREADABLE), open_any_mode(samples.file(index)) as image:  # the check of the files names the others
            sizes.append((image.height, image.width))
    height, width = median_size(sizes or [(side, side)])
    edge = min(height, width)
    if side < max(DEAR, ENLARGED * edge):
        return []
    own = max(-(-edge // STEP) * STEP, SMALLEST)
    return [
        f"data.image_size={side}: images are enlarged {side / edge:.1f} times, the median one from {width}×{height}, "
        f"and a step computes {(side / own) ** 2:.0f} times as much as with data.image_size={own}"
    ]


def dark_note(paths: Sequence[str]) -> list[str]:
    """Return a message if grey images of 16 bits use so little of the range that 8 bits leave few shades; looks at LOOKED files."""
    found = [value for path in paths[:: -(-len(paths) // LOOKED)] if (value := _brightest(path)) is not None]
    if not found or max(found) >= DARK:
        return []
    return [
        f"images of 16 bits are scaled from 65535 to 255, and the brightest value of {len(found)} training images is {max(found)}: "
        f"{max(found) // 257 + 1} shades are left. Write files whose values use the whole range"
    ]


def _brightest(path: str) -> int | None:
    """Return the largest value of a grey image of 16 bits; None of another file."""
    try:
        with open_any_mode(path) as image:
            return int(np.asarray(whole_range(image, image)).max()) if image.mode in DEEP else None
    except UNREADABLE:  # the check of the files names what cannot be read
        return None


def _has_alpha(samples: Any, index: int) -> bool:
    try:
        with open_any_mode(samples.file(index)) as image:
            return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    except Exception:  # the check of the files names what cannot be read
        return False

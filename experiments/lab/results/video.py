"""Videos: their frames as pictures, and pictures as a video. OpenCV, which reads and writes them, need not be installed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from lab.base.errors import UserError
from lab.base.files import UNFINISHED, refuse_special
from lab.data.images.files import CorruptError, most_pixels

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm")
CODEC = "vp09"  # in .mp4; OpenCV's packages can write it, and browsers show it
USUAL = 25.0  # frames a second of a video that does not say it


@dataclass(frozen=True)
class Frame:
    """The place of a picture in a video: its number, from 0, and the video's frames a second."""

    number: int
    rate: float

    def tree(self) -> dict[str, Any]:
        return {"frame": self.number, "second": round(self.number / self.rate, 3)}


def is_video(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def opencv(path: Path) -> Any:
    """Return the module cv2.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        import cv2
    except ImportError as error:  # it is missing, or a library of the system that it needs
        raise UserError(
            f"{path}: is a video, and OpenCV, which reads videos, cannot be imported ({error}). "
            "Install it by: uv pip install opencv-python-headless"
        ) from None
    return cv2


def frames_of(path: Path) -> Iterator[tuple[Frame, Image.Image]]:
    """Yield the frames of a video in RGB.

    Raises:
        CorruptError: it has no frame that can be read, or frames of too many pixels; UserError: OpenCV or a regular file is missing.
    """
    refuse_special(path)
    cv2 = opencv(path)
    # FFmpeg calls no address that a file names, unless OPENCV_FFMPEG_CAPTURE_OPTIONS says so
    video = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)  # an absolute path, because OpenCV takes an address for a path, too
    try:
        rate = video.get(cv2.CAP_PROP_FPS)
        width, height = (int(video.get(side)) for side in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        if width * height > most_pixels():
            raise CorruptError(f"has frames of {width} x {height} pixels; at most {most_pixels():,} are read")
        number = 0
        while True:
            there, pixels = video.read()
            if not there:
                break
            yield Frame(number, rate if 0 < rate < 1000 else USUAL), Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))
            number += 1
        if number == 0:
            raise CorruptError("cannot be read as a video: it has no frame that OpenCV decodes")
    finally:
        video.release()


class VideoFile:
    """Write pictures of one size as a video: the file appears when the block ends, also by Ctrl-C, if it has a picture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: Any = None
        self.draft = path.with_name(f"{UNFINISHED}{path.name}")

    def __enter__(self) -> "VideoFile":
        return self

    def add(self, picture: Image.Image, rate: float) -> None:
        """Append a picture in RGB; the first one's `rate`, in pictures a second, is the video's.

        Raises:
            UserError: the file cannot be written.
        """
        import numpy as np

        cv2 = opencv(self.path)
        size = picture.width + picture.width % 2, picture.height + picture.height % 2  # the codec takes even sides
        if self.writer is None:
            self.draft.unlink(missing_ok=True)  # of a killed process, or a stranger's link
            writer = cv2.VideoWriter(str(self.draft.absolute()), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*CODEC), rate, size)
            if not writer.isOpened():
                raise UserError(f"{self.path}: OpenCV cannot write a video with the codec {CODEC} of {size[0]} x {size[1]} pixels there.")
            self.writer = writer
        self.writer.write(cv2.cvtColor(np.asarray(picture.crop((0, 0, *size))), cv2.COLOR_RGB2BGR))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writer is not None:
            self.writer.release()
            os.replace(self.draft, self.path)

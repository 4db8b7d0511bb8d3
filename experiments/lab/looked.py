"""What a look at a data set's images found, kept: to open a hundred thousand files takes a minute, at every start."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lab.settings import ROOT

FEW = 5000  # images that are looked at within seconds
CACHE = ROOT / "data" / "checked"
Image = TypeVar("Image")


def remembered(
    look: Callable[[dict[int, Image]], dict[int, str]], images: dict[int, Image], about: Sequence[Path], check: str
) -> dict[int, str]:
    """What `look` finds wrong among `images`, by id.

    Of many images it looks anew only at those that were wrong the last time, unless a file or folder of `about` has changed since.
    An image that was good and is written over in its place is not noticed here, but named when it is read.
    """
    if len(images) < FEW:
        return look(images)
    known = [check, *([str(path.absolute()), path.stat().st_mtime_ns, path.stat().st_size] for path in about)]
    stamp = CACHE / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}.json"
    wrong: list[int] | None = None
    with contextlib.suppress(OSError, ValueError):
        wrong = json.loads(stamp.read_bytes())
    if wrong is not None:
        return look({image_id: images[image_id] for image_id in wrong if image_id in images})
    found = look(images)
    with contextlib.suppress(OSError):  # a folder that cannot be written to costs the next start its time
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = stamp.with_name(f".{stamp.name}.{os.getpid()}")
        draft.write_text(json.dumps(list(found)))
        draft.replace(stamp)
    return found

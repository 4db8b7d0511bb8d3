"""A folder of images, one folder a class, made of handwritten digits."""

import itertools
from pathlib import Path

from PIL import Image


def digit_files(root: Path, train: int = 8, val: int = 6, names: tuple[str, ...] = ("0", "1", "2")) -> Path:
    """Files of 16 × 16 pixels, so many of each class, no image in both parts."""
    from sklearn.datasets import load_digits

    known = load_digits()
    for label, name in enumerate(names):
        images = iter(known.images[known.target == label])
        for part, count in (("train", train), ("val", val)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number, image in enumerate(itertools.islice(images, count)):
                Image.fromarray((image * 15).astype("uint8")).resize((16, 16)).save(folder / f"{number}.png")
    return root

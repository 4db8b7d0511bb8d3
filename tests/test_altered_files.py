"""Three hundred altered checkpoints and run folders: each ends in one clear error, or in the right result; none in a traceback."""

import contextlib
import copy
import io
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

import evaluate
import predict
import train
from lab.run import checkpoint

BATCHES, CASES = 10, 30
QUICK = ["model=tiny_resnet", "trainer.device=cpu", "data.image_size=16", "trainer.max_updates=2", "tracking=none"]
JUNK: list[Any] = [None, True, -1, 0, 7, 1e30, math.nan, "", "x", "../../x", "${oc.env:HOME}", "???", [], [1, "a"], {}, {"a": 1}, b"\x00"]


def said_by(app: Any, *words: object) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = app.main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every entry of nested mappings and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [each for key, value in items for each in [(*path, key), *paths_in(value, (*path, key))]]


def altered_tree(tree: Any, random: random.Random) -> Any:
    """Return a copy in which one entry is removed, renamed, doubled, of another type, or another tensor."""
    tree = copy.deepcopy(tree)
    top = random.choice(list(tree))  # first, so that thousands of numbers in one part do not take all cases
    path = random.choice([(top,), *paths_in(tree[top], (top,))])
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    key, value = path[-1], owner[path[-1]]
    if isinstance(value, Tensor) and random.random() < 0.5:
        other: list[Callable[[], Any]] = [
            lambda: value[:0] if value.ndim else value.reshape(1),
            lambda: value.to(torch.complex64),
            lambda: value.new_zeros(3, 3),
            lambda: value.to("meta"),
        ]
        owner[key] = random.choice(other)()
    elif random.random() < 0.25:
        del owner[key]
    elif isinstance(owner, dict) and random.random() < 0.2:
        owner[f"{key}x"] = owner.pop(key)
    else:
        owner[key] = random.choice(JUNK)
    return tree


def alter_bytes(path: Path, random: random.Random) -> None:
    """Flip a bit, cut the file off, overwrite a part, or append to it."""
    data = bytearray(path.read_bytes())
    at = random.randrange(len(data))
    how = random.choice(["flip", "flip", "cut", "overwrite", "append"])
    if how == "flip":
        data[at] ^= 1 << random.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "overwrite":
        data[at : at + 64] = random.randbytes(64)
    else:
        data += random.randbytes(64)
    path.write_bytes(data)


def alter_pt(path: Path, random: random.Random) -> None:
    """Save a checkpoint as a stranger could: whole, with another content."""
    torch.save(altered_tree(torch.load(path, weights_only=True), random), path)


def alter_safetensors(path: Path, random: random.Random) -> None:
    state = checkpoint.load_weights(path)
    weights, about = state.pop("model"), altered_tree({name: value for name, value in state.items() if name != "ema"}, random)
    with contextlib.suppress(TypeError):  # JSON has no bytes; the file stays as it is
        checkpoint.save_weights(weights, path, about)


def alter_config(path: Path, random: random.Random) -> None:
    tree = altered_tree(yaml.safe_load(path.read_text()), random)
    path.write_text(yaml.safe_dump(tree, sort_keys=False))


def alter_records(path: Path, random: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = random.randrange(len(lines))
    lines[at] = random.choice(
        ["", "{", "null", "7", "[]", '"x"', lines[at][:-3], json.dumps(altered_tree(json.loads(lines[at]), random), default=str)]
    )
    path.write_text("\n".join(lines) + "\n")


class Asked:
    """What is asked of an altered copy of a run, and what a whole one answers."""

    def __init__(self, root: Path) -> None:
        self.root, self.image = root, root / "image.png"
        Image.effect_noise((16, 16), 50).save(self.image)
        status, _, err = said_by(train, *QUICK, "name=own", "trainer.save_updates=1", f"trainer.runs={root / 'runs'}")
        assert status == 0, err
        (self.run,) = (root / "runs").iterdir()
        self.right = {name: self.predicted(self.run / "checkpoints" / name)[1] for name in ("best.pt", "best.safetensors")}

    def predicted(self, path: Path) -> tuple[int, str, str]:
        return said_by(predict, f"checkpoint={path}", f"out={self.root / 'out'}", self.image)

    def evaluated(self, path: Path) -> tuple[int, str, str]:
        return said_by(evaluate, f"checkpoint={path}", "tracking=none", f"trainer.runs={self.root / 'evaluations'}")

    def resumed(self, path: Path) -> tuple[int, str, str]:
        return said_by(train, f"resume={path}", "trainer.max_updates=3", "tracking=none")


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return Asked(tmp_path_factory.mktemp("asked"))


# (which part of the run, how it is altered, what is asked then)
WAYS = [
    *[("best.pt", alter_bytes, Asked.predicted), ("best.safetensors", alter_bytes, Asked.predicted)] * 3,
    *[("best.pt", alter_pt, Asked.predicted), ("best.safetensors", alter_safetensors, Asked.predicted)] * 8,
    *[("best.pt", alter_pt, Asked.evaluated)] * 2,
    *[("last.pt", alter_pt, Asked.resumed)] * 2,
    ("last.pt", alter_bytes, Asked.resumed),
    *[("config.yaml", alter_config, Asked.resumed)] * 2,
    ("metrics.jsonl", alter_records, Asked.resumed),
]


@pytest.mark.each
@pytest.mark.parametrize("batch", range(BATCHES))
def test_an_altered_file_ends_in_an_error_or_in_the_right_result(asked, tmp_path, batch):
    refused = 0
    for case in range(CASES):
        number = batch * CASES + case
        choice = random.Random(number)
        name, alter, ask = WAYS[case % len(WAYS)]
        folder = Path(shutil.copytree(asked.run, tmp_path / f"run-{number}"))
        path = folder / name if "." in name and (folder / name).is_file() else folder / "checkpoints" / name
        alter(path, choice)
        whole = ask is Asked.resumed
        status, said, err = ask(asked, folder if whole else path)
        what = f"case {number}: {name}, {alter.__name__}, {ask.__name__}: {err[-2000:]}"
        assert "Traceback" not in err, what
        assert status in (0, 1), what
        if status == 1:
            assert err.startswith("error: "), what
            assert len(err.splitlines()) <= 8, what
            refused += 1
        elif alter is alter_bytes and ask is Asked.predicted:
            assert said.rpartition(": ")[2] == asked.right[name].rpartition(": ")[2], what
        shutil.rmtree(folder)
    assert refused > CASES // 4

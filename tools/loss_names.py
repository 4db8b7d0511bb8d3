"""Where the users of other libraries find their losses: tools/loss_names.toml, its page, and the comparison of both libraries' calls.

Run it to compare every row that says "the same", and to write the differences into the record; a library's name compares that one alone.
"""

import importlib
import inspect
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lossforge.losses
from lossforge.bench.report import tables

RECORD = Path(__file__).with_suffix(".toml")
Row = dict[str, Any]
LARGEST = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The largest difference of value and gradients that is "the same", as a share of the largest entry."""


def libraries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(RECORD.read_text(encoding="utf-8"))


def names(row: Row) -> list[str]:
    return [row["name"]] if isinstance(row["name"], str) else row["name"]


def inputs(dtype: torch.dtype) -> dict[str, Any]:
    """Return what the calls of the record are given, by name. Tensors that require grad are those that are differentiated."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=dtype)

    target = torch.randint(3, (2, 12, 10), generator=draw)  # no pixel is of class 3
    every = torch.randint(4, (2, 12, 10), generator=draw)
    corners = torch.rand(2, 6, 2, generator=draw, dtype=dtype)
    boxes, others = torch.cat([corners, corners + 0.5 + 0.1 * random(2, 6, 2).abs()], -1)
    chosen = torch.zeros(2, 3, 4, dtype=torch.bool)
    chosen[0, :2], chosen[1, 2, 1:] = True, True  # 11 of the patches of two pictures
    leaves = {
        "logits": random(2, 4, 12, 10),
        "logit": random(2, 1, 12, 10),
        "boxes": boxes,
        "view": random(8, 6),
        "view2": random(8, 6),
        "z": random(24, 12),
        "student": random(11, 7),
        "student2": random(11, 7),
        "scores": random(12, 5),
        "heat": random(2, 3, 4, 5),
        "q": random(12, 5).softmax(-1),
    }
    return {
        **{name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()},
        "target": target,
        "every": every,
        "one_hot": F.one_hot(target, 4).movedim(-1, 1).to(dtype),
        "inside": (torch.rand(2, 1, 12, 10, generator=draw) < 0.8).to(dtype),
        "masks": torch.rand(2, 4, 12, 10, generator=draw, dtype=dtype).round(),
        "mask": target[:, None].clamp(max=1).to(dtype),
        "others": others,
        "labels": torch.arange(24) % 6,
        "teacher": random(11, 7),
        "teacher2": random(11, 7),
        "chosen": chosen,
        "heat2": random(2, 3, 20).softmax(-1).view(2, 3, 4, 5),
        "p": random(12, 5).softmax(-1),
        "index": torch.arange(12) % 5,
        "several": torch.rand(12, 5, generator=draw, dtype=dtype).round(),
        "counts": torch.tensor([50.0, 5.0, 20.0, 8.0, 30.0]),
        "torch": torch,
        "F": F,
        "math": math,
    }


def modules(library: dict[str, Any]) -> list[Any]:
    return [importlib.import_module(name) for name in library["modules"]]


def public(library: dict[str, Any]) -> set[str]:
    """Return the names of the library's public losses: its modules' classes of torch modules, and functions."""
    found = set()
    for module in modules(library):
        for name, each in vars(module).items():
            if name.startswith("_") or not getattr(each, "__module__", "").startswith(library["modules"][0].partition(".")[0]):
                continue
            if library["short"] == "torchmetrics":
                counts = inspect.isclass(each) and getattr(each, "is_differentiable", False) is True
            elif library["short"] == "torchvision":
                counts = inspect.isfunction(each) and name.endswith(("_loss", "box_iou"))
            else:
                counts = inspect.isfunction(each) or (inspect.isclass(each) and issubclass(each, torch.nn.Module))
            if counts:
                found.add(each.__name__)  # an alias has the name of what it stands for
    return found


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def difference(library: dict[str, Any], row: Row) -> float:
    """Return the largest difference of a row's two calls, over value and gradients, as a share of the largest entry."""
    dtype = getattr(torch, row.get("dtype", "float64"))
    given = inputs(dtype)
    leaves = [each for each in given.values() if isinstance(each, Tensor) and each.requires_grad]
    given[library["short"]] = importlib.import_module("torchmetrics") if library["short"] == "torchmetrics" else modules(library)[0]
    theirs, ours = dict(given), {**vars(lossforge.losses), **given}
    torch.manual_seed(0)
    if "criterion" in row:
        theirs["criterion"] = ours["criterion"] = criterion = eval(row["criterion"], theirs).to(dtype)
        leaves += criterion.parameters()
    found = []
    for call, names in ((row["theirs"], theirs), (row["same"], ours)):
        with default_dtype(dtype):  # of torchmetrics' sums
            value = eval(call, names)
        upstream = 1.7 + torch.arange(value.numel(), dtype=dtype).view(value.shape)
        gradients = torch.autograd.grad(value, leaves, upstream.to(value.dtype), allow_unused=True)
        found.append([value.detach(), *gradients])
    if not any(each is not None and each.abs().max() > 0 for each in found[0][1:]):
        raise ValueError(f"{library['title']}: {row['name']} has no gradient")
    largest = 0.0
    for right, other in zip(*found, strict=True):
        if right is None or other is None:
            if right is not other:
                raise ValueError(f"{library['title']}: {row['name']}: only one of both has a gradient")
            continue
        if right.shape != other.shape:
            raise ValueError(f"{library['title']}: {row['name']}: shapes {tuple(right.shape)} and {tuple(other.shape)}")
        largest = max(largest, ((right - other).abs().max() / right.abs().max()).item())
    return largest


def verdict(row: Row) -> str:
    if "same" in row:
        return f"the same{', ' + row['note'] if 'note' in row else ''} ({row['difference']:.0e})"
    return f"differs: {row['differs']}" if "differs" in row else f"not here: {row['absent']}"


def calls(row: Row) -> tuple[str, str]:
    """Return what stands in the columns of both libraries."""
    if "same" not in row:
        return ", ".join(f"`{name}`" for name in names(row)), f"`{row['ours']}`" if "ours" in row else ""
    parts = [*([f"criterion = {row['criterion']}"] if "criterion" in row else []), row["theirs"]]
    more = [f"`{name}`" for name in names(row) if not re.search(rf"\b{name}\b", " ".join(parts))]
    return "<br>".join([*(f"`{part}`" for part in parts), *more]), f"`{row['same']}`"


def page() -> str:
    """Return a table a library."""
    texts = []
    for library in libraries().values():
        rows = [[*calls(row), verdict(row)] for row in library["rows"]]
        count = {kind: sum(len(names(row)) for row in library["rows"] if kind in row) for kind in ("same", "differs", "absent")}
        told = f"{sum(count.values())} names: the same {count['same']}, differs {count['differs']}, not here {count['absent']}"
        table = tables.markdown((library["title"], "ours", "compared"), rows)
        folded = f'<details markdown="1"><summary>{library["title"]} {library["version"]}: {told}</summary>\n\n{table}\n\n</details>'
        texts.append("\n\n".join([f"## {library['title']}", *([library["intro"]] if "intro" in library else []), folded]))
    return "\n\n".join(texts)


def main() -> int:
    chosen, failed = sys.argv[1:], 0
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    for name, library in libraries().items():
        if chosen and name not in chosen:
            continue
        listed = {each for row in library["rows"] for each in names(row)} | {*library.get("utilities", ())}
        if missing := public(library) ^ listed:
            print(f"{name}: in one of the library and the record: {', '.join(sorted(missing))}", file=sys.stderr)
            failed += 1
        for row in library["rows"]:
            if "same" not in row:
                continue
            try:
                found = difference(library, row)
            except Exception as problem:
                print(f"{name}: {row['name']}: {type(problem).__name__}: {problem}", file=sys.stderr)
                failed += 1
                continue
            if not found < LARGEST[getattr(torch, row.get("dtype", "float64"))]:
                print(f"{name}: {row['name']}: differs by {found:.1e}", file=sys.stderr)
                failed += 1
            (at,) = (i for i, line in enumerate(lines) if f"theirs = '{row['theirs']}'" in line and f"same = '{row['same']}'" in line)
            kept = re.sub(r", difference = [^,}]+?(?=,| })", "", lines[at])
            lines[at] = re.sub(r"(same = '[^']*')", rf"\1, difference = {found:.1e}", kept)
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

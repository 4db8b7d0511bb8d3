"""Draw the way of one call and of one update: run both, and write docs/know/way.md and its pictures.

With --check nothing is written, and the status is 1 where a file is stale. A call of cross entropy and an update of the app's trainer
are made on the CPU, with kernels in Triton's interpreter. So the pictures are the same on every machine.
"""

import argparse
import contextlib
import gc
import inspect
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "know" / "way.md"
PICTURES = ROOT / "docs" / "pictures"
SOURCE = "https://github.com/lossforge/lossforge/blob/main"
LAYERS = {  # folder of the repository: short name, colour of the frame, colour of the box
    "experiments/lab": ("lab", "#8250df", "#f7f1ff"),
    "packages/losses/src/lossforge/losses": ("losses", "#0969da", "#eef6ff"),
    "packages/kernels/src/lossforge/kernels": ("kernels", "#1a7f37", "#edfaf0"),
}
HELPERS = re.compile(
    r"lab/(base/|data/batch\.py)|losses/(base/|checks\.py|state\.py|formulas\.py)"
    r"|kernels/(__init__|call|math|tiles|torch_internals)\.py|kernels/(\w+/)+(additions|calls|layout|results|rows|sweep)\.py"
)
"""Files that are called from everywhere, and parts of one kernel: they are not stops."""
SMALL = {"new_like", "aligned", "sum_slots", "chip", "note", "counts_itself"}
"""Functions of launches that only compute a number or a tensor."""
NOT_FOLLOWED = ("losses/engine/calls.py", "losses/engine/autograd.py")
"""Where an update enters the way of a call, which has a picture of its own."""


@dataclass
class Call:
    """A call of one of our functions, with the calls that it made."""

    file: str
    name: str
    calls: list["Call"] = field(default_factory=list)


@dataclass
class Stop:
    """Functions of one file, one or several that nothing else follows from, with the stops that they lead to."""

    file: str
    names: list[str]
    stops: list["Stop"] = field(default_factory=list)


def name_of(frame: FrameType) -> tuple[str, str]:
    """Return the file of a frame in the repository, and the function; empty texts for code that is not ours or not in a function."""
    code = frame.f_code
    path = code.co_filename.replace(os.sep, "/")
    for folder in LAYERS:
        _, ours, rest = path.rpartition(f"/{folder}/")
        if ours and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            return f"{folder}/{rest}", re.sub(r"\.__\w+__$", "", code.co_qualname.partition(".<locals>")[0])
    return "", ""


@contextlib.contextmanager
def traced() -> Iterator[Call]:
    """Yield a record that fills with all calls of this thread. Without garbage collection, which would run finalizers anywhere."""
    root = Call("", "")
    stack: list[tuple[FrameType | None, Call]] = [(None, root)]

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and all(name_of(frame)):
            call = Call(*name_of(frame))
            stack[-1][1].calls.append(call)
            stack.append((frame, call))
        elif event == "return" and frame is stack[-1][0]:
            stack.pop()

    gc.disable()
    sys.setprofile(see)
    try:
        yield root
    finally:
        sys.setprofile(None)
        gc.enable()


def short(file: str) -> str:
    """Return a file as pictures show it: from the layer's own name."""
    for folder, (name, *_) in LAYERS.items():
        if file.startswith(folder):
            return name + file.removeprefix(folder)
    raise ValueError(f"{file} is in none of {', '.join(LAYERS)}")


def stops_of(call: Call, file: str = "", ends: Sequence[str] = ()) -> list[Stop]:
    """Return the stops below a call of `file`: functions that another file enters, or from which the way leads into another file.

    ends: files of stops whose own calls are not followed.
    """
    found: list[Stop] = []
    for each in call.calls:
        if HELPERS.match(short(each.file)) or each.name in SMALL:
            found += stops_of(each, file, ends)
            continue
        below = [] if short(each.file) in ends else stops_of(each, each.file, ends)
        if each.file != file or below:
            found.append(Stop(each.file, [each.name], below))
    return joined(found)


def joined(stops: list[Stop]) -> list[Stop]:
    """Return each stop once: calls of the same function, and leaves of the same file, are one."""
    found: list[Stop] = []
    for stop in stops:
        same = [each for each in found if each.file == stop.file and (each.names == stop.names or not (each.stops or stop.stops))]
        if not same:
            found.append(stop)
            continue
        same[0].names += [name for name in stop.names if name not in same[0].names]
        same[0].stops = joined([*same[0].stops, *stop.stops])
    return found


def way_of_call() -> tuple[list[Stop], list[Stop]]:
    """Make two equal calls with their backward, and return the stops of the first and of the second."""
    import torch

    from lossforge.losses import cross_entropy

    x, target = torch.zeros(4, 7, requires_grad=True), torch.tensor([1, 2, 3, 4])
    ways = []
    for _ in range(2):
        with traced() as call:
            cross_entropy(x, target).backward()
        ways.append(stops_of(call))
    first, second = ways
    return first, second


class Watch:
    """A callback of the trainer: records all between the first update and the second, and the functions that called the trainer's loop."""

    def __init__(self) -> None:
        self.above: list[tuple[str, str]] = []
        self.stack = contextlib.ExitStack()

    def on_update(self, trainer: Any) -> None:
        if trainer.done == 1:
            frame = inspect.currentframe()
            while frame := frame and frame.f_back:
                self.above += [name_of(frame)] if all(name_of(frame)) else []
            self.call = self.stack.enter_context(traced())
        else:
            self.stack.close()
            signal.raise_signal(signal.SIGTERM)


def way_of_update() -> list[Stop]:
    """Train for two updates, and return the stops of the second."""
    import lab

    watch = Watch()
    settings = ("model=tiny_resnet", "data.batch_size=8", "trainer.device=cpu", "tracking.enabled=false")
    with tempfile.TemporaryDirectory() as folder:
        lab.train(*settings, f"trainer.runs={folder}/runs", callbacks=[watch])
    call = watch.call
    for file, name in watch.above[1:]:  # the first is what called the callback
        call = Call("", "", [Call(file, name, call.calls)])
    return stops_of(call, ends=NOT_FOLLOWED)


WIDTH, STEP, MARGIN, GAP, LINE = 366, 11, 4, 6, 13
LETTER = 6.7
"""How wide a letter of a name may be."""


def drawing(title: str, stops: list[Stop]) -> str:
    """Return an SVG picture: a box a stop, below the one that leads to it. It is as wide as a phone."""
    parts: list[str] = []
    used = [layer for folder, layer in LAYERS.items() if any(stop.file.startswith(folder) for stop, _ in flat(stops))]
    parts += [text(MARGIN, 16, title, 'font-weight="bold" font-family="sans-serif" font-size="13"')]
    for i, (name, edge, fill) in enumerate(used):
        x = MARGIN + 90 * i
        parts += [f'<rect x="{x}" y="26" width="11" height="11" rx="2" fill="{fill}" stroke="{edge}"/>']
        parts += [text(x + 17, 36, name, 'font-family="sans-serif" font-size="11"')]
    y, bottoms = 46, {-1: 0}
    for stop, depth in flat(stops):
        x = MARGIN + STEP * depth
        lines = wrapped(stop.names, int((WIDTH - MARGIN - x - 12) / LETTER))
        height = LINE * (len(lines) + 1) + 6
        _, edge, fill = next(layer for folder, layer in LAYERS.items() if stop.file.startswith(folder))
        if depth:
            middle, stem = y + 14, x - STEP + 5
            parts += [f'<path d="M{stem} {bottoms[depth - 1]}V{middle}H{x - 1}" fill="none" stroke="#6e7781" marker-end="url(#end)"/>']
        parts += [f'<rect x="{x}" y="{y}" width="{WIDTH - MARGIN - x}" height="{height}" rx="4" fill="{fill}" stroke="{edge}"/>']
        for i, line in enumerate(lines):
            parts += [text(x + 7, y + LINE * (i + 1), line, 'font-weight="bold" font-size="11"')]
        parts += [text(x + 7, y + LINE * (len(lines) + 1), short(stop.file), 'fill="#57606a" font-size="10"')]
        bottoms[depth] = y + height
        y += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img"'
    family = 'font-family="ui-monospace, \'DejaVu Sans Mono\', Menlo, Consolas, monospace" fill="#1f2328"'
    end = '<path d="M0 0L5 3L0 6z" fill="#6e7781"/>'
    marker = f'<marker id="end" markerWidth="5" markerHeight="6" refX="5" refY="3" orient="auto">{end}</marker>'
    top = [f"{head} {family}>", f"<title>{escape(title)}</title>", f"<defs>{marker}</defs>"]
    return "\n".join([*top, f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>', *parts, "</svg>", ""])


def text(x: int, y: int, words: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def wrapped(names: list[str], width: int) -> list[str]:
    """Return the names in lines of at most `width` letters."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + 2 + len(name) > width:
            lines[-1] += ","
            lines.append(name)
        else:
            lines[-1] += (", " if lines[-1] else "") + name
    return lines


def flat(stops: list[Stop], depth: int = 0) -> Iterator[tuple[Stop, int]]:
    """Yield the stops in their order, each with its depth."""
    for stop in stops:
        yield stop, depth
        yield from flat(stop.stops, depth + 1)


def table(*ways: list[Stop]) -> str:
    """Return a Markdown table of the files of all stops, in the order of the way, each with its functions."""
    names: dict[str, dict[str, None]] = {}
    for stop in (stop for stops in ways for stop, _ in flat(stops)):
        names.setdefault(stop.file, {}).update(dict.fromkeys(stop.names))
    rows = [f"| [`{short(file)}`]({SOURCE}/{file}) | {', '.join(f'`{name}`' for name in found)} |" for file, found in names.items()]
    return "\n".join(["| file | functions |", "| --- | --- |", *rows])


def files() -> dict[Path, str]:
    """Return the page and its pictures, as today's code makes them."""
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        first, second = way_of_call()
        update = way_of_update()
    page = PAGE.read_text(encoding="utf-8")
    for name, made in {"call": table(first, second), "update": table(update)}.items():
        before, begin, rest = page.partition(f"<!-- {name}: uv run tools/way.py -->")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return {
        PAGE: page,
        PICTURES / "way_first_call.svg": drawing("A first call, and its backward", first),
        PICTURES / "way_equal_call.svg": drawing("An equal call, and its backward", second),
        PICTURES / "way_update.svg": drawing("An update", update),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [(path, text) for path, text in files().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'stale, run uv run tools/way.py' if check else 'written'}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

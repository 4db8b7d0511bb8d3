"""`python -m lossforge.bench.tune FILE [COMMIT]`: find tiles for the GPU at hand, and how far the built-in choice is from the best.

Every choice in lossforge.kernels.tiles is a few numbers by arithmetic over shape and dtype. Here each is tried beside its neighbours
on the shapes it was made for; each trial's gradient is compared with the built-in choice's before it is timed. The table that this
writes (results/tiles-*.json) is what the arithmetic was fitted to: change lossforge.kernels.tiles where another choice wins by more
than the spread.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lossforge import kernels
from lossforge.bench.measure import times
from lossforge.bench.run import current_commit, new_report
from lossforge.kernels import tiles
from lossforge.kernels.tiles import BackwardTiles, ElementTiles, ResidentTiles, RowTiles
from lossforge.losses.formulas import FORMULAS

ROWS = ((16384, 1000), (16384, 1001), (8192, 32000), (8192, 50304), (8192, 128256), (4096, 262144))
DTYPES = (torch.float32, torch.bfloat16)
MILLISECONDS = 20.0

Trial = tuple[Any, Callable[[], object], torch.Tensor]  # tiles, the launch, what it writes


def rows(n: int, classes: int, dtype: torch.dtype) -> Iterable[tuple[str, list[Any], Callable[[], object], torch.Tensor]]:
    """(launch, tiles to try, the launch, what it writes) of cross entropy."""
    x = torch.randn(n, classes, device="cuda").to(dtype)
    target = torch.randint(0, classes, (n,), device="cuda")
    gradient, one = torch.empty_like(x), torch.ones((), device="cuda")
    spec = kernels.Spec(FORMULAS["cross_entropy"].kernel, target, scale=1.0 / n)
    stats = kernels.rowwise(spec, x, stats=True).stats
    assert stats is not None
    vector, whole = 16 // dtype.itemsize, 1 << (classes - 1).bit_length()
    warps = (1, 2, 4, 8, 16, 32)
    if whole <= 8192:
        forward = [RowTiles(r, whole, True, 1, w) for r, w in itertools.product((1, 2, 4), warps) if 4 <= r * whole // (w * 32) <= 64]
    else:
        sizes, stages = (2048, 4096, 8192, 16384), (1, 3, 4)
        forward = [RowTiles(1, b, False, vector, w, s) for b, w, s in itertools.product(sizes, warps, stages) if 8 <= b // (w * 32) <= 32]
    resident: list[Any] = []
    if classes * dtype.itemsize >= 32 * 1024:
        for size, ring, held, w, programs in itertools.product((8192, 16384), (4, 8, 12, 13, 14, 25, 28), (0, 2, 3, 4, 6), (8, 16), (1, 2)):
            chunk = size // dtype.itemsize
            fits = ring * size * programs <= 226 * 1024 and ring + held <= -(-classes // chunk) and held * size // (w * 128) <= 48
            if fits and (held or ring == -(-classes // chunk)):
                resident.append(ResidentTiles(chunk, ring, held, w, programs))
    backward = [BackwardTiles(1, b, w) for b, w in itertools.product((1024, 2048, 4096, 8192, 16384), warps) if 8 <= b // (w * 32) <= 32]
    both = resident or [t for t in forward if t.stages == 1]
    yield "value and gradient", both, lambda: kernels.rowwise(spec, x, gradient=gradient), gradient
    yield "forward", forward, lambda: kernels.rowwise(spec, x, stats=True), stats
    yield "backward", backward, lambda: kernels.rowwise_backward(spec, x, stats, loss=one, gradient=gradient), gradient


def elements(name: str, n: int, dtype: torch.dtype, indices: bool, weighted: bool) -> tuple[list[Any], Callable[[], object], torch.Tensor]:
    x = torch.randn(n // 80, 80, device="cuda").to(dtype)
    y = torch.randint(-1, 80, (n // 80,), device="cuda") if indices else torch.rand_like(x)
    weight = torch.rand_like(x) if weighted else None
    gradient = torch.empty_like(x)
    hyper = {"focal": (2.0, 0.25), "bce_with_logits": (1.0,)}.get(name, ())
    tried = [ElementTiles(b, w) for b, w in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)) if 4 <= b // (w * 32) <= 16]
    return tried, lambda: kernels.elementwise(FORMULAS[name].kernels, x, y, hyper, weight=weight, gradient=gradient), gradient


def best(tried: list[Any], call: Callable[[], object], written: torch.Tensor) -> dict[str, Any]:
    """The built-in choice and the trials, quickest first, in milliseconds."""
    device = written.device
    call()
    expected = written.clone()
    found: list[dict[str, Any]] = [{"tiles": "built in", "ms": times(call, device, MILLISECONDS).median}]
    for choice in tried:
        with tiles.trial(choice):
            try:
                written.fill_(float("nan"))
                call()
                error = ((written.double() - expected.double()).norm() / expected.double().norm()).item()
                if not error < 1e-2:
                    raise ValueError(f"wrong by {error:.1e}")
                found.append({"tiles": list(choice), "ms": times(call, device, MILLISECONDS).median})
            except Exception as failure:
                print(f"  {choice}: {str(failure).splitlines()[0][:100]}")
    return {"kind": type(tried[0]).__name__, "trials": sorted(found, key=lambda f: f["ms"])[:8], "built_in_ms": found[0]["ms"]}


def main(words: list[str]) -> int:
    if not 1 <= len(words) <= 2:
        print("usage: python -m lossforge.bench.tune FILE [COMMIT]", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("No CUDA GPU here: there is nothing to find tiles for.", file=sys.stderr)
        return 1
    report = new_report(torch.device("cuda", torch.cuda.current_device()), words[1] if len(words) > 1 else current_commit(), {})
    table: list[dict[str, Any]] = []

    def add(what: str, tried: list[Any], call: Callable[[], object], written: torch.Tensor) -> None:
        found = {"what": what, **best(tried, call, written)}
        table.append(found)
        print(
            f"{what}: built in {found['built_in_ms']:.4f} ms, best {found['trials'][0]['ms']:.4f} {found['trials'][0]['tiles']}", flush=True
        )

    for (n, classes), dtype in itertools.product(ROWS, DTYPES):
        if n * classes * dtype.itemsize <= 2**32:
            for launch, tried, call, written in rows(n, classes, dtype):
                add(f"{launch} {n}x{classes} {dtype}", tried, call, written)
    for dtype in DTYPES:
        for name, indices, weighted in (
            ("l1", False, False),
            ("bce_with_logits", False, True),
            ("focal", False, False),
            ("focal", True, False),
        ):
            what = f"{name}{' class index' if indices else ''}{' weighted' if weighted else ''} {dtype}"
            add(what, *elements(name, 2**27 // 80 * 80, dtype, indices, weighted))
    where = {name: getattr(report, name) for name in ("gpu", "versions", "commit", "date")}
    Path(words[0]).write_text(json.dumps({**where, "table": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m lossforge.bench.tune FILE [COMMIT [LAUNCHES]]`: find the best tiles for this GPU, and compare the built-in choice with them.
LAUNCHES is a glob of launch names, such as "kl *". Without it all launches are tried, which takes long.

lossforge.kernels.tiles computes each choice from shape and dtype. This program tries neighbouring choices on the shapes that the
arithmetic was made for. Before a trial is timed, its gradient is compared with the built-in choice's. The table that it writes
(results/tiles-*.json) is what the arithmetic was fitted to: change lossforge.kernels.tiles where another choice wins by more than the
spread.
"""

import fnmatch
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lossforge.bench.measure import times
from lossforge.bench.report import write_text
from lossforge.bench.run import current_commit, new_report
from lossforge.kernels import trial
from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.kernels.classes.calls import DistributionCall, DivergenceCall, RowwiseCall
from lossforge.kernels.elements.calls import ElementwiseCall
from lossforge.kernels.features.calls import ContrastiveCall, SimilarityCall
from lossforge.kernels.masks.calls import OverlapCall
from lossforge.kernels.plans import by_plan
from lossforge.kernels.tiles import (
    BackwardTiles,
    BinTiles,
    BoxTiles,
    ElementTiles,
    FeatureTiles,
    OverlapTiles,
    ResidentPairTiles,
    ResidentTiles,
    RowTiles,
    SimilarityGradientTiles,
    SimilarityTiles,
)
from lossforge.losses.base.record import Several
from lossforge.losses.engine.spec import ExecutionSpec, template_of

ROWS = ((16384, 1000), (16384, 1001), (8192, 32000), (8192, 50304), (8192, 128256), (4096, 262144))
DTYPES = (torch.float32, torch.bfloat16)
MILLISECONDS = 20.0

Trials = tuple[str, list[Any], Callable[[], torch.Tensor]]  # a launch's name, tiles to try, and the launch, which returns its output


def into(written: torch.Tensor, launch: Callable[[], object]) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        launch()
        return written

    return call


def forward(call: Any, gradients: Sequence[torch.Tensor | None], keep: bool) -> tuple[Several, Several]:
    spec, tensors = _spec(call)
    key, launches = spec.key_of(tensors, "tuned forward", keep, *[g is None for g in gradients]), spec.template.launches
    arguments = spec.formulas, gradients, keep and spec.keeps, True
    return spec.split(by_plan(key, (*tensors, *gradients), launches.forward, lambda: (call, *arguments)))


def backward(call: Any, kept: Several, grad_outputs: Sequence[torch.Tensor | None], gradient: torch.Tensor) -> None:
    spec, tensors = _spec(call)
    key, launches = spec.key_of(tensors, "tuned backward", *[t is None for t in kept]), spec.template.launches
    arguments = call, spec.formulas, kept, grad_outputs, [gradient]
    by_plan(key, (*tensors, *kept, *grad_outputs, gradient), launches.backward, lambda: arguments)


def _spec(call: Any) -> tuple[ExecutionSpec[Any], Several]:
    template = template_of(call)
    tensors, numbers = template.flat(call)
    return ExecutionSpec(template, call.loss, numbers), tensors


def both(call: Any, *gradients: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """Return the launch that computes value and gradient, and returns the first gradient."""
    assert gradients[0] is not None
    return into(gradients[0], lambda: forward(call, gradients, False))


def resident_rows(classes: int, dtype: torch.dtype, bias: bool = False) -> list[Any]:
    """Return tiles for rows that stay on chip. The ring is as large as shared memory allows or the row needs."""
    found: list[Any] = []
    if classes * dtype.itemsize < 32 * 1024:
        return found
    for size, held, w, programs in itertools.product((8192, 16384), (0,) if bias else (0, 2, 3, 4, 6), (8, 16, 32), (1, 2)):
        chunk = size // dtype.itemsize
        chunks = -(-classes // chunk)
        ring = min((226 * 1024 // programs - bias * 4 * chunk * chunks) // size, chunks - held)
        least = 1 if ring + held == chunks else chunks if bias else 4  # a row that does not fit needs four slots at least
        if ring >= least and size // 16 >= 32 * w and held * size // (w * 128) <= 48:
            found.append(ResidentTiles(chunk, ring, held, w, programs))
    return found


def with_prior(n: int, classes: int, dtype: torch.dtype, device: torch.device) -> Trials:
    """Return trials of logit-adjusted cross entropy."""
    x = torch.randn(n, classes, device=device).to(dtype)
    target = torch.randint(0, classes, (n,), device=device)
    gradient, prior = torch.empty_like(x), torch.rand(classes, device=device).log()
    call = RowwiseCall("cross_entropy", x, target, bias=prior, loss_scale=1.0 / n)
    return f"prior {n}x{classes} {dtype}", resident_rows(classes, dtype, bias=True), both(call, gradient)


def rows(n: int, classes: int, dtype: torch.dtype, device: torch.device) -> Iterable[Trials]:
    """Yield trials of cross entropy."""
    x = torch.randn(n, classes, device=device).to(dtype)
    target = torch.randint(0, classes, (n,), device=device)
    gradient, one = torch.empty_like(x), torch.ones((), device=device)
    call = RowwiseCall("cross_entropy", x, target, loss_scale=1.0 / n)

    def sweep() -> torch.Tensor:
        _, (_, stats, _) = forward(call, [None], True)
        assert stats is not None
        return stats

    kept = None, sweep(), None
    vector, whole = 16 // dtype.itemsize, 1 << (classes - 1).bit_length()
    warps, name = (1, 2, 4, 8, 16, 32), f"{n}x{classes} {dtype}"
    if whole <= 8192:
        sweeping = [RowTiles(r, whole, True, 1, w) for r, w in itertools.product((1, 2, 4), warps) if 4 <= r * whole // (w * 32) <= 64]
    else:
        sizes, stages = (2048, 4096, 8192, 16384), (1, 3, 4)
        sweeping = [RowTiles(1, b, False, vector, w, s) for b, w, s in itertools.product(sizes, warps, stages) if 8 <= b // (w * 32) <= 32]
    resident = resident_rows(classes, dtype)
    backwards = [BackwardTiles(1, b, w) for b, w in itertools.product((1024, 2048, 4096, 8192, 16384), warps) if 8 <= b // (w * 32) <= 32]
    tried = resident or [t for t in sweeping if t.stages == 1]
    yield f"value and gradient {name}", tried, both(call, gradient)
    yield f"forward {name}", sweeping, sweep
    yield f"backward {name}", backwards, into(gradient, lambda: backward(call, kept, (one, None, None, None), gradient))


def pixels(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Trials:
    """Return trials of cross entropy of maps, whose neighbouring rows are adjacent in memory."""
    x = torch.randn(shape, device=device).to(dtype)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)
    gradient, n = torch.empty_like(x), target.numel()
    call = RowwiseCall("cross_entropy", x, target, loss_scale=1.0 / n)
    whole = 1 << (shape[1] - 1).bit_length()
    sides = itertools.product((32, 64, 128, 256, 512), (1, 2, 4, 8))
    tried = [RowTiles(r, whole, True, 1, w) for r, w in sides if 8 <= r * whole // (w * 32) <= 128]
    return f"pixels {'x'.join(map(str, shape))} {dtype}", tried, both(call, gradient)


HYPER: dict[str, tuple[float, ...]] = {
    "focal": (2.0, 0.25),
    "bce_with_logits": (1.0,),
    "bce_softened": (0.9, 0.0, float("-inf"), 1.0),
    "asymmetric": (4.0, 1.0, 0.05, 1.0),
    "bce": (1e-12,),
}


def elements(
    name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, target: str = "", weighted: bool = False
) -> Trials:
    """Return trials of an element-wise loss. target: "class index", "diagonal", or dense ("")."""
    x = torch.rand(shape, device=device).to(dtype)
    y = {"": torch.rand_like(x), "class index": torch.randint(-1, shape[1], shape[:1], device=device), "diagonal": None}[target]
    weight = torch.rand_like(x) if weighted else None
    gradient, hyper = torch.empty_like(x), HYPER.get(name, ())
    sizes = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 16))
    sides = itertools.product(sizes, (1, 6, 8, 12), (1, 2, 3, 4))
    tried = list(dict.fromkeys(ElementTiles(b, w, max(1, 4 * n // w), s) for (b, w), n, s in sides))
    what = " ".join(filter(None, (name, target, "weighted" if weighted else "", f"{shape[0]}x{shape[1]}", str(dtype))))
    call = ElementwiseCall(name, x, y, weight=weight, hyper=list(hyper), ignore_index=-2)
    return what, tried, both(call, gradient)


def box_pairs(name: str, n: int, device: torch.device) -> Trials:
    near = torch.rand(n, 4, device=device) + torch.tensor([0.0, 0.0, 2.0, 2.0], device=device)
    boxes1, boxes2 = near, near + 0.3 * torch.randn_like(near)
    gradient = torch.empty_like(boxes1)
    tried = [BoxTiles(b, w) for b, w in itertools.product((64, 128, 256, 512, 1024), (1, 2, 4, 8)) if 1 <= b // (w * 32) <= 8]
    return f"{name} {n}x4", tried, both(BoxesCall(name, boxes1, boxes2, hyper=[1e-7]), gradient, None)


def distributions(n: int, bins: int, dtype: torch.dtype, device: torch.device) -> Trials:
    """Return trials of the distribution focal loss. Bins that are not a power of two are tried in one tile and in two."""
    x = torch.randn(n, bins, device=device).to(dtype)
    target, gradient = (bins - 1) * torch.rand(n, device=device), torch.empty_like(x)
    whole = 1 << (bins - 1).bit_length()
    splits = {(whole, 0), (whole // 2, 1 << (bins - whole // 2 - 1).bit_length())} if bins < whole else {(whole, 0)}
    sides = itertools.product(sorted(splits), (32, 64, 128, 256), (1, 2, 4, 8))
    tried = [BinTiles(r, size, tail, w) for (size, tail), r, w in sides if 8 <= r * size // (w * 32) <= 32]
    return f"bins {n}x{bins} {dtype}", tried, both(DistributionCall("cross_entropy", x, target), gradient)


def divergences(name: str, n: int, classes: int, dtype: torch.dtype, device: torch.device) -> Trials:
    x, teacher = (torch.randn(n, classes, device=device).to(dtype) for _ in range(2))
    gradient = torch.empty_like(x)
    call = DivergenceCall(name, x, teacher, hyper=[0.5] if name == "js" else [], loss_scale=1.0 / n)
    vector, whole = 16 // dtype.itemsize, 1 << (classes - 1).bit_length()
    warps = (2, 4, 8, 16, 32)
    tried: list[Any]
    if whole <= 8192:
        tried = [RowTiles(r, whole, True, 1, w) for r, w in itertools.product((1, 2), warps) if 4 <= r * whole // (w * 32) <= 32]
    else:
        sizes = (2048, 4096, 8192, 16384)
        tried = [RowTiles(1, b, False, vector, w) for b, w in itertools.product(sizes, warps) if 8 <= b // (w * 32) <= 32]
        helds = (0,) if name == "kl" else (0, 2, 4, 8, 16)
        for size, ring, held, w, programs in itertools.product((8192, 16384), range(4, 15), helds, (8, 16, 32), (1, 2)):
            chunk = size // dtype.itemsize
            chunks, lanes = -(-classes // chunk), chunk // vector
            fits = 2 * ring * size * programs <= 226 * 1024 < 2 * (ring + 1) * size * programs
            registers = held * chunk // (32 * w)
            if held <= chunks <= ring <= 4 * chunks and fits and lanes >= 32 * w and registers <= 1024 // (w * programs):
                tried.append(ResidentPairTiles(chunk, ring, held, w, programs))
    return f"{name} {n}x{classes} {dtype}", tried, both(call, gradient)


def similarities(n: int, dtype: torch.dtype, device: torch.device) -> Iterable[Trials]:
    """Yield trials of the contrastive loss of n pairs: the sums of both sides, and the gradient."""
    x = torch.randn(n, n, device=device).to(dtype)
    gradient, call, one = torch.empty_like(x), ContrastiveCall("clip", x, loss_scale=1.0 / n), torch.ones((), device=device)

    def sums() -> Several:
        return forward(call, [None], True)[1]

    def column_lse() -> torch.Tensor:
        found = sums()[1]
        assert found is not None
        return found

    kept = sums()
    sides = [(r, c, w) for r, c, w in itertools.product((32, 64, 128), (64, 128, 256), (4, 8)) if 16 <= r * c // (w * 32) <= 64]
    name, back = f"{n}x{n} {dtype}", [SimilarityGradientTiles(*t) for t in sides]
    yield f"similarities {name}", [SimilarityTiles(*t) for t in sides], column_lse
    yield f"gradient of similarities {name}", back, into(gradient, lambda: backward(call, kept, [one], gradient))


def features(n: int, depth: int, device: torch.device) -> Iterable[Trials]:
    """Yield trials of CLIP's loss of n pairs of features: the sums of both sides, and these with the gradients."""
    a, b = (torch.nn.functional.normalize(torch.randn(n, depth, device=device)).bfloat16() for _ in range(2))
    call = SimilarityCall("both_sides", a, b, logit_scale=20.0, reduction="mean")
    gradient = torch.empty_like(a)
    gradients = [gradient, torch.empty_like(b), None, None]

    def column_lse() -> torch.Tensor:
        found = forward(call, [None] * 4, True)[1][2]
        assert found is not None
        return found

    tried = []
    for r, c, k, w, stages, programs in itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4), (1, 2)):
        shared, registers = 2 * stages * (r + c) * k * programs, r * c // (32 * w) * programs
        if shared <= 226 * 1024 and 32 <= registers <= 128:
            tried.append(FeatureTiles(r, c, k, 8, w, stages, programs))
    yield f"features {n}x{depth}", tried, column_lse
    yield f"features with gradients {n}x{depth}", tried, into(gradient, lambda: forward(call, gradients, True))


def maps(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Trials:
    """Return trials of the dice loss of maps. Its launches for sums and for the gradient share their tiles."""
    x = torch.randn(shape, device=device).to(dtype)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)
    gradient = torch.empty_like(x)
    call = OverlapCall("dice", x, target, hyper=[1e-5, 1e-5])
    whole = 1 << (shape[1] - 1).bit_length()
    sides = itertools.product((32, 64, 128, 256), (1, 2, 4, 8, 16))
    tried = [OverlapTiles(whole, p, w) for p, w in sides if 4 <= p * whole // (w * 32) <= 64]
    tried += [OverlapTiles(shape[1], 32 * w * own, w, own) for w, own in itertools.product((1, 2, 4), (1, 2, 4, 8))]
    return f"dice {'x'.join(map(str, shape))} {dtype}", tried, both(call, gradient)


def launches(device: torch.device) -> Iterable[Trials]:
    """Yield every launch to try, each with new tensors."""
    for (n, classes), dtype in itertools.product(ROWS, DTYPES):
        if n * classes * dtype.itemsize <= 2**32:
            yield from rows(n, classes, dtype, device)
    for dtype in DTYPES:
        yield with_prior(4096, 21841, dtype, device)
        anchors = (2**27 // 80, 80)
        yield elements("l1", anchors, dtype, device)
        yield elements("bce_with_logits", anchors, dtype, device, weighted=True)
        yield elements("focal", anchors, dtype, device)
        yield elements("focal", anchors, dtype, device, target="class index")
        yield elements("bce", anchors, dtype, device, weighted=True)
        yield elements("asymmetric", (4096, 9605), dtype, device)
        yield elements("bce_softened", (4096, 21841), dtype, device, target="class index")
        yield elements("bce_with_logits", (16384, 16384), dtype, device, target="diagonal")
    for name in ("iou", "ciou"):
        yield box_pairs(name, 2**22, device)
    for (n, bins), dtype in itertools.product(((16 * 89600, 17), (16 * 89600, 16), (16 * 22400, 33)), DTYPES):
        yield distributions(n, bins, dtype, device)
    yield from features(16384, 512, device)
    for dtype in DTYPES:
        for name, (n, classes) in itertools.product(("kl", "js"), ((16384, 1000), (8192, 32000), (8192, 128256))):
            yield divergences(name, n, classes, dtype, device)
        yield from similarities(16384, dtype, device)
        yield maps((8, 21, 512, 512), dtype, device)
        yield pixels((8, 21, 512, 512), dtype, device)


def best(tried: list[Any], call: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Time the built-in choice and the trials, and return them with the fastest first, in milliseconds."""
    written = call()
    device, expected = written.device, written.clone()
    times(call, device, MILLISECONDS)  # warm up, so that the first choice does not run on a cold GPU
    found: list[dict[str, Any]] = [{"tiles": "built in", "ms": times(call, device, MILLISECONDS).median}]
    for choice in tried:
        with trial(choice):
            try:
                written.fill_(float("nan"))
                written = call()
                error = ((written.double() - expected.double()).norm() / expected.double().norm()).item()
                if not error < 1e-2:
                    raise ValueError(f"wrong by {error:.1e}")
                found.append({"tiles": list(choice), "ms": times(call, device, MILLISECONDS).median})
            except Exception as failure:
                print(f"  {choice}: {str(failure).splitlines()[0][:100]}")
    return {"kind": type(tried[0]).__name__, "trials": sorted(found, key=lambda f: f["ms"])[:8], "built_in_ms": found[0]["ms"]}


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 3:
        print("usage: python -m lossforge.bench.tune FILE [COMMIT [LAUNCHES]]", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("No CUDA GPU here: there is nothing to find tiles for.", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    report = new_report(device, argv[1] if len(argv) > 1 else current_commit(), {})
    table: list[dict[str, Any]] = []

    for what, tried, call in launches(device):
        if len(argv) > 2 and not fnmatch.fnmatchcase(what, argv[2]):
            continue
        found = {"what": what, **best(tried, call)}
        table.append(found)
        quickest = found["trials"][0]
        print(f"{what}: built in {found['built_in_ms']:.4f} ms, best {quickest['ms']:.4f} {quickest['tiles']}", flush=True)
    where = {name: getattr(report, name) for name in ("gpu", "versions", "commit", "date")}
    write_text(Path(argv[0]), json.dumps({**where, "table": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

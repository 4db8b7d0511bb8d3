"""Measure losses of features spread over GPUs: the ring of `group=` beside open_clip's gathered form, and losses without negatives.

BATCH pairs in all, of WIDTH features in bfloat16, with a learned scale in float32. Forward and backward are timed apart. A time is the
median of CALLS calls, the slowest process's; the memory is what a call takes beside the features. Gradients are those that DDP averages:
of open_clip's forms, whose gathers add up the gradients of all processes, and of the ring alike. The error is the largest difference from
float64 of the loss, relative, and of the gradients of ROWS images and texts, relative to their largest entry. Losses without negatives and
centres of a teacher's logits are of float32, and stand beside one GPU with all rows, by the rules of spread_vocabulary.py; so do their
errors. With --small, 64 pairs of 16 features on two processes of the CPU.
"""

import functools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import reported
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Request, Timer, free_memory, largest, launched, peak_mib, processes
from spread_vocabulary import OURS, Case, Contender, Gradients, exchanges, gradients, rows_of
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from lab.processes import distributed
from lab.run.machine import pick_device
from lossforge.losses import (
    barlow_twins_loss,
    clip_loss_from_features,
    info_nce_loss,
    koleo_loss,
    mean_center,
    siglip_loss_from_features,
    sinkhorn_center,
    vicreg_loss,
)

BATCH, WIDTH, SMALL = 65536, 512, (64, 16)
CALLS, WARM, ROWS = 7, 2, 16
SCALE, BIAS = 20.0, -10.0
BATCHES: dict[str, tuple[Callable[..., Tensor], int, tuple[int, int], tuple[int, int]]] = {
    "Barlow Twins": (barlow_twins_loss, 2, (8192, 4096), (32, 16)),
    "VICReg": (vicreg_loss, 2, (8192, 4096), (32, 16)),
    "KoLeo": (koleo_loss, 1, (16384, 1024), (32, 16)),
    "mean_center": (mean_center, 0, (8192, 65536), (32, 16)),
    "sinkhorn_center": (sinkhorn_center, 0, (8192, 65536), (32, 16)),
}
"""Losses of a whole batch: the function, how many views it takes with gradient (0: a centre of scores, without), rows and features of all
processes, and those of --small."""
Form = Callable[..., Tensor]


def every(t: Tensor) -> Tensor:
    """Return the features of all processes; backward adds up their gradients, as open_clip's gather_with_grad does."""
    return torch.cat(all_gather(t))


def places(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device) + dist.get_rank() * len(rows)


def gathered_clip(images: Tensor, texts: Tensor, scale: Tensor, _: Tensor, local_loss: bool) -> Tensor:
    """Compute the formula of open_clip's ClipLoss with gather_with_grad."""
    every_image, every_text = every(images), every(texts)
    if local_loss:
        rows, columns, place = scale * images @ every_text.T, scale * texts @ every_image.T, places(images)
    else:
        rows = scale * every_image @ every_text.T
        columns, place = rows.T, torch.arange(len(rows), device=rows.device)
    return (F.cross_entropy(rows, place) + F.cross_entropy(columns, place)) / 2


def gathered_info_nce(images: Tensor, texts: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(scale * images @ every(texts).T, places(images))


def gathered_siglip(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Compute the formula of open_clip's SigLipLoss with dist_impl="gather"."""
    logits = scale * images @ every(texts).T + bias
    signs = torch.full_like(logits, -1.0)
    signs[torch.arange(len(images), device=logits.device), places(images)] = 1.0
    return -F.logsigmoid(signs * logits).sum() / len(images)


def forms(small: bool) -> dict[str, dict[str, Form]]:
    """Return what computes each loss."""
    world = dist.group.WORLD
    ring: dict[str, Form] = {
        "InfoNCE": lambda a, b, s, _: info_nce_loss(a, b, None, 1.0 / s, normalize=False, group=world),
        "CLIP": lambda a, b, s, _: clip_loss_from_features(a, b, s, group=world),
        "SigLIP": lambda a, b, s, t: siglip_loss_from_features(a, b, s, t, group=world),
    }
    gathered: dict[str, dict[str, Form]] = {
        "InfoNCE": {"gathered": gathered_info_nce},
        "CLIP": {"gathered, local_loss": lambda a, b, s, t: gathered_clip(a, b, s, t, True)},
        "SigLIP": {"gathered": gathered_siglip},
    }
    found = {}
    for name, others in gathered.items():
        found[name] = {"ring": ring[name]} | {f"{how}, eager": form for how, form in others.items()}
        backend = "aot_eager" if small else "inductor"  # which compiles C++ for the CPU
        found[name] |= {f"{how}, torch.compile": torch.compile(form, dynamic=False, backend=backend) for how, form in others.items()}
    # last, because the whole matrix is in the memory of each GPU, and may not fit
    found["CLIP again"] = {"gathered, eager": lambda a, b, s, t: gathered_clip(a, b, s, t, False)}
    return found


def timed(form: Form, leaves: list[Tensor]) -> dict[str, Any]:
    """Return milliseconds and MiB of the slowest and largest process, and the last call's loss and gradients."""
    device = leaves[0].device
    times, mib = [], 0.0
    for call in range(WARM + CALLS):
        dist.barrier()
        before = memory(device)
        timer = Timer(device)
        timer.mark()
        loss = form(*leaves)
        timer.mark()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        timer.mark()
        if call >= WARM:
            times.append(timer.between())
            mib = max(mib, (peak_mib() or 0.0) - before)
        if call + 1 < WARM + CALLS:
            del loss, grads
    forward, backward, both = (statistics.median(each) for each in zip(*((*t, sum(t)) for t in times), strict=True))
    figures = {"forward_ms": forward, "backward_ms": backward, "ms": both, "mib": mib}
    slowest = [max(t) for t in zip(*distributed.gathered([sum(t) for t in times]), strict=True)]
    spread = {"range": [min(slowest), max(slowest)]}
    return {**{name: largest(value) for name, value in figures.items()}, **spread, "loss": loss.detach(), "grads": grads}


def memory(device: torch.device) -> float:
    """Return the MiB that are allocated on a GPU, and count the peak from now on."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**20


def expected(name: str, a: Tensor, b: Tensor, first: int) -> tuple[float, Tensor, Tensor]:
    """Return the loss, and the gradients of the ROWS images and texts from `first` on, of all features in float64 on one GPU."""
    x, y = a.double(), b.double()
    own = slice(first, first + ROWS)
    place = torch.arange(own.start, own.stop, device=a.device)
    here = torch.arange(ROWS, device=a.device)
    rows, columns = SCALE * x[own] @ y.T, SCALE * y[own] @ x.T
    if name == "SigLIP":
        value, parts = 0.0, []
        for start in range(0, len(x), 1024):
            z = SCALE * x[start : start + 1024] @ y.T + BIAS
            z[torch.arange(len(z)), torch.arange(len(z)) + start] *= -1
            value += F.softplus(z).sum().item()
        for logits, of in ((rows, y), (columns, x)):
            g = (logits + BIAS).sigmoid()
            g[here, place] -= 1
            parts.append(SCALE * g @ of / len(x))
        return value / len(x), parts[0], parts[1]
    lse_rows = torch.cat([(SCALE * t @ y.T).logsumexp(1) for t in x.split(1024)])
    lse_columns = torch.cat([(SCALE * t @ x.T).logsumexp(1) for t in y.split(1024)])
    pairs = SCALE * (x * y).sum(1)
    both = name != "InfoNCE"
    parts = []
    for logits, of, mine, others in ((rows, y, lse_rows, lse_columns), (columns, x, lse_columns, lse_rows)):
        over_own, over_others = (logits - mine[own, None]).exp(), (logits - others).exp()
        over_own[here, place] -= 1
        over_others[here, place] -= 1
        texts_alone = over_own if of is y else over_others
        parts.append(SCALE * (0.5 * (over_own + over_others) if both else texts_alone) @ of / len(x))
    value = (lse_rows - pairs).mean()
    return (0.5 * (value + (lse_columns - pairs).mean()) if both else value).item(), parts[0], parts[1]


def features(batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the unit vectors of all processes, the same in each."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(batch, width, device=device, generator=generator)
    texts = images + 2 * torch.randn(batch, width, device=device, generator=generator)
    a, b = (F.normalize(t, dim=1).bfloat16() for t in (images, texts))
    return a, b


def measure(name: str, of_name: dict[str, Form], a: Tensor, b: Tensor) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    each = len(a) // world
    leaves = [t[rank * each : (rank + 1) * each].clone().requires_grad_() for t in (a, b)]
    leaves += [torch.tensor(v, device=a.device, requires_grad=True) for v in (SCALE, BIAS)]
    value, *right = expected(name, a, b, rank * each)
    found = {}
    for how, form in of_name.items():
        try:
            figures = timed(form, leaves)
        except torch.OutOfMemoryError:  # in every process, because all have equal parts
            found[how] = {"error": "out of memory"}
            continue
        loss, grads = figures.pop("loss").float(), figures.pop("grads")
        dist.all_reduce(loss)  # of local losses the mean is the global one
        wrong = [abs(loss.item() / world - value) / abs(value)]
        for g, exact in zip(grads, right, strict=False):
            wrong.append(((g[:ROWS].double() / world - exact).abs().max() / exact.abs().max()).item())
        found[how] = {**figures, "errors": [*map(largest, wrong)]}
        if how == "ring":
            again = torch.autograd.grad(form(*leaves), leaves, allow_unused=True)
            same = all(g is None or torch.equal(g, h) for g, h in zip(grads, again, strict=True))
            call = functools.partial(lambda form: torch.autograd.grad(form(*leaves), leaves, allow_unused=True), form)
            found[how] |= {"same": same, **exchanges(call, a.device)}
        if rank == 0:
            print(name, how, json.dumps(found[how]), flush=True)
        del grads
    return found


def batches(small: bool, device: torch.device) -> Iterator[tuple[tuple[int, int], Case]]:
    """Yield losses whose scalar is that of all rows, and centres of all rows, with their sizes."""
    world = dist.get_world_size()
    for name, (function, views, full, little) in BATCHES.items():
        rows, width = little if small else full
        generator = torch.Generator(device).manual_seed(0)
        first = torch.randn(rows, width, device=device, generator=generator)
        every = [first, first + torch.randn(rows, width, device=device, generator=generator)][: max(views, 1)]
        own = slice(dist.get_rank() * rows // world, (dist.get_rank() + 1) * rows // world)
        mine, wide = [t[own].clone() for t in every], [t.double() for t in every]
        if not views:
            calls = [functools.partial(center, function, *t, **spread) for t, spread in ((every, {}), (mine, {"group": dist.group.WORLD}))]
            right = center(function, *wide)
            yield (rows, width), Case(name, (right, right), {OURS: functools.partial(Contender, *calls)})
            continue
        for t in (*every, *mine, *wide):
            t.requires_grad_()
        exact = gradients(function, tuple(wide))
        # with group, gradients are those of the sum of what all processes return
        pair = tuple(g[:ROWS] for g in exact), tuple(g[own][:ROWS] * world for g in exact)
        calls = [
            functools.partial(gradients, function, tuple(every)),
            functools.partial(gradients, function, tuple(mine), group=dist.group.WORLD),
        ]
        del wide, exact
        free_memory()
        yield (rows, width), Case(name, pair, {OURS: functools.partial(Contender, *calls)}, same_input=False)


def center(function: Callable[..., Tensor], scores: Tensor, **spread: Any) -> Gradients:
    """Return a centre of scores, which is the same with any constant added."""
    found = function(scores, **spread)
    return ((found - found.mean()).unsqueeze(0),)


def work(request: Request, batch: int, width: int) -> None:
    """Measure as one of several processes; the first one writes what was measured so far."""
    device = pick_device("cpu" if request.small else "auto")
    distributed.start(device)
    a, b = features(batch, width, device)
    source = request.source("triton") | {"gpus": distributed.ranks(), "batch": batch, "width": width}
    rows: list[dict[str, Any]] = []
    for sizes, case in batches(request.small, device):
        rows += rows_of(sizes, case, device)
    found: dict[str, dict[str, Any]] = {}
    for name, of_name in forms(request.small).items():
        found[name] = measure(name, of_name, a, b)
        if distributed.rank() == 0:
            request.save({**source, "losses": found, "rows": rows})
    dist.barrier()
    distributed.stop()


def spread_contrastive(request: Request) -> int:
    sizes = SMALL if request.small else (BATCH, WIDTH)
    launched(work, processes(request), request, *sizes, threads=1 if request.small else 8)
    print(reported.spread_contrastive(request.out))
    return 0
